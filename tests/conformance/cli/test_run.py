"""What the command does with kernels: exit statuses, files, and what it says where."""

import json
from dataclasses import replace

import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cli import catalogue
from attest.conformance.record import Result, RunRecord, Verdict
from attest.conformance.records.record_file import read_record, write_record
from attest.conformance.running import gate as gating
from attest.conformance.running import runner
from attest.conformance.running.plan import Task
from attest.conformance.running.progress import Meter
from attest.conformance.sizes import sizes
from tests import toys

CASES = (Case(q_len=2, kv_len=3, causal=True), Case(q_len=3, kv_len=2, causal=True, head_dim=4, value_dim=4))


@pytest.fixture(autouse=True)
def _small_plan(monkeypatch):
    """Two cases in place of a profile's dozens; workers are processes that would not see this."""
    planned = [Task("", case, ("forward",)) for case in CASES]
    monkeypatch.setattr(runner, "tasks", lambda subject, profile, seed, only: iter(planned))


def question(name: str, case: Case, check: str = "forward") -> str:
    return json.dumps({"subject": f"tests.toys:{name}", "check": check, "case": case.to_json()})


def test_a_right_kernel_passes(attest, tmp_path):
    path = tmp_path / "run.json"
    done = attest("check", "tests.toys:right", "-n", 0, "--json", path)
    assert done.status == 0
    assert done.err == ""
    record = read_record(path)
    assert record.complete
    assert record.status == "pass"
    assert {result.subject for result in record.results} == {"tests.toys:right"}
    assert record.environment["backend"] == "cpu"
    assert record.environment["block_sizes"].keys() == {"tests.toys:right"}


def test_a_wrong_kernel_fails_and_says_how_to_replay_it(attest, tmp_path):
    path = tmp_path / "run.json"
    done = attest("check", "tests.toys:top_left", "-n", 0, "--json", path)
    assert done.status == 1
    record = read_record(path)
    (minimal,) = (result for result in record.results if result.minimal)
    assert minimal.case.q_len + minimal.case.kv_len <= 3
    assert "attest replay" in done.out
    again = attest("replay", "--allow-import", question("top_left", minimal.case), "-n", 0)
    assert again.status == 1
    assert again.out.startswith("FAIL tests.toys:top_left: forward")


def test_other_forms_of_a_record(attest, tmp_path):
    paths = {name: tmp_path / f"run.{name}" for name in ("json", "junit", "markdown", "html", "sarif")}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    assert attest("check", "tests.toys:top_left", "-n", 0, *options).status == 1
    first = {name: path.read_bytes() for name, path in paths.items()}
    assert attest("report", paths["json"], *options[2:]).status == 0
    assert {name: path.read_bytes() for name, path in paths.items()} == first
    assert "tests.toys:top_left" in attest("report", paths["json"]).out


def test_shards_merge_into_one_record(attest, tmp_path):
    parts = [tmp_path / f"{number}.json" for number in (1, 2, 3)]
    for number, part in enumerate(parts, start=1):
        attest("check", "tests.toys:right", "-n", 0, "--shard", f"{number}/3", "--json", part)
    merged = tmp_path / "all.json"
    assert attest("merge", *parts, "--json", merged).status == 0
    assert {result.case for result in read_record(merged).results} == set(CASES)
    done = attest("merge", *parts[:2])
    assert done.status == 2
    assert "shards: got 1/3, 2/3, expected 1/3, 2/3, 3/3" in done.err


def test_a_run_that_is_to_fail_fast_ends_at_its_first_red_verdict(attest, tmp_path):
    path = tmp_path / "run.json"
    done = attest("check", "tests.toys:top_left", "-n", 0, "--fail-fast", "--json", path)
    assert done.status == 1
    assert "stopped at the first failing verdict" in done.err
    record = read_record(path)
    assert [result.verdict.red for result in record.results] == [True]
    assert not record.complete
    assert attest("check", "tests.toys:right", "-n", 0, "--fail-fast").status == 0


