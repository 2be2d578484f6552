"""What our Hopper kernels declare: every feature but dropout, in 16 bits, and the standard semantics.

Nothing here imports Pallas before a kernel is called, so that any machine can list the subject.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from attest.conformance.subject import Subject, Tiling, default_numerics
from attest.conformance.subjects._declared import declared
from attest.conformance.subjects.triton import CUDA, CUDA_MATRIX_UNIT
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
    "backward_key": {**_BACKWARD, "separate": True},
    "backward_bias": _BACKWARD,
}

# Up to this head dim shared memory has room for a mask and a bias beside the tiles of two consumers.
_LARGEST_BESIDE_PAIRS = 192


def _has_pairs(options: Mapping[str, Any]) -> bool:
    """Whether there is a mask or bias of every pair, whose tiles come through shared memory."""
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
    """`flash_attention_with_lse`; blocks: one choice for each kernel, by name, None for their own."""
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


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Weights and dS cast to the inputs' dtype, all else in float32."""
    functions = {**CUDA, "tanh": 2.0**-20}  # their own: kernels/pallas/mosaic_gpu/tanh.py
    return replace(default_numerics(dtype, tiling), key_block=FEWEST_KEYS, **functions, **CUDA_MATRIX_UNIT)


def _why_not_here() -> str | None:
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) == COMPUTE_CAPABILITY:
        return None
    return f"needs a GPU of compute capability {COMPUTE_CAPABILITY}, this machine has {device.device_kind}"


SUBJECTS = (
    Subject(
        name="pallas.mosaic_gpu",
        call=_flash_attention,
        **declared(MOSAIC_GPU),
        meshes=("explicit",),
        sharded=declared(MOSAIC_GPU)["features"],
        numerics=_numerics,
        backend="gpu",
        tilings=(
            Tiling({"blocks": _SMALL}, query_block=128, key_block=64),
            Tiling({}, *PRODUCTION_BLOCKS),
        ),
        returns_lse=True,
        longest=1 << 20,
        ready=_why_not_here,
    ),
)
