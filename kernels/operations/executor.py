"""The executor: finds the configuration of a call and runs the operation with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from attest.kernels.call.arrays import exactly_narrowed, fitted
from attest.kernels.call.options import refuse
from attest.kernels.operations.caches import any_overlay
from attest.kernels.operations.configs import FlashAttentionConfig
from attest.kernels.operations.invocation import Invocation, abstract
from attest.kernels.operations.kernel import Kernel
from attest.kernels.operations.persistent import PersistentCache
from attest.kernels.operations.policy import AutotunePolicy
from attest.kernels.operations.selector import ConfigSelectorChain, Explanation
from attest.kernels.operations.specs import checked_specs
from attest.kernels.operations.timing import traced
from attest.kernels.operations.tuner import Tuner, TuningRecord

# Calls whose configuration an executor remembers.
_MOST_REMEMBERED = 4096


class Executor[Config, Out]:
    """A runner of operations: `executor(op, *args, cfg=None, **kwargs)`.

    The configuration is found while Python runs the call, so that it works under jit, vmap, grad, scan and
    shard_map, and the program is that of the operation with the configuration given. chooser: the chain that
    finds it.
    """

    def __init__(self, chooser: ConfigSelectorChain[Any, Any] | None = None) -> None:
        """Take a chain, by default a new one without a persistent cache."""
        self.chooser = chooser or ConfigSelectorChain[Any, Any]()
        self._remembered: dict[Any, Any] = {}

    def __call__(
        self,
        op: Kernel[Config, Out],
        *args: Any,
        cfg: Config | None = None,
        mesh: Mesh | None = None,
        in_specs: Sequence[Any] | None = None,
        out_specs: Any = None,
        **kwargs: Any,
    ) -> Out:
        """Run an operation.

        cfg: the configuration, in place of what the chain finds. mesh, in_specs, out_specs: of the shards, as
        `create_shard_map_wrapper` of the operation takes them; all three or none.

        Raises: ValueError naming the argument; what the operation raises.
        """
        mesh, in_specs, out_specs = checked_specs(mesh, in_specs, out_specs)
        args, kwargs = _prepared(op, args, kwargs)
        where = (mesh, in_specs, out_specs)
        config = self._config(op, args, kwargs, cfg, *where)
        if mesh is None:
            return op.run(*args, cfg=config, **kwargs)
        function, operands = op.create_shard_map_wrapper(
            *args, mesh=mesh, in_specs=in_specs, out_specs=out_specs, cfg=config, **kwargs
        )
        return function(*operands)

    def choose_config(
        self, op: Kernel[Config, Out], *args: Any, cfg: Config | None = None, **kwargs: Any
    ) -> Config:
        """Return the configuration that a call would run with, tuned if the policy says so."""
        args, kwargs = _prepared(op, args, kwargs)
        return self._config(op, args, kwargs, cfg, None, None, None)

    def explain(
        self,
        op: Kernel[Config, Out],
        *args: Any,
        cfg: Config | None = None,
        mesh: Mesh | None = None,
        in_specs: Sequence[Any] | None = None,
        out_specs: Any = None,
        **kwargs: Any,
    ) -> Explanation:
        """Return how a call would be run: each step of the chain, and the complete configuration.

        Arrays may be jax.ShapeDtypeStruct. Nothing is tuned.
        """
        mesh, in_specs, out_specs = checked_specs(mesh, in_specs, out_specs)
        args, kwargs = _prepared(op, args, kwargs)
        return self.chooser.explain(invocation(op, args, kwargs, cfg, mesh, in_specs, out_specs), op)

    def tune(
        self,
        op: Kernel[Config, Out],
        *args: Any,
        mesh: Mesh | None = None,
        in_specs: Sequence[Any] | None = None,
        out_specs: Any = None,
        **kwargs: Any,
    ) -> TuningRecord[Config]:
        """Time the candidates of a call ahead of time, and keep the winner in the caches.

        Float arrays may be jax.ShapeDtypeStruct. With mesh, in_specs and out_specs, what the first device
        computes of the call is tuned, on one device, and calls over that mesh run with the winner. The policy
        of the chain says whether gradients count.

        Raises: ValueError where a candidate cannot be judged or none is right; nothing is cached then. Also
        for an operation that has one configuration, and inside of a trace.
        """
        mesh, in_specs, out_specs = checked_specs(mesh, in_specs, out_specs)
        args, kwargs = _prepared(op, args, kwargs)
        inv = invocation(op, args, kwargs, None, mesh, in_specs, out_specs)
        if mesh is not None:
            part = op.part_of(inv)
            if part is None:
                got, advice = f"a mesh for {op.op_id}", "It needs no tuning: call it."
                refuse("mesh", got, "an operation that is tuned by the part of a device", advice)
            inv, kwargs = part, _first_parts(kwargs, part.kwargs)
        self._remembered.clear()
        return self.chooser.tune(inv, op, kwargs)

    def compile(
        self, op: Kernel[Config, Out], *args: Any, cfg: Config | None = None, **kwargs: Any
    ) -> Callable[..., Out]:
        """Return a compiled program for a call of these shapes; it takes the arrays of the call by name.

        What is no array is as it is here.
        """
        args, kwargs = _prepared(op, args, kwargs)
        config = self._config(op, args, kwargs, cfg, None, None, None)
        arrays = exactly_narrowed({name: x for name, x in kwargs.items() if _has_arrays(x)})
        static = {name: x for name, x in kwargs.items() if name not in arrays}

        def run(arrays: dict[str, Any]) -> Out:
            return op.run(*args, cfg=config, **arrays, **static)

        program = jax.jit(run).lower(arrays).compile()
        return lambda **arrays: program(_fitted(arrays))

    def _config(
        self,
        op: Kernel[Config, Out],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        cfg: Config | None,
        mesh: Any,
        in_specs: Any,
        out_specs: Any,
    ) -> Config:
        """Return the configuration of a call, remembered from the last call that looked alike."""
        if cfg is not None or any_overlay():
            inv = invocation(op, args, kwargs, cfg, mesh, in_specs, out_specs)
            return self.chooser.choose(inv, op, kwargs)
        looks = (
            op,
            self.chooser.policy,
            self.chooser.cache.changes,
            traced(),
            jax.config.jax_default_device,
            mesh,
            in_specs,
            out_specs,
            _looks(args, kwargs),
        )
        try:
            return self._remembered[looks]
        except KeyError:
            pass
        inv = invocation(op, args, kwargs, cfg, mesh, in_specs, out_specs)
        config = self.chooser.choose(inv, op, kwargs)
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[*looks[:2], self.chooser.cache.changes, *looks[3:]] = config
        return config


def _prepared(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as the operation takes them; refuse an operation of another type."""
    if not isinstance(op, Kernel):
        got = f"the class {op.__name__}" if isinstance(op, type) else f"a {type(op).__name__}"
        refuse("op", got, "an operation, such as FlashAttention()", "Pass an instance of a Kernel.")
    return op.prepare(*args, **kwargs)


