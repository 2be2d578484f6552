"""The tables of docs/log/error-model.md, in Markdown, from the measurements in docs/evidence/."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Families whose statistics thresholds.toml judges; the others are held to the bound alone.
BOUND_ONLY = ("integers", "large_logits", "tiny")


def tables(folder: Path) -> str:
    """Every table that there are measurements for."""
    parts = {
        "functions": _functions,
        "bounds": _bounds,
        "kernels": _bounds,
        "calibration": _calibration,
        "defects": _defects,
    }
    text: list[str] = []
    for name, write in parts.items():
        path = folder / f"{name}.json"
        if path.exists():
            text += [f"### {name}", "", *write(json.loads(path.read_text())["result"]), ""]
    return "\n".join(text)


def _rows(header: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines]


def _functions(result: Mapping[str, Any]) -> list[str]:
    cells = ((name, *(f"{row[k]:.2e}" for k in ("largest", "rms", "mean"))) for name, row in result.items())
    return _rows(("function", "largest relative error", "rms", "mean"), cells)


def _bounds(result: Mapping[str, Any]) -> list[str]:
    def cells() -> Iterator[Sequence[str]]:
        for at, row in result.items():
            worst = row["worst"]["worst_ratio"]
            failed = len(row["failed"])
            yield (*at.split(" "), str(row["calls"]), f"{worst['value']:.3f}", worst["family"], str(failed))

    header = ("kernel", "dtype", "output", "calls", "worst err/bound", "in family", "calls over any limit")
    return _rows(header, cells())


def _calibration(result: Mapping[str, Any]) -> list[str]:
    def cells() -> Iterator[Sequence[str]]:
        for at, row in result.items():
            families = {name: v for name, v in row["rms_ratio"].items() if name not in BOUND_ONLY}
            if not families:
                continue
            low, high = (f(v[i] for v in families.values()) for i, f in ((0, min), (1, max)))
            usual = families.get("normal", (0.0, 0.0))
            bias = max(families, key=lambda name: families[name][2])
            yield (
                *at.split(" "),
                str(row["calls"]),
                f"{usual[0]:.2f} to {usual[1]:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{max(v[3] for v in families.values()):.1f}",
                f"{families[bias][2]:.1f} ({bias})",
                str(len(row["failed"])),
            )

    header = ("kernel", "dtype", "output", "calls", "rms ratio, normal", "rms ratio, all families")
    return _rows((*header, "largest z", "largest bias t", "calls over a limit"), cells())


def _defects(result: Sequence[Mapping[str, Any]]) -> list[str]:
    def cells() -> Iterator[Sequence[str]]:
        for row in result:
            wrong, right = row["defective"], row["correct"]
            caught = sorted({name for output in wrong.values() for name in output["caught_by"]})
            false = sorted({name for output in right.values() for name in output["caught_by"]})
            yield (
                row["defect"],
                row["dtype"],
                row["family"],
                *(_change(right, wrong, name) for name in ("bound", "rms", "z", "bias")),
                ", ".join(caught) or "nothing",
                ", ".join(false) or "nothing",
                *(_usual(right, wrong, rule) for rule in ("allclose", "twice_baseline")),
            )

    header = ("defect", "dtype", "values", "err/bound", "rms ratio", "largest z", "bias t", "caught by")
    return _rows((*header, "correct kernel fails", "allclose 1e-2", "2x baseline"), cells())


def _usual(right: Mapping[str, Any], wrong: Mapping[str, Any], rule: str) -> str:
    """What a usual rule says; it is applied to out and the gradients, since such tests ask for no lse."""
    verdicts = [all(v[rule] for name, v in case.items() if name != "lse") for case in (right, wrong)]
    if verdicts[1]:
        return "passes"
    return "fails" if verdicts[0] else "fails, and the correct kernel too"


def _change(right: Mapping[str, Any], wrong: Mapping[str, Any], name: str) -> str:
    """The statistic of the output that the defect moved most: before, after, and which."""

    def moved(output: str) -> float:
        return abs(wrong[output][name]) / max(abs(right[output][name]), 1e-9 if name != "bias" else 1.0)

    output = max(wrong, key=moved)
    before, after = abs(right[output][name]), abs(wrong[output][name])
    return f"{before:.2g} to {after:.2g} ({output})"
