"""Scores: a defect is killed, a correct rewrite is not, and a run goes on where another one ended."""

import json
from dataclasses import replace

import pytest

from attest.conformance.mutants import clean_score, package_score, run
from attest.conformance.mutants.catalogue import Edit, Mutant, load
from attest.conformance.mutants.run import scores_from_json
from attest.conformance.mutants.summary import interval, lost, totals
from attest.conformance.mutants.table import lost as lost_text
from attest.conformance.mutants.table import markdown, text
from attest.conformance.mutants.verdict import Score

KILLED = Score("a", "clean_kernel", False, "mask", "quick", 0, 3, "wrong", "forward", {"q_len": 2}, "wrong")
SURVIVED = replace(KILLED, name="b", defect_class="bias", how="", check="", case=None, message="", results=9)
PASSED = replace(SURVIVED, name="c", group="nulls", null=True)


def quick(name, group="clean_kernel"):
    return clean_score.scored(clean_score.Judge(), load(group)[name], "quick", 0, {})


def test_a_defect_of_the_clean_kernel_is_killed():
    score = quick("causal_top_left")
    assert (score.how, score.null, score.defect_class) == ("wrong", False, "causal")
    assert score.results > 0
    assert score.case is not None


def test_totals_count_names_and_intervals():
    again = replace(KILLED, seed=1), replace(SURVIVED, seed=1, how="crash")
    (found,) = totals([KILLED, SURVIVED, PASSED, *again])
    assert (found.total, found.killed, found.null_total, found.null_killed) == (2, 1, 1, ())
    assert found.survived == {"b": (0,)}
    assert found.by_class == {"bias": (0, 1), "mask": (1, 1)}
    assert found.by_how == {"crash": 1, "wrong": 2}
    assert found.low == pytest.approx(0.0945, abs=1e-4)  # the example of 1 in 2 by Wilson's formula
    assert found.high == pytest.approx(0.9055, abs=1e-4)
    shown = text([found], {"d": "needs a GPU", "e": "needs a GPU"})
    assert "defects killed with every seed: 1 of 2, 50.0 % (95 % interval 9.5 to 90.5)" in shown
    assert "survived: b (seed 0)" in shown
    assert "not scored here: 2, needs a GPU" in shown
    assert "| `b` | survives seed 0 |" in markdown([found], {"clean_kernel": "0123"}, ())


def test_kills_are_counted_by_the_kernel_that_has_the_defect():
    in_kernels = [
        replace(KILLED, name="x", group="kernels", subject="triton.interpret"),
        replace(SURVIVED, name="y", group="kernels", subject="triton.interpret"),
        replace(KILLED, name="z", group="kernels", subject="ring.xla"),
    ]
    (found,) = totals([KILLED, *in_kernels])
    assert found.by_subject == {"ring.xla": (1, 1), "triton.interpret": (1, 2)}
    assert "  triton.interpret: 1 of 2\n" in text([found], {})
    assert "| kernel | quick |\n| --- | --- |\n| ring.xla | 1 of 1 |" in markdown([found], {}, ())
    (clean,) = totals([KILLED])
    assert "kernel |" not in markdown([clean], {}, ())


def test_a_red_rewrite_is_a_false_alarm():
    (found,) = totals([replace(PASSED, how="wrong", check="forward")])
    assert found.null_killed == ("c",)
    assert "false alarm: c" in text([found], {})


@pytest.mark.parametrize(("killed", "total"), [(0, 0), (0, 5), (5, 5), (200, 200), (3, 7)])
def test_an_interval_holds_the_share(killed, total):
    low, high = interval(killed, total)
    assert 0 <= low <= (killed / total if total else 0.5) <= high <= 1


@pytest.fixture
def counted(monkeypatch):
    """Runs scores in this process, where those that are made are counted."""

    class Made(list):
        left_out = frozenset()

    made = Made()

    def performed(_work, jobs, _workers, left_out=frozenset()):
        made.left_out = left_out
        for mutant, profile, seed in jobs:
            made.append((mutant.name, profile, seed))
            if mutant.subject:
                yield mutant.name, "needs a GPU"
            else:
                yield mutant.name, replace(KILLED, name=mutant.name, profile=profile, seed=seed)

    monkeypatch.setattr(run, "_performed", performed)
    return made


