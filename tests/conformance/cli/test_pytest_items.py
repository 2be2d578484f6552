"""The marker of the pytest plugin: what its items are called, which outcome they have, what they print."""

import re
import shutil
import signal
from collections.abc import Callable

import pytest

from attest import replay_case
from attest.conformance import pytest_items, testing
from attest.conformance.cases.case import Case
from attest.conformance.running.plan import Task
from attest.conformance.subject import Subject
from tests import toys

pytest_plugins = ["pytester"]

CAUSAL = Case(q_len=6, kv_len=4, causal=True)
# Two rows: each of the first has a case that top-left causal order gets wrong.
ROWS = (
    Task("", CAUSAL, ("forward", "gradients"), also=((Case(q_len=7, kv_len=5, causal=True), ("forward",)),)),
    Task("", Case(q_len=2, kv_len=2), ("forward",)),
)
PASSES, FAILS = "toys.right", "toys.top_left"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run a marked function as a suite of its own, on a plan of few cases."""
    monkeypatch.setattr(testing, "_judged", set())
    # With them pytest repeats every explanation, whole, in its summary.
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)

    def run(marker: str, *options: str, plan=ROWS, body: str = "...", **files: str) -> pytest.RunResult:
        monkeypatch.setattr(pytest_items, "tasks", lambda *_: iter(plan))
        for name, text in files.items():
            pytester.makefile(".toml", **{name: text})
        head = "import pytest\nfrom tests import toys\n"
        pytester.makepyfile(
            f"{head}\n@pytest.mark.attest({marker})\ndef test_kernel(attest_case):\n    {body}\n"
        )
        return pytester.runpytest_inprocess("-p", "no:benchmark", *options)

    return run


def names(result: pytest.RunResult) -> list[str]:
    return re.findall(r"test_kernel\[(\S+)\]", result.stdout.str())


def section(result: pytest.RunResult, title: str) -> tuple[str, list[str]]:
    """The heading of the one report below a title, and its lines."""
    text = re.split("^=+ (.+) =+$", result.stdout.str(), flags=re.MULTILINE)
    heading, *lines = [line for line in text[text.index(title) + 1].splitlines() if line]
    return heading, lines


def test_an_item_is_a_check_and_a_row(suite):
    result = suite(PASSES, "--collect-only", "-q")
    assert names(result) == [
        "forward-float32-causal-row0",
        "gradients-float32-causal-row0",
        "forward-float32-plain-row1",
    ]


def test_items_are_chosen_by_check_dtype_and_feature(suite):
    result = suite(PASSES, "--collect-only", "-q", "-k", "gradients and causal and float32 or plain")
    assert names(result) == ["gradients-float32-causal-row0", "forward-float32-plain-row1"]


def test_collecting_calls_no_kernel(suite, pytester):
    """The whole quick profile, of a subject that has no kernel."""
    uncalled = toys.toy(call=lambda *_arrays, **_options: pytest.exit("called"))
    items = pytest_items.planned_items(
        pytest_items.marked_subject((uncalled,), {}, pytester.path, pytest_items.Options())
    )
    ids = [f"{item.id}-{item.row}" for item in items]
    assert len(set(ids)) == len(ids) > 100
    assert {"forward", "gradients", "refusal.scale_huge"} <= {item.check for item in items}
    assert any({"causal", "gqa"} <= item.features for item in items)


def test_the_rows_of_a_plan_are_groups_of_xdist(suite, pytester):
    pytest.importorskip("xdist")
    suite(PASSES, "--collect-only")
    items, _ = pytester.inline_genitems("-p", "no:benchmark")
    groups = [item.get_closest_marker("xdist_group").args[0] for item in items]
    assert groups[0] == groups[1] != groups[2]
    assert all("test_kernel" in group for group in groups)


def test_a_right_kernel_passes(suite):
    suite(PASSES).assert_outcomes(passed=3)


def test_the_function_needs_no_argument(suite, pytester):
    suite(PASSES)
    pytester.makepyfile(
        "import pytest\nfrom tests import toys\n@pytest.mark.attest(toys.top_left)\ndef test_a(): ..."
    )
    pytester.runpytest_inprocess("-k", "forward").assert_outcomes(failed=1, passed=1, deselected=1)


def test_the_body_runs_first_and_may_skip(suite):
    body = "assert attest_case.subject is toys.top_left and attest_case.row in (0, 1)\n"
    body += "    if 'causal' in attest_case.features: pytest.skip(attest_case.check)"
    result = suite(FAILS, "-rs", body=body)
    result.assert_outcomes(skipped=2, passed=1)
    result.stdout.fnmatch_lines(["SKIPPED*gradients"])


def test_a_failure_is_the_explanation_of_the_suite_alone(suite):
    result = suite(FAILS, "-k", "forward")
    result.assert_outcomes(failed=1, passed=1, deselected=1)
    _, lines = section(result, "FAILURES")
    text = "\n".join(lines)
    assert "FAIL toys.top_left: forward (the simplest failing case that was found)" in text
    assert "2 of the 2 cases of this row fail" in text
    assert "S6: causal" in text
    assert "Traceback" not in text
    assert ".py:" not in text
    assert len(lines) < 25
    line = next(line for line in lines if "replay:" in line).partition("replay: ")[2]
    again = eval(line.partition("  #")[0], {"replay_case": replay_case, "subject": toys.top_left})
    assert again.verdict == "FAIL"
    assert again.case.q_len + again.case.kv_len < CAUSAL.q_len + CAUSAL.kv_len


def test_a_failure_shows_the_stage_and_the_places(suite):
    """As the card of `attest check` does, although an item judges one check alone."""
    options = ("-k", "gradients", "--attest-shrink=0")
    text = "\n".join(section(suite("'tests.wrong_kernels.subjects:causal_edge'", *options), "FAILURES")[1])
    stage = "the logits or which keys are visible, before the softmax"
    assert f"  out WRONG  lse WRONG  dquery WRONG  dkey WRONG  dvalue WRONG  -> {stage}\n" in text
    assert re.search(r"    wrong in \d of 6 elements: quer.* of 6", text)


def test_a_failure_without_numbers_has_no_stage(suite):
    _, lines = section(suite("toys.raves", "-k", "plain"), "FAILURES")
    assert "WRONG" not in "\n".join(lines)


def test_the_first_failure_of_a_check_is_simplified(suite):
    plan = [Task("", Case(q_len=n, kv_len=n - 1, causal=True), ("forward",)) for n in (3, 4)]
    text = suite(FAILS, plan=plan).stdout.str()
    assert text.count("FAIL toys.top_left: forward (the simplest failing case that was found)\n") == 1
    assert text.count("FAIL toys.top_left: forward\n") == 1
    assert "simplest" not in suite(FAILS, "--attest-shrink=0", plan=plan).stdout.str()


def test_a_subject_by_name_has_the_replay_line_of_the_command(suite):
    result = suite("'tests.toys:top_left'", "-k", "forward and causal")
    result.stdout.fnmatch_lines(
        ["*FAIL tests.toys:top_left: forward*", "*attest replay '{*--subject=tests.toys:top_left"]
    )


def test_a_long_failure_loses_lines_in_its_middle(suite):
    result = suite("toys.raves", "-k", "plain")
    _, lines = section(result, "FAILURES")
    assert len(lines) == 40
    assert "lines left out ...]" in lines[-3]
    assert "replay: replay_case(" in lines[-1]


CASES = [
    (Case(causal=True), "INCONCLUSIVE: the case cannot distinguish a kernel without causal"),
    (Case(q_len=2, kv_len=3, window=(1, 1)), "UNSUPPORTED: does not declare window"),
]


@pytest.mark.parametrize(("case", "reason"), CASES)
def test_what_cannot_be_judged_is_skipped_with_the_reason(suite, case, reason):
    result = suite(PASSES, "-rs", plan=[Task("", case, ("forward",))])
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"SKIPPED*test_what_cannot*.py:*: {reason}*"])


def test_one_case_that_shows_something_is_enough(suite):
    blind = (Case(causal=True), ("forward",))
    suite(PASSES, plan=[Task("", CAUSAL, ("forward",), also=(blind,))]).assert_outcomes(passed=1)


def test_a_subject_of_another_machine_is_skipped(suite, monkeypatch):
    monkeypatch.setattr(toys, "away", Subject("toys.away", toys.right.call, backend="tpu"), raising=False)
    result = suite("toys.away", "-rs")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["SKIPPED*toys.away cannot run here: runs on tpu, this machine has *"])


EXPECT = """
[[expect]]
subject = "{subject}"
check = "forward"
reason = "aligned to the top left"
link = "https://example.org/1"
[expect.when]
features = ["causal"]
"""


def test_expected_failures_are_xfailed(suite):
    known = EXPECT.format(subject="toys.top_left")
    for marker, option in (
        (f"{FAILS}, expectations='known.toml'", ()),
        (FAILS, ("--attest-expectations=known.toml",)),
    ):
        result = suite(marker, "-rx", *option, known=known)
        result.assert_outcomes(xfailed=1, failed=1, passed=1)
        result.stdout.fnmatch_lines(["XFAIL*aligned to the top left*(https://example.org/1)"])


def test_files_of_the_marker_are_beside_the_test_and_options_in_the_current_folder(suite, pytester):
    suite(f"{FAILS}, expectations='known.toml'", known=EXPECT.format(subject="toys.top_left"))
    below = pytester.mkdir("below")
    for file in (*pytester.path.glob("*.py"), pytester.path / "known.toml"):
        file.rename(below / file.name)
    pytester.runpytest_inprocess("below").assert_outcomes(xfailed=1, failed=1, passed=1)
    missing = pytester.runpytest_inprocess("below", "--attest-expectations=known.toml")
    missing.stdout.fnmatch_lines([f"*attest: {pytester.path / 'known.toml'}: no such file or folder*"])


def test_what_was_expected_to_fail_and_passes_is_red(suite):
    result = suite(f"{PASSES}, expectations=['known.toml']", known=EXPECT.format(subject="toys.right"))
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["XPASS toys.right: forward*", "*passes, but was expected to fail*"])


BROKEN = {
    "": "missing a required argument: 'subject'; write attest(subject, profile=, seed=, expectations=)",
    "toys.right, size=3": "got an unexpected keyword argument 'size'; write attest(",
    "toys.right, toys.right": "too many positional arguments; write attest(",
    "toys.not_a_subject": "subject: got int, expected an attest.Subject or its name",
    "'xla.nothing'": "unknown subject 'xla.nothing'",
    "'tests.nowhere:subject'": "subject 'tests.nowhere:subject' cannot be loaded: ModuleNotFoundError: ",
    "toys.right, profile='slow'": "unknown profile 'slow': expected one of quick, standard, ",
    "toys.right, seed=-1": "seed: got -1, expected an integer from 0 on",
    "toys.right, expectations='none.toml'": "none.toml: no such file or folder of expectations",
    "toys.right, expectations=3": "expectations: got 3, expected a path, or a list of paths",
}


@pytest.mark.parametrize("marker", BROKEN)
def test_a_wrong_marker_is_one_line_at_collection(suite, marker):
    result = suite(marker)
    result.assert_outcomes(errors=1)
    _, (line,) = section(result, "ERRORS")
    assert line.startswith("test_kernel: attest: ")
    assert BROKEN[marker] in line


def test_a_plan_that_cannot_be_drawn_is_one_line(suite):
    def broken():
        raise RuntimeError("no\ntwo lines")
        yield

    result = suite(PASSES, plan=broken())
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_kernel: attest: cannot draw cases for toys.right: RuntimeError: no"])
    suite(PASSES, plan=()).stdout.fnmatch_lines(["*has no case for toys.right: nothing is tested"])


def test_a_declaration_that_raises_fails_its_items_alone(suite, monkeypatch):
    def numerics(_dtype, _tiling):
        raise RuntimeError("no idea")

    monkeypatch.setattr(toys, "unsure", toys.toy(numerics=numerics), raising=False)
    result = suite("toys.unsure", "-k", "plain or gradients")
    text = result.stdout.str()
    assert "RuntimeError: no idea" in text
    assert "Traceback" not in text
    assert "pytest_items.py" not in text


def test_options_come_before_the_marker(suite, monkeypatch):
    seen = []
    suite(f"{PASSES}, profile='standard', seed=3")
    monkeypatch.setattr(
        pytest_items, "tasks", lambda _, profile, seed: seen.append((profile.name, seed)) or iter(ROWS)
    )
    marked = pytest_items.marked_subject
    given = ((toys.right,), {"profile": "standard", "seed": 3})
    for options in (pytest_items.Options(), pytest_items.Options("nightly", 0)):
        pytest_items.planned_items(marked(*given, testing.Path(), options))
    assert seen == [("standard", 3), ("nightly", 0)]


def test_the_last_failures_run_again(suite, pytester):
    suite(FAILS).assert_outcomes(failed=2, passed=1)
    pytester.runpytest_inprocess("--lf").assert_outcomes(failed=2)
    shutil.rmtree(pytester.path / ".pytest_cache")


def test_a_second_subject_in_one_process_is_warned_of_once(suite, pytester):
    suite(PASSES)
    pytester.makepyfile(
        "import pytest\nfrom tests import toys\n@pytest.mark.attest(toys.top_left)\ndef test_a(): ...\n"
    )
    result = pytester.runpytest_inprocess("-k", "plain or gradients", "-W", "default")
    result.assert_outcomes(failed=1, passed=1, deselected=1, warnings=1)
    result.stdout.fnmatch_lines(["*SharedProcessWarning: toys.top_left is judged in a process*"])


def test_a_class_of_unittest_is_refused(pytester):
    pytester.makepyfile(
        "import pytest, unittest\nfrom tests import toys\n\n@pytest.mark.attest(toys.right)\n"
        "class Test(unittest.TestCase):\n    def test_kernel(self): ..."
    )
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: *::Test::test_kernel: attest: methods of unittest.TestCase cannot *"]
    )


def test_a_class_may_have_the_marker(suite, pytester):
    suite(PASSES)
    pytester.makepyfile(
        "import pytest\nfrom tests import toys\n\n@pytest.mark.attest(toys.right)\n"
        "class TestKernel:\n    def test_it(self): ..."
    )
    pytester.runpytest_inprocess("-W", "ignore").assert_outcomes(passed=3)


def test_ctrl_c_ends_the_suite(suite, pytester, monkeypatch):
    def interrupted(*_arrays, **_options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(toys, "interrupted", toys.toy(interrupted), raising=False)
    suite("toys.interrupted", "--collect-only")
    ended = pytester.inline_run("-p", "no:benchmark", no_reraise_ctrlc=True)
    assert ended.ret == pytest.ExitCode.INTERRUPTED
    ended.assertoutcome()


def test_the_fixture_needs_the_marker(pytester):
    pytester.makepyfile("def test_kernel(attest_case): ...")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["attest_case: the test has no marker @pytest.mark.attest(subject)"])
