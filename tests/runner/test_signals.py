"""A signal that asks a run to end waits until no call of the workers' pool is under way."""

import signal
import threading

import pytest
from pebble import ProcessPool

from conformance.signals import postponed
from conformance.workers import Job, perform
from tests import toys


def test_what_is_under_way_is_ended_first():
    before = signal.getsignal(signal.SIGINT)
    reached = []

    def ended() -> None:
        with postponed():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        ended()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_of_outside_is_called_once():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    try:
        with postponed():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_postpone_nothing():
    handlers = []

    def look():
        with postponed():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_pool_is_not_left_in_the_middle_of_a_call(monkeypatch):
    schedule, scheduled = ProcessPool.schedule, []

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        scheduled.append(schedule(*arguments, **options))
        return scheduled[-1]

    monkeypatch.setattr(ProcessPool, "schedule", interrupted)
    jobs = [Job("tests.toys:right", _answer, number) for number in range(3)]
    with pytest.raises(KeyboardInterrupt):
        list(perform(jobs, {"tests.toys:right": toys.right}, 1, 60.0))
    assert len(scheduled) == 1


def _answer(_subject, argument):
    return argument
