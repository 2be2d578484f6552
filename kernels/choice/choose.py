"""The choice of the implementation that runs a call of `attest.flash_attention`.

It is the one that the call names, or the first that supports the call on the device that the call runs on.
If `attest.kernels.choice.fastest` has a faster one, that one runs it.

Malformed arguments do not affect the choice: the checks of the call refuse them by name.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attest.kernels.arguments import AttentionArguments
from attest.kernels.call.options import FLOAT_DTYPES, check_number, refuse, shown
from attest.kernels.call.symbolic import has_symbolic_sizes
from attest.kernels.call.wide_keys import wide_keys_allowed
from attest.kernels.choice.fastest import Sizes, winners
from attest.kernels.choice.two_implementations import apart
from attest.kernels.config import platform_of
from attest.kernels.contract import Capabilities, Implementation, Passes
from attest.kernels.implementations import IMPLEMENTATIONS, XLA
from attest.kernels.versions import Version


@dataclass(frozen=True)
class Device:
    """The device where calls run.

    backend: as JAX calls it. compute_capability: of an NVIDIA GPU, such as "9.0"; of others the value of
    JAX in its place, or None. kind: as JAX calls it, such as "NVIDIA H200"; None: any.
    """

    backend: str
    compute_capability: str | None = None
    kind: str | None = None

    @property
    def of_amd(self) -> bool:
        """Whether it is a GPU of AMD, whose capability has the form "gfx942"."""
        return "gfx" in (self.compute_capability or "")


@dataclass(frozen=True)
class Traits:
    """The properties of a call that decide which implementation supports it.

    dtypes: the names of those of query, key and value. logits_dtypes: of those of bias and `logits_dtype`.
    Names other than the float dtypes of S16 are ignored. head_dims: D and Dv. dropout: whether pairs are
    dropped. kv_positions: whether keys have positions of their own. alibi: whether it has slopes. symbolic:
    whether some size is symbolic.
    """

    dtypes: frozenset[str] = frozenset()
    logits_dtypes: frozenset[str] = frozenset()
    head_dims: frozenset[int] = frozenset()
    dropout: bool = False
    kv_positions: bool = False
    alibi: bool = False
    symbolic: bool = False


@dataclass(frozen=True, repr=False)
class Choice:
    """The implementation that runs a call, and the device that it was chosen for; None where it was named.

    alone: the one that runs it where no gradients are taken; None: the same.
    """

    implementation: Implementation
    call: Traits
    device: Device | None = None
    alone: Implementation | None = None

    def __repr__(self) -> str:
        """Return short text, the same in every process: it is printed with the programs that JAX traces."""
        name = self.implementation.name
        if self.alone is not None:
            name = f"{name}, {self.alone.name} without gradients,"
        return name if self.device is None else f"{name} on {self.device}"

    def load(self) -> Passes:
        """Import and return the passes."""
        passes = self.implementation.load()
        return passes if self.alone is None else apart(self.alone.load(), passes)


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def device_of(*arrays: Any) -> Device:
    """Return the device that arrays are on, or JAX's default device where all are traced.

    The default device is that of `jax.default_device`, or the first of the default backend.
    """
    placed = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if placed:
        device: Any = min(placed[0].devices(), key=lambda device: device.id)
    else:
        device = jax.config.jax_default_device or jax.devices()[0]
    return described(jax.devices(device)[0] if isinstance(device, str) else device)


def described(device: Any) -> Device:
    """Return the properties of a device that the choice depends on."""
    capability = getattr(device, "compute_capability", None)
    return Device(device.platform, None if capability is None else str(capability), device.device_kind)


def implementation_for(
    device: Device,
    call: Traits,
    platform: object = None,
    installed: Callable[[str], bool] = _installed,
    jax_version: Version = jax.__version_info__,
) -> Implementation:
    """Return the first implementation that takes a call on a device, or the one that `platform` names.

    Raises: ValueError for a platform that does not exist; NotImplementedError if the one that is named does
    not take the call (clause S20), with the reason and the names of those that do, or if none does.
    """
    why_not = partial(_why_not, device=device, call=call, installed=installed, jax_version=jax_version)
    if platform is None:
        return _able(why_not)[0]
    named = [x for x in IMPLEMENTATIONS if isinstance(platform, str) and x.name == platform]
    if not named:
        choices = ", ".join(repr(x.name) for x in IMPLEMENTATIONS)
        refuse("platform", shown(platform), f"one of {choices}", "Leave it out for the fastest that can.")
    (chosen,) = named
    reason = why_not(chosen.capabilities, named=True)
    if reason is not None:
        able = [x for x in IMPLEMENTATIONS if why_not(x.capabilities) is None]
        others = " or ".join(repr(x.name) for x in able)
        advice = (
            f"Use {others}, or leave it out for the fastest that can." if able else "No other one can either."
        )
        raise NotImplementedError(f"platform: {platform!r} {reason}. {advice}")
    return chosen


def fastest_for(
    device: Device,
    call: Traits,
    sizes: Sizes | None,
    installed: Callable[[str], bool] = _installed,
    jax_version: Version = jax.__version_info__,
) -> tuple[Implementation, Implementation]:
    """Return the fastest implementations of a call on a device: with gradients, and without.

    Without sizes, or where nothing near them was measured, both are that of `implementation_for`.

    Raises: NotImplementedError where none supports this version of JAX.
    """
    why_not = partial(_why_not, device=device, call=call, installed=installed, jax_version=jax_version)
    able = _able(why_not)
    if sizes is None or device.kind is None:
        return able[0], able[0]
    by_name = {x.name: x for x in able}
    found = winners(device.kind, sizes, tuple(by_name))
    return by_name[found.followed], by_name[found.alone]


def _able(why_not: Callable[[Capabilities], str | None]) -> list[Implementation]:
    """Return the implementations that take a call on a device, at least one, in the default order.

    why_not: returns why the capabilities of one do not suffice, or None.

    Raises: NotImplementedError if none does.
    """
    able = [x for x in IMPLEMENTATIONS if why_not(x.capabilities) is None]
    if not able:
        # XLA supports every call, so what it lacks is a version of JAX.
        reason = why_not(XLA.capabilities)
        raise NotImplementedError(f"platform: {XLA.name!r} {reason}. Install such a version of JAX.")
    return able


def chosen(arguments: AttentionArguments, call: Traits, sizes: Sizes | None = None) -> Choice:
    """Return the implementation that runs a call, given its arguments and its traits.

    A call names one by `platform`, or by its configuration. sizes: by which the fastest is looked up where it
    names none.

    Raises: ValueError for block sizes without a platform, or beside a configuration; for a configuration of
    another platform; what `implementation_for` raises.
    """
    config, platform = arguments.config, arguments.platform
    for name, params in (("fwd_params", arguments.fwd_params), ("bwd_params", arguments.bwd_params)):
        got = f"a {type(params).__name__}"
        if config is not None and params is not None:
            refuse(name, f"{got} and a config", "one of them", "Put the block sizes into the config.")
        if platform is None and params is not None:
            refuse(
                name,
                got,
                "None where no platform is named",
                'Block sizes belong to one implementation: name it, such as platform="triton".',
            )
    if config is not None:
        platform = platform_of(config, platform)
    if isinstance(platform, Implementation):
        return Choice(platform, call)
    device = device_of(arguments.query, arguments.key, arguments.value)
    if platform is not None:
        return Choice(implementation_for(device, call, platform), call)
    implementation, alone = fastest_for(device, call, sizes)
    return Choice(implementation, call, device, None if alone is implementation else alone)


def check_supported(choice: Choice) -> None:
    """Raise NotImplementedError if the chosen implementation supports the call on no device (clause S20)."""
    for implementation in (choice.implementation, choice.alone or choice.implementation):
        reason = _why_not_the_call(implementation.capabilities, choice.call)
        if reason is not None:
            raise NotImplementedError(
                f"{implementation.name}: {reason}. Use platform='xla', or leave it out."
            )


def traits_of(given: AttentionArguments) -> Traits:
    """Return the traits of a call, of its well-formed arguments alone."""
    arrays: tuple[Any, ...] = (given.query, given.key, given.value)
    tensors = [x for x in arrays if isinstance(x, jax.Array | np.ndarray)]
    bias = [given.bias] if isinstance(given.bias, jax.Array | np.ndarray) else []
    logits = {x.dtype.name for x in bias}
    if given.logits_dtype is not None:
        with suppress(Exception):  # NumPy raises what it likes for what is no dtype
            logits.add(jnp.dtype(given.logits_dtype).name)
    read = [x for x in tensors if x is given.query or not wide_keys_allowed()]
    return Traits(
        dtypes=frozenset(x.dtype.name for x in read),
        logits_dtypes=frozenset(logits),
        head_dims=frozenset(x.shape[3] for x in tensors if x.ndim == 4),
        dropout=_drops(given.dropout_prob),
        kv_positions=given.kv_positions is not None,
        alibi=given.alibi_slopes is not None,
        symbolic=has_symbolic_sizes(tensors + bias),
    )


def _drops(dropout_prob: Any) -> bool:
    with suppress(ValueError):
        return 0.0 < check_number("dropout_prob", dropout_prob) < 1.0
    return False


def _why_not(
    capabilities: Capabilities,
    *,
    named: bool = False,
    device: Device,
    call: Traits,
    installed: Callable[[str], bool],
    jax_version: Version,
) -> str | None:
    """Return why an implementation does not support a call on a device, in one clause; or None."""
    backends = capabilities.backends
    if backends is not None and named:
        backends += capabilities.named_on
    if backends is not None and device.backend not in backends:
        return f"runs on {' and '.join(backends)}, and JAX runs on {device.backend}"
    capability = capabilities.compute_capability
    if device.backend == "gpu" and capability not in (None, device.compute_capability):
        got = device.compute_capability or "unknown"
        return f"runs on GPUs of compute capability {capability}, and JAX's is {got}"
    if capabilities.jax_versions is not None and jax_version not in capabilities.jax_versions:
        got = ".".join(map(str, jax_version))
        return f"needs jax {capabilities.jax_versions}, and jax is {got}"
    return missing_package(capabilities, device, installed) or _why_not_the_call(capabilities, call)


def missing_package(
    capabilities: Capabilities, device: Device, installed: Callable[[str], bool]
) -> str | None:
    """Return which required package is missing on a device, in one clause; or None."""
    packages = capabilities.packages + (capabilities.amd_packages if device.of_amd else ())
    missing = [package for package in packages if not installed(package)]
    return f"needs the package {missing[0]}, which is not installed" if missing else None


def _why_not_the_call(capabilities: Capabilities, call: Traits) -> str | None:
    """Return why an implementation does not support a call on any device, in one clause; or None."""
    for what, known, got in (
        ("", capabilities.dtypes, call.dtypes),
        ("a bias and logits of ", capabilities.logits_dtypes, call.logits_dtypes),
    ):
        others = sorted(got & set(FLOAT_DTYPES) - set(known))
        if others:
            return f"takes {what}{' and '.join(known)}, and the call has {others[0]}"
    limit, largest = capabilities.largest_head_dim, max(call.head_dims, default=0)
    if limit is not None and largest > limit:
        return f"takes head dims up to {limit}, and the call has {largest}"
    if call.dropout and not capabilities.dropout:
        return "takes no dropout_prob above 0"
    if call.kv_positions and not capabilities.kv_positions:
        return "takes no kv_positions"
    if call.alibi and not capabilities.alibi:
        return "takes no alibi_slopes"
    if call.symbolic and not capabilities.symbolic:
        return "takes no symbolic sizes"
    return None
