"""What is read from elsewhere may be anything: it is taken, or refused in one sentence."""

import io
import json
import string
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from attest.conformance.cli.replay_request import read_replay_request
from attest.conformance.record import RunRecord, Verdict, merge_records
from attest.conformance.records.baseline_file import baseline_text
from attest.conformance.records.journal import read_journal
from attest.conformance.records.record_file import read_record, record_text
from attest.conformance.records.schema import result_to_json, run_to_json
from attest.conformance.running import runner
from attest.conformance.running.expectations import FOLDER, expect, load_expectations
from attest.conformance.running.gate import with_policy
from attest.reports.compare import compare_records
from attest.reports.render import html, junit, markdown, sarif
from attest.reports.render.terminal import print_comparison, print_run
from tests.examples import examples
from tests.reports.records import example_base, example_head

# A record of schema 1.
OLD = json.loads((Path(__file__).parents[1] / "records" / "data" / "run1.json").read_text())
RECORDS = [json.loads(record_text(record)) for record in (example_base(), example_head())] + [OLD]
ORIGINAL = example_base()

# Numbers at the ends of every type, text that terminals and formats obey, and nests.
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**63, -(2**63) - 1, 2**64, 10**400, 1e308, -0.0, 0.5]),
    st.sampled_from(
        ["", "nan", "-inf", "PASS", "FAIL", "TIMEOUT", "MISTRUSTED", "\x1b[31m", "\ud800", "x" * 70_000]
    ),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
) | st.integers(1, 3000).map(_nest := lambda depth: json.loads("[" * min(depth, 900) + "]" * min(depth, 900)))


@st.composite
def changed(draw: st.DrawFn, originals: list[Any]) -> Any:
    """JSON of which one to three places are another value, absent, twice there, or under another name."""
    data = json.loads(json.dumps(draw(st.sampled_from(originals))))
    for _ in range(draw(st.integers(1, 3))):
        place, key = data, None
        for _ in range(draw(st.integers(1, 6))):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            parent, key = place, draw(st.sampled_from(keys))
            place = parent[key]
            if not isinstance(place, (dict, list)):
                break
        if key is None:
            continue
        change = draw(st.sampled_from(["replace", "remove", "add", "rename"]))
        if change == "replace":
            parent[key] = draw(VALUES)
        elif change == "remove":
            del parent[key]
        elif change == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=3))] = parent.pop(key)
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(["subject", "tiling", "min", "colour"]))] = draw(VALUES)
        else:
            parent.append(draw(VALUES))
    return data


