"""A causal language model with ring attention and dropout trains alike on any number of devices (S21)."""

import itertools
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.ring import attention, pairs
from attest.kernels.ring.arguments import STRATEGIES
from attest.kernels.xla.blocks import ChunkSizes
from tests.kernels.ring import gpt

LIMITS = tomllib.loads((Path(__file__).parent / "training.toml").read_text())
DEVICES = 8

pytestmark = pytest.mark.process(devices=DEVICES)


def losses(strategy: str, devices: int, dtype: Any = jnp.float32) -> np.ndarray:
    """The losses of the model inside of jax.shard_map."""
    options = {"axis_name": gpt.AXIS, "strategy": strategy}
    return gpt.losses(gpt.attend_in(dtype, **options), gpt.mesh_of(devices))


@cache
def of_one_device() -> np.ndarray:
    found = gpt.losses(gpt.attend_in(jnp.float32))
    assert found[-5:].mean() < LIMITS["learnt"] * found[0], found
    return found


def agree(found: np.ndarray) -> None:
    np.testing.assert_allclose(found, of_one_device(), rtol=LIMITS["relative"], atol=0)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_those_of_one_device(strategy: str, devices: int) -> None:
    agree(losses(strategy, devices))


def test_losses_from_outside_are_those_of_one_device() -> None:
    agree(gpt.losses(gpt.attend_in(jnp.float32, axis_name=gpt.AXIS, mesh=gpt.mesh_of(4))))


def _local_dropout(pair: pairs.Pair) -> Any:
    """Where the pairs of a call begin, by the rows and keys of the shards alone."""
    begin = jnp.array([0, 0, pair.lines.first, pair.columns.first], jnp.uint32)
    return begin if pair.own.call.dropout_seed is not None else None


def _shifted_order(order: Callable[..., Any]) -> Callable[..., Any]:
    """Causal order in which a row stands where that of the next device does."""
    return lambda call, spread: replace(order(call, spread), shift=call.query.shape[1])


def test_dropout_by_coordinates_of_the_shard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.Pair, "_origin", _local_dropout)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        agree(losses("ring", 2))


def test_a_mask_off_by_a_shard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = attention
    monkeypatch.setattr(module, "_order", _shifted_order(module._order))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        agree(losses("ring", 2))


def test_meshes_differ_no_more_than_block_sizes_in_bfloat16() -> None:
    """Losses on 1, 2, 4 and 8 devices spread no further than those of four block sizes on one device."""
    sizes = (ChunkSizes(n, n) for n in (8, 16, 32, 64))
    blocks = [gpt.losses(gpt.attend_in(jnp.bfloat16, fwd_params=x, bwd_params=x)) for x in sizes]
    meshes = [losses("ring", devices, jnp.bfloat16) for devices in (1, 2, 4, 8)]
    assert spread(blocks) > 0
    assert spread(meshes) <= LIMITS["spread"] * spread(blocks)


def spread(trainings: Sequence[np.ndarray]) -> float:
    """The root mean square of relative differences of losses, over pairs of trainings and steps."""
    found = [a / b - 1 for a, b in itertools.combinations(np.asarray(trainings, np.float64), 2)]
    return float(np.sqrt(np.square(found).mean()))