def test_a_run_that_its_budget_cut_is_incomplete_everywhere(attest, tmp_path, monkeypatch):
    monkeypatch.setattr(Meter, "seconds_left", 0.0)
    known = {"tests.toys:right": toys.right}
    monkeypatch.setattr(gating, "discover", lambda: known)
    monkeypatch.setattr(gating, "find", known.__getitem__)
    base = tmp_path / "base.json"
    write_record(RunRecord("quick", 0), base)
    paths = {name: tmp_path / f"run.{name}" for name in ("json", "junit", "markdown", "html", "sarif")}
    options = [word for name, path in paths.items() for word in (f"--{name}", path)]
    done = attest("gate", "-n", 0, "--budget", 7, "--baseline", base, *options)
    said = "stopped after its 7 seconds: 2 of 2 cases not judged"
    assert done.status == 1
    assert done.out.splitlines()[-1].startswith(f"INCOMPLETE: 0 results, cut short ({said}; no case judged")
    assert "not compared with the baseline; the results so far are in" in done.err
    assert all(said in path.read_text() for path in paths.values())
    record = read_record(paths["json"])
    assert (record.complete, record.status, record.problems) == (False, "fail", ())
    assert attest("report", paths["json"]).out == done.out
    assert attest("compare", paths["json"], paths["json"]).status == 1


def test_all_that_was_skipped_is_shown_if_it_is_asked_for(attest, tmp_path):
    path = tmp_path / "run.json"
    short = attest("check", "tests.toys:right", "-n", 0, "--json", path)
    long = attest("report", path, "-v").out
    assert short.status == 0
    assert "more, which -v lists" in short.out
    assert f" in {json.loads(path.read_text())['seconds']:.1f} s\n" in long
    listed = [f"skipped: {text}" for text in read_record(path).left_out]
    assert [line for line in long.splitlines() if line.startswith("skipped: ")] == listed
    assert attest("check", "tests.toys:right", "-n", 0, "--verbose").out.count("skipped: ") == len(listed)


def test_a_case_that_is_not_supported_is_not_judged(attest):
    biased = question("right", Case(q_len=2, kv_len=2, bias="111"))
    done = attest("replay", "--allow-import", biased, "-n", 0)
    assert done.status == 1
    assert done.out.startswith("UNSUPPORTED tests.toys:right: forward\n  does not declare bias")
    assert done.err == "attest: nothing was judged: tests.toys:right does not declare bias\n"
    refused = question("refuses_bias", Case(batch=2, q_len=5, kv_len=5), "refusal.undeclared_bias")
    done = attest("replay", "--allow-import", refused, "-n", 0)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("UNSUPPORTED")


def test_a_case_with_rows_that_a_dialect_leaves_open_is_not_judged(attest):
    empty = Case(q_len=3, kv_len=2, causal=True)
    done = attest("replay", "--allow-import", question("promises_little", empty), "-n", 0)
    assert done.status == 1
    assert "nothing was judged: tests.toys:promises_little declares that rows which see no key" in done.err
    full = Case(q_len=2, kv_len=2, causal=True)
    assert attest("replay", "--allow-import", question("promises_little", full), "-n", 0).status == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--check", "lse"), "--check lse does not apply: toys.right does not return lse"),
        (
            ("--check", "forward", "--check", "production"),
            "--check production: the profile quick has no such cases for toys.right;"
            " use --profile production",
        ),
    ],
)
def test_a_check_that_fits_nothing_says_so(attest, tmp_path, options, sentence):
    path = tmp_path / "run.json"
    done = attest("check", "tests.toys:right", "-n", 0, *options, "--json", path)
    assert (done.status, done.out) == (2, "")
    assert done.err == f"attest: {sentence}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_gate_judges_what_runs_here_and_compares_with_a_baseline(attest, tmp_path, monkeypatch):
    known = {"tests.toys:right": toys.right}
    monkeypatch.setattr(gating, "discover", lambda: known)
    monkeypatch.setattr(gating, "find", known.__getitem__)
    path = tmp_path / "base.json"
    assert attest("gate", "-n", 0, "--json", path).status == 0
    assert attest("gate", "-n", 0, "--baseline", path).status == 0
    assert attest("compare", path, path).status == 0
    known["tests.toys:right"] = toys.top_left
    worse = tmp_path / "head.json"
    done = attest("gate", "-n", 0, "--baseline", path, "--json", worse)
    assert done.status == 1
    assert "worse than the baseline" in read_record(worse).problems
    assert attest("compare", path, worse, "--markdown", tmp_path / "compare.md").status == 1
    assert (tmp_path / "compare.md").stat().st_size > 0


