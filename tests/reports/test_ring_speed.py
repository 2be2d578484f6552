"""The benchmark of ring attention: its rows, its shares and its table."""

import tomllib

import pytest

from attest.kernels.ring.arguments import STRATEGIES
from benchmarks import ring_speed
from benchmarks.gpu.timing import Absent
from benchmarks.gpu.workload import FORWARD
from benchmarks.ring_speed import ALONE, PEER, Measured

DATA = tomllib.loads(ring_speed.TARGETS.read_text())


def test_all_strategies_are_timed_and_targets_name_them() -> None:
    assert set(DATA["strategies"]) == set(STRATEGIES)
    for row in DATA["rows"]:
        assert set(row["least"]) <= {*STRATEGIES, "best"}


def test_a_share_is_that_of_one_device_on_its_own_tokens() -> None:
    """Two devices have four times as many pairs, so twice as long is as fast, but for the diagonal."""
    seconds = {ALONE: 1.0, "ring": 4.0, "zigzag": 2.0, PEER: Absent("no mask")}
    shares = ring_speed.shares_of(DATA, 8192, FORWARD, 2, seconds)
    assert shares == pytest.approx({"ring": 0.5, "zigzag": 1.0}, rel=1e-3)
    assert ring_speed.shares_of(DATA, 8192, FORWARD, 2, {**seconds, ALONE: Absent("none")}) == {}


def test_the_best_strategy_has_a_target_of_its_own_and_the_peer_none() -> None:
    least = {"zigzag": 0.85, "ulysses": 0.9, "best": 0.95}
    assert ring_speed.outcomes(least, {"zigzag": 0.84, "ring": 0.96, PEER: 2.0}) == {
        "zigzag": "MISSED",
        "ulysses": "absent",
        "best": "met",
    }
    assert ring_speed.outcomes(least, {PEER: 2.0}) == dict.fromkeys(least, "absent")


def test_the_table_has_times_shares_and_reasons() -> None:
    seconds = {**dict.fromkeys((ALONE, *DATA["strategies"]), 2e-3), PEER: Absent("ValueError: no")}
    row = Measured(8192, FORWARD, seconds, {"zigzag": 0.5}, {"zigzag": "MISSED"}, None)
    text = ring_speed.as_markdown({"device": "here"}, DATA, [row])
    assert "2.00 (0.50)" in text
    assert "zigzag MISSED" in text
    assert "ValueError: no" in text
    assert ring_speed.to_json(row)["seconds"][PEER] == {"absent": "ValueError: no"}
