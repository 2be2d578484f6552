"""An `Invocation`: one call of an operation as shapes, dtypes and options, and its key in caches."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from attest.kernels.operations.environment import environment

# Options whose value says nothing about speed: what counts is whether they are given.
_PRESENCE = frozenset(
    {"softmax_scale", "dropout_prob", "dropout_seed", "logits_soft_cap", "q_offset", "origin"}
)
_DIGITS = 24


@dataclass(frozen=True)
class Invocation[Config, Out]:
    """One call of an operation.

    op_id, version: of the operation. args, kwargs: its arguments, arrays as jax.ShapeDtypeStruct. device: the
    JAX device of the call, None for the default one. override_cfg: the configuration that the call gives.
    method: "shard_map" where a mesh is given, else None. mesh, in_specs, out_specs: as the call gives them.
    """

    op_id: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str = "0"
    device: Any = None
    override_cfg: Config | None = None
    method: str | None = None
    mesh: Any = None
    in_specs: tuple[Any, ...] | None = None
    out_specs: Any = None

    @cached_property
    def call(self) -> dict[str, Any]:
        """The call in a readable form: what the key is made of, beside the environment."""
        arguments = {str(i): x for i, x in enumerate(self.args)} | dict(self.kwargs)
        described = {
            name: _described(name, x)
            for name, x in sorted(arguments.items())
            if x is not None and x is not False
        }
        if self.mesh is not None:
            described["mesh"] = {str(name): int(size) for name, size in self.mesh.shape.items()}
            described["in_specs"] = [str(x) for x in self.in_specs or ()]
            described["out_specs"] = str(self.out_specs)
        return described

    @cached_property
    def call_key(self) -> str:
        """A hash of shapes, dtypes and options, the same in every process."""
        return _hash(self.call)

    def make_key(self, key_builder: Callable[["Invocation[Any, Any]"], str] | None = None) -> str:
        """Return `call_key`, or what `key_builder` makes of the invocation."""
        return self.call_key if key_builder is None else key_builder(self)

    @cached_property
    def environment(self) -> dict[str, str]:
        """The place where the call runs; see `attest.kernels.operations.environment`."""
        return environment(self.device)

    @cached_property
    def key(self) -> tuple[str, str, str]:
        """The key of the caches: environment, operation with its version, and call."""
        return _hash(self.environment), f"{self.op_id}@{self.version}", self.call_key


def abstract(x: Any) -> Any:
    """Return a pytree with its arrays as jax.ShapeDtypeStruct, and other leaves as they are."""
    return jax.tree.map(_abstract, x)


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) or not isinstance(x, jax.Array | np.ndarray):
        return x
    sharding = getattr(jax.typeof(x), "sharding", None) if isinstance(x, Tracer) else None
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        sharding = x.sharding
    # JAX reads int64 of NumPy as int32, and warns of it in a shape.
    dtype = (
        jax.dtypes.canonicalize_dtype(x.dtype)
        if isinstance(x, np.ndarray) and x.dtype.kind in "iu"
        else x.dtype
    )
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding if _spreads(sharding) else None)


def _spreads(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def _described(name: str, x: Any) -> Any:
    if name in _PRESENCE and not hasattr(x, "shape"):
        return "given"
    leaves, structure = jax.tree.flatten(x)
    if len(leaves) == 1 and leaves[0] is x:
        return _leaf(x)
    return {"structure": str(structure), "leaves": [_leaf(leaf) for leaf in leaves]}


def _leaf(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        sharding = None if x.sharding is None else getattr(x.sharding, "spec", x.sharding)
        where = "" if sharding is None else f" {sharding} of {dict(x.sharding.mesh.shape)}"  # pyright: ignore[reportOptionalMemberAccess]
        return f"{x.dtype}{list(x.shape)}{where}"
    if x is None or isinstance(x, str | int | float | bool):
        return x
    if isinstance(x, type) or hasattr(x, "dtype"):
        return str(np.dtype(x))
    return str(x)


def _hash(x: Any) -> str:
    return hashlib.sha256(json.dumps(x, sort_keys=True).encode()).hexdigest()[:_DIGITS]
