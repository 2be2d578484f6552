"""Meshes of tests in a process of eight devices, and what compiled programs do over them."""

import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

kinds = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "automatic"])


def mesh_of(batch: int, heads: int, kind: AxisType = AxisType.Explicit) -> Any:
    return jax.make_mesh((batch, heads), ("data", "model"), axis_types=(kind,) * 2)


def mesh(kind: AxisType = AxisType.Auto) -> Any:
    """Of all eight devices."""
    return mesh_of(2, 4, kind)


def assert_same(found: Any, wanted: Any) -> None:
    """Within the order of float32 sums: the same pairs are visible, and the same ones are dropped."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def collectives(program: str) -> Counter[str]:
    """The collectives of a compiled program, by name."""
    return Counter(
        re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", program)
    )
