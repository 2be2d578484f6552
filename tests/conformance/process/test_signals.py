"""A signal ends a run where nothing is lost, and is not what a subject raises."""

import signal
import threading

import pytest

from attest.conformance.process.signals import Interrupted, interruptible, postponed
from attest.conformance.process.workers import Job, perform
from tests import toys


def test_what_is_under_way_is_ended_first():
    # A shell starts background processes with SIGINT ignored.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT)
    reached = []

    def ended() -> None:
        with postponed():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    try:
        with pytest.raises(KeyboardInterrupt):
            ended()
        assert reached == ["the end"]
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, outside)


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


def test_a_run_with_workers_ends_between_two_outcomes():
    """The signal comes while the consumer is at work, which it must not interrupt."""
    jobs = [Job("tests.toys:right", _answer, number) for number in range(3)]
    got = []

    def consume() -> None:
        for outcome in perform(jobs, {"tests.toys:right": toys.right}, 1, 60.0):
            signal.raise_signal(signal.SIGINT)
            got.append(outcome.value)

    with interruptible(), pytest.raises(Interrupted):
        consume()
    assert got == [0]


def test_a_signal_that_is_ignored_outside_ends_a_run():
    """As a shell has it for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Interrupted), interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_does_not_disturb_the_end():
    reached = []

    def end() -> None:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)
                reached.append("the end")

    with pytest.raises(Interrupted):
        end()
    assert reached == ["the end"]


def _answer(_subject, argument):
    return argument
