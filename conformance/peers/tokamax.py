"""The Subjects of `tokamax.dot_product_attention` on GPUs: in Pallas Triton and in Pallas Mosaic GPU.

Its heuristics choose the block sizes. Causal order starts in the top-left corner.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

from attest.conformance.subject import Limits, Subject
from attest.reference.semantics import Semantics

_PROFILER = "xprof.cli.tools"
_IMPORTING = Lock()  # threads that compile import it at once


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    implementation: str,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
) -> Any:
    return _library().dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        scale=softmax_scale,
        is_causal=causal,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
    )


def _library() -> Any:
    """Import tokamax without the profiler that its own benchmarks use, where that one is not installed."""
    with _IMPORTING:
        if "xprof" not in sys.modules and find_spec("xprof") is None:
            names = _PROFILER.split(".")
            for end in range(1, len(names) + 1):
                name = ".".join(names[:end])
                sys.modules[name] = ModuleType(name)
            vars(sys.modules[_PROFILER])["get_kernel_stats_tool"] = None
        return import_module("tokamax")


def _why_not_here() -> str | None:
    return None if find_spec("tokamax") else "needs the package tokamax, which is not installed"


def _subject(implementation: str) -> Subject:
    return Subject(
        name=f"tokamax.{implementation}",
        call=partial(_call, implementation=implementation),
        features=frozenset({"scale", "bias", "causal", "soft_cap", "gqa", "value_dim"}),
        dtypes=("bfloat16", "float16"),
        semantics=Semantics(
            causal="top_left",
            gradients=frozenset({"query", "key", "value", "bias"}),
            lse_gradient=False,
        ),
        backend="gpu",
        limits=Limits(longest=1 << 20),
        ready=_why_not_here,
    )


TRITON = _subject("triton")
MOSAIC = _subject("mosaic")

SUBJECTS: tuple[Subject, ...] = ()
UNCONFIRMED = (TRITON, MOSAIC)
