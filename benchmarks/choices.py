"""Rows of kernels/choice/choices.toml from a run of `python3 -m benchmarks.gpu_speed --kernels auto`.

    python3 -m benchmarks.choices FOLDER/gpu_speed_auto.jsonl

The rows of the device that the file was measured on replace those that the table has of it.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from attest.conformance.files import write_text
from attest.conformance.tuning.workload import Workload, draw, options
from attest.kernels.arguments import AttentionArguments
from attest.kernels.choice.fastest import TABLE, sizes_of
from benchmarks.contenders import KERNELS
from benchmarks.record import Report, read_report
from benchmarks.workload import DIRECTIONS

_OURS = "our_"
# What may be chosen, each as a call that gives no precision runs it.
_IMPLEMENTATIONS = frozenset(KERNELS) - {"auto"}


def main(
    file: Annotated[Path, typer.Argument(help="What gpu_speed wrote.")],
    table: Annotated[Path, typer.Option(help="The table to write.")] = TABLE,
) -> None:
    """Write the measured calls of a device into the table of choices."""
    report = read_report(file)
    text = table.read_text()
    head = text[: text.index("[[calls]]")] if "[[calls]]" in text else text
    device = report.run.device
    others = [row for row in tomllib.loads(text).get("calls", ()) if row["device"] != device]
    rows = [*others, *measured_calls(report)]
    write_text(table, head + "\n".join(map(_as_toml, rows)))
    print(f"{len(rows) - len(others)} calls on {device}, {len(others)} on others: {table}")


def measured_calls(report: Report) -> list[dict[str, Any]]:
    """Return a row for each workload that several implementations of ours were timed on, forward and both."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    workloads: dict[str, Workload] = {}
    for result in report.results:
        row = result.row
        for label, entry in row.entries.items():
            value, name = result.value(label), entry.contender.removeprefix(_OURS)
            if name in _IMPLEMENTATIONS and value is not None:
                workloads[row.name] = entry.call()
                times.setdefault(row.name, {}).setdefault(name, {})[row.direction] = 1e3 * value
    about = {"device": report.run.device, "commit": report.run.commit, "date": report.run.date}
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        whole = {
            x: [each[d] for d in DIRECTIONS] for x, each in found.items() if len(each) == len(DIRECTIONS)
        }
        if len(whole) > 1:
            rows.append({**about, "name": name, "sizes": _sizes(workloads[name]), "milliseconds": whole})
    return rows


def _sizes(workload: Workload) -> dict[str, Any]:
    inputs = jax.eval_shape(lambda: draw(workload))
    found: list[Any] = []

    def look(inputs: Mapping[str, Any]) -> None:
        arrays = (inputs[name] for name in ("query", "key", "value"))
        given = AttentionArguments(*arrays, **options(workload, dict(inputs)))
        found.append(sizes_of(given, workload.dropout > 0))

    jax.eval_shape(look, inputs)
    return found[0]._asdict()


def _as_toml(row: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{name} = {_value(x)}" for name, x in row["sizes"].items())
    times = ", ".join(f"{name} = {_value(x)}" for name, x in row["milliseconds"].items())
    about = "\n".join(f"{name} = {_value(row[name])}" for name in ("name", "device", "commit", "date"))
    return f"[[calls]]\n{about}\nsizes = {{ {sizes} }}\nmilliseconds = {{ {times} }}\n"


def _value(x: Any) -> str:
    if isinstance(x, str):
        return f'"{x}"'
    if isinstance(x, Iterable):
        return f"[{', '.join(map(_value, x))}]"
    return f"{x:.4g}" if isinstance(x, float) else str(x)


if __name__ == "__main__":
    typer.run(main)
