"""Records as lines: the same record in every form, read a result at a time; each fault is one sentence."""

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from attest.conformance.files import FileError
from attest.conformance.record import RunRecord, Verdict
from attest.conformance.records import line_format, record_file
from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.journal import Journal, journal_path
from attest.conformance.records.line_format import LINES, all_lines, read_lines, result_line
from attest.conformance.records.lines import open_lines
from attest.conformance.records.record_file import read_record, record_text, write_lines, write_record
from attest.conformance.sizes import sizes
from tests.conformance.cli.test_fuzz import one_sentence, scrambled
from tests.reports.records import case, example_base, example_head, measurement, result, run

OLD = Path(__file__).parent / "data" / "run1.json"  # of schema 1
FULL = replace(
    result(Verdict.FAIL, measurement(broken=("bound",)), asked=case(2), seconds=1.25),
    message="wrong",
    minimal=True,
    shrunk_from="abc",
    phase="compiling",
    link="https://example.org",
)
RECORDS = {
    "old": read_record(OLD),
    "base": example_base(),
    "head": example_head(),
    "empty": run(),
    "full": replace(
        run(FULL, result(Verdict.PASS, asked=case(1))),
        complete=False,
        note="cut short",
        shard=(2, 3),
        problems=("a", "b"),
        left_out=("k lse: no lse",),
        seconds=2.5,
        narrowed="--check lse",
    ),
}
NAMES = ("run.jsonl", "run.jsonl.gz", "run.json", "run", "run.gz")


def lines_of(record: RunRecord) -> list[bytes]:
    return [result_line(each)[:-1] for each in sorted(record.results, key=lambda each: each.sort_key)]


def in_order(record: RunRecord) -> RunRecord:
    return replace(record, results=tuple(sorted(record.results, key=lambda each: each.sort_key)))


