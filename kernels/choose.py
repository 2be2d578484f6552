"""The choice of the implementation that runs a call of `attest.flash_attention`.

It is the fastest that supports the call on JAX's default device, or the one that the call names. Malformed
arguments do not affect the choice: the implementation that is chosen refuses them by name.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.options import FLOAT_DTYPES, check_number, refuse, shown


@dataclass(frozen=True)
class Device:
    """Where calls run.

    backend: as JAX calls it. compute_capability: of an NVIDIA GPU, such as "9.0"; of others what JAX says in
    its place, None where it says nothing.
    """

    backend: str
    compute_capability: str | None = None


@dataclass(frozen=True)
class Traits:
    """What of a call decides who takes it.

    dtypes: the names of those of query, key and value. logits_dtypes: of those of bias and `logits_dtype`.
    Names that are no float dtype of S16 say nothing. head_dims: D and Dv. dropout: whether pairs are dropped.
    """

    dtypes: frozenset[str] = frozenset()
    logits_dtypes: frozenset[str] = frozenset()
    head_dims: frozenset[int] = frozenset()
    dropout: bool = False


@dataclass(frozen=True)
class Implementation:
    """One implementation, and the calls that it takes.

    name: what `platform` calls it. module: where its functions are; imported when a call first runs it.
    backends: those of JAX that it is chosen for, None for every one. named_on: further ones where it may be
        asked for by name, in an interpreter or compiled for a device that is not here; whether that is so, it
        knows itself.
    compute_capability: that of the only GPUs that it takes; None for any.
    dtypes: of query, key and value. logits_dtypes: of bias and logits. largest_head_dim: None for any.
    dropout: whether it takes dropout.
    packages: what it needs beside JAX, as Python imports them.
    """

    name: str
    module: str
    backends: tuple[str, ...] | None = None
    named_on: tuple[str, ...] = ()
    compute_capability: str | None = None
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    logits_dtypes: tuple[str, ...] = FLOAT_DTYPES
    largest_head_dim: int | None = None
    dropout: bool = True
    packages: tuple[str, ...] = ()


# The fastest first; the last takes every call.
IMPLEMENTATIONS = (
    Implementation(
        "mosaic_gpu",
        "attest.kernels.pallas.mosaic_gpu",
        backends=("gpu",),
        named_on=("cpu",),
        compute_capability="9.0",
        dtypes=("bfloat16", "float16"),
        largest_head_dim=256,
        dropout=False,
    ),
    Implementation(
        "triton",
        "attest.kernels.triton",
        backends=("gpu",),
        named_on=("cpu",),
        largest_head_dim=256,
        packages=("triton", "jax_triton"),
    ),
    Implementation(
        "pallas_tpu",
        "attest.kernels.pallas.tpu",
        backends=("tpu",),
        named_on=("cpu",),
        dtypes=("float32", "bfloat16"),
        logits_dtypes=("float32", "bfloat16"),
        largest_head_dim=256,
    ),
    Implementation("xla", "attest.kernels.xla"),
)


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def default_device() -> Device:
    """JAX's default device: the first of its default backend."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return Device(jax.default_backend(), None if capability is None else str(capability))


def implementation_for(
    device: Device,
    call: Traits,
    platform: object = None,
    installed: Callable[[str], bool] = _installed,
) -> Implementation:
    """The fastest implementation that takes a call on a device, or the one that `platform` names.

    Raises: ValueError for a platform that does not exist; NotImplementedError if the one that is named does
    not take the call (clause S20), which says the reason and names those that do.
    """
    why_not = partial(_why_not, device=device, call=call, installed=installed)
    able = [x for x in IMPLEMENTATIONS if why_not(x, x.backends) is None]
    if platform is None:
        return able[0]
    named = [x for x in IMPLEMENTATIONS if isinstance(platform, str) and x.name == platform]
    if not named:
        choices = ", ".join(repr(x.name) for x in IMPLEMENTATIONS)
        refuse("platform", shown(platform), f"one of {choices}", "Leave it out for the fastest that can.")
    (chosen,) = named
    reason = why_not(chosen, None if chosen.backends is None else chosen.backends + chosen.named_on)
    if reason is not None:
        others = " or ".join(repr(x.name) for x in able)
        raise NotImplementedError(
            f"platform: {platform!r} {reason}. Use {others}, or leave it out for the fastest that can."
        )
    return chosen


def chosen(arguments: Mapping[str, Any], platform: str | None) -> Any:
    """Return the module of the implementation that runs a call, given the call's arguments by name.

    Raises: ValueError for block sizes without a platform; what `implementation_for` raises.
    """
    for name in ("fwd_params", "bwd_params"):
        if platform is None and arguments[name] is not None:
            refuse(
                name,
                f"a {type(arguments[name]).__name__}",
                "None where no platform is named",
                'Block sizes belong to one implementation: name it, such as platform="triton".',
            )
    return import_module(implementation_for(default_device(), _traits(arguments), platform).module)


def _traits(given: Mapping[str, Any]) -> Traits:
    """Those of a call, as far as it has any: what is malformed is refused where it is read."""
    arrays = {
        name: x
        for name in ("query", "key", "value", "bias")
        if isinstance(x := given.get(name), jax.Array | np.ndarray)
    }
    logits = {arrays["bias"].dtype.name} if "bias" in arrays else set[str]()
    if given.get("logits_dtype") is not None:
        with suppress(TypeError, ValueError):
            logits.add(jnp.dtype(given["logits_dtype"]).name)
    tensors = [x for name, x in arrays.items() if name != "bias"]
    return Traits(
        dtypes=frozenset(x.dtype.name for x in tensors),
        logits_dtypes=frozenset(logits),
        head_dims=frozenset(x.shape[3] for x in tensors if x.ndim == 4),
        dropout=_drops(given.get("dropout_prob", 0.0)),
    )


def _drops(dropout_prob: Any) -> bool:
    with suppress(ValueError):
        return 0.0 < check_number("dropout_prob", dropout_prob) < 1.0
    return False


def _why_not(
    implementation: Implementation,
    backends: tuple[str, ...] | None,
    *,
    device: Device,
    call: Traits,
    installed: Callable[[str], bool],
) -> str | None:
    """Why an implementation, where it runs on `backends`, does not take a call, in one clause; or None."""
    if backends is not None and device.backend not in backends:
        return f"runs on {' and '.join(backends)}, and JAX runs on {device.backend}"
    capability = implementation.compute_capability
    if device.backend == "gpu" and capability not in (None, device.compute_capability):
        got = device.compute_capability or "unknown"
        return f"runs on GPUs of compute capability {capability}, and JAX's is {got}"
    missing = [package for package in implementation.packages if not installed(package)]
    if missing:
        return f"needs the package {missing[0]}, which is not installed"
    for what, known, got in (
        ("", implementation.dtypes, call.dtypes),
        ("a bias and logits of ", implementation.logits_dtypes, call.logits_dtypes),
    ):
        others = sorted(got & set(FLOAT_DTYPES) - set(known))
        if others:
            return f"takes {what}{' and '.join(known)}, and the call has {others[0]}"
    limit, largest = implementation.largest_head_dim, max(call.head_dims, default=0)
    if limit is not None and largest > limit:
        return f"takes head dims up to {limit}, and the call has {largest}"
    if call.dropout and not implementation.dropout:
        return "takes no dropout_prob above 0"
    return None
