"""S20: integers are checked as they were given, before anything narrows them to 32 bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest import attention, flash_attention, flash_attention_with_lse, validate_call
from attest.kernels import operations
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.ring import ring_attention
from tests.kernels.integers import Case, aliases, check_makes_a_difference, check_taken_as_given

pytestmark = pytest.mark.found_outside

B, SQ, SK, HQ = 2, 5, 7, 2
RNG = np.random.default_rng(0)
QKV = tuple(RNG.standard_normal((B, length, HQ, 4)).astype("f") for length in (SQ, SK, SK))


def over_a_mesh(**options: Any) -> jax.Array:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return ring_attention(*QKV, mesh=mesh, axis_name="x", **options)


def sharded(**options: Any) -> jax.Array:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    specs = {"in_specs": (P("x"), P("x"), P("x")), "out_specs": P("x")}
    return operations.flash_attention(*QKV, mesh=mesh, **specs, **options)


def with_two_batch_dimensions(**options: Any) -> jax.Array:
    """Arrays of the call's batch are [1, B, ...] and those that all share [1, 1, ...]."""
    arrays = {
        name: x[None]
        for name, x in options.items()
        if isinstance(x, np.ndarray) and x.ndim > 1 and name != "origin"
    }
    return flash_attention(*(x[None] for x in QKV), **{**options, **arrays})[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "flash_attention": partial(flash_attention, *QKV),
    "flash_attention_with_lse": lambda **options: flash_attention_with_lse(*QKV, **options)[0],
    "attention": lambda **options: attention(*QKV, deterministic=False, **options)[0],
    "operations.flash_attention": partial(operations.flash_attention, *QKV),
    "operations.attention": lambda **options: operations.attention(*QKV, deterministic=False, **options)[0],
    "ring_attention": partial(ring_attention, *QKV),
    "ring_attention over a mesh": over_a_mesh,
    "operations.flash_attention over a mesh": sharded,
    "two batch dimensions": with_two_batch_dimensions,
}

IDS = {"q_segment_ids": np.zeros((B, SQ), int), "kv_segment_ids": np.arange(B * SK).reshape(B, SK) % 2}
STARTS = {"cum_seqlens_q": np.array([0, 4, 9]), "cum_seqlens_k": np.array([0, 5, 12])}
MASK = np.ones((1, 1, SQ, SK), int)
MASK[0, 0, 1, 2] = 0
# By name: the argument, the other arguments, what it means far above and far below, and the entry that moves.
ARGUMENTS: dict[str, tuple[Any, dict[str, Any], int | None, int | None, tuple[int, ...]]] = {
    "attention_mask": (MASK, {}, 1, 1, (0, 0, 1, 2)),
    "kv_start": (np.full((B, SQ), 3), {}, SK, 0, (1, 2)),
    "kv_end": (np.full((B, SQ), 3), {}, SK, 0, (1, 2)),
    "q_segment_ids": (IDS["q_segment_ids"], IDS, 9, -1, (1, 2)),
    "kv_segment_ids": (IDS["kv_segment_ids"], IDS, 9, -1, (1, 3)),
    "cum_seqlens_q": (STARTS["cum_seqlens_q"], STARTS, None, None, (1,)),
    "cum_seqlens_k": (STARTS["cum_seqlens_k"], STARTS, None, None, (1,)),
    "q_offset": (0, {"causal": True}, 100, -100, ()),
    "q_positions": (np.arange(B * SQ).reshape(B, SQ) % 3, {"causal": True}, 100, -100, (1, 2)),
    "kv_positions": (np.full((B, SK), 4), {"causal": True}, 100, -100, (1, 2)),
    "origin": (np.zeros(4, int), {"dropout_prob": 0.5, "dropout_seed": 1}, None, None, (1,)),
    "sliding_window": (1, {}, 100, None, ()),
    "chunk_size": (2, {}, 100, None, ()),
}


def case(function: Callable[..., Any], name: str) -> Case:
    base, others, above, below, at = ARGUMENTS[name]
    call = lambda x: function(**{**others, name: x})  # noqa: E731
    return Case(name, call, base, above, below, at, unsigned=name == "origin")


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=5)
@given(data=st.data())
def test_arguments_of_functions(function: str, name: str, data: Any) -> None:
    of = case(FUNCTIONS[function], name)
    check_taken_as_given(of, *data.draw(aliases(of)))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_the_entries_mean_differs(name: str) -> None:
    check_makes_a_difference(case(FUNCTIONS["flash_attention"], name))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_seeds_of_64_bits(function: str) -> None:
    """High words count, of whatever type the integer is."""
    words = np.array([3, 1], np.uint32)
    call = partial(FUNCTIONS[function], dropout_prob=0.5)
    want = call(dropout_seed=words)
    for seed in (2**32 + 3, np.int64(2**32 + 3), np.uint64(2**32 + 3), np.array(2**32 + 3)):
        np.testing.assert_array_equal(call(dropout_seed=seed), want)
    with pytest.raises(ValueError, match=r"^dropout_seed: got -4294967293; expected 0 <= dropout_seed"):
        call(dropout_seed=np.int64(3 - 2**32))


