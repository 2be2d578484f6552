"""The base of an operation: what it computes, and how its configurations are found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attest.kernels.call.arrays import is_integer
from attest.kernels.operations.invocation import Invocation


class Kernel[Config, Out]:
    """An operation with configurations that change its speed and not its results.

    A subclass has `run` and `heuristic_cfg`. For each kind of hardware there may be methods of their own:
    `heuristic_cfg_gpu`, `candidate_cfgs_gpu`, `candidate_cfgs_shard_map_gpu`, and the same for `tpu` and
    `xla`, which is for CPUs. `heuristic_cfg` and `candidate_cfgs` use them if they exist.

    op_id: the name in keys, by default that of the class. version: part of the key of caches; change it when
    configurations mean something else. config_type: the class of configurations, with `to_json` and
    `from_json`. key_builder: makes the key of a call, in place of `Invocation.call_key`.
    """

    op_id: str = ""
    version: str = "0"
    config_type: ClassVar[type[Any] | None] = None
    key_builder: Callable[[Invocation[Any, Any]], str] | None = None

    def __init__(self, op_id: str | None = None) -> None:
        """Name the operation."""
        self.op_id = op_id or type(self).op_id or type(self).__name__

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as `run` takes them."""
        return args, kwargs

    def run(self, *args: Any, cfg: Config, **kwargs: Any) -> Out:
        """Compute the operation with a configuration."""
        raise NotImplementedError(f"{type(self).__name__}.run: not written. Define it in the class.")

    def get_impl(self, cfg: Config) -> Callable[..., Out]:
        """Return the function that `run` calls with a configuration."""
        raise NotImplementedError(f"{type(self).__name__}.get_impl: not written. Define it in the class.")

    def heuristic_cfg(self, inv: Invocation[Config, Out]) -> Config:
        """Return a configuration without timing anything."""
        found = self._for_hardware("heuristic_cfg", inv)
        if found is None:
            name = type(self).__name__
            raise NotImplementedError(f"{name}.heuristic_cfg: not written. Define it in the class.")
        return found(inv)

    def candidate_cfgs(self, inv: Invocation[Config, Out]) -> Iterable[Config]:
        """Return the configurations worth timing, the likeliest first; none means that nothing is tuned."""
        found = self._for_hardware("candidate_cfgs", inv)
        return () if found is None else found(inv)

    def check_cfg(self, cfg: Any, inv: Invocation[Config, Out]) -> Config:
        """Return a configuration that a call gives, checked.

        Raises: ValueError for a configuration of another operation or backend.
        """
        return cfg

    def check_cached(self, cfg: Config, inv: Invocation[Config, Out]) -> Config:
        """Return a configuration from the disk, checked: the call must be able to run with it here.

        Raises: ValueError or NotImplementedError for one that does not fit the call.
        """
        return self.check_cfg(cfg, inv)

    def combined_cfg(self, timed: Iterable[tuple[Config, float]]) -> Config | None:
        """Return a configuration that joins the best parts of several that were timed; None if none does."""
        return None

    def forward_part(self, cfg: Config) -> Any:
        """Return what of a configuration the forward pass reads, hashable: by default all of it.

        Where no gradients are taken, a tuner tries one of the candidates that are the same in it.
        """
        return cfg

    def plain(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call in the form that a judge reads, and `run` takes as well."""
        return arguments

    def unused(self, cfg: Config, inv: Invocation[Config, Out]) -> tuple[str, ...]:
        """Return the fields of a configuration that have no effect on a call, each with the reason."""
        return ()

    def complete(self, cfg: Config, inv: Invocation[Config, Out]) -> Config:
        """Return a configuration with everything that the implementation chooses itself."""
        return cfg

    def implementation_of(self, cfg: Config, inv: Invocation[Config, Out]) -> str:
        """Return the name of what computes a call with a configuration: by default the operation's own."""
        return self.op_id

    def part_of(self, inv: Invocation[Config, Out]) -> Invocation[Config, Out] | None:
        """Return what one device computes of a call over a mesh, as a call without one.

        Configurations that were tuned for it count for the call, and `Executor.tune` with a mesh tunes it.
        None where the operation has no such part.
        """
        return None

    def create_shard_map_wrapper(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Callable[..., Out], tuple[Any, ...]]:
        """Return a function under jax.shard_map, and the arguments to call it with."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}.create_shard_map_wrapper: this operation is not sharded. Leave mesh out, or define it."
        )

    def _for_hardware(self, method: str, inv: Invocation[Config, Out]) -> Callable[..., Any] | None:
        """Return the method for the hardware of a call: under jax.shard_map its own one, if there is one."""
        hardware = hardware_of(inv)
        names = [f"{method}_{hardware}", f"{method}_xla"]
        if inv.method is not None:
            names = [f"{method}_{inv.method}_{hardware}", *names]
        return next((found for name in names if (found := getattr(self, name, None)) is not None), None)


def named_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], positional: Sequence[str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that are their defaults.

    positional: the names of those that may be given by position. defaults: of all arguments, by name.

    Raises: TypeError for an argument that does not exist, or is given twice.
    """
    if len(args) > len(positional):
        raise TypeError(f"got {len(args)} positional arguments; expected at most {len(positional)}.")
    arguments: dict[str, Any] = dict(zip(positional, args, strict=False))
    for name, x in kwargs.items():
        if name in arguments:
            raise TypeError(f"{name}: got it by position and by name; expected one of them.")
        if name not in defaults:
            there = ", ".join(defaults)
            raise TypeError(f"{name}: no such argument; expected some of {there}. Correct the name.")
        arguments[name] = as_python(x)
    return {name: x for name, x in arguments.items() if not _is_default(defaults[name], x)}


def as_python(x: Any) -> Any:
    """Return a number of NumPy as one of Python, which is static in a call; anything else as it is."""
    numbers = np.bool_ | np.number
    if isinstance(x, np.ndarray) and x.ndim == 0 and is_integer(x.dtype):
        return x.item()
    return x.item() if isinstance(x, numbers) and not isinstance(x, np.timedelta64) else x


def _is_default(default: Any, x: Any) -> bool:
    # Two floats that are equal may be two objects; True and 1 are equal, and not the same.
    return x is default or (isinstance(default, float) and type(x) is float and x == default)


def hardware_of(inv: Invocation[Any, Any]) -> str:
    """Return "gpu" or "tpu", and "xla" for all else."""
    backend = inv.environment["device"].partition(" ")[0]
    return backend if backend in ("gpu", "tpu") else "xla"
