"""The steps of a call from its arguments to an implementation."""

from dataclasses import replace
from typing import Any

import jax

from attest.kernels.arguments import AttentionArguments, check_arguments, merged
from attest.kernels.call.leading_axes import split
from attest.kernels.call.options import check_dtype, check_flag, check_names_of_flax
from attest.kernels.call.symbolic import check_symbolic
from attest.kernels.choice.choose import check_supported, chosen, traits_of
from attest.kernels.choice.fastest import sizes_of
from attest.kernels.choice.lowering import refused_elsewhere
from attest.kernels.choice.neutral_sizes import split_sizes, with_sizes
from attest.kernels.contract import Passes, Settings
from attest.kernels.differentiate import attend
from attest.kernels.with_mask_info import with_mask_info


def computed(function: str, arguments: AttentionArguments) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of a call.

    function: the name of the public function, with which messages about derivatives begin.

    Raises: as `attest.flash_attention`.
    """
    check_names_of_flax(arguments.mask, arguments.dropout_rng)
    arguments, leading = merged(arguments)
    arguments = with_mask_info(arguments)
    check_symbolic(arguments.query, arguments.key, arguments.value, arguments.softmax_aux)
    arguments, sizes = split_sizes(arguments)
    traits = traits_of(arguments)
    # Block sizes are those of one implementation.
    by_sizes = arguments.platform is None and not any(sizes.values())
    choice = chosen(arguments, traits, sizes_of(arguments, traits.dropout) if by_sizes else None)
    passes = choice.load()
    call = check_arguments(arguments)
    # Now the call is well-formed; block sizes may depend on the device.
    check_supported(choice)
    arguments = with_sizes(arguments, sizes, choice.implementation, call, named=choice.device is None)
    settings = replace(settings_of(passes, arguments), function=function)
    if choice.device is not None:
        passes = refused_elsewhere(passes, choice)
    out, lse = attend(passes, settings, call)
    return split(out, leading), split(lse, leading)


def settings_of(passes: Passes, arguments: AttentionArguments) -> Settings:
    """Return the settings among the arguments of a call, checked for an implementation.

    Raises: ValueError naming the argument.
    """
    forward, backward = arguments.fwd_params, arguments.bwd_params
    if arguments.config is not None:
        forward, backward = arguments.config.forward, arguments.config.backward
    return Settings(
        passes.check_forward(forward),
        passes.check_backward(backward),
        check_flag("normalize_output", arguments.normalize_output),
        passes.check_precision(arguments.precision),
        _logits_dtype(arguments.logits_dtype),
    )


def _logits_dtype(dtype: Any) -> str:
    return "float32" if dtype is None else check_dtype("logits_dtype", dtype)