def visible(info: MaskInfo) -> jax.Array:
    return info.get_or_compute_attention_mask(SQ, SK)


TOKENS = np.ones((B, SQ), int)
TOKENS[1, 2] = 0
CAUSAL = MaskInfo().apply_causal()
MASK_INFOS: dict[str, Case] = {
    "from_attention_mask": Case(
        "attention_mask", lambda x: visible(MaskInfo.from_attention_mask(x)), MASK, 1, 1, (0, 0, 1, 2)
    ),
    "a mask of tokens": Case(
        "attention_mask",
        lambda x: MaskInfo.from_attention_mask(x).get_or_compute_attention_mask(),
        TOKENS,
        1,
        1,
        (1, 2),
    ),
    "from_segments": Case(
        "q_segment_ids",
        lambda x: visible(MaskInfo.from_segments(x, IDS["kv_segment_ids"])),
        IDS["q_segment_ids"],
        9,
        -1,
        (1, 2),
    ),
    "one batch of ids for all": Case(
        "q_segment_ids",
        lambda x: visible(MaskInfo.from_segments(x, IDS["kv_segment_ids"])),
        np.zeros((1, SQ), int),
        9,
        -1,
        (0, 2),
    ),
    "from_cu_seqlens": Case(
        "cum_seqlens_q",
        lambda x: visible(MaskInfo.from_cu_seqlens(x, STARTS["cum_seqlens_k"], padded=True)),
        STARTS["cum_seqlens_q"],
        None,
        None,
        (1,),
    ),
    "apply_kv_lengths": Case(
        "kv_lengths", lambda x: visible(MaskInfo().apply_kv_lengths(x)), np.array([3, 4]), None, None, (1,)
    ),
    "one length": Case("kv_lengths", lambda x: visible(MaskInfo().apply_kv_lengths(x)), 3),
    "apply_kv_ranges, kv_start": Case(
        "kv_start",
        lambda x: visible(MaskInfo().apply_kv_ranges(kv_start=x)),
        np.full((B, SQ), 3),
        SK,
        0,
        (1, 2),
    ),
    "apply_kv_ranges, kv_end": Case(
        "kv_end", lambda x: visible(MaskInfo().apply_kv_ranges(kv_end=x)), np.full((B, SQ), 3), SK, 0, (1, 2)
    ),
    "with_positions, q_positions": Case(
        "q_positions", lambda x: visible(CAUSAL.with_positions(x)), np.full((B, SQ), 3), 100, -100, (1, 2)
    ),
    "with_positions, kv_positions": Case(
        "kv_positions",
        lambda x: visible(CAUSAL.with_positions(None, x)),
        np.full((B, SK), 3),
        100,
        -100,
        (1, 2),
    ),
    "with_positions, q_offset": Case(
        "q_offset", lambda x: visible(CAUSAL.with_positions(q_offset=x)), np.array([1, 2]), 100, -100, (1,)
    ),
    "apply_sliding_window": Case(
        "sliding_window", lambda x: visible(MaskInfo().apply_sliding_window(x)), 1, 100, None
    ),
    "apply_chunked": Case("chunk_size", lambda x: visible(MaskInfo().apply_chunked(x)), 2, 100, None),
}


@pytest.mark.parametrize("name", MASK_INFOS)
@settings(max_examples=6)
@given(data=st.data())
def test_arguments_of_mask_infos(name: str, data: Any) -> None:
    of = MASK_INFOS[name]
    check_taken_as_given(of, *data.draw(aliases(of)))


@pytest.mark.parametrize("name", MASK_INFOS)
def test_what_the_entries_of_mask_infos_mean_differs(name: str) -> None:
    check_makes_a_difference(MASK_INFOS[name])


@pytest.mark.parametrize("name", ["cum_seqlens_q", "cum_seqlens_k", "origin"])
@settings(max_examples=6)
@given(data=st.data())
def test_validate_call_refuses_them(name: str, data: Any) -> None:
    """Of the integers that have no meaning beyond 32 bits."""
    base, others, _, _, at = ARGUMENTS[name]
    of = Case(name, lambda x: None, base, at=at, unsigned=name == "origin")
    alias, dtype, _ = data.draw(aliases(of))
    if name.startswith("cum"):
        others = {key: x.astype(np.int32) for key, x in others.items()}
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        validate_call(*QKV, **{**others, name: of.with_entry(alias, dtype)})


