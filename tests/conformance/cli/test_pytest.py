"""What other people's test suites get: a function that raises, a fixture with subtests, and no cost."""

import subprocess
import sys
from dataclasses import replace

import pytest

from attest import conformance
from attest.conformance import Subject, replay_case, run_conformance_test, testing
from attest.conformance.cases.case import Case
from attest.conformance.running import runner
from attest.conformance.running.plan import Task
from tests import toys

pytest_plugins = ["pytester"]

POSED = [
    Task("", Case(q_len=2, kv_len=3, causal=True), ("forward",)),
    Task("", Case(q_len=3, kv_len=2, causal=True), ("forward", "gradients")),
]


@pytest.fixture(autouse=True)
def _small_plan(monkeypatch):
    monkeypatch.setattr(testing, "_judged", set())
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(POSED))


def test_a_right_kernel_passes():
    record = run_conformance_test(toys.right)
    assert record.status == "pass"
    assert len(record.results) == 3


def test_a_wrong_kernel_raises_with_its_simplest_case(capsys):
    with pytest.raises(AssertionError, match="does not conform") as raised:
        run_conformance_test(toys.top_left)
    text = str(raised.value)
    assert "FAIL toys.top_left: forward (the simplest failing case that was found)" in text
    assert text.count("FAIL toys.top_left: forward") == 1
    assert "S6: causal" in text
    line = next(line for line in text.splitlines() if "replay:" in line).partition("replay: ")[2]
    again = eval(line.partition("  #")[0], {"replay_case": replay_case, "subject": toys.top_left})
    assert again.verdict == "FAIL"
    assert "FAIL toys.top_left: forward" in capsys.readouterr().out


@pytest.mark.found_outside
def test_a_second_subject_in_one_process_is_warned_of():
    run_conformance_test(toys.right)
    run_conformance_test(toys.right)
    other = replace(toys.right, name="toys.other")
    said = r"toys\.other is judged in a process that has run toys\.right"
    with pytest.warns(testing.SharedProcessWarning, match=said) as warned:
        run_conformance_test(other)
    assert warned[0].filename == __file__
    with pytest.warns(testing.SharedProcessWarning, match=said):
        replay_case(other, "forward", '{"q_len": 2}')


def test_a_kernel_that_passes_nothing_raises():
    unable = Subject("toys.unable", toys.right.call)
    with pytest.raises(AssertionError, match="no check passed"):
        run_conformance_test(unable)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="subject: got function"):
        run_conformance_test(run_conformance_test)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown profile 'slow'"):
        run_conformance_test(toys.right, "slow")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        conformance.nothing  # noqa: B018


SUITE = """
from attest.conformance.running import runner
from attest.conformance.cases.case import Case
from attest.conformance.running.plan import Task
from tests import toys

POSED = [Task("", Case(q_len=3, kv_len=2, causal=True), ("forward", "purity"))]

def test_kernel(attest_conformance, monkeypatch):
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(POSED))
    attest_conformance(toys.{name})
"""


@pytest.mark.parametrize(("name", "outcomes"), [("right", {"passed": 1}), ("top_left", {"failed": 2})])
def test_the_fixture_reports_each_check(pytester, name, outcomes):
    pytester.makepyfile(SUITE.format(name=name))
    result = pytester.runpytest_inprocess(*_only_ours(), "--attest-profile=quick", "--attest-seed=5")
    found = result.parseoutcomes()
    if outcomes.get("failed"):
        assert found["failed"] >= 1
        result.stdout.fnmatch_lines(["*FAIL toys.top_left: forward*", "*replay_case(subject, 'forward', *"])
    else:
        assert found["passed"] == 1
        assert "failed" not in found


def test_an_unknown_profile_is_one_sentence(pytester):
    pytester.makepyfile(SUITE.format(name="right"))
    result = pytester.runpytest_inprocess(*_only_ours(), "--attest-profile=slow")
    result.stdout.fnmatch_lines(["*--attest-profile: got 'slow', expected quick, standard, nightly*"])


def test_suites_that_do_not_use_it_pay_nothing():
    code = (
        "import sys, attest.conformance.pytest_plugin;"
        "print([m for m in ('jax', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _only_ours() -> list[str]:
    """The plugin under test is loaded by name where the distribution is not installed."""
    return ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark"]
