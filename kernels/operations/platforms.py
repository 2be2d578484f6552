"""Platforms and backends: which technology a kernel is written in, and which hardware it runs on.

`Platform` names a technology, as users of ejKernel know it; an implementation has a name of its own. "pallas"
is the TPU kernel on a TPU and the Hopper kernel on a GPU.
"""

from enum import StrEnum
from typing import Any

from attest.kernels.call.options import refuse, shown
from attest.kernels.choice.choose import Device
from attest.kernels.implementations import IMPLEMENTATIONS, MOSAIC_GPU, PALLAS_TPU

_NAMES = tuple(x.name for x in IMPLEMENTATIONS)


class Platform(StrEnum):
    """The technology that a kernel is written in."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    XLA = "xla"


class Backend(StrEnum):
    """The hardware that a kernel runs on; ANY is all of it."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"


# The technology of each implementation.
PLATFORMS = {
    "mosaic_gpu": Platform.PALLAS,
    "triton": Platform.TRITON,
    "pallas_tpu": Platform.PALLAS,
    "xla": Platform.XLA,
}

# As plain words: every call looks in them, and members of an enum are slow to ask for theirs.
_CUDA = Platform.CUDA.value
_KNOWN = ("auto", Platform.PALLAS.value, *_NAMES)
_BACKENDS = tuple(x.value for x in Backend)


def check_platform(platform: Any) -> str:
    """Return the name of a platform or of an implementation, "auto" for None.

    Raises: ValueError for a platform that does not exist, and for "cuda", in which no kernel is written.
    """
    name = "auto" if platform is None else str(platform)
    if name == _CUDA:
        refuse("platform", "'cuda'", "a platform with a kernel", "Use 'auto', or 'pallas' on a Hopper GPU.")
    if name not in _KNOWN:
        choices = ", ".join(map(repr, _KNOWN))
        refuse("platform", shown(platform), f"one of {choices}", "Leave it out for the fastest that can.")
    return name


def implementation_name(platform: Any, device: Device) -> str | None:
    """Return the implementation that a platform names on a device; None for "auto" and None.

    Raises: what `check_platform` raises.
    """
    name = check_platform(platform)
    if name == Platform.PALLAS.value:
        return (PALLAS_TPU if device.backend == "tpu" else MOSAIC_GPU).name
    return None if name == "auto" else name


def check_backend(backend: Any) -> str:
    """Return the name of a backend.

    Raises: ValueError for one that does not exist.
    """
    name = "any" if backend is None else str(backend)
    if name not in _BACKENDS:
        choices = ", ".join(map(repr, _BACKENDS))
        refuse("backend", shown(backend), f"one of {choices}", "Use 'any'.")
    return name


def check_runs_on(backend: str, device: Device) -> None:
    """Refuse a backend that is not that of the device of a call.

    Raises: ValueError.
    """
    if backend not in ("any", device.backend):
        expected = f"'any' or {device.backend!r}, on which JAX runs the call"
        refuse("backend", repr(backend), expected, "Use 'any'.")
