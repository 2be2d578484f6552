"""Decides whether an attention kernel is right: draws cases, runs kernels, judges them against the oracle.

What other projects use is here, loaded when it is first asked for: a pytest plugin lives in this package,
and must cost nothing to suites that do not use it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.subject import Subject, Tiling
    from conformance.testing import replay_case, run_conformance_test
    from conformance.validation import validate_call

__all__ = ["Subject", "Tiling", "replay_case", "run_conformance_test", "validate_call"]

_HOMES = {
    "Subject": "conformance.subject",
    "Tiling": "conformance.subject",
    "replay_case": "conformance.testing",
    "run_conformance_test": "conformance.testing",
    "validate_call": "conformance.validation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
