"""`flash_attention`, `attention` and `ring_attention` of ejKernel on one device, against the oracle."""

import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels.adapters import ejkernel
from attest.kernels.operations import AttentionConfig, FlashAttentionConfig, FwdParams, MaskInfo
from tests.adapters.exact import assert_exact, normal
from tests.examples import examples

pytestmark = pytest.mark.found_outside

B, S, SK, HQ, HKV, D = 2, 8, 12, 4, 2, 8
SELF = {
    "query": normal(B, S, HQ, D, seed=1),
    "key": normal(B, S, HKV, D, seed=2),
    "value": normal(B, S, HKV, 6, seed=3),
}
CROSS = {**SELF, "key": normal(B, SK, HKV, D, seed=4), "value": normal(B, SK, HKV, 6, seed=5)}
BIAS = normal(B, HQ, S, S, seed=6)
SINKS = normal(HQ, seed=7)
MASK = np.random.default_rng(8).integers(0, 4, (B, 1, S, S)) > 0
NEEDED = inspect.Parameter.empty
DEFAULT = lax.Precision.DEFAULT
# The arguments of ejkernel.modules 0.0.80 in its order, with their defaults; a bar ends those by position.
SIGNATURES: dict[Any, dict[str, Any]] = {
    ejkernel.flash_attention: {
        "query": NEEDED, "key": NEEDED, "value": NEEDED, "bias": None, "cum_seqlens_q": None,
        "cum_seqlens_k": None, "softmax_aux": None, "block_tables": None, "|": None, "mask_info": None,
        "softmax_scale": None, "dropout_prob": 0.0, "causal": False, "dropout_seed": None,
        "sliding_window": None, "logits_soft_cap": None, "normalize_output": True, "precision": DEFAULT,
        "logits_dtype": jnp.float32, "platform": None, "cfg": None, "mesh": None, "in_specs": None,
        "out_specs": None,
    },
    ejkernel.attention: {
        "query": NEEDED, "key": NEEDED, "value": NEEDED, "bias": None, "dropout_rng": None,
        "softmax_aux": None, "|": None, "mask_info": None, "init_bias": None, "deterministic": True,
        "softmax_scale": None, "logits_soft_cap": None, "dtype": jnp.bfloat16, "softmax_dtype": None,
        "dropout_prob": 0.0, "causal": False, "sliding_window": None,
    },
    ejkernel.ring_attention: {
        "query": NEEDED, "key": NEEDED, "value": NEEDED, "softmax_aux": None, "bias": None, "|": None,
        "mask_info": None, "mask_builder": None, "sliding_window": None, "chunk_size": None,
        "causal": False, "logits_soft_cap": None, "softmax_scale": None, "axis_name": None,
        "fused_backward": False, "platform": None, "cfg": None, "mesh": None, "in_specs": None,
        "out_specs": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_names_order_and_defaults_are_those_of_ejkernel(function: Any) -> None:
    """What is ours comes behind them, by keyword; all of theirs goes by keyword, too."""
    theirs = SIGNATURES[function]
    parameters = list(inspect.signature(function).parameters.values())
    by_position = list(theirs).index("|")
    names = [name for name in theirs if name != "|"]
    assert [x.name for x in parameters[: len(names)]] == names
    assert {x.name: x.default for x in parameters[: len(names)]} == {name: theirs[name] for name in names}
    kinds = [x.kind for x in parameters]
    assert set(kinds[:by_position]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(kinds[by_position:]) == {inspect.Parameter.KEYWORD_ONLY}


sides = st.sampled_from([0, 2, 9])
windows = st.none() | sides | st.tuples(sides, sides)


@examples(4)
@given(
    st.sampled_from([ejkernel.flash_attention, ejkernel.ring_attention]),
    st.booleans(),
    windows,
    st.none() | st.sampled_from([0.5, 20.0]),
    st.none() | st.sampled_from([0.25, -1.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_options(
    function: Any, causal: bool, window: Any, cap: Any, scale: Any, mask: bool, bias: bool, sinks: bool
) -> None:
    """Sinks [n] are shared by all heads, of which there may be as many as sinks."""
    common = {
        "causal": causal,
        "sliding_window": window,
        "logits_soft_cap": cap,
        "softmax_scale": scale,
        "attention_mask": MASK if mask else None,
    }

    def call(**arrays: Any) -> jax.Array:
        return function(**arrays, **common, softmax_aux=SINKS if sinks else None)

    options = common | {"sliding_window": (window, window) if isinstance(window, int) else window}
    options = {name: x for name, x in options.items() if x is not None}
    if sinks:
        options["softmax_aux"] = np.broadcast_to(SINKS, (HQ, HQ)).copy()
    assert_exact(call, {**SELF, "bias": BIAS} if bias else SELF, options=options)


def in_order(causal: bool, window: tuple[int, int] | None, offset: int) -> np.ndarray:
    """Who sees whom, [1, 1, S, SK], where row i stands at i + offset."""
    i, j = np.arange(S)[:, None] + offset, np.arange(SK)[None]
    seen = np.ones((S, SK), bool)
    if window is not None:
        seen &= (j >= i - window[0]) & (j <= i + window[1])
    return (seen & (j <= i) if causal else seen)[None, None]


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, (2, 3)), (True, (2, 3))])
@pytest.mark.parametrize("function", [ejkernel.flash_attention, ejkernel.ring_attention])
def test_other_lengths_of_queries_and_keys(function: Any, causal: bool, window: Any) -> None:
    """ejKernel's kernels differ in where the rows stand, so that one of them must be meant."""
    options: dict[str, Any] = {"causal": causal, "sliding_window": window}
    for offset, where in ((0, {"platform": "xla"}), (0, {"q_offset": 0}), (4, {"q_offset": 4})):
        seen = in_order(causal, window, offset)
        assert_exact(lambda **x: function(**x, **options, **where), CROSS, options={"attention_mask": seen})  # noqa: B023
    with pytest.raises(ValueError, match=r"^q_offset: got None for 8 queries and 12 keys; .*Triton kernel"):
        function(**CROSS, **options)
    # The place of the rows matters to nothing else, and a MaskInfo of ours may say it.
    function(**CROSS)
    placed = MaskInfo().with_positions(q_offset=4)
    np.testing.assert_array_equal(
        function(**CROSS, **options, mask_info=placed), function(**CROSS, **options, q_offset=4)
    )


def program(function: Any, **options: Any) -> str:
    loss = jax.grad(lambda arrays: function(**arrays, **options).sum())
    return jax.jit(loss).lower(SELF).as_text()


THEIR_SIZES = SimpleNamespace(q_blocksize=2, kv_blocksize=2, num_warps=4)
SIZES = [
    (ejkernel.flash_attention, {"chunk_size_q": 2, "chunk_size_k": 2}),
    (ejkernel.flash_attention, {"fwd_params": THEIR_SIZES}),
    (ejkernel.flash_attention, {"cfg": FlashAttentionConfig(fwd_params=FwdParams(2, 2))}),
    (
        ejkernel.flash_attention,
        {"cfg": SimpleNamespace(fwd_params=THEIR_SIZES, bwd_params=None, platform="auto", backend="any")},
    ),
    (ejkernel.ring_attention, {"query_chunk_size": 2, "key_chunk_size": 2}),
    (ejkernel.ring_attention, {"fwd_params": THEIR_SIZES}),
    (ejkernel.ring_attention, {"chunk_size": 2, "platform": "xla"}),
]


@pytest.mark.parametrize(("function", "sizes"), SIZES)
def test_sizes_of_blocks_reach_the_kernel_and_change_nothing_beyond_rounding(
    function: Any, sizes: dict[str, Any]
) -> None:
    assert program(function, causal=True, **sizes) != program(function, causal=True)
    assert_exact(lambda **x: function(**x, causal=True, **sizes), SELF, options={"causal": True})


IDS = np.array([[1, 1, 1, 2, 2, 0, 0, 0], [0, 0, 3, 3, 3, 3, 3, -1]], np.int32)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("zero_is_padding", [None, False, True])
@pytest.mark.parametrize("function", [ejkernel.flash_attention, ejkernel.ring_attention])
def test_segment_0(function: Any, zero_is_padding: bool | None, traced: bool) -> None:
    """Padding in the ring attention of ejKernel's first versions, a segment in its flash attention."""
    hidden = function is ejkernel.ring_attention if zero_is_padding is None else zero_is_padding
    ids = np.where(IDS == 0, -1, IDS) if hidden else IDS
    flag = {} if zero_is_padding is None else {"zero_is_padding": zero_is_padding}

    def call(ids: Any, **arrays: Any) -> jax.Array:
        return function(**arrays, q_segment_ids=ids, **flag)

    run = jax.jit(call) if traced else call
    options = {"q_segment_ids": ids, "kv_segment_ids": ids}
    assert_exact(lambda **x: run(IDS, **x), SELF, options=options)
    if not traced:
        np.testing.assert_array_equal(
            call(np.where(IDS < 0, 9, IDS).astype(np.uint8), **SELF).shape, (B, S, HQ, 6)
        )


def of_ejkernel(mask: Any = None, q_ids: Any = None, kv_ids: Any = None, positions: Any = None) -> Any:
    """What a MaskInfo of ejKernel stores, and the positions that it computes."""
    return SimpleNamespace(
        _attention_mask=mask,
        _q_segment_ids=q_ids,
        _kv_segment_ids=kv_ids,
        get_or_compute_positions=lambda: positions or (None, None),
    )


FUNCTIONS = [
    ejkernel.flash_attention,
    lambda **x: ejkernel.attention(**x, dtype=jnp.float32)[0],
    ejkernel.ring_attention,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mask_infos(function: Any) -> None:
    """Negative ids are padding in both; what ejKernel's stores counts, all of it."""
    info = MaskInfo.from_segments(IDS).apply_attention_mask(MASK)
    options = {"q_segment_ids": IDS, "kv_segment_ids": IDS, "attention_mask": MASK}
    for mask_info in (info, of_ejkernel(MASK, IDS, IDS)):
        assert_exact(lambda **x: function(**x, mask_info=mask_info), SELF, options=options)  # noqa: B023
    with pytest.raises(ValueError, match=r"^mask_info: got a int; expected a MaskInfo of attest or of ej"):
        function(**SELF, mask_info=3)


def test_positions_of_a_mask_info_of_ejkernel() -> None:
    """Its ring attention compares them where there is causal order or a window."""
    places = np.array([[0, 1, 2, 0, 1, -1, -1, -1]] * B, np.int32)
    info = of_ejkernel(None, IDS, IDS, (places, np.where(places < 0, 2**31 - 1, places)))
    seen = places[:, None, :, None] >= np.where(places < 0, 99, places)[:, None, None, :]
    options = {"q_segment_ids": IDS, "kv_segment_ids": IDS, "attention_mask": seen}
    assert_exact(lambda **x: ejkernel.ring_attention(**x, mask_info=info, causal=True), SELF, options=options)
    whole = {"q_segment_ids": IDS, "kv_segment_ids": IDS}
    assert_exact(lambda **x: ejkernel.ring_attention(**x, mask_info=info), SELF, options=whole)


def test_sequences_and_specs_in_the_order_of_ejkernel() -> None:
    """Sinks come before the lengths in in_specs, behind them in the call."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    starts = np.array([0, 5, 11], np.int32)
    where = {"mesh": mesh, "out_specs": P("x")}
    specs = (P("x"), P("x"), P("x"), P("x"), P(None), P(None), P(None))

    def call(query: Any, key: Any, value: Any, bias: Any) -> jax.Array:
        return ejkernel.flash_attention(
            query, key, value, bias, starts, starts, SINKS[:3], causal=True, in_specs=specs, **where
        )

    options = {"causal": True, "softmax_aux": SINKS[:3], "cum_seqlens_q": starts, "cum_seqlens_k": starts}
    assert_exact(call, {**SELF, "bias": BIAS}, options=options)
    with pytest.raises(ValueError, match=r"^in_specs of softmax_aux: got axis 0 over x"):
        ejkernel.flash_attention(
            **SELF, softmax_aux=SINKS[None], in_specs=(*specs[:4], P("x")), **where, cum_seqlens_q=starts,
            cum_seqlens_k=starts,
        )  # fmt: skip


@pytest.mark.parametrize("window", [0, 2, (1, 3), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0, 1, 3, 100])
def test_first_keys_beside_a_window(first: int, causal: bool, window: Any) -> None:
    """Any size of causal blocks is causal order, which hides some of the first keys, too."""
    left, right = (window, window) if isinstance(window, int) else window
    i, j = np.arange(S)[:, None], np.arange(S)[None]
    seen = ((j >= i - left) & (j <= i + right)) | (j < first)
    seen = seen & (j <= i) if causal else seen

    def call(**arrays: Any) -> jax.Array:
        return ejkernel.ring_attention(
            **arrays,
            sliding_window=window,
            attention_sink_size=first,
            causal_block_size=3 if causal else None,
            attention_mask=MASK,
        )

    assert_exact(call, SELF, options={"attention_mask": seen[None, None] & MASK})


def test_first_keys_without_a_window_change_nothing() -> None:
    got = ejkernel.ring_attention(**SELF, causal=True, attention_sink_size=3)
    np.testing.assert_array_equal(got, ejkernel.ring_attention(**SELF, causal=True))


def test_positions_of_ring_attention() -> None:
    places = np.array([[3, 1, 0, 2, 7, 6, 5, 4]] * B, np.int32)
    seen = places[:, None, :, None] >= places[:, None, None, :]

    def call(**arrays: Any) -> jax.Array:
        return ejkernel.ring_attention(**arrays, q_position_ids=places, kv_position_ids=places, causal=True)

    assert_exact(call, SELF, options={"attention_mask": seen})


def test_precision_default_is_that_of_our_kernels() -> None:
    for function in (ejkernel.flash_attention, ejkernel.ring_attention):
        assert program(function, precision=DEFAULT) == program(function, precision=None)
        assert program(function, precision=DEFAULT) != program(function, precision="high")


PLACES = np.zeros((B, S), np.int32)
REFUSED = {
    "pages": (
        NotImplementedError, "block_tables: got a list.*jnp.take",
        lambda: ejkernel.flash_attention(**SELF, block_tables=[1]),
    ),
    "dropout without a seed": (
        ValueError, "dropout_seed: got None", lambda: ejkernel.flash_attention(**SELF, dropout_prob=0.5)
    ),
    "a platform of ejKernel alone": (
        ValueError, "platform: got 'tilelang'", lambda: ejkernel.flash_attention(**SELF, platform="tilelang")
    ),
    "sizes twice": (
        ValueError, "chunk_size_q: got sizes beside fwd_params",
        lambda: ejkernel.flash_attention(**SELF, chunk_size_q=2, fwd_params=THEIR_SIZES),
    ),
    "sizes beside a configuration": (
        ValueError, "cfg: got a configuration beside sizes",
        lambda: ejkernel.flash_attention(**SELF, cfg=FlashAttentionConfig(), chunk_size_q=2),
    ),
    "a configuration of attention": (
        ValueError, "cfg: got a AttentionConfig",
        lambda: ejkernel.flash_attention(**SELF, cfg=AttentionConfig()),
    ),
    "a size of 0": (
        ValueError, "chunk_size_k: got 0", lambda: ejkernel.flash_attention(**SELF, chunk_size_k=0)
    ),
    "a bias in the place of sinks": (
        ValueError, "softmax_aux: got shape .2, 4, 8, 8.*Sinks come before a bias",
        lambda: ejkernel.ring_attention(*SELF.values(), BIAS),
    ),
    "a bias behind the cap": (
        NotImplementedError, "bias: got one beside logits_soft_cap; .*behind the cap",
        lambda: ejkernel.attention(**SELF, bias=BIAS, logits_soft_cap=3.0),
    ),
    "a bias that is made, behind the cap": (
        NotImplementedError, "bias: got one beside logits_soft_cap",
        lambda: ejkernel.attention(**SELF, init_bias=lambda: BIAS, logits_soft_cap=3.0),
    ),
    "dropped logits": (
        NotImplementedError, "pdrop: .*drops logits, ahead of the softmax",
        lambda: ejkernel.ring_attention(**SELF, pdrop=0.1, deterministic=False),
    ),
    "a cache": (NotImplementedError, "cache_idx: ", lambda: ejkernel.ring_attention(**SELF, cache_idx=0)),
    "a builder of masks": (
        NotImplementedError, "mask_builder: ", lambda: ejkernel.ring_attention(**SELF, mask_builder=len)
    ),
    "sums in bfloat16": (
        NotImplementedError, "dtype: ", lambda: ejkernel.ring_attention(**SELF, dtype=jnp.bfloat16)
    ),
    "a chunk without a platform": (
        ValueError, "chunk_size: got 4; .*XLA kernel takes it as the size of blocks",
        lambda: ejkernel.ring_attention(**SELF, chunk_size=4),
    ),
    "a negative number of first keys": (
        ValueError, "attention_sink_size: got -1",
        lambda: ejkernel.ring_attention(**SELF, attention_sink_size=-1),
    ),
    "first keys beside positions": (
        NotImplementedError, "attention_sink_size: got first keys beside positions",
        lambda: ejkernel.ring_attention(
            **SELF, sliding_window=1, attention_sink_size=1, q_position_ids=PLACES, kv_position_ids=PLACES
        ),
    ),
    "positions of rows alone": (
        ValueError, "kv_position_ids: got None",
        lambda: ejkernel.ring_attention(**SELF, causal=True, q_position_ids=PLACES),
    ),
    "unsigned ids that nobody knows": (
        ValueError, "q_segment_ids: got dtype uint32; expected a signed dtype",
        lambda: jax.eval_shape(
            lambda ids: ejkernel.ring_attention(**SELF, q_segment_ids=ids), np.zeros((B, S), np.uint32)
        ),
    ),
    "too many specs": (
        ValueError, "in_specs: got 6 of them",
        lambda: ejkernel.ring_attention(
            **SELF, mesh=jax.make_mesh((1,), ("x",)), in_specs=(P(),) * 6, out_specs=P()
        ),
    ),
    "an axis that is not that of the spec": (
        ValueError, "axis_name: got 'y'; expected the axis of the spec of query",
        lambda: ejkernel.ring_attention(
            **SELF, axis_name="y", mesh=jax.make_mesh((1,), ("x",)), in_specs=(P(None, "x"),) * 3,
            out_specs=P(None, "x"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_refused_by_name(name: str) -> None:
    kind, message, call = REFUSED[name]
    with pytest.raises(kind, match=f"^{message}"):
        call()
