"""Subjects of our XLA kernels: every feature and the standard semantics, on any backend of JAX.

`xla.pieces` is what accelerators run, on any backend, and in smaller pieces than they choose.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.subject import CUDA_MATRIX_UNIT, Subject, Tiling, default_numerics
from attest.conformance.subjects._declared import SHARED, declared
from attest.kernels.attention import flash_attention_with_lse as flash_attention_of
from attest.kernels.implementations import XLA
from attest.kernels.xla import ChunkSizes, attention, flash_attention_with_lse, pieces
from attest.kernels.xla.passes import PASSES
from attest.kernels.xla.whole import D_LOGITS_BELOW
from attest.kernels.xla.whole import LIMITS as WHOLE
from attest.reference.numerics import Numerics


def _attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call `attention`, which switches dropout on by `deterministic=False` and returns its weights too."""
    out, _weights = attention(query, key, value, deterministic=False, **options)
    return out


def _flash_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return numerics of float32 throughout, rounded once at the end.

    A small problem without block sizes of its own is computed in one piece, but its normaliser in steps. On
    accelerators 16-bit calls without block sizes are those of `xla.pieces`.
    """
    if dtype != "float32" and not tiling.options and jax.default_backend() != "cpu":
        return _pieces_numerics(dtype, tiling)
    dot_keys = None if tiling.options else WHOLE["pairs"]
    return Numerics(output_dtype=dtype, key_block=tiling.key_block, dot_keys=dot_keys)


def _pieces_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return numerics of all keys at once; P and dS are rounded to the inputs' dtype, sums are float32.

    In float16, dS is scaled down where it might overflow.
    """
    matrix_unit = CUDA_MATRIX_UNIT if dtype != "float32" and jax.default_backend() == "gpu" else {}
    below = D_LOGITS_BELOW if dtype == "float16" else math.inf
    return replace(
        default_numerics(dtype, tiling), key_block=None, sum_lanes=1, d_logits_below=below, **matrix_unit
    )


def _materialised_numerics(dtype: str, tiling: Tiling) -> Numerics:
    return Numerics(output_dtype=dtype, key_block=tiling.key_block, materialised=True)


def _chunks(q: int, k: int) -> Tiling:
    sizes = ChunkSizes(q, k)
    return Tiling({"fwd_params": sizes, "bwd_params": sizes}, query_block=q, key_block=k)


_DEFAULT = ChunkSizes()
_LIMITS = {
    **pieces.LIMITS,
    "forward_logits": 2**12,
    "backward_logits": 2**10,
    "backward_rows": 8,
    "backward_keys": 16,
    "part_rows": 8,
    "alignment": 4,
}
_PIECES = replace(
    PASSES,
    forward=partial(pieces.forward, limits=_LIMITS),
    backward=partial(pieces.backward, limits=_LIMITS),
)

SUBJECTS = (
    Subject(
        name="xla.flash_attention",
        call=flash_attention_with_lse,
        **declared(XLA, meshes=("explicit", "automatic")),
        numerics=_flash_numerics,
        tilings=(_chunks(16, 16), _chunks(8, 32), Tiling({}, _DEFAULT.q, _DEFAULT.k)),
        returns_lse=True,
    ),
    Subject(
        name="xla.pieces",
        call=partial(flash_attention_of, platform=replace(XLA, load=lambda: _PIECES)),
        **declared(XLA, longest=512),
        numerics=_pieces_numerics,
        tilings=(Tiling({}, 16, 16),),
        returns_lse=True,
    ),
    Subject(
        name="xla.attention",
        call=_attention,
        features=frozenset(ALL_FEATURES) - {"unnormalized"},
        dtypes=DTYPES,
        numerics=_materialised_numerics,
        **SHARED,
    ),
)