def invocation[Config, Out](
    op: Kernel[Config, Out],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cfg: Config | None = None,
    mesh: Any = None,
    in_specs: Sequence[Any] | None = None,
    out_specs: Any = None,
) -> Invocation[Config, Out]:
    """Return a call of an operation as shapes and dtypes."""
    return Invocation(
        op.op_id,
        abstract(args),
        abstract(dict(kwargs)),
        version=op.version,
        device=_device((args, dict(kwargs))),
        override_cfg=cfg,
        method=None if mesh is None else "shard_map",
        mesh=mesh,
        in_specs=None if in_specs is None else tuple(in_specs),
        out_specs=out_specs,
    )


def create_default_executor(
    persistent_cache_path: str | None = None,
    enable_autotuning: bool = True,
    warmup_iterations: int = 5,
    timing_iterations: int = 100,
    *,
    name: str = "flash-attention",
) -> Executor[Any, Any]:
    """Return an executor with a memory cache, a persistent cache and a tuner, which falls back to tables.

    persistent_cache_path: the folder of the cache, in place of ATTEST_CACHE_DIR or the user's cache folder.
    enable_autotuning: whether candidates may be timed at all; on a miss the tables come first, so tuning is
    `executor.tune` or a policy with cache_miss_fallback="autotune". name: of the folder within the cache.
    """
    return Executor(
        ConfigSelectorChain(
            policy=AutotunePolicy(
                allow_autotune=enable_autotuning, cache_miss_fallback="heuristics", validate_backward=True
            ),
            tuner=Tuner(warmup=warmup_iterations, iters=timing_iterations),
            persistent=PersistentCache(name, FlashAttentionConfig, persistent_cache_path),
        )
    )


def _first_parts(whole: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the first device, with the values of those that are not shapes."""

    def first(part: Any, x: Any) -> Any:
        if not hasattr(part, "shape") or isinstance(x, jax.ShapeDtypeStruct):
            return part
        more = x.ndim - len(part.shape)
        x = x.reshape(-1, *x.shape[more + 1 :]) if more > 0 else x.reshape((1,) * -more + x.shape)
        return x[tuple(slice(0, size) for size in part.shape)]

    return {name: jax.tree.map(first, x, whole[name]) for name, x in parts.items()}


def _looks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what may decide the configuration of a call, hashable."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    return structure, tuple(map(_looks_of_leaf, leaves))


def _looks_of_leaf(x: Any) -> Any:
    if isinstance(x, jax.Array):
        traced = isinstance(x, Tracer)
        return x.shape, x.dtype, traced or x.sharding, traced
    if hasattr(x, "shape"):
        return x.shape, x.dtype
    try:
        hash(x)
    except TypeError:
        return repr(x)
    # True and 1 are equal, and no call means the same by them.
    return type(x), x


def _fitted(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a call for a program, which would narrow integers that 32 bits do not hold."""
    found = exactly_narrowed(arrays)
    for name, x in found.items():
        if isinstance(x, np.ndarray) and x.dtype in (np.int64, np.uint64):
            fitted(name, "values", x, "The program takes them as int32.")
    return found


def _has_arrays(x: Any) -> bool:
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))


def _device(x: Any) -> Any:
    """Return the device of the first concrete array; None for the default one."""
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return min(leaf.devices(), key=lambda device: device.id)
    default = jax.config.jax_default_device
    return jax.devices(default)[0] if isinstance(default, str) else default
