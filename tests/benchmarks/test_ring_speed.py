"""The benchmark of ring attention: its rows, its shares and its table."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from attest.kernels.ring.arguments import STRATEGIES
from benchmarks import ring_speed, targets
from benchmarks.record import Absent, Report, Result, Run, Samples
from benchmarks.report import as_markdown
from benchmarks.ring_speed import ALONE, PEER

DATA = targets.read(ring_speed.TARGETS)
BENCHMARK = ring_speed.benchmark(DATA, devices=2)
NONE = dict.fromkeys((ALONE, *DATA["strategies"], PEER), Absent("ValueError: none"))


def outcomes(**values: float) -> dict[str, str]:
    """The outcome of each target of the first row, where one device alone takes a second."""
    row = BENCHMARK.rows[0]
    result = Result(row, {**NONE, ALONE: Samples((1.0,)), **{x: Samples((it,)) for x, it in values.items()}})
    return {" ".join(target.of): result.outcome(target) for target in row.targets}


def test_all_strategies_are_timed_and_targets_name_them() -> None:
    assert set(DATA["strategies"]) == set(STRATEGIES)
    for row in BENCHMARK.rows:
        assert row.entries.keys() == {ALONE, PEER, *STRATEGIES}
        assert row.targets
        assert all(set(target.of) <= set(STRATEGIES) for target in row.targets)


def test_a_share_is_that_of_one_device_on_its_own_tokens() -> None:
    """Two devices have four times as many pairs, so twice as long is as fast, but for the diagonal."""
    share = BENCHMARK.layout.columns[-1]
    measured = {**NONE, ALONE: Samples((1.0,)), "ring": Samples((4.0,)), "zigzag": Samples((2.0,))}
    result = Result(BENCHMARK.rows[0], measured)
    assert [share.cell(result, name, Samples((1.0,))) for name in ("ring", "zigzag", ALONE, PEER)] == [
        "0.50",
        "1.00",
        "",
        "",
    ]
    alone_failed = replace(result, measured={**measured, ALONE: Absent("none")})
    assert share.cell(alone_failed, "ring", Samples((4.0,))) == ""


def test_the_best_strategy_has_a_target_of_its_own_and_the_peer_none() -> None:
    best = " ".join(DATA["strategies"])
    assert outcomes(zigzag=2 / 0.84, ring=2 / 0.96) == {"zigzag": "missed", "ulysses": "absent", best: "met"}
    assert outcomes(**{PEER: 1.0}) == {"zigzag": "absent", "ulysses": "absent", best: "absent"}


def test_the_table_has_times_shares_and_reasons() -> None:
    result = Result(BENCHMARK.rows[0], NONE | {ALONE: Samples((2e-3,)), "zigzag": Samples((8e-3,))})
    text = as_markdown(Report(Run("today", "abc", "here", {}), (result,)), BENCHMARK.layout)
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
    assert ["zigzag", "1x16384, 16, 128", "8.000"] in [line[1:4] for line in lines]
    assert [line[-1] for line in lines if line[1:2] == ["zigzag"]] == ["MISSED", "0.50"]
    assert "absent: ValueError: none" in text


@pytest.mark.process(devices=2)
def test_every_strategy_computes_the_same() -> None:
    """On devices of a CPU, where the peer is absent."""
    data = {**DATA, "heads": 2, "head_dim": 8, "rows": [{"tokens": 16, "least": {"zigzag": 0.1}}]}
    small = ring_speed.benchmark({**data, "timing": {"samples": 1, "sample_seconds": 1e-9}}, devices=2)
    assert jax.local_device_count() == 2
    for row in small.rows:
        measured = small.measure(row, small.prepare([row]))
        assert isinstance(measured[PEER], Absent)
        assert isinstance(measured[ALONE], Samples)
        apart = [measured[name].difference for name in STRATEGIES if measured[name].difference is not None]
        assert len(apart) == len(STRATEGIES) - 1
        np.testing.assert_array_less(apart, 0.02)
