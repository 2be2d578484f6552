"""A call as shapes alone: what tables and candidates are chosen by."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.arguments import AttentionArguments, by_name, check_arguments, merged
from attest.kernels.call.call import Call
from attest.kernels.choice.choose import Traits, traits_of
from attest.kernels.choice.fastest import Sizes, sizes_of
from attest.kernels.operations.inputs import check_concrete
from attest.kernels.sharding.explicit import FLOATS
from attest.kernels.with_mask_info import with_mask_info

_UNNEEDED = ("config", "platform", "fwd_params", "bwd_params")


@dataclass(frozen=True)
class AbstractCall:
    """A checked call whose arrays are jax.ShapeDtypeStruct, its traits, and the sizes it is looked up by."""

    call: Call
    traits: Traits
    sizes: Sizes | None = None


def abstract_call(arguments: Mapping[str, Any]) -> AbstractCall:
    """Return the call of arguments of `attest.flash_attention`, arrays or jax.ShapeDtypeStruct.

    Raises: what `check_call` raises.
    """
    arrays = {
        name: x for name, x in arguments.items() if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))
    }
    static = {name: x for name, x in arguments.items() if name not in arrays}
    traits: list[Traits] = []
    sizes: list[Sizes | None] = []

    def check(arrays: dict[str, Any]) -> Call:
        given, _ = merged(AttentionArguments(**static, **arrays))
        given = with_mask_info(given)
        traits.append(traits_of(given))
        sizes.append(sizes_of(given, traits[0].dropout))
        return check_arguments(given)

    return AbstractCall(jax.eval_shape(check, arrays), traits[0], sizes[0])


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with one batch dimension, without a MaskInfo, the seed as an integer.

    Float arrays may be jax.ShapeDtypeStruct, and are so in the result. Arguments that are None are left out.

    Raises: ValueError for integer arrays whose values are not known, and what the call raises.
    """
    floats = {name: x for name, x in arguments.items() if name in FLOATS and x is not None}
    # One number, read as if it were all of the array.
    zeros = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in floats.items()}
    for name, x in arguments.items():
        if name not in floats:
            check_concrete(name, x)
    known: dict[str, Any] = {**arguments, **zeros}
    given, _ = merged(AttentionArguments(**known))
    given = with_mask_info(given)
    given = replace(given, dropout_seed=_seed(given.dropout_seed))
    plain = {name: x for name, x in by_name(given).items() if x is not None and name not in _UNNEEDED}
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) if name in floats else x for name, x in plain.items()
    }


def _seed(seed: Any) -> int | None:
    """Return the seed of dropout as a Python int."""
    if seed is None or isinstance(seed, int):
        return seed
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.bits(seed, (2,), "uint32")
    words = np.asarray(seed).reshape(-1)
    return int(words[0]) | int(words[1]) << 32 if len(words) == 2 else int(words[0])
