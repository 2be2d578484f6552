"""Attention kernels and the suite that decides whether an attention kernel is right.

    from attest import flash_attention                  # the kernels
    from attest import Subject, run_conformance_test    # judge your own

Names are loaded when they are first asked for: pytest imports this package in every session, for its plugin,
and suites that do not use it must not pay for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attest.conformance import (
        Limits,
        Sharding,
        Subject,
        Tiling,
        replay_case,
        run_conformance_test,
        validate_call,
    )
    from attest.kernels import flash_attention, flash_attention_with_lse
    from attest.kernels.xla.attention import attention
    from attest.reference.numerics import Numerics
    from attest.reference.semantics import Semantics

    __version__: str

__all__ = [
    "Limits",
    "Numerics",
    "Semantics",
    "Sharding",
    "Subject",
    "Tiling",
    "attention",
    "flash_attention",
    "flash_attention_with_lse",
    "replay_case",
    "run_conformance_test",
    "validate_call",
]

# The packages that have them, which in turn load no more than a name needs.
_HOMES = {
    "Limits": "attest.conformance",
    "Numerics": "attest.reference.numerics",
    "Semantics": "attest.reference.semantics",
    "Sharding": "attest.conformance",
    "Subject": "attest.conformance",
    "Tiling": "attest.conformance",
    "attention": "attest.kernels.xla.attention",
    "flash_attention": "attest.kernels",
    "flash_attention_with_lse": "attest.kernels",
    "replay_case": "attest.conformance",
    "run_conformance_test": "attest.conformance",
    "validate_call": "attest.conformance",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attest-attention")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if _HOMES[name] != "attest.conformance" or (error.name or "attest").partition(".")[0] == "attest":
            raise
        raise ImportError(
            f"attest.{name} needs the package {error.name}, which is not installed: install the extra suite, "
            'pip install "attest-attention[suite]"'
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
