"""The Subject of ejKernel's Triton flash attention, with its own default block sizes."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from attest.conformance.subject import Limits, Subject
from attest.reference.semantics import Semantics


def _call(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call it: its options have our names."""
    library = import_module("ejkernel.kernels._triton.flash_attention")
    return library.flash_attention(query, key, value, **options)


def _why_not_here() -> str | None:
    return None if find_spec("ejkernel") else "needs the package ejkernel, which is not installed"


TRITON = Subject(
    name="ejkernel.triton",
    call=_call,
    features=frozenset({"scale", "causal", "gqa"}),
    dtypes=("bfloat16", "float16"),
    semantics=Semantics(gradients=frozenset({"query", "key", "value"}), lse_gradient=False),
    backend="gpu",
    limits=Limits(longest=1 << 20),
    ready=_why_not_here,
)

SUBJECTS: tuple[Subject, ...] = ()
UNCONFIRMED = (TRITON,)