def test_a_run_goes_on_where_another_one_ended(counted, tmp_path):
    path = tmp_path / "scores.json"
    mutants = [
        Mutant(name="a", group="clean_kernel", change="x"),
        Mutant(name="b", group="nulls", change="y"),
    ]
    shown = []
    first = run.score_all(mutants[:1], ["quick"], [0], 1, path, lambda *now: shown.append(now[1:]))
    assert scores_from_json(path.read_bytes(), "scores") == first
    again = run.score_all(mutants, ["quick"], [0, 1], 1, path, lambda *now: shown.append(now[1:]))
    assert counted == [("a", "quick", 0), ("b", "quick", 0), ("a", "quick", 1), ("b", "quick", 1)]
    assert len(again.scores) == 4
    assert shown == [(1, 1), (2, 4), (3, 4), (4, 4)]


def test_scores_of_another_catalogue_are_refused(counted, tmp_path):
    path = tmp_path / "scores.json"
    run.score_all([Mutant(name="a", group="nulls", change="x")], ["quick"], [0], 1, path, lambda *_: None)
    path.write_text(json.dumps({**json.loads(path.read_text()), "catalogue": {"nulls": "0"}}))
    with pytest.raises(ValueError, match="its scores are of the group nulls as 0, which is "):
        run.score_all([Mutant(name="b", group="nulls", change="x")], ["quick"], [0], 1, path, lambda *_: None)


def test_what_was_made_for_a_class_is_left_out_and_its_scores_are_not_mixed_with_others(counted, tmp_path):
    path, mutants = tmp_path / "scores.json", [load("clean_kernel")["sinks_scaled"]]
    found = run.score_all(mutants, ["quick"], [0], 1, path, lambda *_: None, "sinks")
    assert found.ablated == "sinks"
    assert counted.left_out >= {"sinks_scaled", "sinks_capped"}
    assert "causal_top_left" not in counted.left_out
    with pytest.raises(ValueError, match="without the cases made for sinks, these are of all cases: name"):
        run.score_all(mutants, ["quick"], [0], 1, path, lambda *_: None)


def test_what_is_lost_was_killed_before():
    kills = {"b": {"quick": {"0": {}, "1": {}}}, "a": {"quick": {"0": {}}}}
    assert lost([SURVIVED, KILLED, PASSED], kills) == ["b"]
    assert lost([replace(SURVIVED, seed=2)], kills) == []
    assert lost_text("bias", ["b"]) == "only the cases and sizes made for the class bias kill 1 defect: b"
    assert lost_text("bias", []) == "without the cases and sizes made for the class bias, no defect is lost"


def test_a_mutant_that_cannot_run_here_is_skipped(counted):
    mutant = Mutant(name="a", group="kernels", change="", subject="s")
    found = run.score_all([mutant], ["quick"], [0], 1, None, lambda *_: None)
    assert (found.scores, found.skipped) == ((), {"a": "needs a GPU"})


def package_mutant(planted, subject="xla.attention"):
    edit = Edit("kernels/attention.py", '"""', f'{planted}\n"""')
    return Mutant(name="edited", group="kernels", change="x", subject=subject, check="forward", edits=(edit,))


@pytest.fixture
def asked(monkeypatch):
    """What the process that judges a mutant of the package is asked, and what it says."""
    said = {}

    def run_planted(subject, folder, *arguments, seconds):
        said["asked"] = (subject, *arguments[2:])
        assert (folder / "attest" / "__init__.py").exists()
        return said["done"]

    def plant(_mutant, folder):
        (folder / "attest").mkdir()
        (folder / "attest" / "__init__.py").touch()

    monkeypatch.setattr(package_score, "run_planted", run_planted)
    monkeypatch.setattr(package_score, "plant", plant)
    return said


def done(returncode, stdout="", stderr=""):
    from subprocess import CompletedProcess

    return CompletedProcess([], returncode, stdout, stderr)


def test_what_a_process_says_becomes_a_score(asked):
    mutant = package_mutant("")
    red = {"how": "wrong", "check": "forward", "case": {}, "message": "outside"}
    asked["done"] = done(0, f"noise\n{json.dumps({'results': 4, 'red': red})}\n")
    score = package_score.scored(mutant, "quick", 7)
    assert asked["asked"] == ("xla.attention", "xla.attention", "quick", "7", "forward")
    assert (score.killed, score.how, score.results, score.seed) == (True, "wrong", 4, 7)
    asked["done"] = done(0, json.dumps({"results": 9, "red": None}))
    assert not package_score.scored(mutant, "quick", 7).killed
    asked["done"] = done(-6, stderr="Abort")
    assert package_score.scored(mutant, "quick", 7).how == "crash"
    asked["done"] = done(0, json.dumps({"reason": "needs a GPU"}))
    with pytest.raises(package_score.NotHereError, match="needs a GPU"):
        package_score.scored(mutant, "quick", 7)
