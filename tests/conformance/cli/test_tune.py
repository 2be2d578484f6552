"""`attest tune`: a table, a record, and a configuration that later calls find."""

import json

import jax
import pytest

from attest.conformance.cli import commands as cli
from attest.conformance.tuning import judge as judging
from attest.kernels.configs import tunable
from attest.kernels.operations import FlashAttention, create_default_executor
from attest.kernels.operations.judging import Judgement

SIZES = ("--q-len", "64", "--q-heads", "2", "--kv-heads", "1", "--head-dim", "8", "--iters", "1")


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTEST_CACHE_DIR", str(tmp_path / "cache"))


def test_the_winner_is_shown_recorded_and_found_by_later_calls(tmp_path, monkeypatch, capsys):
    judged = []

    def judge(call):
        judged.append(call)
        return Judgement(len(judged) > 1, "" if len(judged) > 1 else "out is off")

    monkeypatch.setattr(judging, "judge", judge)
    monkeypatch.setattr(tunable, "MOST_CANDIDATES", 1)
    path = tmp_path / "record.json"
    assert cli.main(["tune", *SIZES, "--causal", "--window", "9", "--forward-only", "--json", str(path)]) == 0
    assert not judged[0].backward
    shown = capsys.readouterr().out
    assert "winner" in shown
    assert "wrong: out is off" in shown

    record = json.loads(path.read_text())
    assert [x["verdict"] for x in record["candidates"][:2]] == ["wrong", "right"]
    shapes = {name: (1, 64, heads, 8) for name, heads in (("query", 2), ("key", 1), ("value", 1))}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    found = create_default_executor().explain(FlashAttention(), **arrays, causal=True, sliding_window=(9, 0))
    assert found.steps[-1].name == "persistent"
    assert found.config.to_json() == record["candidates"][record["chosen"]]["config"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "float64"), "dtype: got float64; expected one of float32, bfloat16, float16."),
        (("--kv-heads", "3"), "query: got 2 heads with 3 key heads; expected a multiple of the key heads."),
        (("--platform", "cuda"), "platform: got 'cuda'; expected a platform with a kernel."),
        (("--platform", "pallas_tpu"), "pallas"),
        (("--dropout", "1.5"), "dropout_prob: got 1.5; expected a number from 0 to below 1."),
        (("--time-limit", "0"), "time_limit: got 0.0; expected a positive number of seconds."),
        (("--time-limit", "inf"), "time_limit: got inf; expected a positive number of seconds."),
        (("--q-len", "0"), "--q-len"),
    ],
)
def test_what_is_malformed_is_one_sentence(options, words, capsys):
    assert cli.main(["tune", *SIZES, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("attest: ")
    assert words in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
