"""S20: whatever an argument is given, it is taken for what it means or refused by name; and in x64 mode."""

import decimal
import fractions
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from attest import kernels
from attest.kernels import triton, xla
from attest.kernels.pallas import mosaic_gpu, tpu
from tests.examples import examples

F32 = np.float32
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape).astype(F32) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)))
FUNCTIONS = {
    "chosen": kernels.flash_attention_with_lse,
    "xla": xla.flash_attention_with_lse,
    "attention": partial(xla.attention, deterministic=False),
    "triton": triton.flash_attention_with_lse,
    "pallas_tpu": tpu.flash_attention_with_lse,
    "mosaic_gpu": mosaic_gpu.flash_attention_with_lse,
}


class Hostile:
    """It raises however its value is asked for."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    def _raise(self, *_):
        raise RuntimeError("no")

    __index__ = __float__ = __len__ = __iter__ = __array__ = _raise
    __hash__ = None  # unhashable


DTYPES = ("float32", "float64", "float16", ">f4", "int8", "int32", "int64", "uint32", ">i4", "bool", "O")
SHAPES = st.sampled_from(
    (
        *((), (0,), (1,), (2,), (3,), (4,), (7,), (1, 4), (4, 1), (2, 5), (2, 7), (1, 7), (1, 1, 5, 7)),
        *((1, 1, 1, 7), (2, 1, 5, 1), (2, 4, 5, 7), (2, 5, 4, 8), (1, 7, 2, 8), (2, 7, 2, 8), (2, 0, 2, 8)),
    )
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**32, 2**64, 10**400, -(10**400), 10**5000]),
    st.floats(),
    st.sampled_from([1e39, -1e39, 3.4e38, 1e-46, 1 - 2**-53]),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(-2, 9), max_size=3),
    st.tuples(st.integers(-2, 9), st.integers(-2, 9) | st.none()),
    st.dictionaries(st.text(max_size=1), st.none(), max_size=1),
    st.sampled_from([np.float16(2), np.float64(1e300), np.int64(-3), np.bool_(True), np.datetime64("2020")]),
    st.sampled_from([fractions.Fraction(1, 3), decimal.Decimal("1e999"), ..., int, len, object()]),
    st.builds(Hostile),
    st.builds(lambda: jax.random.key(0)),
    st.builds(lambda: jnp.float32(2)),
)
ARRAYS = st.builds(
    lambda dtype, shape, value, convert: convert(np.full(shape, value).astype(dtype)),
    st.sampled_from(DTYPES),
    SHAPES,
    st.integers(0, 3),
    st.sampled_from([np.asarray, np.ma.masked_array, np.asfortranarray]),
)
ANYTHING = st.one_of(
    SCALARS, ARRAYS, arrays_of.arrays(np.int64, st.sampled_from([(2,), (3,), (2, 5), (2, 7)]))
)
ARGUMENTS = sorted(set(inspect.signature(kernels.flash_attention).parameters) - {"platform"})


@examples(120)
@given(options=st.dictionaries(st.sampled_from(ARGUMENTS), ANYTHING, min_size=1, max_size=3))
def test_any_argument_is_taken_or_refused_by_name(options):
    given = {"query": Q, "key": K, "value": V, **options}
    try:
        out, lse = jax.eval_shape(lambda: xla.flash_attention_with_lse(**given))
    except ValueError as error:
        refusal = error
    else:
        query, value = given["query"], given["value"]
        assert out.shape == (*query.shape[:3], value.shape[3])
        assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
        assert out.dtype == query.dtype
        return
    name, _, rest = str(refusal).partition(": got ")
    assert name.split(".")[0] in ARGUMENTS
    assert "; expected " in rest
    assert len(str(refusal)) < 600
    # Refused by us where the call begins, not by what it would have become.
    assert inspect.getinnerframes(refusal.__traceback__)[-1].function == "refuse"


ABOVE = np.eye(5, 7, 1, bool)[None, None]
# Another form, and what it means.
SAME = [
    ({"attention_mask": ABOVE.astype("uint8") * 2}, {"attention_mask": ABOVE}),
    ({"attention_mask": np.full((1, 1, 5, 7), 2**40)}, {}),
    ({"sliding_window": [1, np.int8(2)]}, {"sliding_window": (1, 2)}),
    ({"sliding_window": np.int64(2)}, {"sliding_window": (2, 2)}),
    ({"sliding_window": 10**400}, {}),
    ({"softmax_scale": np.float64(0.25)}, {"softmax_scale": 0.25}),
    ({"softmax_scale": fractions.Fraction(1, 4)}, {"softmax_scale": 0.25}),
    ({"softmax_scale": jnp.float32(0.25)}, {"softmax_scale": 0.25}),
    ({"causal": np.bool_(True)}, {"causal": True}),
    ({"dropout_prob": 0.5, "dropout_seed": np.uint64(2**63)}, {"dropout_prob": 0.5, "dropout_seed": 2**63}),
    (
        {"dropout_prob": 0.5, "dropout_seed": np.array([0, 2**31], "uint32")},
        {"dropout_prob": 0.5, "dropout_seed": 2**63},
    ),
    (
        {"cum_seqlens_q": np.array([0, 2, 7]), "cum_seqlens_k": np.array([0, 7, 10])},
        {"cum_seqlens_q": np.array([0, 2, 7], "int32"), "cum_seqlens_k": np.array([0, 7, 10], "int32")},
    ),
    (
        {"q_segment_ids": np.full((2, 5), 200, "uint8"), "kv_segment_ids": np.full((2, 7), 200)},
        {"q_segment_ids": np.full((2, 5), 200, "int32"), "kv_segment_ids": np.full((2, 7), 200, "int32")},
    ),
    ({"softmax_aux": np.ones(3, F32)}, {"softmax_aux": np.ones((1, 3), F32)}),
    ({"softmax_aux": np.ones((1, 3), F32)}, {"softmax_aux": np.ones((4, 3), F32)}),
    ({"softmax_aux": np.ones((1, 4), F32)}, {"softmax_aux": np.ones((4, 4), F32)}),
]


@pytest.mark.parametrize("number", range(len(SAME)))
def test_other_forms_mean_the_same(number):
    other, plain = SAME[number]
    got, want = (xla.flash_attention_with_lse(Q, K, V, **options) for options in (other, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("q_segment_ids", {"kv_segment_ids": np.zeros((2, 7), "int32")}),
        ("kv_segment_ids", {"q_segment_ids": np.zeros((2, 5), "int32")}),
        ("key", {"key": K[:1]}),
        ("key", {"key": K[:1], "value": V[:1]}),
        ("value", {"value": V[:1]}),
        ("softmax_scale", {"softmax_scale": 1e39}),
        ("logits_soft_cap", {"logits_soft_cap": 3e38}),
        ("dropout_prob", {"dropout_prob": 10**400, "dropout_seed": 1}),
        ("softmax_aux", {"softmax_aux": np.ones(4, F32)}),
        ("query", {"query": Q.astype(">f4")}),
    ],
)
def test_every_implementation_refuses(name, options, function):
    """Before it looks for a device."""
    with pytest.raises(ValueError, match=f"^{name}: got "):
        FUNCTIONS[function](**{"query": Q, "key": K, "value": V, **options})


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kernel", ["xla", "attention"])
def test_x64_mode(kernel, jitted):
    """Lengths and ids come as int64 there, and what nobody gave a dtype as float64, which is refused."""
    function = FUNCTIONS[kernel]
    segments = {
        "q_segment_ids": np.arange(10).reshape(2, 5) // 3,
        "kv_segment_ids": np.arange(14).reshape(2, 7) // 5,
    }
    lengths = {"cum_seqlens_q": np.array([0, 3, 8]), "cum_seqlens_k": np.array([0, 7, 9])}
    options = {"causal": True, "dropout_prob": 0.25, "dropout_seed": 3}
    arrays = {**segments, **lengths, "softmax_aux": np.ones((1, 2), F32), "bias": np.ones((1, 1, 1, 7), F32)}

    def run(wrap):
        def call(query, arrays):
            return function(query, jnp.asarray(K), jnp.asarray(V), **arrays, **options)[0]

        def both(query, arrays):
            out, vjp = jax.vjp(lambda query: call(query, arrays), query)
            return out, vjp(out)[0]

        return wrap(both)(jnp.asarray(Q), {name: jnp.asarray(x) for name, x in arrays.items()})

    wrap = jax.jit if jitted else (lambda f: f)
    want = run(wrap)
    with jax.enable_x64(True):
        got = run(wrap)
        with pytest.raises(ValueError, match=r"^query: got dtype float64; .*x\.astype\('float32'\)"):
            function(jnp.asarray(Q, float), K, V)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
