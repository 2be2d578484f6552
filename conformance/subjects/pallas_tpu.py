"""Subjects of our TPU kernels: every feature and the standard semantics, in Pallas's interpreter of TPUs.

Nothing here imports Pallas before a kernel is called, so that any machine can list the subject.
"""

import os
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from attest.conformance.subject import Subject, Tiling, default_numerics
from attest.conformance.subjects._declared import declared
from attest.kernels.implementations import PALLAS_TPU
from attest.reference.numerics import Numerics

# Largest relative errors of the functions, those of XLA on a CPU.
_ARITHMETIC = {"exponential": 2.0**-22, "tanh": 2.0**-20}
# The arguments that may be differentiated; the others are arrays of integers, or static.
_FLOATS = ("query", "key", "value", "bias", "softmax_aux")


def _flash_attention(
    query: Any, key: Any, value: Any, *, blocks: tuple[int, int], seed: int, **options: Any
) -> Any:
    """Run `flash_attention_with_lse` with one choice of blocks, interpreted in one order of the grid."""
    from attest.kernels.pallas.tpu import BlockSizes, flash_attention_with_lse

    sizes = BlockSizes(*blocks)
    call = interpreted_call(flash_attention_with_lse, seed)
    return call(query=query, key=key, value=value, fwd_params=sizes, bwd_params=sizes, **options)


def interpreted_call(call: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """Return a call, of arguments by name, that is interpreted in one order of the grid.

    JAX traces the backward pass when it comes to it, long after the call: hence a derivative of our own,
    which traces it under the interpreter too, and with the context variables of the call.
    """

    def interpreted_in_both_passes(**arguments: Any) -> Any:
        from attest.kernels.pallas.interpreter import interpreted

        floats = {name: arguments.pop(name) for name in _FLOATS if name in arguments}
        # Operands, too: under jax.shard_map the derivative may close over no array.
        others = {name: arguments.pop(name) for name, x in tuple(arguments.items()) if hasattr(x, "shape")}
        context = copy_context()

        def plain(others: dict[str, Any], floats: dict[str, Any]) -> Any:
            return call(**floats, **others, **arguments)

        @jax.custom_vjp
        def attend(floats: dict[str, Any], others: dict[str, Any]) -> Any:
            with interpreted(seed):
                return plain(others, floats)

        def forward(floats: dict[str, Any], others: dict[str, Any]) -> Any:
            with interpreted(seed):
                return context.copy().run(jax.vjp, partial(plain, others), floats)

        def backward(pull: Any, cotangents: Any) -> Any:
            with interpreted(seed):
                return (*pull(cotangents), None)

        attend.defvjp(forward, backward)
        return attend(floats, others)

    return interpreted_in_both_passes


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return numerics with weights and dS in the inputs' dtype, all else in float32."""
    return replace(default_numerics(dtype, tiling), **_ARITHMETIC)


def _tiling(q: int, k: int, seed: int) -> Tiling:
    return Tiling({"blocks": (q, k), "seed": seed}, query_block=q, key_block=k)


def _violations() -> Sequence[object]:
    """Return what the interpreter saw since the last call of this."""
    from attest.kernels.pallas.interpreter import drain_violations

    return drain_violations()


def _why_not_interpreted() -> str | None:
    if "PJRT_NPROC" not in os.environ:
        return "needs a process started with PJRT_NPROC=8, for the threads that the interpreter waits in"
    return None


SUBJECTS = (
    Subject(
        name="pallas.tpu_interpret",
        call=_flash_attention,
        **declared(PALLAS_TPU),
        numerics=_numerics,
        backend="cpu",
        interpreter="Pallas for TPUs",
        # Small blocks cross many edges; large ones make 1024 keys affordable: time goes by steps of a grid.
        tilings=(_tiling(16, 16, seed=1), _tiling(32, 16, seed=2), _tiling(64, 128, seed=3)),
        returns_lse=True,
        ready=_why_not_interpreted,
        violations=_violations,
    ),
)
