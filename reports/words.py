"""Spellings of numbers, counts, cases and text that comes from a subject."""

import math
from collections.abc import Mapping
from typing import Any, cast

from attest.conformance.cases.case import Case
from attest.conformance.record import RunRecord
from attest.conformance.text import printable

STATISTIC_WORDS = {
    "worst_ratio": "max err/bound",
    "rms_ratio": "max rms ratio",
    "rms_median": "median rms ratio",
    "largest_z": "largest z",
    "bias_t": "bias t",
}

# Parts of an environment that are about single subjects, and that no table of settings shows.
_OF_SUBJECTS = ("kernel_files", "declarations")

# What each column of numbers means, for the foot of a table.
LEGEND = (
    "err/bound: the largest error over the bound of a correct kernel, at most 1. rms: the errors' root mean"
    " square over the predicted one, the largest and the median over cases. z: the largest error in predicted"
    " standard deviations. bias t: how one-sided the errors are, without its sign. Expected failures are not"
    " counted; rms and bias are judged only in outputs with enough elements."
)


def number(value: float | None) -> str:
    """Return three significant digits; a dash for what was not measured."""
    if value is None:
        return "-"
    if math.isnan(value) or math.isinf(value):
        return str(value)
    return f"{value + 0.0:.3g}"


def family(check: str) -> str:
    """Return the name that a check shares with others of its kind: "refusal" of "refusal.scale_nan"."""
    return check.partition(".")[0]


def transition(before: str, after: str) -> str:
    """Return what became of a case's verdict, as the end of a sentence."""
    if before == "-":
        return f"{after} and new"
    if after == "-":
        return f"{before} before and gone"
    return f"{before} -> {after}"


def recipe(case: Case) -> str:
    """Return a case in one line: its fields that differ from their defaults."""
    return (
        " ".join(f"{name}={_compact(value)}" for name, value in sorted(case.to_json().items())) or "default"
    )


def _compact(value: Any) -> str:
    return str(value).replace(" ", "")


def one_line(text: str, width: int = 200) -> str:
    """Return text in one line of at most `width` characters."""
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."


def setting(record: RunRecord, name: str) -> Mapping[str, Any]:
    """Return a table of the environment of a run; empty if the record, which may be older, has none."""
    found: Any = record.environment.get(name)
    return cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}


def environment(record: RunRecord) -> dict[str, str]:
    """Return where a run ran, flattened: dotted names, values as text, in order.

    Without the files of kernels, and without their declarations, which are long.
    """
    where = {name: value for name, value in record.environment.items() if name not in _OF_SUBJECTS}
    return dict(sorted(_flat("", where)))


def changed_settings(base: RunRecord, head: RunRecord) -> list[tuple[str, str, str]]:
    """Return where the environments of two runs differ: the name and both values, "-" for none.

    Another date is no other environment.
    """
    before, after = environment(base), environment(head)
    names = sorted(name for name in before | after if name != "date")
    found = [(name, before.get(name, "-"), after.get(name, "-")) for name in names]
    return [entry for entry in found if entry[1] != entry[2]]


def _flat(prefix: str, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            found += _flat(f"{prefix}{name}.", value)
        else:
            found.append((f"{prefix}{name}", str(value)))
    return found