@st.composite
def scrambled(draw: st.DrawFn, original: bytes) -> bytes:
    """Bytes of which some are others, gone or twice there."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 40))
        data[at : at + length] = draw(st.binary(max_size=4) | st.just(bytes(data[at : at + length]) * 2))
    return bytes(data)


def one_sentence(error: ValueError) -> None:
    text = str(error)
    assert "\n" not in text
    assert not {unicodedata.category(character) for character in text} & {"Cc", "Cs", "Zl", "Zp"}
    assert len(text) < 1500
    assert "Traceback" not in text


def use(record: RunRecord) -> None:
    """Everything that is done with a record."""
    page = Console(file=io.StringIO(), width=80)
    print_run(record, page)
    markdown.render_run(record).encode()
    junit.render_run(record).encode()
    sarif.render_run(record).encode()
    for base, head in ((ORIGINAL, record), (record, ORIGINAL), (record, record)):
        comparison = compare_records(base, head)
        print_comparison(comparison, page)
        markdown.render_comparison(comparison).encode()
    with suppress(ValueError):
        merge_records([record])
    with_policy(record, load_expectations())
    record_text(record)


def read(path: Path, data: bytes) -> RunRecord | None:
    path.write_bytes(data)
    try:
        return read_record(path)
    except ValueError as error:
        one_sentence(error)
        return None


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file"


@examples(40)
@given(data=changed(RECORDS))
def test_records_with_other_values(path: Path, data: Any) -> None:
    record = read(path, json.dumps(data).encode())
    if record is not None:
        use(record)
        path.write_text(record_text(record))
        assert record_text(read_record(path)) == record_text(record)


@examples(15)
@given(data=changed(RECORDS))
def test_records_with_other_values_as_pages(path: Path, data: Any) -> None:
    record = read(path, json.dumps(data).encode())
    if record is not None:
        html.render_run(record).encode()


@examples(30)
@given(data=scrambled(record_text(example_head()).encode()))
@example(b"[" * 100_000)
@example(b'{"schema": "attest.run/2", "environment": ' + b'{"a":' * 100_000)
@example(b"")
@example(b"\xff\xfe")
def test_records_with_other_bytes(path: Path, data: bytes) -> None:
    record = read(path, data)
    if record is not None:
        use(record)


@examples(30)
@given(data=scrambled(baseline_text(example_head()).encode()))
def test_baselines_with_other_bytes(path: Path, data: bytes) -> None:
    record = read(path, data)
    if record is not None:
        use(record)
        path.write_text(baseline_text(record))
        assert record_text(read_record(path)) == record_text(record)


def journal() -> list[Any]:
    head = example_head()
    return [run_to_json(head), *({"result": result_to_json(result)} for result in head.results[:6])]


@examples(20)
@given(lines=changed([journal()]), cut=st.integers(0, 30))
def test_journals(path: Path, lines: Any, cut: int) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    record = read(path, text[: len(text) - cut].encode())
    if record is not None:
        use(record)


@examples(20)
@given(data=scrambled("".join(json.dumps(line) + "\n" for line in journal()).encode()))
def test_journals_with_other_bytes(data: bytes) -> None:
    try:
        use(read_journal(data, "a journal"))
    except ValueError as error:
        one_sentence(error)


KNOWN = """
[[expect]]
subject = "our.kernel"
check = "forward"
reason = "it is known"
link = "https://example.org/1"
outputs = ["dkey"]
profiles = ["quick"]
shows = "sometimes"
message_contains = "x"
backends = ["cpu"]
[expect.when]
dtype = ["float16", "bfloat16"]
window = [0, 1]
features = ["bias"]
without = ["mask"]
kv_len = { min = 1024, max = 2048 }
"""
TOML_VALUES = [
    "3",
    "-1.5",
    "nan",
    "true",
    "[]",
    "{}",
    "[[1]]",
    '"x"',
    "1979-05-27",
    "9" * 5000,
    "[" * 2000,
    '"\\u0000"',
]


@st.composite
def changed_toml(draw: st.DrawFn) -> bytes:
    """A line or two with another value, or lines in another order."""
    lines = KNOWN.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(lines) - 1))
        name, equals, _ = lines[number].partition(" = ")
        lines[number] = name + equals + draw(st.sampled_from(TOML_VALUES)) if equals else lines[number] * 2
    return "\n".join(draw(st.permutations(lines)) if draw(st.booleans()) else lines).encode()


@examples(40)
@given(
    data=changed_toml()
    | scrambled(KNOWN.encode())
    | scrambled(next(iter(FOLDER.glob("*.toml"))).read_bytes()[:3000])
)
@example(b"expect = 3")
@example(b"expect = [3]")
@example(b"[[expect]]\nwhen = 3")
@example(KNOWN.replace("1024", "'a'").encode())
def test_expectations(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        known = load_expectations([path])
    except ValueError as error:
        one_sentence(error)
        return
    for result in example_head().results:
        assert isinstance(expect(result, known).verdict, Verdict)


LINES = [
    {
        "case": {
            "dtype": "bfloat16",
            "q_len": 3,
            "lengths": [[1, 2], [1, 1]],
            "window": [0, None],
            "scale": 0.5,
        },
        "check": "forward",
        "subject": "xla.attention",
    },
    {"kv_len": 3, "soft_cap": 2.0, "seed": 7},
]


@examples(80)
@given(data=changed(LINES))
@example({"case": {}, "subject": "a:b", "check": "forward"})
def test_replay_lines(data: Any) -> None:
    try:
        asked = read_replay_request(json.dumps(data), None, ())
    except ValueError as error:
        one_sentence(error)
    else:
        assert ":" not in asked.subject


@examples(40)
@given(data=scrambled(json.dumps(LINES[0]).encode()) | st.text(string.printable, max_size=30).map(str.encode))
def test_replay_lines_with_other_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for text in (data.decode(errors="surrogateescape").replace("\x00", ""), str(path)):
        try:
            read_replay_request(text, "xla.attention", ())
        except ValueError as error:
            one_sentence(error)


WORDS = st.sampled_from(
    [
        "",
        "-",
        "--",
        "-1",
        "0",
        "1/2",
        "2/1",
        "1/0",
        "nan",
        "1e400",
        "9" * 400,
        "tests.toys:right",
        "a:b",
        "a:",
        ":b",
        "xla.attention",
        "/",
        "/dev/null",
        "/dev/full",
        "/nowhere/x",
        "quick",
        "slow",
        "forward",
        "lse",
        "bias",
        "float32",
        "{}",
        "[",
        "\x1b[31m",
        "\udc80",
        "x" * 3000,
        "é",
    ]
)
OPTIONS = st.sampled_from(
    [
        "--feature",
        "--dtype",
        "--check",
        "--examples",
        "--profile",
        "--seed",
        "--shard",
        "--timeout",
        "--expectations",
        "--json",
        "--junit",
        "--markdown",
        "--html",
        "--sarif",
        "--baseline",
        "--subject",
        "--allow-import",
        "--fail-fast",
        "-x",
    ]
)
COMMANDS = st.sampled_from(["check", "replay", "report", "compare", "merge", "gaet"])


@examples(20)
@given(
    command=COMMANDS,
    words=st.lists(WORDS, max_size=3),
    options=st.lists(st.tuples(OPTIONS, WORDS), max_size=3),
)
def test_options(command: str, words: list[str], options: list[tuple[str, str]]) -> None:
    from attest.conformance.cli.commands import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(()))
        patch.setattr(runner, "judge", lambda subject, case, checks: [])
        out, err = io.StringIO(), io.StringIO()
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        status = main([command, *words, *(word for option in options for word in option), "-n", "0"])
    assert status in (0, 1, 2)
    assert "Traceback" not in out.getvalue() + err.getvalue()
    assert err.getvalue().count("\n") <= 1
    assert "\x1b" not in out.getvalue() + err.getvalue()
