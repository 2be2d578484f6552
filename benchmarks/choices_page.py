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
_HEADER = (
    "call",
    "heads",
    "group",
    "queries",
    "keys",
    "head dims",
    "features",
    "forward",
    "forward + backward",
)
_TEXT = """\
# Which implementation runs

*Reference. For each call that was measured on a GPU: which implementation `flash_attention` runs if
the call names none, and how long each of our implementations takes.*

Each cell has the times of our implementations in milliseconds, the default first. The one in bold
runs. It is the default unless another one takes at least {percent:g} % less time. Forward + backward is a
call with gradients. The arrays are bfloat16.

A call that is not listed runs like a similar one on the same kind of GPU, if there is one:
[Kernels](kernels.md#which-implementation-runs) says what is similar.

| column | |
|---|---|
| heads | batch entries times query heads |
| group | query heads on a key head |
| keys | of a batch entry, or of a window or a chunk if these have fewer |
| head dims | that of key plus that of value |

`python3 -m benchmarks.choices_page` writes this page from `kernels/choice/choices.toml`.
"""


def main(page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE) -> None:
    """Write the page."""
    write_text(page, as_page(read(TABLE)))


def as_page(choices: Mapping[str, Any]) -> str:
    """Return the page of a table of choices as `fastest.read` returns it, in Markdown."""
    parts = [_TEXT.format(percent=100 * choices["margin"])]
    for device in dict.fromkeys(row["device"] for row in choices["calls"]):
        rows = [row for row in choices["calls"] if row["device"] == device]
        commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
        calls = table(_HEADER, [_cells(row) for row in rows])
        parts.append(f"## {device}\n\nMeasured at commits {commits}.\n\n{calls}\n")
    return "\n".join(parts)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes: Sizes = row["sizes"]
    times: Mapping[str, list[float]] = row["milliseconds"]
    able = tuple(x.name for x in IMPLEMENTATIONS if x.name in times)
    chosen: Winners = winners(row["device"], sizes, able)
    return (
        row["name"],
        str(sizes.heads),
        f"{sizes.group:g}",
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