@pytest.mark.parametrize("name", ["attention_mask", "kv_end", "q_segment_ids"])
@settings(max_examples=6)
@given(data=st.data())
def test_arguments_of_a_compiled_program(name: str, data: Any) -> None:
    base, others, above, below, at = ARGUMENTS[name]
    arrays = dict(zip(("query", "key", "value"), QKV, strict=True)) | others
    policy = operations.AutotunePolicy(allow_autotune=False)
    executor = operations.Executor(operations.ConfigSelectorChain(policy=policy))

    def call(x: Any) -> jax.Array:
        given = {**arrays, name: x}
        return executor.compile(operations.FlashAttention(), **{**given, name: x.clip(0, 1)})(**given)

    of = Case(name, call, base, above, below, at)
    check_taken_as_given(of, *data.draw(aliases(of)))


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize(
    "name", ["attention_mask", "kv_start", "kv_end", "q_segment_ids", "q_offset", "q_positions", "origin"]
)
def test_traced_integers_of_64_bits_end_at_the_limits_of_32(name: str, above: bool) -> None:
    """Nobody can refuse them; none is taken for another one that 32 bits hold."""
    base, others, high, low, at = ARGUMENTS[name]
    shift = 2**32 if above else -(2**32)
    with jax.enable_x64(True):
        arrays = {key: jnp.asarray(x) for key, x in others.items() if isinstance(x, np.ndarray)}
        options = {key: x for key, x in others.items() if key not in arrays}

        def run(x: Any) -> jax.Array:
            return flash_attention(*map(jnp.asarray, QKV), **{**options, **arrays, name: x})

        whole = np.array(base, np.int64)
        whole[at] += shift
        got, taken_for = (jax.jit(run)(jnp.asarray(x)) for x in (whole, np.asarray(base, np.int64)))
        meant = np.array(base, np.int64)
        if name == "origin":
            meant[at] = 2**32 - 1 if above else 0
        else:
            meant[at] = high if above else low
        np.testing.assert_array_equal(got, jax.jit(run)(jnp.asarray(meant)))
        if name != "origin" or above:
            assert not np.array_equal(got, taken_for)


def test_traced_positions_of_unsigned_32_bits() -> None:
    """2**32 - 1 is no -1."""
    places = np.array([[0, 1, 2**32 - 1, 3, 4]], np.uint32)
    run = jax.jit(lambda x: flash_attention(*QKV, causal=True, q_positions=x))
    np.testing.assert_array_equal(run(places)[:, 2], run(np.uint32(places.clip(max=100)))[:, 2])


def test_an_origin_of_known_and_traced_coordinates() -> None:
    """Known ones are refused as if all were known."""
    options = {"dropout_prob": 0.5, "dropout_seed": 1}

    def run(row: Any, first: Any) -> jax.Array:
        return flash_attention(*QKV, origin=(first, 0, row, 0), **options)

    want = jax.jit(lambda: run(2, 1))()
    np.testing.assert_array_equal(jax.jit(lambda row: run(row, 1))(2), want)
    np.testing.assert_array_equal(jax.jit(lambda row: run(row, jnp.int32(1)))(2), want)
    for first in (np.int64(2**32 + 1), -1):
        with pytest.raises(ValueError, match=r"^origin: got \["):
            jax.jit(partial(run, first=first))(2)


NO_INTEGERS = {
    "timedelta64[s]": "timedelta64",
    "datetime64[s]": "datetime64",
    "object": "object",
    "U1": "<U",
}
ARRAYS = [name for name, (base, *_) in ARGUMENTS.items() if isinstance(base, np.ndarray)]


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_durations_and_dates_are_no_integers(function: str, name: str) -> None:
    """NumPy counts timedelta64 among the signed integers."""
    base, others, *_ = ARGUMENTS[name]
    for dtype, shown in NO_INTEGERS.items():
        with pytest.raises(ValueError, match=rf"^{name}: got .*{shown}"):
            FUNCTIONS[function](**{**others, name: base.astype(dtype)})


@pytest.mark.parametrize("dtype", ["timedelta64[s]", "datetime64[s]"])
@pytest.mark.parametrize("name", [name for name, of in MASK_INFOS.items() if isinstance(of.base, np.ndarray)])
def test_durations_and_dates_in_mask_infos(name: str, dtype: str) -> None:
    of = MASK_INFOS[name]
    with pytest.raises(ValueError, match=rf"^{of.name}: got dtype {dtype[:9]}"):
        of.call(of.base.astype(dtype))


@pytest.mark.parametrize("function", ["flash_attention", "attention", "ring_attention"])
@pytest.mark.parametrize("name", ["attention_mask", "bias"])
def test_a_mask_of_keys_is_told_its_axes(function: str, name: str) -> None:
    keys = np.ones((B, SK), {"attention_mask": bool, "bias": "f"}[name])
    expected = rf"^{name}: got shape \(2, 7\); .*keys .* is {name}\[:, None, None, :\], \[2, 1, 1, 7\]\.$"
    with pytest.raises(ValueError, match=expected):
        FUNCTIONS[function](**{name: keys})
    out = FUNCTIONS[function](**{name: keys[:, None, None, :]})
    np.testing.assert_allclose(out, FUNCTIONS[function](), rtol=1e-5, atol=1e-6)