def times(record: RunRecord) -> list[float]:
    return [record.seconds, *(each.seconds for each in record.results)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_is_the_same_in_every_form(record: RunRecord, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_record(record, path)
    again = read_record(path)
    assert again == in_order(record)
    assert times(again) == times(in_order(record))
    assert record_text(again) == record_text(record)
    found = open_lines(path)
    assert (found.header, found.count) == (replace(record, results=()), len(record.results))
    assert found.header.seconds == record.seconds
    assert list(found) == list(found) == lines_of(record)


def test_the_name_decides_the_form(tmp_path: Path) -> None:
    starts = {}
    for name in NAMES:
        write_record(RECORDS["base"], tmp_path / name)
        starts[name] = (tmp_path / name).read_bytes()[:4]
    assert starts == {
        "run.jsonl": b'{"sc',
        "run.jsonl.gz": b"\x1f\x8b\x08\x00",  # no name in the header
        "run.json": b'{\n "',
        "run": b'{\n "',
        "run.gz": b'{\n "',
    }


def test_a_compressed_record_has_the_same_bytes_under_every_name_at_every_time(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_record(RECORDS["base"], tmp_path / name)
    data = (tmp_path / "a.jsonl.gz").read_bytes()
    assert data == (tmp_path / "b.jsonl.gz").read_bytes()
    assert data[4:8] == bytes(4)  # the time
    assert gzip.decompress(data) == b"".join(all_lines(RECORDS["base"]))


def test_many_lines_are_compressed_piece_by_piece(tmp_path: Path) -> None:
    lines = [os.urandom(5000).hex().encode() + b"\n" for _ in range(100)]
    write_lines(iter(lines), tmp_path / "run.jsonl.gz")
    assert gzip.decompress((tmp_path / "run.jsonl.gz").read_bytes()) == b"".join(lines)


def test_a_line_has_the_name_of_its_case_and_its_time_but_no_defaults() -> None:
    header, plain = map(json.loads, all_lines(run(result(Verdict.PASS, asked=case(1)))))
    assert header["schema"] == LINES
    assert header["results"] == 1
    assert plain.keys() == {"subject", "check", "clauses", "case", "case_id", "verdict"}
    assert plain["case_id"] == case(1).id
    assert json.loads(result_line(FULL))["seconds"] == 1.25


def test_all_kinds_of_files_are_opened_as_lines(tmp_path: Path) -> None:
    record = RECORDS["head"]
    baseline, zipped = tmp_path / "baseline.jsonl", tmp_path / "run.json.gz"
    baseline.write_text(baseline_text(record))
    zipped.write_bytes(gzip.compress(record_text(record).encode()))
    journal = Journal(journal_path(tmp_path / "run"), replace(record, results=()), 5.0)
    journal.add(record.results, "key")
    journal.close()
    for path in (baseline, zipped, journal.path):
        found = open_lines(path)
        whole = read_record(path)
        assert found.header == replace(whole, results=())
        assert found.count == len(whole.results) > 0
        assert list(found) == list(found) == lines_of(whole)
    assert not open_lines(journal.path).header.complete


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    data = b"".join(all_lines(RECORDS["base"]))
    reader, writer = os.pipe()
    try:
        os.write(writer, data)
        os.close(writer)
        found = open_lines(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
    assert list(found) == list(found) == lines_of(RECORDS["base"])


def test_the_content_decides_how_a_file_is_read(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl.gz", tmp_path / "b.json"
    plain.write_bytes(b"".join(all_lines(RECORDS["base"])))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_record(plain) == read_record(packed) == in_order(RECORDS["base"])
    assert list(open_lines(plain)) == list(open_lines(packed)) == lines_of(RECORDS["base"])


Change = Callable[[list[bytes]], list[bytes]]


def _renamed(old: bytes, new: bytes) -> Change:
    return lambda lines: [lines[0], lines[1].replace(old, new), *lines[2:]]


BROKEN: dict[str, tuple[Change, str]] = {
    "too few": (lambda lines: lines[:-1], "line 7: it is missing, the header names 6 results"),
    "too many": (lambda lines: [*lines, lines[-1]], "line 8: more results than the header names, 6"),
    "swapped": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 3: it is out of order: "),
    "cut off": (lambda lines: [*lines[:-1], lines[-1][:-20]], "line 7: not valid JSON"),
    "no object": (lambda lines: [lines[0], b"[]\n", *lines[2:]], "line 2: expected `object`, got `array`"),
    "no case": (_renamed(b'"case_id"', b'"name"'), "line 2: object missing required field `case_id`"),
    "empty name": (
        lambda lines: [lines[0], _unnamed(lines[1]), *lines[2:]],
        "line 2, case_id: expected `str`",
    ),
    "verdict": (_renamed(b'"PASS"', b'"GOOD"'), "line 2, verdict: invalid enum value 'GOOD'"),
    "empty line": (lambda lines: [*lines[:3], b"\n", *lines[3:]], "line 4: not valid JSON"),
    "header": (lambda lines: [lines[0].replace(b'"seed":0,', b""), *lines[1:]], "line 1: object missing"),
    "shard": (lambda lines: [lines[0].replace(b"[1,1]", b"[2,1]"), *lines[1:]], r"shard: got 2/1, expected"),
}


def _unnamed(line: bytes) -> bytes:
    return json.dumps({**json.loads(line), "case_id": ""}).encode() + b"\n"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence_that_names_the_line(name: str, packed: bool, tmp_path: Path) -> None:
    change, message = BROKEN[name]
    data = b"".join(change(list(all_lines(RECORDS["old"]))))
    path = tmp_path / "run"
    path.write_bytes(gzip.compress(data) if packed else data)
    for read in (read_record, lambda path: list(open_lines(path))):
        with pytest.raises(ValueError, match=message) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "Compressed file ended before the end-of-stream marker"),
        (lambda data: data[:-4] + b"oops", "Incorrect length of data produced"),
        (lambda data: data[:-8] + b"oops" + data[-4:], "CRC check failed"),
        (lambda data: data + b"more", "Not a gzipped file"),
    ],
)
def test_a_damaged_gzip_is_one_sentence(change, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    lines = [*all_lines(RECORDS["old"])]
    path.write_bytes(change(gzip.compress(b"".join(lines), mtime=0)))
    with pytest.raises(ValueError, match=f"{path}: not a readable record: {message}"):
        list(open_lines(path))
    with pytest.raises(ValueError, match=f"{path}: not a readable record: {message}"):
        read_record(path)


def limited(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    changed = replace(sizes(), **limits)
    for module in (record_file, line_format):
        monkeypatch.setattr(module, "sizes", lambda: changed)


def test_a_gzip_that_becomes_too_large_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(10_000_000)))
    limited(monkeypatch, record_bytes=100_000)
    monkeypatch.setattr(
        "attest.conformance.records.lines.sizes", lambda: replace(sizes(), line_bytes=100_000)
    )
    message = f"{path}: not a readable record: it has more than 100000 bytes when it is decompressed"
    for read in (read_record, open_lines):
        with pytest.raises(ValueError, match=message):
            read(path)


def test_a_record_that_is_too_large_to_be_read_whole_is_read_by_lines(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.jsonl.gz"
    write_record(RECORDS["head"], path)
    limited(monkeypatch, record_bytes=2000)
    with pytest.raises(ValueError, match="more than 2000 bytes"):
        read_record(path)
    assert list(open_lines(path)) == lines_of(RECORDS["head"])


def test_a_line_that_is_too_long_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.jsonl"
    record = run(result(Verdict.PASS, asked=case(1)), replace(FULL, message="x" * 3000), environment={})
    write_record(record, path)
    limited(monkeypatch, line_bytes=2000)
    number = 2 + [bool(each.message) for each in in_order(record).results].index(True)
    for read in (read_record, lambda path: list(open_lines(path))):
        with pytest.raises(
            ValueError, match=f"{path}: broken record, line {number}: it has more than 2000 bytes"
        ):
            read(path)


def test_a_file_that_is_gone_between_two_readings_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_record(RECORDS["head"], path)
    found = open_lines(path)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path}: not a readable record: No such file"):
        list(found)


def test_what_is_no_record_is_refused_as_by_read_record(tmp_path: Path) -> None:
    damaged = gzip.compress(b"")[:10] + b"\xff\xff\xff\xff"
    for data in (b"", b"{", b"attest", b'{"schema": "other"}', b"\x1f\x8b", gzip.compress(b""), damaged):
        path = tmp_path / "run"
        path.write_bytes(data)
        messages = []
        for read in (read_record, open_lines):
            with pytest.raises(ValueError, match=f"^{path}: ") as caught:
                read(path)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=f"^{path}: not a readable record: "):
            open_lines(path)


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    write_record(RECORDS["base"], path)
    before = path.read_bytes()

    def broken():
        yield b"a line\n"
        raise ValueError("its source is broken")

    with pytest.raises(ValueError, match="its source is broken"):
        write_lines(broken(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileError, match="cannot be written"):
        write_record(RECORDS["base"], tmp_path / "none" / "run.jsonl")


def test_a_device_gets_the_lines_as_they_come(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_record(RECORDS["full"], pipe)
        assert read_lines(os.read(reader, 1 << 16), "the pipe") == in_order(RECORDS["full"])
    finally:
        os.close(reader)


def test_results_with_one_name_stay_as_they_are(tmp_path: Path) -> None:
    """A search may end at a case that was drawn, too."""
    twice = run(replace(FULL, shrunk_from="b"), FULL, FULL)
    write_record(twice, tmp_path / "run.jsonl")
    assert read_record(tmp_path / "run.jsonl") == twice
    assert list(open_lines(tmp_path / "run.jsonl")) == lines_of(twice)


ORIGINAL = b"".join(all_lines(RECORDS["head"]))


@given(
    data=scrambled(ORIGINAL)
    | scrambled(ORIGINAL).map(gzip.compress)
    | scrambled(gzip.compress(ORIGINAL, mtime=0))
)
def test_other_bytes_are_lines_or_one_sentence(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(data)
    faults = [fault(lambda path: list(open_lines(path)), path), fault(read_record, path)]
    assert faults[1] or not faults[0], "a record that is read whole is read by lines, too"
    assert all(text.startswith(f"{path}: ") for text in faults if text)


def fault(read: Callable[[Path], object], path: Path) -> str:
    try:
        read(path)
    except ValueError as error:
        one_sentence(error)
        return str(error)
    return ""


def test_a_line_of_a_long_gzip_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    many = replace(RECORDS["old"], results=RECORDS["old"].results * 800)
    data = gzip.compress(b"".join(all_lines(many)), mtime=0)
    assert len(b"".join(all_lines(many))) > 2 << 20, "more than is read ahead"
    path.write_bytes(data[:-20])
    with pytest.raises(ValueError, match=f"{path}: broken record, line [0-9]+: Compressed file ended"):
        list(open_lines(path))
