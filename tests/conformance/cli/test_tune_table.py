"""`attest tune --table`: rows of right configurations, for a call or a file of calls."""

import json
import tomllib

import jax
import pytest

from attest.conformance.cli import commands as cli
from attest.conformance.cli.tune_calls import NamedCall
from attest.conformance.cli.tune_table import open_table
from attest.conformance.tuning import judge as judging
from attest.conformance.tuning.workload_file import read_workloads
from attest.kernels.operations import FlashAttention, FlashAttentionConfig, create_default_executor
from attest.kernels.operations.judging import Judgement
from attest.kernels.operations.tuner import Candidate, TuningRecord
from attest.kernels.xla import ChunkSizes, Config
from benchmarks import targets

SIZES = ("--q-len", "64", "--q-heads", "2", "--head-dim", "8", "--dtype", "float32")
QUICK = ("--iters", "1", "--candidates", "1")
WORKLOADS = """
[[workloads]]
name = "full"
workload = { batch = 1, length = 64, heads = 2, head_dim = 8, dtype = "float32" }

[[workloads]]
name = "packed and masked"
batch = 1
length = 96
heads = 2
key_heads = 1
head_dim = 8
causal = true
segment = 32
key_mask = true
dropout = 0.5
dtype = "float32"

[[workloads]]
name = "full, longer"
workload = { batch = 1, length = 80, heads = 2, head_dim = 8, dtype = "float32" }
"""


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTEST_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def judged(monkeypatch):
    """The calls that were judged. The first candidate of each, which is the tables' choice, is wrong."""
    calls = []

    def judge(call):
        lengths = [x.arguments["query"].shape[1] for x in calls]
        calls.append(call)
        return Judgement(call.arguments["query"].shape[1] in lengths, "out is off")

    monkeypatch.setattr(judging, "judge", judge)
    return calls


def complete(monkeypatch, table, length=64, **options):
    """The configuration that a call runs with where a table is loaded."""
    monkeypatch.setenv("ATTEST_BLOCKS", str(table))
    x = jax.ShapeDtypeStruct((1, length, 2, 8), "float32")
    return create_default_executor().explain(FlashAttention(), x, x, x, platform="xla", **options).complete


def test_a_winner_is_a_row_that_other_calls_find(tmp_path, monkeypatch, capsys, judged):
    table, record = tmp_path / "own.toml", tmp_path / "record.json"
    given = ("--table", str(table), "--json", str(record), "--platform", "xla")
    assert cli.main(["tune", *SIZES, *QUICK, *given]) == 0
    assert f"rows of xla written: {table}" in capsys.readouterr().out
    assert judged[0].backward

    written = tomllib.loads(table.read_text())
    assert written["implementation"] == "xla"
    found = json.loads(record.read_text())
    config = json.loads(found["candidates"][found["chosen"]]["config"])["config"]
    sizes = {row["kernel"]: {"q": row["q"], "k": row["k"]} for row in written["sizes"]}
    assert sizes == {name: config[name] for name in ("forward", "backward") if config[name]} != {}
    for row in written["sizes"]:
        measured = row["measured"]
        assert set(measured) == {"call", "device", "versions", "commit", "date"}, "no gain over what is wrong"
        assert measured["call"] == "1x64, 2, 8, float32"
        assert f"jax {jax.__version__}," in measured["versions"]

    # Longer, and no entry of the cache.
    own = complete(monkeypatch, table, length=72).config
    assert {name: vars(x) for name in ("forward", "backward") if (x := getattr(own, name))} == sizes
    assert complete(monkeypatch, table, causal=True).config.forward is None


def test_a_file_of_calls_gives_rows_and_those_decided_are_not_tuned_again(
    tmp_path, monkeypatch, capsys, judged
):
    workloads, table, record = (tmp_path / name for name in ("calls.toml", "own.toml", "record.json"))
    workloads.write_text(WORKLOADS)
    given = ("--workloads", str(workloads), "--table", str(table), "--json", str(record))
    assert cli.main(["tune", *QUICK, *given, "--forward-only", "--platform", "xla"]) == 0
    assert "full, longer: an earlier call gave its rows" in capsys.readouterr().out
    assert [x["name"] for x in json.loads(record.read_text())] == ["full", "packed and masked"]
    masked = next(x.arguments for x in judged if "attention_mask" in x.arguments)
    assert masked["q_segment_ids"].max() == 2
    assert masked["causal"]
    assert masked["dropout_prob"] == 0.5

    rows = tomllib.loads(table.read_text())["sizes"]
    assert [(row["kernel"], row["only"]) for row in rows] == [
        ("forward", ["causal", "dropout", "ids", "pairs", "small"]),
        ("forward", ["small"]),
    ]
    # Again, without a platform: the file says whose table it is. A comment and other rows stay.
    row = '  { kernel = "forward", head_dim = 8, devices = ["another"], q = 1, k = 1 },'
    table.write_text(table.read_text().replace("sizes = [", f"# mine\nsizes = [\n{row}"))
    judged.clear()
    assert cli.main(["tune", *QUICK, *given, "--forward-only"]) == 0
    text = table.read_text()
    assert "\n# mine\n" in text
    assert row in text
    assert len(tomllib.loads(text)["sizes"]) == 3


