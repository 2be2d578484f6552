"""The refusal to lower a program for a device where another implementation would be chosen.

The choice is made when a call is traced. `jax.jit` then lowers the program for the device of its arguments,
and `jax.export` for the platforms that it is given. So a traced program carries an operation that refuses
other devices when it is lowered. It leaves nothing in the lowered program.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from attest.kernels.call.call import Call
from attest.kernels.choice.choose import Choice, Device, implementation_for
from attest.kernels.contract import Forward, Passes, Settings
from attest.kernels.guards import guard

# The backends of the platforms whose names differ.
_BACKENDS = {"cuda": "gpu", "rocm": "gpu"}


@cache
def refused_elsewhere(passes: Passes, choice: Choice) -> Passes:
    """Return the passes of a choice; the forward pass cannot be lowered where another would be chosen.

    Lowering it then raises NotImplementedError with both names. Equal arguments return the same passes, so
    that `jax.jit` does not compile them twice.
    """

    def forward(settings: Settings, call: Call) -> Forward:
        return passes.forward(settings, replace(call, query=_chosen.bind(call.query, choice=choice)))

    return replace(passes, forward=forward)


def _lower(context: Any, query: Any, *, choice: Choice) -> list[Any]:
    for platform in context.platforms or context.module_context.platforms:
        _check(choice, platform)
    return [query]


def _check(choice: Choice, platform: str) -> None:
    """Raise NotImplementedError if another implementation would be chosen on a platform of JAX."""
    backend, name = _BACKENDS.get(platform, platform), choice.implementation.name
    assert choice.device is not None
    if backend == choice.device.backend:
        return
    there = implementation_for(Device(backend), choice.call).name
    if there != name:
        raise NotImplementedError(
            f"platform: got None when the call was traced for {choice.device.backend}, where {name!r} runs "
            f"it, and the program is compiled for {platform}, where {there!r} does. Pass platform='xla', "
            f"which runs everywhere, or compile a program for {platform} alone with platform={there!r}."
        )


_chosen = guard("flash_attention_choice", lower=_lower)
