"""The clean kernels are correct: each way to compute gives the answer of the oracle."""

from functools import cache

import pytest

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.kinds import REFUSED
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject
from tests.alarms.emulated import SUBJECTS as EMULATED
from tests.alarms.subjects import OUTSIDERS, choose
from tests.alarms.together import judge_together

# Each feature at least once, lengths that cross blocks, and rows that see nothing.
CASES = {
    "masked": {"batch": 2, "q_len": 70, "kv_len": 90, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "seed": 11}
    | {
        "mask": "bh",
        "integer_mask": True,
        "empty_rows": True,
        "sinks": 5,
        "causal": True,
        "dtype": "bfloat16",
    },
    "biased": {
        "batch": 2,
        "q_len": 20,
        "kv_len": 140,
        "q_heads": 2,
        "kv_heads": 2,
        "head_dim": 24,
        "seed": 12,
    }
    | {"bias": "1h1", "bias_hides": True, "soft_cap": 2.0, "dropout": 0.25, "value_dim": 8},
    "padded": {"batch": 3, "q_len": 66, "kv_len": 66, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "seed": 13}
    | {"lengths": [[66, 3], [0, 66], [20, 40]], "window": [9, 2], "bias": "bhq", "scale": -0.5},
    "packed": {"q_len": 90, "kv_len": 80, "q_heads": 2, "kv_heads": 2, "head_dim": 8, "seed": 14}
    | {"lengths": [[30, 20], [0, 10], [40, 40]], "causal": True, "sinks": 2, "sinks_per_head": True},
    "segmented": {"batch": 2, "q_len": 40, "kv_len": 40, "head_dim": 40, "segments": 3, "seed": 15}
    | {"normalized": False, "sinks": 1, "dropout": 0.1, "dtype": "float16", "soft_cap": 30.0},
    "poisoned": {
        "batch": 2,
        "q_len": 33,
        "kv_len": 70,
        "q_heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "seed": 16,
    }
    | {"lengths": [[33, 7], [9, 70]], "bias": "b1q", "soft_cap": 5.0, "window": [4, 4], "poison": True},
}
JUDGED = ("forward", "lse", "gradients")
COMPILED = [subject for subject in OUTSIDERS if subject.name.startswith("outsider.jax")]
PLAIN = [subject for subject in OUTSIDERS if subject.name.endswith(".plain")]


@cache
def case_of(name: str) -> Case:
    return case_from_json(CASES[name])


def red_results(subject: Subject, case: Case, checks: tuple[str, ...]) -> list[str]:
    results = judge(subject, case, checks)
    return [f"{result.check}: {result.message}" for result in results if result.verdict.red]


@pytest.mark.parametrize("name", sorted(CASES))
def test_numpy_kernels_answer_as_the_oracle_does(name: str) -> None:
    subjects = [s for s in OUTSIDERS if s not in COMPILED]
    judged = [result for _, of in judge_together(subjects, case_of(name), JUDGED) for result in of]
    assert len(judged) > len(JUDGED)
    assert [f"{x.subject}, {x.check}: {x.message}" for x in judged if x.verdict.red] == []


@pytest.mark.parametrize(
    ("subject", "name"),
    [(s, sorted(CASES)[number % len(CASES)]) for number, s in enumerate(COMPILED)],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_jax_kernels_answer_as_the_oracle_does(subject: Subject, name: str) -> None:
    if subject.why_not(case_of(name)) is None:
        assert red_results(subject, case_of(name), JUDGED) == []


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_plain_jax_kernel_answers_every_kind_of_case(name: str) -> None:
    (subject,) = (s for s in PLAIN if s in COMPILED)
    assert red_results(subject, case_of(name), JUDGED) == []


@pytest.mark.parametrize("name", ["masked", "poisoned"])
@pytest.mark.parametrize("subject", EMULATED, ids=lambda s: s.name)
def test_the_emulator_answers_as_the_oracle_does(subject: Subject, name: str) -> None:
    assert red_results(subject, case_of(name), JUDGED) == []


@pytest.mark.parametrize("subject", PLAIN, ids=lambda s: s.name)
def test_clean_kernels_refuse_malformed_calls(subject: Subject) -> None:
    from attest.conformance.checks import all_checks

    checks = tuple(n for n, check in all_checks().items() if check.kind is REFUSED)
    case = Case(batch=2, q_len=5, kv_len=5, q_heads=2, kv_heads=2, head_dim=4)
    assert red_results(subject, case, checks) == []


def test_subjects_that_are_judged_together_get_the_verdicts_that_they_get_alone() -> None:
    subjects = [s for s in OUTSIDERS if s not in COMPILED][:4]
    case = case_of("segmented")
    together = {subject.name: results for subject, results in judge_together(subjects, case, JUDGED)}
    assert set(together) == {subject.name for subject in subjects}
    for subject in subjects:
        alone = judge(subject, case, JUDGED)
        assert together[subject.name] == alone
        assert {result.verdict for result in alone} == {Verdict.PASS}


def test_a_name_chooses_the_subjects_that_begin_with_it() -> None:
    (group,) = choose(["outsider.numpy"])
    assert len(group) >= 12
    assert {subject.name.rpartition(".")[0] for subject in group} == {"outsider.numpy"}
    everyone = {subject.name for group in choose(["all"]) for subject in group}
    assert {"xla.flash_attention", "xla.attention", "emulator.flash", "outsider.jax.plain"} <= everyone
