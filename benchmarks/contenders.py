"""The contenders: our kernels, and the peers of `attest.conformance.peers`.

Each takes a workload and returns what computes it, or raises where it cannot. A library is imported by the
call, so that a missing one stops no other.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax

from attest.conformance.peers import ejkernel, jax_nn, tokamax
from attest.conformance.subject import Subject
from attest.conformance.tuning.workload import Inputs, Workload, options
from benchmarks.workload import Attend, in_direction

# Ours: a report judges one of them, and may time the others beside it. "auto" is a call that names none.
KERNELS = {
    "triton": "attest.kernels.triton",
    "mosaic_gpu": "attest.kernels.pallas.mosaic_gpu",
    "xla": "attest.kernels.xla",
    "auto": "attest.kernels",
}

PEERS = {
    # Its Subject is limited to calls that cuDNN takes forward + backward; benchmarks try others, too.
    "cudnn": replace(
        jax_nn.CUDNN,
        call=jax_nn.call_cudnn,
        head_dims=(8, 256),
        limits=replace(jax_nn.CUDNN.limits, length_multiple=1),
    ),
    # Its subject has small problems alone, for CPUs, and no mask that is broadcast.
    "jax_nn_xla": replace(
        jax_nn.XLA,
        features=jax_nn.XLA.features | {"broadcast"},
        limits=replace(jax_nn.XLA.limits, longest=jax_nn.CUDNN.limits.longest),
    ),
    # Its forward pass takes a soft cap, which its subject leaves out.
    "tokamax_triton": replace(
        tokamax.TRITON, features=tokamax.TRITON.features | {"soft_cap"}, unjudged=frozenset()
    ),
    "tokamax_mosaic": tokamax.MOSAIC,
    "ejkernel": ejkernel.TRITON,
}


def ours(module: str, workload: Workload, precision: str | None = None) -> Attend:
    """Return one of our kernels on a workload."""
    flash_attention = import_module(module).flash_attention

    def attend(inputs: Inputs) -> jax.Array:
        arrays = (inputs[name] for name in ("query", "key", "value"))
        return flash_attention(*arrays, precision=precision, **options(workload, inputs))

    return attend


def peer(subject: Subject, workload: Workload) -> Attend:
    """Return a peer on a workload. Raises NotImplementedError with what the peer does not declare."""
    reason = subject.why_not_here(jax.default_backend()) or subject.why_not(workload.case)
    placed = workload.causal or workload.window is not None
    if reason is None and placed and workload.length != workload.keys:
        aligned = subject.semantics.causal == "bottom_right"
        reason = None if aligned else "aligns the first query with the first key"
    if reason is not None:
        raise NotImplementedError(reason)

    def attend(inputs: Inputs) -> jax.Array:
        arrays = (inputs[name] for name in ("query", "key", "value"))
        result = subject.call(*arrays, **options(workload, inputs))
        return result[0] if subject.returns_lse else result

    return attend


CONTENDERS: dict[str, Callable[[Workload], Attend]] = {
    **{f"our_{name}": partial(ours, module) for name, module in KERNELS.items()},
    # Where the GPU's instruction computes the tanh of a soft cap.
    "our_mosaic_gpu_default": partial(ours, KERNELS["mosaic_gpu"], precision="default"),
    **{name: partial(peer, subject) for name, subject in PEERS.items()},
}


def program(contender: str, workload: Workload, direction: str) -> Callable[[Inputs], Any]:
    """Return what a contender computes of a workload, see `in_direction`."""
    return in_direction(CONTENDERS[contender](workload), direction)
