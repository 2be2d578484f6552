"""The manual axes of shard_map under every name that the allowed versions of JAX give them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from attest.kernels import varying


@dataclass(frozen=True)
class OldType:
    """What `jax.typeof` gave before jax 0.10."""

    vma: frozenset[str]


def sharded(call: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(call, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))


def test_leaves_that_are_replicated_join_the_axes_of_the_others() -> None:
    seen = []

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append([varying.varying_axes(each) for each in (x, y, *varying.vary_together((x, y)))])
        return x + y

    sharded(call)(jnp.ones(2), jnp.ones(2))
    data = frozenset({"data"})
    assert seen[0] == [data, frozenset(), data, data]


def test_outputs_of_a_launch_vary_as_its_inputs() -> None:
    seen = []

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.extend(varying.shape_varying_as(each, (3,), "int32") for each in (x, y))
        return x + y

    sharded(call)(jnp.ones(2), jnp.ones(2))
    assert [(x.shape, x.dtype) for x in seen] == [((3,), jnp.int32)] * 2
    assert [set(x.manual_axis_type.varying) for x in seen] == [{"data"}, set()]


def test_the_names_before_jax_0_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vma` for the axes, `lax.pvary` for the cast."""
    kinds = {1: OldType(frozenset({"b", "a"})), 2: OldType(frozenset({"a"})), 3: OldType(frozenset())}
    monkeypatch.setattr(varying.jax, "typeof", lambda x: kinds[x])
    monkeypatch.setattr(varying, "lax", SimpleNamespace(pvary=lambda x, axes: (x, axes)))
    assert varying.vary_together({"x": 1, "y": 2, "z": 3}) == {"x": 1, "y": (2, ("b",)), "z": (3, ("a", "b"))}
    given = []
    monkeypatch.setattr(varying.jax, "ShapeDtypeStruct", lambda *shape, **own: given.append((shape, own)))
    varying.shape_varying_as(1, (2,), np.int32)  # pyright: ignore[reportArgumentType]
    assert given == [(((2,), np.int32), {"vma": frozenset({"a", "b"})})]
