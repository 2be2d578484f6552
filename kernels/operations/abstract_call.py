"""A call as shapes alone: what tables and candidates are chosen by."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from attest.kernels import attention
from attest.kernels.arguments import Call, check_call
from attest.kernels.batching import merged
from attest.kernels.choose import Traits, traits_of
from attest.kernels.masks.given import with_mask_info

# Every argument of a call with its default; those that `check_call` does not take.
_DEFAULTS = {name: x.default for name, x in inspect.signature(attention.flash_attention).parameters.items()}
_SETTINGS = (
    "normalize_output", "precision", "logits_dtype", "mask_info", "config", "platform", "fwd_params",
    "bwd_params",
)  # fmt: skip


@dataclass(frozen=True)
class AbstractCall:
    """A checked call whose arrays are jax.ShapeDtypeStruct, and its traits."""

    call: Call
    traits: Traits


def abstract_call(arguments: Mapping[str, Any]) -> AbstractCall:
    """Return the call of arguments of `attest.flash_attention`, arrays or jax.ShapeDtypeStruct.

    Raises: what `check_call` raises.
    """
    arrays = {
        name: x for name, x in arguments.items() if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}
    traits: list[Traits] = []

    def check(arrays: dict[str, Any]) -> Call:
        given, _ = merged({**_DEFAULTS, **static, **arrays})
        given = with_mask_info(given, given["mask_info"])
        traits.append(traits_of(given))
        return check_call(**{name: x for name, x in given.items() if name not in _SETTINGS})

    return AbstractCall(jax.eval_shape(check, arrays), traits[0])
