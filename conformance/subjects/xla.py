"""What our XLA kernels declare: every feature and the standard semantics, on any backend of JAX."""

from typing import Any

from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.subject import Subject, Tiling
from attest.conformance.subjects._declared import SHARED, declared
from attest.kernels.implementations import XLA
from attest.kernels.xla import ChunkSizes, attention, flash_attention_with_lse
from attest.kernels.xla.whole import LIMITS as WHOLE
from attest.reference.numerics import Numerics


def _attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`attention` switches dropout on by `deterministic=False` and returns its weights too."""
    out, _weights = attention(query, key, value, deterministic=False, **options)
    return out


def _flash_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Everything in float32, rounded once at the end.

    A small problem without block sizes of its own is computed in one piece, but its normaliser in steps.
    """
    dot_keys = None if tiling.options else WHOLE["pairs"]
    return Numerics(output_dtype=dtype, key_block=tiling.key_block, dot_keys=dot_keys)


def _materialised_numerics(dtype: str, tiling: Tiling) -> Numerics:
    return Numerics(output_dtype=dtype, key_block=tiling.key_block, materialised=True)


def _chunks(q: int, k: int) -> Tiling:
    sizes = ChunkSizes(q, k)
    return Tiling({"fwd_params": sizes, "bwd_params": sizes}, query_block=q, key_block=k)


_DEFAULT = ChunkSizes()

SUBJECTS = (
    Subject(
        name="xla.flash_attention",
        call=flash_attention_with_lse,
        **declared(XLA),
        meshes=("explicit", "automatic"),
        sharded=declared(XLA)["features"],
        numerics=_flash_numerics,
        tilings=(_chunks(16, 16), _chunks(8, 32), Tiling({}, _DEFAULT.q, _DEFAULT.k)),
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