@pytest.mark.found_outside
def test_several_subjects_in_one_process_are_warned_of(attest, monkeypatch):
    known = {"tests.toys:right": toys.right, "tests.toys:talks": toys.talks}
    monkeypatch.setattr(gating, "discover", lambda: known)
    monkeypatch.setattr(gating, "find", known.__getitem__)
    done = attest("gate", "-n", 0)
    assert (done.status, done.err) == (
        0,
        "attest: -n 0 runs all subjects in one process, where one can spoil those after it\n",
    )
    assert attest("gate", "-n", 0, "--subject", "tests.toys:right").err == ""


def test_an_expected_failure_passes_and_an_unexpected_pass_fails(attest, tmp_path):
    path = tmp_path / "known.toml"
    path.write_text(
        '[[expect]]\nsubject = "tests.toys:top_left"\ncheck = "forward"\nreason = "starts top left"\n'
        'link = "docs/reference/semantics.md"\n'
    )
    options = ("-n", 0, "--expectations", path)
    assert attest("replay", "--allow-import", question("top_left", CASES[0]), *options).status == 0
    done = attest("check", "tests.toys:top_left", *options)
    assert done.status == 1
    assert "no check passed" in done.out
    path.write_text(path.read_text().replace("top_left", "right"))
    done = attest("replay", "--allow-import", question("right", CASES[0]), *options)
    assert done.status == 1
    assert done.out.startswith("XPASS")


