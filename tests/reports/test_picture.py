"""The picture of a cause: drawn in its card, and read from a record as it was written."""

import re
from dataclasses import replace
from pathlib import Path

from attest.conformance.record import Picture, RunRecord, Verdict
from attest.conformance.records.record_file import read_record, write_record
from attest.reports.render.html import render_run
from attest.reports.render.picture import drawings
from tests.reports.records import case, measurement, result, run

SEEN = Picture(
    batch=0,
    head=1,
    rows=4,
    keys=200,
    first_row=1,
    first_key=62,
    query_block=2,
    key_block=32,
    differ=3,
    seen=("##?..", "###?.", "#!###"),
    errors=("..5..", ".3.0.", "....x"),
)
CAUSE = ("bound", "semantics")


def record(picture: Picture | None) -> RunRecord:
    broken = measurement(broken=CAUSE)
    return run(
        result(Verdict.FAIL, broken, asked=case(q_len=4, kv_len=5), minimal=True, picture=picture),
        result(Verdict.PASS, measurement(), asked=case(1)),
    )


def cells(svg: str) -> dict[str, int]:
    """How many cells each class of a drawing covers."""
    side = int(re.findall(r"v(\d+)h-", svg)[0])
    found = re.findall(r'<path class="(\w+)" d="([^"]*)"', svg)
    return {
        name: sum(int(width) for width in re.findall(rf"h(\d+)v{side}h-", path)) // side
        for name, path in found
        if name != "block"
    }


def test_each_pair_is_a_cell_of_its_kind() -> None:
    visible, errors = drawings(SEEN)
    assert cells(visible.svg) == {"seen": 9, "unseen": 3, "wrong": 1, "lacking": 2}
    assert cells(errors.svg) == {"unseen": 11, "e1": 1, "e2": 1, "e3": 1, "e4": 1}
    for drawing in (visible, errors):
        used = set(cells(drawing.svg))
        assert used <= {name for name, _ in drawing.legend}


def test_a_drawing_says_what_it_shows() -> None:
    visible, errors = drawings(SEEN)
    assert visible.title.startswith("Visible keys: 3 of 800 pairs differ; batch entry 0, head 1")
    assert errors.title.startswith("Errors of the weights: 4 weights are outside their bound")
    assert 'role="img" aria-label="3 of 800 pairs differ"' in visible.svg
    assert re.findall(r">(\d+)</text>", visible.svg) == ["1", "3", "62", "66"]


def test_lines_lie_between_blocks() -> None:
    """The part begins at row 1 and key 62: the next blocks begin at row 2 and at key 64."""
    visible, _ = drawings(SEEN)
    (block,) = re.findall(r'class="block" d="([^"]*)"', visible.svg)
    side = int(re.findall(r"v(\d+)h-", visible.svg)[0])
    corners = [(int(x), int(y)) for x, y in re.findall(r"M(\d+) (\d+)h", visible.svg)]
    left, top = (min(axis) for axis in zip(*corners, strict=True))
    assert block == f"M{left + 2 * side} {top}v{3 * side}M{left} {top + side}h{5 * side}"
    plain, _ = drawings(replace(SEEN, query_block=0, key_block=0))
    assert 'class="block"' not in plain.svg


def test_weights_within_their_bounds_are_not_drawn() -> None:
    assert len(drawings(replace(SEEN, errors=(".....",) * 3))) == 1


def test_a_large_picture_fits_a_page() -> None:
    rows = ("#." * 36,) * 40
    visible, errors = drawings(replace(SEEN, seen=rows, errors=("1." * 36,) * 40))
    assert len(visible.svg) + len(errors.svg) < 120_000
    widths = [int(re.findall(r'width="(\d+)"', drawing.svg)[0]) for drawing in (visible, errors)]
    assert max(widths) < 800


def test_a_card_has_the_picture_of_its_simplest_case() -> None:
    page = render_run(record(SEEN))
    assert page.count('<svg class="picture"') == 2
    assert "hidden but should be visible" in page
    assert "2 ###|?." not in page
    assert "1 ##|?..\n" in page
    assert '<svg class="picture"' not in render_run(record(None))


def test_characters_of_another_makers_record_are_no_markup() -> None:
    page = render_run(record(replace(SEEN, seen=("<b>&<",), errors=("<i>\x1b<",))))
    assert "<b>" not in page
    assert "<i>" not in page
    assert "\x1b" not in page


def test_a_record_keeps_its_pictures(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for written in (record(SEEN), record(None)):
        write_record(written, file)
        assert [each.picture for each in read_record(file).results] == [
            each.picture for each in sorted(written.results, key=lambda each: each.sort_key)
        ]


def test_a_record_from_before_pictures_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_record(record(None), file)
    text = file.read_text()
    before = re.sub(r'"picture": null,\n\s*', "", text)
    assert before.count("picture") == 0 < text.count("picture")
    file.write_text(before)
    assert {each.picture for each in read_record(file).results} == {None}
