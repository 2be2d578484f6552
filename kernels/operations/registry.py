"""The registry of kernels: by algorithm, platform and backend.

`kernel_registry` has our own; `register` adds others to it, as a decorator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from attest.kernels import attention
from attest.kernels.call.options import shown
from attest.kernels.choice.choose import Traits, device_of, implementation_for
from attest.kernels.implementations import IMPLEMENTATIONS
from attest.kernels.operations.platforms import PLATFORMS, Backend, Platform, implementation_name
from attest.kernels.xla.attention import attention as xla_attention


class NoImplementationError(ValueError, NotImplementedError):
    """No implementation of an operation is registered for a platform and a backend (S20)."""


def _always() -> bool:
    return True


@dataclass(frozen=True)
class RegisteredKernel:
    """One kernel of the registry.

    priority: of those that fit, the highest is found first. runs_here: whether it runs on JAX's default
    device.
    """

    algorithm: str
    platform: Platform
    backend: Backend
    implementation: Callable[..., Any]
    priority: int = 0
    runs_here: Callable[[], bool] = _always


class KernelRegistry:
    """Kernels by algorithm, platform and backend."""

    def __init__(self) -> None:
        """Start without kernels."""
        self._kernels: list[RegisteredKernel] = []

    def register[F: Callable[..., Any]](
        self,
        algorithm: str,
        platform: Platform | str,
        backend: Backend | str,
        priority: int = 0,
        *,
        runs_here: Callable[[], bool] = _always,
    ) -> Callable[[F], F]:
        """Return a decorator that registers a kernel and returns it unchanged.

        Raises: ValueError for a platform or a backend that does not exist.
        """
        where = _platform(platform), _backend(backend)

        def decorate(function: F) -> F:
            self._kernels.append(RegisteredKernel(algorithm, *where, function, priority, runs_here))
            # Stable, so that of equal priorities the first one registered comes first.
            self._kernels.sort(key=lambda x: -x.priority)
            return function

        return decorate

    def get(
        self, algorithm: str, platform: Platform | str | None = None, backend: Backend | str | None = None
    ) -> Callable[..., Any]:
        """Return the kernel of the highest priority that fits; None and "auto" fit all.

        A kernel for Backend.ANY fits every backend. Where neither is named it is the one that runs here.

        Raises: NoImplementationError, a ValueError and a NotImplementedError, naming what exists.
        """
        known = self.list_implementations(algorithm)
        found = known
        if platform not in (None, "auto"):
            found = [x for x in found if x.platform is _platform(platform)]
        if backend not in (None, "any", Backend.ANY):
            found = [x for x in found if x.backend in (Backend.ANY, _backend(backend))]
        if not found:
            there = ", ".join(f"{x.platform} on {x.backend}" for x in known)
            raise NoImplementationError(
                f"platform and backend: got {shown(platform)} and {shown(backend)}; expected a kernel of "
                f"{algorithm!r}, which has {there}. Use one of them, or 'auto'."
            )
        return next((x for x in found if x.runs_here()), found[0]).implementation

    def list_algorithms(self) -> list[str]:
        """Return the names of all algorithms, sorted."""
        return sorted({x.algorithm for x in self._kernels})

    def list_implementations(self, algorithm: str) -> list[RegisteredKernel]:
        """Return the kernels of an algorithm, the highest priority first.

        Raises: NoImplementationError if there is none.
        """
        found = [x for x in self._kernels if x.algorithm == algorithm]
        if not found:
            there = ", ".join(map(repr, self.list_algorithms()))
            raise NoImplementationError(
                f"algorithm: got {shown(algorithm)}; expected one of {there}. Register a kernel for it."
            )
        return found


def _platform(platform: Any) -> Platform:
    try:
        return Platform(platform)
    except ValueError:
        _no_member("platform", platform, Platform)


def _backend(backend: Any) -> Backend:
    try:
        return Backend(backend)
    except ValueError:
        _no_member("backend", backend, Backend)


def _no_member(name: str, got: object, known: type[Platform] | type[Backend]) -> NoReturn:
    choices = ", ".join(repr(x.value) for x in known)
    raise NoImplementationError(f"{name}: got {shown(got)}; expected one of {choices}. Correct the name.")


def _runs_here(name: str) -> bool:
    traits = Traits(dtypes=frozenset({"bfloat16"}))
    device = device_of()
    try:
        implementation_for(device, traits, name)
    except NotImplementedError:
        return False
    backends = next(x for x in IMPLEMENTATIONS if x.name == name).capabilities.backends
    return backends is None or device.backend in backends


def _ours() -> KernelRegistry:
    registry = KernelRegistry()
    for priority, implementation in enumerate(reversed(IMPLEMENTATIONS)):
        backends = implementation.capabilities.backends or (Backend.ANY.value,)
        for backend in backends:
            registry.register(
                "flash_attention",
                PLATFORMS[implementation.name],
                backend,
                priority,
                runs_here=partial(_runs_here, implementation.name),
            )(partial(attention.flash_attention, platform=implementation.name))
    registry.register("attention", Platform.XLA, Backend.ANY)(xla_attention)
    return registry


kernel_registry = _ours()


def detect_platform(algorithm: str, platform: Any = None) -> Platform:
    """Return the platform that calls of an algorithm run on here, or the one that is named.

    algorithm: one of the registry, such as "flash_attention". platform: "auto" or None for the fastest that
    takes a plain call in bfloat16 on JAX's default device.

    Raises: ValueError for an algorithm or a platform that does not exist.
    """
    known = kernel_registry.list_implementations(algorithm)
    if platform not in (None, "auto"):
        return PLATFORMS[str(implementation_name(platform, device_of()))]
    here = device_of().backend
    found = [x for x in known if x.backend in (Backend.ANY, here) and x.runs_here()]
    return found[0].platform if found else known[-1].platform