def test_a_call_that_fails_is_named_and_the_others_have_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        judging, "judge", lambda call: Judgement(call.arguments["query"].shape[1] == 96, "out is off")
    )
    workloads, table = tmp_path / "calls.toml", tmp_path / "own.toml"
    workloads.write_text(WORKLOADS)
    given = ("--workloads", str(workloads), "--table", str(table), "--platform", "xla")
    assert cli.main(["tune", *QUICK, *given, "--forward-only"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(": candidates: got none of")[0] for line in errors] == [
        "attest: full",
        "attest: full, longer",
    ]
    rows = tomllib.loads(table.read_text())["sizes"]
    assert all("dropout" in row["only"] for row in rows)


def test_a_row_that_an_earlier_call_decided_is_not_written_again(tmp_path):
    """Where another row of the call is new."""
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), "float32")
    call = NamedCall("call", {"query": x, "key": x, "value": x})
    table = open_table(tmp_path / "own.toml", "xla", [call], forward_only=False)
    winner = FlashAttentionConfig(config=Config(ChunkSizes(16, 16), ChunkSizes(32, 32)))
    record = TuningRecord(
        "flash_attention", {}, {"jax": "1"}, True, (Candidate(winner, 1.0, "right"),), 0, 1.5
    )
    assert table.add(call, record) == 2
    (forward,) = (x for x in table.done if ("kernel", "forward") in x)
    table.path.unlink()
    again = open_table(table.path, "xla", [call], forward_only=False)
    again.done.add(forward)
    assert not again.has(call)
    assert again.add(call, record) == 1
    (row,) = tomllib.loads(table.path.read_text())["sizes"]
    assert (row["kernel"], row["q"], row["measured"]["gain"]) == ("backward", 32, 1.5)
    assert again.has(call)


def test_workloads_of_the_benchmarks_are_read():
    found = read_workloads(targets.MODELS)
    assert found["Gemma-3 4B"].head_dim == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[workloads]\n", "not readable as TOML"),
        ("", "has no workloads; expected a list [[workloads]] of tables"),
        ("workloads = 3", "workloads[0]: expected `object`, got `int`"),
        ("[[workloads]]\nsize = 3", "workloads[0]: got the field 'size', expected fields among batch,"),
        ("[[workloads]]\nbatch = 0", "workloads[0], batch: got 0, expected at least 1"),
        ("[[workloads]]\nbatch = 'a'", "workloads[0]"),
        ("[[workloads]]\nname = 3\nworkload = { batch = 1, length = 8, heads = 1, head_dim = 8 }", "name"),
        (WORKLOADS + WORKLOADS, "two workloads have the name 'full': rename one"),
        (
            "[[workloads]]\nbatch = 1\nlength = 8\nheads = 1\nhead_dim = 8\ndtype = 'int8'",
            "dtype: got int8; expected one of float32, bfloat16, float16.",
        ),
    ],
)
def test_a_malformed_file_of_workloads_is_one_sentence(text, words, tmp_path, capsys):
    path = tmp_path / "calls.toml"
    path.write_text(text)
    assert cli.main(["tune", "--workloads", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--table", "own.toml", "--json", "own.toml"),
            "--table own.toml and --json own.toml are the same file",
        ),
        (("--table", "no/own.toml"), "--table no/own.toml: the folder no does not exist"),
        (("--table", "text.toml"), "--table text.toml: got no TOML"),
        (
            ("--table", "other.toml"),
            "--table other.toml, implementation: got None; expected one of mosaic_gpu,",
        ),
        (
            ("--table", "xla.toml", "--platform", "triton"),
            "--platform: got triton, expected xla, whose table",
        ),
        (("--table", "line.toml"), "--table line.toml: a table of block sizes has a line 'sizes = [', and"),
        (("--workloads", "calls.toml"), "--q-len: is of one call, and --workloads has the calls"),
        (("--candidates", "0"), "--candidates"),
    ],
)
def test_malformed_options_are_one_sentence(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.toml").write_text("no table")
    (tmp_path / "other.toml").write_text("sizes = [\n]\n")
    (tmp_path / "xla.toml").write_text('implementation = "xla"\nsizes = [\n]\n')
    (tmp_path / "line.toml").write_text('implementation = "xla"\nsizes = []\n')
    (tmp_path / "calls.toml").write_text(WORKLOADS)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert cli.main(["tune", *SIZES, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attest: ")
    assert words in error
    assert error.count("\n") == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == before


def test_without_a_call_it_says_what_to_give(capsys):
    assert cli.main(["tune", "--q-len", "8"]) == 2
    assert "give all three, or --workloads FILE" in capsys.readouterr().err
