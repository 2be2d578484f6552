"""What `kernels.flash_attention` declares: which implementation runs on which backend, and its arithmetic."""

import jax

from conformance.case import Case
from conformance.features import DTYPES, FEATURES
from conformance.subject import Subject, Tiling
from conformance.subjects import triton, xla
from kernels import flash_attention_with_lse
from reference.numerics import Numerics

# By backend of JAX, the implementation that is meant to run, and the subject that declares its arithmetic.
# Written down here, not asked of the code that chooses, so that a wrong choice is seen.
_MEANT = {"cpu": ("xla", "xla.flash_attention"), "gpu": ("triton", "triton.cuda")}
_BY_NAME = {subject.name: subject for subject in (*xla.SUBJECTS, *triton.SUBJECTS)}


def _implementation(_case: Case) -> str:
    name, _ = _MEANT[jax.default_backend()]
    return name


def _kernel() -> Subject:
    """The subject that calls are handed to here."""
    _, name = _MEANT[jax.default_backend()]
    return _BY_NAME[name]


def _numerics(dtype: str, _tiling: Tiling) -> Numerics:
    """Those of the kernel that runs, with the blocks that it chooses itself."""
    kernel = _kernel()
    return kernel.numerics(dtype, kernel.tilings[-1])


def _why_not_ready() -> str | None:
    backend = jax.default_backend()
    if backend not in _MEANT:
        return f"declares no arithmetic for {backend}"
    return _kernel().ready()


SUBJECTS = (
    Subject(
        name="auto",
        call=flash_attention_with_lse,
        features=frozenset(FEATURES),
        dtypes=DTYPES,
        numerics=_numerics,
        returns_lse=True,
        ready=_why_not_ready,
        implementation=_implementation,
    ),
)
