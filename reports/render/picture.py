"""The picture of a failing case as SVG: which keys each row sees, and the errors of the weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from attest.conformance.record import Picture

# The side of a cell: a picture of few keys has large ones, of many keys small ones.
_LARGEST_CELL, _SMALLEST_CELL, _WIDTH = 24, 6, 640
# Room for the numbers of rows and of keys.
_LEFT, _TOP, _RIGHT = 34, 16, 12
# The classes of run.css, by character: of a key that a row sees, and of the power of ten of err / bound.
_SEEN = {"#": "seen", ".": "unseen", "!": "wrong", "?": "lacking"}
_ERRORS = {".": "unseen", "x": "e4"} | {str(power): f"e{min(power // 2 + 1, 4)}" for power in range(10)}


@dataclass(frozen=True)
class Drawing:
    """One drawing. title: what it shows. legend: a name for each class of cells. svg: the element."""

    title: str
    legend: tuple[tuple[str, str], ...]
    svg: str


def drawings(picture: Picture) -> tuple[Drawing, ...]:
    """Return the drawing of visibility, and that of the weights where any of these is wrong."""
    where = f"batch entry {picture.batch}, head {picture.head}, query rows down, keys across"
    differ = f"{picture.differ} of {picture.rows * picture.keys} pairs differ"
    legend = (
        ("seen", "visible"),
        ("unseen", "hidden"),
        ("wrong", "visible but should be hidden"),
        ("lacking", "hidden but should be visible"),
    )
    shown = [Drawing(f"Visible keys: {differ}; {where}", legend, _svg(picture, picture.seen, _SEEN, differ))]
    if picture.wrong_weights:
        wrong = sum(sign != "." for row in picture.errors for sign in row)
        said = f"{wrong} weights are outside their bound"
        powers = (
            ("unseen", "within the bound"),
            ("e1", "err/bound below 100"),
            ("e2", "below 10,000"),
            ("e3", "below 1,000,000"),
            ("e4", "more, or not finite"),
        )
        svg = _svg(picture, picture.errors, _ERRORS, said)
        shown.append(Drawing(f"Errors of the weights: {said}; {where}", powers, svg))
    return tuple(shown)


def _svg(picture: Picture, rows: Sequence[str], classes: Mapping[str, str], label: str) -> str:
    keys = len(rows[0]) if rows else 0
    cell = min(max(_WIDTH // max(keys, 1), _SMALLEST_CELL), _LARGEST_CELL)
    width, height = _LEFT + keys * cell + _RIGHT, _TOP + len(rows) * cell + 1
    parts = [
        f'<svg class="picture" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
    ]
    paths: dict[str, list[str]] = {}
    for i, row in enumerate(rows):
        start = 0
        for sign, run in groupby(row):
            length = len(list(run))
            place = f"M{_LEFT + start * cell} {_TOP + i * cell}"
            paths.setdefault(classes.get(sign, "wrong"), []).append(
                f"{place}h{length * cell}v{cell}h{-length * cell}z"
            )
            start += length
    parts += [f'<path class="{name}" d="{"".join(found)}"/>' for name, found in sorted(paths.items())]
    lines = [
        f"M{_LEFT + j * cell} {_TOP}v{len(rows) * cell}"
        for j in _edges(picture.first_key, keys, picture.key_block)
    ] + [
        f"M{_LEFT} {_TOP + i * cell}h{keys * cell}"
        for i in _edges(picture.first_row, len(rows), picture.query_block)
    ]
    parts += [f'<path class="block" d="{"".join(lines)}"/>'] if lines else []
    parts += _numbers(picture, len(rows), keys, cell)
    return "".join([*parts, "</svg>"])


def _edges(first: int, length: int, block: int) -> list[int]:
    """Return the places in the part shown at which a block begins, but for its own first."""
    return [place for place in range(1, length) if block and (first + place) % block == 0]


def _numbers(picture: Picture, rows: int, keys: int, cell: int) -> Iterable[str]:
    """Yield the numbers of the first and the last row and key."""
    for i in sorted({0, rows - 1}) if rows else ():
        y = _TOP + i * cell + cell / 2 + 4
        yield f'<text x="{_LEFT - 4}" y="{y:g}" text-anchor="end">{picture.first_row + i}</text>'
    for j in sorted({0, keys - 1}) if keys else ():
        x = _LEFT + j * cell + cell / 2
        yield f'<text x="{x:g}" y="{_TOP - 4}" text-anchor="middle">{picture.first_key + j}</text>'
