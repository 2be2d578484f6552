"""Failures of one mistake are one cause, and those of two are two."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cases.case import Case
from attest.conformance.causes.card import card, headline
from attest.conformance.causes.group import causes
from attest.conformance.judging.failure import replay_line
from attest.conformance.record import Element, Measurement, Result, Verdict, to_shrink
from tests.conformance.running.fakes import result

GRADIENTS = ("dquery", "dkey", "dvalue")
CHECKS = {"forward": ("out",), "lse": ("lse",), "gradients": GRADIENTS}
ALL = frozenset({"out", "lse", *GRADIENTS})
# Every combination of three features, twice, in two dtypes.
CASES = tuple(
    Case(
        q_len=20 + place,
        kv_len=20 + place,
        causal=causal,
        window=(3, None) if window else None,
        soft_cap=5.0 if cap else None,
        seed=seed,
        dtype=dtype,
    )
    for place, (causal, window, cap, seed, dtype) in enumerate(
        product((False, True), (False, True), (False, True), (0, 1), ("float32", "bfloat16"))
    )
)


def measured(output: str, wrong: bool, semantic: bool = True) -> Measurement:
    broken = ("bound", "semantics") if semantic else ("rms",)
    worst = Element((0, 14, 0, 0), 1.0, 2.0, "0x0", "0x0")
    if not wrong:
        return Measurement(output, 40, 0.1, 1.0, 1.0, 0.0, worst=worst)
    return Measurement(output, 40, 9.0, 9.0, 9.0, 0.0, broken, worst, 3, 40, ("query 14 of 20",))


def run(mistake: Callable[[Case], frozenset[str]], semantic: bool = True, cases=CASES) -> list[Result]:
    """The results of a kernel whose wrong outputs depend on the case."""
    return [
        result(
            case,
            check,
            Verdict.FAIL if mistake(case) & set(outputs) else Verdict.PASS,
            measurements=tuple(measured(name, name in mistake(case), semantic) for name in outputs),
            message="outside the error model: some" if mistake(case) & set(outputs) else "",
        )
        for case in cases
        for check, outputs in CHECKS.items()
    ]


def when(met: Callable[[Case], bool], *outputs: str) -> Callable[[Case], frozenset[str]]:
    return lambda case: frozenset(outputs or ALL) if met(case) else frozenset()


def test_a_mistake_of_one_feature_is_one_cause():
    (cause,) = causes(run(when(lambda case: case.causal)))
    assert cause.condition is not None
    assert cause.condition.sentence == "fails 16 of 16 cases with causal, 0 of 16 without"
    assert len(cause.results) == 48
    assert headline(cause) == "out, lse, dquery, dkey and dvalue are wrong with causal"
    assert cause.stage.startswith("the logits")


def test_a_mistake_of_two_features_together_names_both():
    (cause,) = causes(run(when(lambda case: case.causal and case.window is not None)))
    assert cause.condition is not None
    assert cause.condition.words == "with causal and window"


def test_two_mistakes_in_the_forward_pass_are_two_causes():
    mistakes = run(when(lambda case: case.causal or case.soft_cap is not None))
    words = [cause.condition and cause.condition.words for cause in causes(mistakes)]
    assert len(words) == 2
    assert set(words) <= {"with causal", "with soft_cap"}


def test_two_mistakes_in_different_gradients_are_two_causes():
    def mistake(case: Case) -> frozenset[str]:
        in_cap = {"dquery", "dkey"} if case.soft_cap is not None else set()
        return frozenset(in_cap | ({"dvalue"} if case.window is not None else set()))

    found = causes(run(mistake))
    assert {cause.stage for cause in found} >= {"dS, the gradient of the logits"}
    assert {cause.condition and cause.condition.words for cause in found} == {"with soft_cap", "with window"}


def test_a_mistake_in_the_forward_pass_explains_wrong_gradients():
    (cause,) = causes(run(when(lambda case: case.causal, "lse", *GRADIENTS)))
    assert cause.outputs == {"out": False, "lse": True, "dquery": True, "dkey": True, "dvalue": True}


def test_a_mistake_everywhere_has_no_condition():
    (cause,) = causes(run(when(lambda _case: True, "dvalue"), semantic=False))
    assert cause.condition is None
    assert cause.of_precision
    assert headline(cause) == "dvalue is imprecise"
    assert cause.stage == "dV = P^T dO"


def test_a_mistake_that_shows_now_and_then_is_not_cut_in_pieces():
    random = Random(3)
    failing = {case for case in CASES if random.random() < 0.6}
    assert len(causes(run(lambda case: ALL if case in failing else frozenset()))) == 1


@given(st.randoms(use_true_random=False))
def test_the_order_of_results_does_not_matter(random):
    results = run(when(lambda case: case.causal or case.soft_cap is not None))
    shuffled = random.sample(results, len(results))
    assert causes(shuffled) == causes(results)


def test_what_follows_from_wrong_numbers_folds_under_them():
    results = run(when(lambda case: case.causal))
    vmap = result(CASES[-1], "transforms.vmap", Verdict.FAIL, measurements=(measured("out", True),))
    leak = result(CASES[-1], "poison", Verdict.FAIL, message="NaN changed out")
    first, second = causes([*results, vmap, leak])
    assert first.follows == (vmap,)
    assert second.results == (leak,)
    assert headline(second) == "poison NaN changed out"


def test_an_exception_is_one_cause_by_its_line():
    def raised(case: Case, check: str, line: int) -> Result:
        message = f"raised ValueError: shape ({case.q_len},)\nat kernel.py:{line} in step: x + y"
        return result(case, check, Verdict.FAIL, message=message)

    same = [raised(case, check, 7) for case in CASES[:5] for check in (*CHECKS, "transforms.vmap")]
    first, second = causes([*same, raised(CASES[9], "forward", 8)])
    assert (len(first.results), len(second.results)) == (20, 1)
    assert "at kernel.py:7 in step: x + y" in card(first, 1, 2)


def test_calls_that_are_accepted_are_one_cause():
    silent = "silently accepted; expected a refusal that names {}"
    results = [
        result(CASES[0], f"refusal.{name}", Verdict.FAIL, message=silent.format(name)) for name in "abc"
    ]
    (cause,) = causes(results)
    assert len(cause.results) == 3
    assert "same cause: refusal.b 1, refusal.c 1" in card(cause, 1, 1)


def test_the_simplest_case_is_shown():
    results = run(when(lambda case: case.causal))
    failing = next(r for r in results if r.verdict is Verdict.FAIL)
    minimal = replace(failing, case=Case(causal=True, q_len=2), minimal=True, shrunk_from=failing.case.id)
    (cause,) = causes([*results, minimal])
    assert cause.example == minimal
    shown = card(cause, 1, 1).splitlines()
    assert shown[0].startswith("CAUSE 1 of 1, 49 failures: toys.right: out, lse")
    assert "  simplest failing case: float32, batch 1, 2 queries x 1 key, heads 1, head dim 1" in "\n".join(
        shown
    )
    assert any(line.startswith("  out: wrong in 3 of 40 elements: query 14 of 20;") for line in shown)
    assert shown[-2].startswith("  replay: attest replay ")


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.XFAIL, Verdict.PASS, Verdict.UNSUPPORTED])
def test_other_verdicts_have_no_cause(verdict):
    assert causes([result(verdict=verdict, message="whatever")]) == ()


@pytest.mark.parametrize("verdict", [Verdict.ERROR, Verdict.XPASS])
def test_other_red_verdicts_have_a_cause(verdict):
    (cause,) = causes([result(verdict=verdict, message="whatever")])
    assert headline(cause) == f"{verdict} whatever"


def test_a_mistake_that_needs_more_than_its_feature_is_still_named_by_it():
    """At the edge of a block, say: a few of the cases with a window fail, and none without."""
    windows = [case for case in CASES if case.window is not None]
    failing = set(windows[::2])
    (cause,) = causes(run(lambda case: ALL if case in failing else frozenset()))
    assert cause.condition is not None
    assert cause.condition.sentence == "fails 8 of 16 cases with window, 0 of 16 without"


@pytest.mark.found_outside
def test_an_output_of_another_name_is_no_traceback():
    """A record may come from elsewhere, and any text may name an output there."""
    (cause,) = causes([Result("k", "forward", (), Case(), Verdict.FAIL, (measured("strange", True),))])
    assert list(cause.outputs) == ["strange"]
    assert headline(cause) == "strange is wrong"


def test_another_check_that_fails_for_a_reason_of_its_own_is_a_cause_of_its_own():
    """The kernel is wrong with causal order; under vmap it is wrong without it, too."""
    results = run(when(lambda case: case.causal))
    vmap = result(
        CASES[0], "transforms.vmap", Verdict.FAIL, measurements=(measured("out", True),), message="x"
    )
    assert not CASES[0].causal
    first, second = causes([*results, vmap])
    assert first.follows == ()
    assert second.results == (vmap,)


def test_lost_precision_explains_no_wrong_numbers_of_another_check():
    results = run(when(lambda _case: True, "out"), semantic=False)
    vmap = result(
        CASES[0], "transforms.vmap", Verdict.FAIL, measurements=(measured("out", True),), message="x"
    )
    assert [cause.results[-1] for cause in causes([*results, vmap])][1:] == [vmap]
    assert ("toys.right", "transforms.vmap", True) in to_shrink([*results, vmap])
    imprecise = replace(vmap, measurements=(measured("out", True, semantic=False),))
    assert len(causes([*results, imprecise])) == 1
    assert list(to_shrink([*results, imprecise])) == [("toys.right", "forward", False)]


def test_the_smallest_case_of_several_blocks_stands_beside_the_simplest():
    """Of the failing cases of the run; of those that are precise, it says nothing."""
    results = run(when(lambda case: case.causal))
    failing = [r for r in results if r.verdict is Verdict.FAIL]
    several = [replace(r, several_blocks=True) for r in failing if r.case.q_len >= 30]
    right = [r for r in results if r.verdict is Verdict.PASS]
    minimal = replace(failing[0], case=Case(causal=True, q_len=2), minimal=True)
    (cause,) = causes([*several, *right, minimal])
    line = card(cause, 1, 1).splitlines()[-2]
    smallest = min((r for r in several if r.check == "forward"), key=lambda r: r.case.q_len)
    assert line == f"  smallest of several blocks: {replay_line(smallest)}"
    (cause,) = causes([*several, *right, replace(minimal, several_blocks=True)])
    assert cause.of_several_blocks is None
    (cause,) = causes([*failing, *right, minimal])
    assert cause.of_several_blocks is None
    assert "several blocks" not in card(cause, 1, 1)
    imprecise = [replace(r, measurements=(measured("out", True, semantic=False),)) for r in several]
    (cause,) = causes([*imprecise, *right, minimal])
    assert cause.of_several_blocks is None


def test_without_an_lse_the_stage_of_a_wrong_out_is_open():
    """A wrong mask makes both wrong; what multiplies the values makes out wrong alone."""
    results = run(when(lambda case: case.causal, "out"))
    (cause,) = causes(results)
    assert cause.stage == "P V, the normaliser or dropout, after the logits"
    (cause,) = causes([r for r in results if r.check != "lse"])
    assert cause.stage.startswith("the forward pass: the logits, which keys are visible, or what follows")