MISBEHAVIOUR = {
    "raises": ("forward", "raised RuntimeError: out of luck"),
    "interrupts": ("forward", "raised KeyboardInterrupt: not the user"),
    "gives_up": ("forward", "raised GeneratorExit"),
    "speaks_badly": ("forward", "raised SpeechlessError: (its text cannot be read: ZeroDivisionError)"),
    "wants_memory": ("forward", "(other workers may hold this memory: use -n 1)"),
    "exits": ("forward", "raised SystemExit: no"),
    "one_query_short": ("forward", "returned out of shape (1, 1, 1, 1), expected (1, 2, 1, 1)"),
    "another_dtype": ("forward", "returned out of dtype float16, expected float32"),
    "nothing": ("forward", "returned out as NoneType, expected an array"),
    "modifies": ("purity", "modified its input query"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_is_one_sentence(attest, name):
    check, sentence = MISBEHAVIOUR[name]
    done = attest("replay", "--allow-import", question(name, Case(q_len=2, kv_len=3), check), "-n", 0)
    assert done.status == 1
    assert done.out.startswith(f"FAIL tests.toys:{name}: {check}\n")
    assert sentence in done.out.splitlines()[1]
    assert "Traceback" not in done.out + done.err


def test_an_exception_keeps_its_whole_text_up_to_a_limit(attest):
    done = attest("replay", "--allow-import", question("raises", Case(q_len=2, kv_len=3)), "-n", 0)
    assert done.out.splitlines()[1:3] == ["  raised RuntimeError: out of luck", "  second line"]
    done = attest("replay", "--allow-import", question("raves", Case(q_len=2, kv_len=3)), "-n", 0)
    assert "characters left out" in done.out
    assert len(done.out) < 2 * sizes().exception_characters


def test_a_tracer_of_another_call_is_one_sentence(attest):
    asked = question("hoarder", Case(q_len=2, kv_len=3))
    done = attest("replay", "--allow-import", asked, "--check", "forward", "--check", "purity", "-n", 0)
    assert done.status == 1
    failure = done.out[done.out.index("FAIL tests.toys:hoarder: purity") :]
    assert "returned out as a tracer" in failure.splitlines()[1]


def test_what_kernels_print_stays_out_of_the_report(attest):
    done = attest("replay", "--allow-import", question("talks", CASES[0]))
    assert done.status == 0
    assert done.out.startswith("PASS tests.toys:talks: forward")
    assert "own words" not in done.out


def test_a_hang_is_one_sentence(attest):
    done = attest("replay", "--allow-import", question("hangs", CASES[0]), "--timeout", 8)
    assert done.status == 1
    assert done.out.startswith(
        "TIMEOUT tests.toys:hangs: forward\n  did not finish within 8 s, in the phase running"
    )


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_nothing_but_text_off_terminals(attest, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = attest("check", "tests.toys:top_left", "-n", 0)
    assert "\x1b" not in done.out + done.err
    assert all(line.startswith("attest: ") for line in done.err.splitlines())


def test_list_names_every_subject_and_its_dialect(attest):
    done = attest("list", "-v")
    assert done.status == 0
    assert "xla.flash_attention" in done.out
    assert "causal top_left" in done.out


def test_list_has_a_line_for_each_subject(attest):
    done = attest("list")
    assert done.status == 0
    lines = done.out.splitlines()
    assert len(lines) == len(catalogue.discover()) + 2
    assert any(line.split() == ["xla.flash_attention", "f32/bf16/f16", "runs", "here"] for line in lines)


COMMANDS = "\x1b[31m\x9b2J\x07\r\u202e\u2028\x7f"


def test_no_control_character_reaches_a_terminal(attest, tmp_path):
    """Whatever a subject, a record, an option or a file says."""
    known = tmp_path / f"{COMMANDS}.toml"
    known.write_text("[[expect]]\nsubject = 3\n")
    path = tmp_path / "run.json"
    failure = Result(f"a.{COMMANDS}", "forward", (COMMANDS,), CASES[0], Verdict.FAIL, message=COMMANDS)
    timeout = replace(failure, verdict=Verdict.TIMEOUT)
    expected = replace(failure, verdict=Verdict.XFAIL, link=COMMANDS)
    write_record(
        RunRecord("quick", 0, (failure, timeout, expected), problems=(COMMANDS,), note=COMMANDS), path
    )
    for command in (
        ("report", path),
        ("compare", path, path),
        ("merge", path),
        ("replay", "--allow-import", question("shouts", Case(q_len=2, kv_len=3)), "-n", 0),
        ("check", "tests.toys:shouts", "-n", 0),
        ("check", COMMANDS),
        ("check", f"{COMMANDS}:x"),
        ("check", "tests.toys:right", "--feature", COMMANDS),
        ("check", "tests.toys:right", "--check", COMMANDS),
        ("check", "tests.toys:right", "--json", f"/nowhere/{COMMANDS}"),
        ("check", "tests.toys:right", "--expectations", known),
        ("replay", '{"case": {"dtype": "\\u001b[31m"}, "subject": "x"}'),
        ("report", COMMANDS),
        (COMMANDS,),
    ):
        done = attest(*command)
        assert done.out + done.err
        assert not set(COMMANDS) & set(done.out + done.err) - set("[31m2J"), command


def test_list_shows_no_control_character(attest, monkeypatch):
    monkeypatch.setattr(catalogue, "discover", lambda: {f"a.{COMMANDS}": None})

    def find(name):
        raise LookupError(f"subject {name} cannot be loaded: {COMMANDS}")

    monkeypatch.setattr(catalogue, "find", find)
    done = attest("list")
    assert "\\x1b" in done.out
    assert not set(COMMANDS) & set(done.out) - set("[31m2J")


def test_a_subject_that_cannot_be_listed_spoils_no_other(attest, monkeypatch):
    def ready():
        raise SystemExit("not me")

    known = {"a.right": toys.right, "b.leaves": replace(toys.right, ready=ready)}
    monkeypatch.setattr(catalogue, "discover", lambda: known)
    monkeypatch.setattr(catalogue, "find", known.__getitem__)
    done = attest("list")
    assert done.status == 0
    assert [line.split()[0] for line in done.out.splitlines()[:2]] == ["a.right", "b.leaves"]
    assert "broken: SystemExit: not me" in done.out
    done = attest("list", "-v")
    assert "broken    SystemExit: not me" in done.out
    assert "dtypes    float32" in done.out


def test_a_replay_draws_which_keys_are_seen(attest):
    options = ("--subject", "tests.toys:top_left", "--check", "forward", "--picture", "-n", 0)
    done = attest("replay", '{"q_len": 2, "kv_len": 4, "causal": true}', *options)
    assert done.status == 1
    assert "\n0 #??.\n1 ##??\n" in done.out
