"""The tuner: the fastest of the candidates that are right, and a record of all."""

import json
import math
import statistics
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from attest.kernels.operations import Tuner, timing, tuner
from attest.kernels.operations.executor import invocation
from attest.kernels.operations.inputs import draw
from attest.kernels.operations.judging import Judgement
from attest.kernels.operations.programs import compiled
from attest.kernels.operations.timing import OutOfTimeError, median_seconds, within
from tests.kernels.operations.toy import Judge, Toy, ToyConfig

X = np.ones((64, 64), np.float32)
IDS = np.arange(3)


def tuned(*candidates: ToyConfig, judge: Any = None, **more: Any):
    operation = Toy(candidates)
    options = {"warmup": 1, "iters": 3, "judge": judge or Judge(), **more}
    arguments = {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}
    return Tuner(**options).tune(operation, invocation(operation, (), arguments), arguments)


def test_what_is_wrong_or_fails_is_never_chosen_however_fast():
    slow = ToyConfig(cost=40)
    record = tuned(ToyConfig("wrong"), ToyConfig("crashes"), slow, ToyConfig(cost=400))
    assert record.winner() == slow
    assert [x.verdict for x in record.candidates] == ["wrong", "failed", "right", "right"]
    assert [math.isfinite(x.seconds) for x in record.candidates] == [False, False, True, True]
    assert "out is off by" in record.candidates[0].why
    assert record.candidates[1].why == "it raised RuntimeError: no room"


def test_a_candidate_that_hangs_ends_at_its_time_limit():
    record = tuned(ToyConfig("hangs"), ToyConfig(), time_limit=8.0)
    assert record.winner() == ToyConfig()
    assert record.candidates[0].why == "it was not judged in 8 s"


def test_the_winner_is_judged_again_on_other_inputs():
    """One that is right the first time only is not chosen."""

    class Fickle(Judge):
        def __call__(self, call):
            judgement = super().__call__(call)
            worst = judgement.statistics["out"]["worst"]
            again = len(self.seeds) > 2 and worst == 0.0
            return Judgement(False, "wrong the second time", judgement.statistics) if again else judgement

    judge = Fickle()
    with pytest.raises(ValueError, match=r"candidates: got none of 2 that is right .*wrong the second time"):
        tuned(ToyConfig(), ToyConfig(cost=1), judge=judge)
    assert len(set(judge.seeds)) == len(judge.seeds) == 4


@pytest.mark.parametrize(
    ("in_turns", "chosen"),
    [
        ([1.00, 1.01, 1.06, 1.02, 1.01, 1.01, 1.01], 0),
        ([1.30, 1.20, 1.30, 0.99, 1.30, 1.20, 1.30], 0),
        ([1.30, 1.20, 1.02, 1.03, 1.30, 1.02, 1.03], 1),
    ],
    ids=["by too little", "not every time", "every time"],
)
def test_noise_does_not_win(monkeypatch, in_turns, chosen):
    """The first candidate, which runs without tuning, is kept unless another is faster in every turn."""
    one_after_another = [1.0, 0.5]
    turns = [seconds for ratio in in_turns for seconds in (1.0, ratio)]
    seconds = iter([*one_after_another, *turns])
    monkeypatch.setattr(tuner, "median_seconds", lambda *_: next(seconds))
    record = tuned(ToyConfig(), ToyConfig("also right"))
    assert record.chosen == chosen
    assert record.gain == (statistics.median(in_turns) if chosen else 1.0)
    assert next(seconds, None) is None


def test_nothing_right_is_an_error_that_says_why():
    words = r"got none of 2 that is right .*it raised RuntimeError: no room.*; expected at least one"
    with pytest.raises(ValueError, match=words):
        tuned(ToyConfig("wrong"), ToyConfig("crashes"))


def test_parts_of_several_candidates_are_joined_and_the_join_is_judged_too():
    class Joining(Toy):
        def combined_cfg(self, timed):
            self.timed = dict(timed)
            return ToyConfig("wrong")

    operation = Joining((ToyConfig(cost=3), ToyConfig(cost=2)))
    arguments = {"x": X}
    record = Tuner(1, 3, Judge()).tune(operation, invocation(operation, (), arguments), arguments)
    assert set(operation.timed) == set(operation.candidates)
    assert [x.verdict for x in record.candidates] == ["right", "right", "wrong"]
    assert record.winner() != ToyConfig("wrong")


