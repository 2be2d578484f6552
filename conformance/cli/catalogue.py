"""The texts of `attest list`: a line for each subject, or a paragraph with everything that it declares."""

import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.process.signals import Interrupted
from attest.conformance.subject import Subject, discover, find
from attest.conformance.text import describe, sentence, shortened
from attest.reference.semantics import STANDARD, Semantics

_WIDTH = 100
_INDENT = " " * 12
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def catalogue() -> str:
    """Return a paragraph for each subject, with the reason if it cannot be loaded."""
    return "\n\n".join("\n".join(_paragraph(name)) for name in sorted(discover()))


def short_catalogue(backend: str) -> str:
    """Return a line for each subject: its name, its dtypes, and whether it runs here.

    backend: of this process, as JAX names it.
    """
    names = sorted(discover())
    width = max(map(len, names), default=0)
    lines = [f"{name:{width}}  {_summary(name, backend)}" for name in names]
    return "\n".join([*lines, "", "attest list -v shows everything that they declare."])


def _summary(name: str, backend: str) -> str:
    try:
        subject = find(name)
        reason = subject.why_not_here(backend)
    except Interrupted:
        raise
    except BaseException as error:  # a module or a declaration of somebody else's
        return shortened(_broken(error), _WIDTH)
    dtypes = "/".join(_SHORT.get(dtype, dtype) for dtype in subject.dtypes)
    return f"{dtypes:12}  {'runs here' if reason is None else reason}"


def _broken(error: BaseException) -> str:
    said = str(error.args[0]) if isinstance(error, LookupError) else describe(error)
    return f"broken: {sentence(said)}"


def _paragraph(name: str) -> Iterator[str]:
    yield name
    try:
        subject = find(name)
        reason = subject.ready()
    except Interrupted:
        raise
    except BaseException as error:  # a module or a declaration of somebody else's
        yield _line("broken", _broken(error).partition(": ")[2])
        return
    yield _line("runs on", "any backend" if subject.backend == "any" else subject.backend)
    if reason is not None:
        yield _line("not here", reason)
    if subject.distribution:
        yield _line("part of", subject.distribution)
    if subject.interpreter:
        yield _line("run by", f"an interpreter of {subject.interpreter}")
    yield _line("dtypes", ", ".join(subject.dtypes))
    yield _line("head dims", "{} to {}".format(*subject.head_dims))
    yield _line("features", _features(subject))
    limited = "; ".join(limits(subject))
    if limited:
        yield _line("limits", limited)
    yield _line("returns", "out and lse" if subject.returns_lse else "out")
    yield _line("semantics", "; ".join(differences(subject.semantics)) or "standard")


def _features(subject: Subject) -> str:
    if subject.features == frozenset(ALL_FEATURES):
        return "all"
    return ", ".join(name for name in ALL_FEATURES if name in subject.features) or "none"


def limits(subject: Subject) -> Iterator[str]:
    """Yield the limits that a subject declares, in words."""
    for together in subject.limits.excludes:
        yield f"not {' and '.join(sorted(together))} in one call"
    if subject.limits.window_sides == "left":
        yield "windows to the left only"
    if subject.limits.length_multiple > 1:
        yield f"lengths that are multiples of {subject.limits.length_multiple}"
    if subject.limits.head_dim_multiple > 1:
        yield f"head dims that are multiples of {subject.limits.head_dim_multiple}"
    if subject.limits.seed_bits < 64:
        yield f"dropout seeds of {subject.limits.seed_bits} bits"
    if subject.limits.origin_multiple > 1:
        yield f"origins whose key is a multiple of {subject.limits.origin_multiple}"
    if subject.limits.sinks != "any":
        yield {"shared": "sinks shared by all heads", "per_head": "sinks for each head"}[subject.limits.sinks]
    if subject.gradient_dtype != "input":
        yield f"gradients in {subject.gradient_dtype}"
    if subject.limits.traces:
        yield "traces its arrays"
    if not subject.limits.validates:
        yield "does not validate its arguments"


def differences(semantics: Semantics) -> list[str]:
    """Return words on where a dialect differs from the standard."""
    found = [(f.name, getattr(semantics, f.name), getattr(STANDARD, f.name)) for f in fields(Semantics)]
    return [_difference(name, got, standard) for name, got, standard in found if got != standard]


def _difference(name: str, got: Any, standard: Any) -> str:
    if isinstance(got, frozenset):
        missing, added = sorted(standard - got), sorted(got - standard)
        parts = [f"without {', '.join(missing)}"] if missing else []
        return f"{name} {' and '.join([*parts, *([', '.join(added)] if added else [])])}"
    return f"{name} {got}"


def _line(title: str, text: str) -> str:
    first = f"  {title}".ljust(len(_INDENT))
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=_INDENT)
