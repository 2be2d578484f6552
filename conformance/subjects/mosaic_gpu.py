"""Subjects of our Hopper kernels: every feature, in 16 bits, and the standard semantics.

Nothing here imports Pallas before a kernel is called, so that any machine can list the subject.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from attest.conformance.subject import CUDA_MATRIX_UNIT, Subject, Tiling, default_numerics
from attest.conformance.subjects._declared import declared
from attest.conformance.subjects.triton import CUDA
from attest.kernels.implementations import MOSAIC_GPU
from attest.reference.numerics import Numerics

COMPUTE_CAPABILITY = MOSAIC_GPU.capabilities.compute_capability
# The fewest keys in a step that the kernels' own table chooses.
FEWEST_KEYS = 64
# What the table chooses forward for a head dim of 128: lengths are drawn around it.
PRODUCTION_BLOCKS = (128, 128)
# Blocks that few tokens go through more than once, at any head dim: so the backward kernels' rings have one
# slot, which is awaited empty and awaited full in every step.
_ROOM = {"consumers": 2, "registers": (240, 24)}
_BACKWARD = {**_ROOM, "step": 64, "stages": 1, "ping_pong": True}
_SMALL = {
    "forward": {**_ROOM, "k": 64, "stages": 2, "partial_sums": False},
    "backward_query": _BACKWARD,
    "backward_key": {**_BACKWARD, "separate": True, "copies": 2},
    "backward_bias": _BACKWARD,
}
# Queries in a step of the fused backward kernel, by what both head dims are padded to; it has no others.
_FUSED_STEPS = {(64, 64): 128, (128, 128): 64}
# Without shared dropout: all Hopper kernels draw their pairs by one function, which the other subject judges.
_FUSED_FEATURES = frozenset(
    {"scale", "soft_cap", "causal", "sinks", "unnormalized", "gqa", "value_dim", "dropout", "origin"}
)

# What a soft cap meets in a kernel. The instruction for its tanh is off by up to 2^-11.
_BESIDE_CAP = frozenset(
    {"scale", "soft_cap", "causal", "window", "segments", "mask", "bias", "alibi", "sinks", "unnormalized"}
)
_TANH_BY_INSTRUCTION = 2.0**-10.9

# Up to this head dim shared memory has room for a mask and a bias beside the tiles of two consumers.
_LARGEST_BESIDE_PAIRS = 192


def _has_pairs(options: Mapping[str, Any]) -> bool:
    """Return whether there is a mask or bias of every pair, whose tiles come through shared memory."""
    arrays = (options.get(name) for name in ("attention_mask", "bias"))
    return any(x is not None and min(x.shape[-2:], default=1) > 1 for x in arrays)


def _flash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    blocks: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Run `flash_attention_with_lse`; blocks: one choice for each kernel, by name, None for their own."""
    from attest.kernels.pallas.mosaic_gpu import (
        BackwardBlocks,
        BackwardSizes,
        Blocks,
        flash_attention_with_lse,
    )

    if blocks is not None:
        head_dims = query.shape[-1:] + value.shape[-1:]  # there may be any number of axes
        if max(head_dims, default=0) > _LARGEST_BESIDE_PAIRS and _has_pairs(options):
            blocks = {name: {**chosen, "consumers": 1} for name, chosen in blocks.items()}
        backward = {name: BackwardBlocks(**chosen) for name, chosen in blocks.items() if name != "forward"}
        options |= {"fwd_params": Blocks(**blocks["forward"]), "bwd_params": BackwardSizes(**backward)}
    return flash_attention_with_lse(query, key, value, **options)


def _with_default_precision(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Run `flash_attention_with_lse` where the GPU's instruction computes the tanh of a cap."""
    return _flash_attention(query, key, value, precision="default", **options)


def _fused_step(arguments: Mapping[str, Any]) -> int | None:
    """Return the queries in a step of the fused backward kernel, None if there is none for this call."""
    from attest.kernels.operations.abstract_call import abstract_call
    from attest.kernels.pallas.mosaic_gpu.blocks import pad_dims
    from attest.kernels.pallas.mosaic_gpu.spec import work_of

    try:
        call = abstract_call(arguments).call
    except (TypeError, ValueError, NotImplementedError):
        return None  # the kernel says what is wrong
    dims = call.query.shape[3], call.value.shape[3]
    if work_of(call) & {"ranges", "pairs"} or max(dims) > max(max(_FUSED_STEPS)):
        return None  # pairs are hidden by more than causal order, or rows are too long
    return _FUSED_STEPS.get(pad_dims(*dims))


def _fused_flash_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Run `flash_attention_with_lse`, of which one kernel sums dquery, dkey and dvalue where it can.

    The table takes that kernel for thousands of queries only.
    """
    from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, flash_attention_with_lse

    step = _fused_step({"query": query, "key": key, "value": value, **options})
    if step is not None:
        blocks = BackwardBlocks(step=step, stages=2, consumers=2, registers=(232, 24), fused=True)
        options["bwd_params"] = BackwardSizes(backward_key=blocks)
    return flash_attention_with_lse(query, key, value, **options)


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return numerics with weights and dS in the inputs' dtype, all else in float32."""
    functions = {**CUDA, "tanh": 2.0**-20}  # their own: kernels/pallas/mosaic_gpu/tile/tanh.py
    return replace(default_numerics(dtype, tiling), key_block=FEWEST_KEYS, **functions, **CUDA_MATRIX_UNIT)


def _default_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return numerics with the GPU's instruction for the tanh of a cap."""
    return replace(_numerics(dtype, tiling), tanh=_TANH_BY_INSTRUCTION)


def _why_not_here() -> str | None:
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) == COMPUTE_CAPABILITY:
        return None
    return f"needs a GPU of compute capability {COMPUTE_CAPABILITY}, this machine has {device.device_kind}"


_DECLARED: Mapping[str, Any] = {
    **declared(MOSAIC_GPU),
    "numerics": _numerics,
    "backend": "gpu",
    "returns_lse": True,
    "ready": _why_not_here,
}

_OF_DEFAULT_PRECISION: Mapping[str, Any] = {
    **_DECLARED,
    "features": _BESIDE_CAP,
    "unjudged": _DECLARED["features"] - _BESIDE_CAP,
    "numerics": _default_numerics,
}

_OF_FUSED: Mapping[str, Any] = {
    **_DECLARED,
    "features": _FUSED_FEATURES,
    "unjudged": _DECLARED["features"] - _FUSED_FEATURES,
    "head_dims": (1, max(max(_FUSED_STEPS))),
}

SUBJECTS = (
    Subject(
        name="pallas.mosaic_gpu",
        call=_flash_attention,
        **_DECLARED | declared(MOSAIC_GPU, longest=1 << 20, meshes=("explicit",)),
        tilings=(
            Tiling({"blocks": _SMALL}, query_block=128, key_block=64),
            Tiling({}, *PRODUCTION_BLOCKS),
        ),
    ),
    Subject(
        name="pallas.mosaic_gpu.fused",
        call=_fused_flash_attention,
        **_OF_FUSED,
        tilings=(Tiling({}, query_block=64, key_block=128),),
    ),
    Subject(
        name="pallas.mosaic_gpu.default_precision",
        call=_with_default_precision,
        **_OF_DEFAULT_PRECISION,
        tilings=(Tiling({}, *PRODUCTION_BLOCKS),),
    ),
)
