"""The conformance suite: it draws cases, runs kernels and judges their answers against the oracle.

What other projects use is here, loaded when it is first used: a pytest plugin lives in this package,
and must cost nothing to suites that do not use it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attest.conformance.subject import Limits, Sharding, Subject, Tiling
    from attest.conformance.testing import replay_case, run_conformance_test
    from attest.conformance.validation import validate_call

__all__ = [
    "Limits",
    "Sharding",
    "Subject",
    "Tiling",
    "replay_case",
    "run_conformance_test",
    "validate_call",
]

_HOMES = {
    "Limits": "attest.conformance.subject",
    "Sharding": "attest.conformance.subject",
    "Subject": "attest.conformance.subject",
    "Tiling": "attest.conformance.subject",
    "replay_case": "attest.conformance.testing",
    "run_conformance_test": "attest.conformance.testing",
    "validate_call": "attest.conformance.validation",
}

if __name__ == "conformance":
    raise ImportError(
        "import attest.conformance: conformance alone is a second copy of it, or another project's package"
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
