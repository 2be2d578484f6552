"""The Subject of `attest.flash_attention`: what runs where, and in which arithmetic."""

from collections.abc import Sequence
from dataclasses import replace

import jax

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.subject import Subject, Tiling
from attest.conformance.subjects import mosaic_gpu, pallas_tpu, triton, xla
from attest.conformance.subjects._declared import SHARED
from attest.kernels import flash_attention_with_lse
from attest.reference.numerics import Numerics

# The compute capability of Hopper GPUs: not read from the record that the choice reads, see `_meant`.
_HOPPER = "9.0"
# The subject that declares the arithmetic of each implementation.
_DECLARED = {"xla": "xla.flash_attention", "triton": "triton.cuda", "mosaic_gpu": "pallas.mosaic_gpu"}
_BY_NAME = {
    subject.name: subject
    for subject in (*xla.SUBJECTS, *triton.SUBJECTS, *mosaic_gpu.SUBJECTS, *pallas_tpu.SUBJECTS)
}


def declared_by(implementation: str, anywhere: bool = False) -> Subject | None:
    """Return the Subject that declares the arithmetic of an implementation in this process.

    Of Triton it is the interpreter's or the GPU's. None where nobody declares any. anywhere: whether a
    Subject for other machines counts, too.
    """
    names = {**_DECLARED, "pallas_tpu": "pallas.tpu_interpret"}
    if implementation == "triton" and jax.default_backend() == "cpu":
        names["triton"] = "triton.interpret"
    subject = _BY_NAME.get(names.get(implementation, ""))
    return subject if anywhere or subject is None or subject.ready() is None else None


def _meant(dtype: str) -> tuple[str, ...]:
    """Return the implementations that may run each pass here; none where no arithmetic is declared.

    Written down here, not asked of the code that chooses, so that a wrong choice is seen.
    """
    backend = jax.default_backend()
    if backend == "gpu":
        hopper = getattr(jax.devices()[0], "compute_capability", None) == _HOPPER
        return ("mosaic_gpu", "triton") if hopper and dtype != "float32" else ("triton",)
    return ("xla",) if backend == "cpu" else ()


def _implementation(case: Case) -> frozenset[str]:
    names = _meant(case.dtype)
    assert names, "not ready here"
    return frozenset(names)


def _kernels(dtype: str) -> list[Subject]:
    """Return the subjects that calls of a dtype may be handed to here."""
    return [_BY_NAME[_DECLARED[name]] for name in _meant(dtype)]


def _numerics(dtype: str, _tiling: Tiling) -> Numerics:
    """Return those of the kernels that may run, with the blocks that they choose themselves."""
    return widest([kernel.numerics(dtype, kernel.tilings[-1]) for kernel in _kernels(dtype)])


def widest(found: Sequence[Numerics]) -> Numerics:
    """Return the arithmetic of the first, with the errors of the worst: each of them may run a pass."""
    blocks = [x.key_block for x in found if x.key_block is not None]
    return replace(
        found[0],
        exponential=max(x.exponential for x in found),
        tanh=max(x.tanh for x in found),
        key_block=min(blocks, default=None),
    )


def _why_not_ready() -> str | None:
    kernels = {kernel.name: kernel for dtype in DTYPES for kernel in _kernels(dtype)}
    if not kernels:
        return f"declares no arithmetic for {jax.default_backend()}"
    reasons = (kernels[name].ready() for name in sorted(kernels))
    return next((reason for reason in reasons if reason is not None), None)


SUBJECTS = (
    Subject(
        name="auto",
        call=flash_attention_with_lse,
        # Positions of keys run in XLA on every device, whose arithmetic on GPUs is not declared.
        features=frozenset(ALL_FEATURES) - {"positions"},
        unjudged=frozenset({"positions"}),
        dtypes=DTYPES,
        **SHARED,
        numerics=_numerics,
        returns_lse=True,
        ready=_why_not_ready,
        implementation=_implementation,
    ),
)
