"""The page of measured calls: which of our implementations runs each of them, and how long each takes.

    python3 -m benchmarks.choices_page

It shows `kernels/choice/choices.toml` as `attest.kernels.choice.fastest` reads it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attest.conformance.files import write_text
from attest.kernels.choice.fastest import TABLE, Sizes, Winners, read, winners
from attest.kernels.implementations import IMPLEMENTATIONS
from benchmarks.report import table

PAGE = Path(__file__).parents[1] / "docs/reference/which-implementation-runs.md"
_HEADER = ("call", "heads", "queries", "keys", "head dims", "features", "forward", "forward + backward")
_TOP = """# Which implementation runs

*Reference. For each measured call: which implementation `flash_attention` runs if the call names
none, and the times of those that were measured.*

{text}
"""
_TEXT = """\
The implementation in bold runs. Numbers are milliseconds, of calls in bfloat16. The first
implementation of a cell is the default: another one runs only if it saves at least {percent:g} %.
Heads are those of all batch entries, head dims are that of key plus that of value, and keys are
those that a query may see by its window and chunk. Other calls run like a similar one: see
[Kernels](kernels.md#which-implementation-runs). `python3 -m benchmarks.choices_page` writes this
page from `kernels/choice/choices.toml`."""


def main(page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE) -> None:
    """Write the page."""
    write_text(page, as_page(read(TABLE)))


def as_page(choices: Mapping[str, Any]) -> str:
    """Return the page of a table of choices as `fastest.read` returns it, in Markdown."""
    parts = [_TOP.format(text=_TEXT.format(percent=100 * choices["margin"]))]
    for device in dict.fromkeys(row["device"] for row in choices["calls"]):
        rows = [row for row in choices["calls"] if row["device"] == device]
        commits = ", ".join(f"{row['commit'][:7]}" for row in {x["commit"]: x for x in rows}.values())
        parts.append(
            f"## {device}\n\nCommits: {commits}.\n\n{table(_HEADER, [_cells(row) for row in rows])}\n"
        )
    return "\n".join(parts)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes: Sizes = row["sizes"]
    times: Mapping[str, list[float]] = row["milliseconds"]
    able = tuple(x.name for x in IMPLEMENTATIONS if x.name in times)
    chosen: Winners = winners(row["device"], sizes, able)
    return (
        row["name"],
        str(sizes.heads),
        str(sizes.queries),
        str(sizes.keys),
        str(sizes.width),
        ", ".join(sizes.features).replace("_", " "),
        *(
            ", ".join(_timed(name, times[name][i], name == runs) for name in able)
            for i, runs in enumerate(chosen)
        ),
    )


def _timed(name: str, milliseconds: float, runs: bool) -> str:
    shown = f"{name} {milliseconds:.3g}"
    return f"**{shown}**" if runs else shown


if __name__ == "__main__":
    typer.run(main)
