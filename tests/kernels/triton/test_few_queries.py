"""The Triton kernels where queries are few: packed heads, and keys in parts, give what the clauses say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels import xla
from attest.kernels.call.call import check_call
from attest.kernels.contract import Forward
from attest.kernels.operations.abstract_call import abstract_call
from attest.kernels.triton import BackwardSizes, BlockSizes, flash_attention, flash_attention_with_lse
from attest.kernels.triton.candidates import TUNABLE
from attest.kernels.triton.few_queries import choose_parts, whole
from attest.kernels.triton.memory import drain_violations
from attest.kernels.triton.target import Launch, recorded
from tests.kernels.interpreted import needs_interpreter
from tests.kernels.test_few_queries import GROUP, HEADS, KEY, OPTIONS, QUERY, VALUE, K, Q, normal

# Blocks of 16 keys, of which 50 keys have four.
SIZES = {programs: BlockSizes(16, 16, num_stages=1, programs=programs) for programs in (1, 16)}
FURTHER: dict[str, dict[str, Any]] = {
    "ALiBi": {"alibi_slopes": np.linspace(0.1, 1, HEADS, dtype=np.float32)},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 7},
    "enormous logits": {"softmax_scale": 1e30},
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attest.kernels.triton.few_queries._FEWEST_BLOCKS", 1)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "programs"), [*((name, 16) for name in (*OPTIONS, *FURTHER)), ("plain", 1), ("dropout", 1)]
)
def test_out_and_lse_are_right(name: str, programs: int) -> None:
    options = (OPTIONS | FURTHER)[name]
    got = flash_attention_with_lse(QUERY, KEY, VALUE, fwd_params=SIZES[programs], **options)
    wanted = xla.flash_attention_with_lse(QUERY, KEY, VALUE, **options)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-6)
    assert not drain_violations()


@needs_interpreter
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", [{}, {"softmax_aux": normal(HEADS, 2)}], ids=["plain", "sinks"])
def test_out_is_rounded_once(options: dict[str, Any], dtype: Any) -> None:
    """Parts are merged in float32: what is rounded is within half a unit of what is not."""
    arrays: Any = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
    sizes: Any = {"fwd_params": SIZES[16]}
    got = flash_attention(*arrays, **sizes, **options)
    exact = flash_attention(*(x.astype(jnp.float32) for x in arrays), **sizes, **options)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=2.5 * jnp.finfo(dtype).eps, atol=2e-3)


def test_the_share_of_sinks_is_exact_beside_large_logits() -> None:
    """The new lse rounds by 3e-5 here, the difference of both by nothing."""
    lse, sink = np.float32(1000.0), np.float32(1000.25)
    call = check_call(QUERY, KEY, VALUE, softmax_aux=np.full((1, 1), sink))
    batch, rows, heads = KEY.shape[0], GROUP * Q, HEADS // GROUP
    numbers = jnp.full((batch, heads, rows), lse)
    sums = Forward(jnp.ones((batch, rows, heads, VALUE.shape[3])), numbers, numbers)
    exact = 1.0 / (1.0 + np.exp(np.float64(sink) - np.float64(lse)))
    np.testing.assert_allclose(whole(sums, call, 1, jnp.float32).out, exact, rtol=3e-7)


@needs_interpreter
def test_gradients_are_right() -> None:
    sizes = {"fwd_params": SIZES[16], "bwd_params": BackwardSizes(BlockSizes(16, 16), BlockSizes(16, 16))}
    cotangent = normal(*QUERY.shape[:3], VALUE.shape[3])

    def gradients(attend: Any, **options: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, causal=True, **options), QUERY, KEY, VALUE)[1](
            cotangent
        )

    for got, wanted in zip(gradients(flash_attention, **sizes), gradients(xla.flash_attention), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("programs", SIZES)
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(programs: int) -> None:
    """The last key, which the last query alone sees."""
    value = VALUE.at[0, K - 1, 0, 1].set(jnp.nan)
    out = flash_attention(QUERY, KEY, value, causal=True, fwd_params=SIZES[programs])
    nan = np.zeros(out.shape, bool)
    nan[0, Q - 1, :GROUP, 1] = True
    np.testing.assert_array_equal(np.isnan(out), nan)


def launched(q_heads: int, queries: int, keys: int, **options: Any) -> Launch:
    query = jax.ShapeDtypeStruct((2, queries, q_heads, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, keys, 4, 128), jnp.bfloat16)
    with recorded("sm_90") as launches:
        jax.eval_shape(lambda *x: flash_attention(*x, **options), query, key, key)
    (found,) = launches
    return found


def test_one_program_reads_a_key_head_for_all_its_query_heads() -> None:
    short = launched(q_heads=16, queries=1, keys=100)
    assert short.constants["SPEC"].shape.group == 1
    assert short.grid == (2 * 4, 1)
    long = launched(q_heads=16, queries=1, keys=2**15)
    assert long.grid[0] == 2 * 4
    assert long.grid[1] == long.constants["SPEC"].shape.key_parts > 4
    assert long.outputs[0].shape == (2 * long.grid[1], 4, 4, 128)
    assert long.outputs[0].dtype == jnp.float32


@pytest.mark.parametrize("queries", [1, 8])
def test_the_table_is_asked_for_the_rows_of_packed_heads(queries: int) -> None:
    """With 4 query heads on a key head, 8 queries are 32 rows: no longer few."""
    launch = launched(q_heads=16, queries=queries, keys=2**15)
    arrays = {
        name: jax.ShapeDtypeStruct((2, length, heads, 128), jnp.bfloat16)
        for name, length, heads in (("query", queries, 16), ("key", 2**15, 4), ("value", 2**15, 4))
    }
    with recorded("sm_90"):
        sizes = TUNABLE.chosen(abstract_call(arrays).call).forward
    assert (sizes.q, sizes.k) == (launch.blocks["BLOCK_Q"], launch.blocks["BLOCK_K"])
    assert (sizes.num_warps, sizes.num_stages) == (launch.num_warps, launch.num_stages)


def test_others_are_launched_as_they_are() -> None:
    many = launched(q_heads=16, queries=17, keys=2**15)
    bias = launched(q_heads=16, queries=1, keys=2**15, bias=jnp.zeros((1, 1, 1, 2**15)))
    raw = launched(q_heads=16, queries=1, keys=2**15, normalize_output=False)
    assert [(x.constants["SPEC"].shape.group, x.grid[1]) for x in (many, bias, raw)] == [(4, 1)] * 3


@given(st.integers(1, 2000), st.integers(1, 3000), st.integers(1, 600))
def test_no_part_is_empty(tiles: int, k_blocks: int, programs: int) -> None:
    parts = choose_parts(tiles, k_blocks, programs)
    each = -(-k_blocks // parts)
    assert 1 <= parts <= max(1, programs // tiles)
    assert (parts - 1) * each < k_blocks