def test_forward_alone_tries_one_of_the_candidates_that_are_the_same_there():
    class TwoPasses(Toy):
        def forward_part(self, cfg):
            return cfg.cost

    operation = TwoPasses((ToyConfig("a", 1), ToyConfig("b", 1), ToyConfig("c", 2)))
    inv = invocation(operation, (), {"x": X})
    tried = {}
    for backward in (False, True):
        record = Tuner(1, 3, Judge()).tune(operation, inv, {"x": X}, backward=backward)
        tried[backward] = [x.config.name for x in record.candidates]
    assert tried == {False: ["a", "c"], True: ["a", "b", "c"]}


def test_the_record_is_json_and_progress_sees_every_candidate():
    seen: list[Any] = []
    record = tuned(
        ToyConfig(), ToyConfig("wrong"), progress=lambda done, total, x: seen.append((done, total, x.verdict))
    )
    assert seen == [(1, 3, "right"), (2, 3, "wrong")]
    written = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert written["chosen"] == 0
    assert written["op_id"] == "toy"
    assert written["call"] == {"x": "float32[64, 64]"}
    assert written["candidates"][1]["seconds"] is None
    assert written["candidates"][0]["statistics"]["out"]["worst"] == 0.0
    assert {"device", "jax", "source"} <= set(written["environment"])
    assert record.gain == 1.0
    assert "1 of 2 candidates are right" in record.summary()


def test_a_program_returns_gradients_where_the_call_trains():
    program = compiled(partial(Toy().run, cfg=ToyConfig()), {"x": X}, backward=True)
    outputs = program({"x": X + 1})()
    np.testing.assert_array_equal(outputs["out"], 6 * X)
    np.testing.assert_array_equal(outputs["dx"], 3 * X)
    np.testing.assert_array_equal(program({"x": X}, 2 * X)()["dx"], 6 * X)
    assert set(compiled(partial(Toy().run, cfg=ToyConfig()), {"x": X}, backward=False)({"x": X})()) == {"out"}


def test_a_slow_candidate_is_given_up_early():
    now = iter(range(1000))
    calls: list[int] = []

    def clock() -> float:
        return float(next(now))

    assert median_seconds(calls.append, 2, 50, 0.5, clock) == 1.0
    assert calls == [2, *[1] * 8]
    calls.clear()
    assert median_seconds(calls.append, 2, 50, 0.9, clock) == 1.0
    assert len(calls) == 54


def test_short_calls_are_timed_several_at_a_time():
    now = [0.0]
    calls: list[int] = []

    def call(times: int) -> None:
        calls.append(times)
        now[0] += times * 1e-4

    assert median_seconds(call, 1, 3, math.inf, lambda: now[0]) == pytest.approx(1e-4)
    assert calls[:2] == [1, 1]
    assert set(calls[2:]) <= {19, 20}


def test_within_returns_raises_or_runs_out_of_time():
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}[1])
    with pytest.raises(OutOfTimeError):
        within(0.05, lambda: time.sleep(1))


def test_the_end_of_the_process_waits_for_what_was_left_alone(monkeypatch):
    monkeypatch.setattr(timing, "_left", [])
    ended: list[bool] = []
    with pytest.raises(OutOfTimeError):
        within(0.01, lambda: (time.sleep(0.3), ended.append(True)))
    assert not ended
    timing.wait_for_left()
    assert ended


@pytest.mark.parametrize(
    ("options", "name"),
    [({"warmup": 0}, "warmup"), ({"iters": 1.5}, "iters"), ({"time_limit": 0}, "time_limit")],
)
def test_malformed_options_are_refused(options, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        Tuner(**options)


def test_integers_are_needed_as_they_are():
    arguments = {"x": X, "ids": jax.ShapeDtypeStruct((3,), "int32")}
    with pytest.raises(ValueError, match=r"ids: got the shape \(3,\) alone; expected the array itself"):
        draw(arguments, 0)
    drawn = draw({"x": jax.ShapeDtypeStruct((3,), "float32"), "ids": IDS}, 0)
    assert drawn["ids"] is IDS
    assert not np.array_equal(drawn["x"], draw({"x": X[0, :3]}, 1)["x"])
