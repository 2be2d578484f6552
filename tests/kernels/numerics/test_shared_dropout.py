"""S29: what shares one mask of dropout, on the way through every public function."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attest
from attest.kernels import operations, xla
from attest.kernels.call.call import check_call
from attest.kernels.operations import FlashAttention
from attest.kernels.operations.easydel import FlashAttn, OperationMetadata, VanillaAttn
from attest.kernels.operations.executor import invocation
from attest.kernels.ring import ring_attention

pytestmark = pytest.mark.found_outside

BATCH, ROWS, KEYS, HEADS = 2, 3, 16, 4
DROPS: dict[str, Any] = {"dropout_prob": 0.5, "dropout_seed": 9}
shared = pytest.mark.parametrize("shared", [None, "b", "h", "bh"])


def by_metadata(query: Any, key: Any, value: Any, **options: Any) -> Any:
    rest = {name: x for name, x in options.items() if name != "dropout_prob"}
    operator = FlashAttn(OperationMetadata(dropout_prob=options["dropout_prob"]))
    return operator(query, key, value, **rest).attention_outputs


# Of one-hot values, out is the weights.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attest": attest.flash_attention,
    "in one piece": partial(xla.flash_attention, fwd_params=None),
    "in blocks": partial(xla.flash_attention, fwd_params=xla.ChunkSizes(2, 8)),
    "weights": lambda *x, **options: xla.attention(*x, deterministic=False, **options)[0],
    "operation": operations.flash_attention,
    "operation of weights": lambda *x, **o: operations.attention(*x, deterministic=False, **o)[0],
    "EasyDeL": by_metadata,
    "EasyDeL's weights": lambda *x, **o: VanillaAttn()(*x, deterministic=False, **o).attention_outputs,
    "ring of one": ring_attention,
}


def kept(function: Callable[..., Any], *leading: int, **options: Any) -> np.ndarray:
    """The pairs that are kept, [batch..., heads, rows, keys]: logits are 0, and values the unit matrix."""
    query, key = (jnp.zeros((*leading, length, HEADS, 8)) for length in (ROWS, KEYS))
    value = jnp.broadcast_to(jnp.eye(KEYS)[:, None], (*leading, KEYS, HEADS, KEYS))
    out = function(query, key, value, **{**DROPS, **options})
    return np.asarray(out).swapaxes(-3, -2) != 0


@cache
def alone(entry: int, head: int) -> np.ndarray:
    """The pairs of one batch entry and head of the whole, [rows, keys]."""
    return kept(attest.flash_attention, 1, origin=(entry, head, 0, 0))[0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
@shared
def test_every_function_shares_what_it_is_asked_to(shared: str | None, function: str) -> None:
    found = kept(FUNCTIONS[function], BATCH, dropout_shared=shared)
    for entry, head in np.ndindex(BATCH, HEADS):
        place = 0 if "b" in (shared or "") else entry, 0 if "h" in (shared or "") else head
        np.testing.assert_array_equal(found[entry, head], alone(*place))


@pytest.mark.parametrize("leading", [(), (2, 3), (3, 1, 2)], ids=str)
@shared
def test_all_batch_dimensions_are_batch_entries(shared: str | None, leading: tuple[int, ...]) -> None:
    found = kept(attest.flash_attention, *leading, dropout_shared=shared).reshape(-1, HEADS, ROWS, KEYS)
    want = kept(attest.flash_attention, len(found), dropout_shared=shared)
    np.testing.assert_array_equal(found, want)


@shared
def test_an_axis_that_is_mapped_is_no_batch_dimension(shared: str | None) -> None:
    """Each of its entries is a call by itself, whatever is shared: S22."""
    query, key = (jnp.zeros((BATCH, 1, length, HEADS, 8)) for length in (ROWS, KEYS))
    value = jnp.broadcast_to(jnp.eye(KEYS)[:, None], (BATCH, 1, KEYS, HEADS, KEYS))
    call = partial(attest.flash_attention, **DROPS, dropout_shared=shared)
    found = np.asarray(jax.vmap(call)(query, key, value)).swapaxes(-3, -2) != 0
    want = kept(attest.flash_attention, 1, dropout_shared=shared)
    for entry in found:
        np.testing.assert_array_equal(entry, want)


@pytest.mark.parametrize("shared", ["b", "bh"])
def test_packed_sequences_have_masks_of_their_own(shared: str) -> None:
    zeros, lengths = jnp.zeros((1, KEYS, 1, 8)), np.array([0, 8, 16], np.int32)
    value = jnp.eye(KEYS)[None, :, None]
    cumulated = {"cum_seqlens_q": lengths, "cum_seqlens_k": lengths}
    out = attest.flash_attention(zeros, zeros, value, **DROPS, **cumulated, dropout_shared=shared)
    first, second = (np.asarray(out)[0, part, 0, part] != 0 for part in (slice(8), slice(8, 16)))
    assert (first != second).any()


def test_without_dropout_nothing_is_shared() -> None:
    """So calls that differ in nothing else are one program."""
    arrays = [np.zeros((1, 2, 1, 4), np.float32)] * 3
    assert check_call(*arrays, dropout_shared="bh").dropout_shared == ""
    assert check_call(*arrays, **DROPS, dropout_shared="bh").dropout_shared == "bh"
    with pytest.raises(ValueError, match=r"^dropout_shared: got 'hb'; expected 'b', 'h', 'bh' or None"):
        check_call(*arrays, dropout_shared="hb")


def test_it_is_part_of_the_key_of_a_configuration() -> None:
    """And of none without it: what was cached before is found."""
    arrays = dict.fromkeys(("query", "key", "value"), jnp.zeros((1, 2, 1, 4)))
    operation = FlashAttention()

    def key(**options: Any) -> str:
        _, given = operation.prepare(**arrays, **DROPS, **options)
        return invocation(operation, (), given).call_key

    assert key() == key(dropout_shared=None)
    assert len({key(), key(dropout_shared="b"), key(dropout_shared="h")}) == 3
