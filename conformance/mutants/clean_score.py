"""Scores mutants of the clean kernel: each is judged until the first red verdict.

A mutant that runs in NumPy is judged first on the cases where its answer differs from that of the clean
kernel. On the others the checks of answers say of it what they say of the clean kernel.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.mutants.catalogue import Mutant
from attest.conformance.mutants.clean_kernel import Planted, planted_kernel
from attest.conformance.mutants.verdict import Score, decided_by, survivor
from attest.conformance.record import Result
from attest.conformance.running.judge import judge_trial
from attest.conformance.running.plan import load_profile, tasks

Planned = tuple[Case, tuple[str, ...]]
Kills = Mapping[str, Mapping[str, Mapping[str, Any]]]

KILLS = Path(__file__).with_name("kills.json")
# Cases whose arrays and exact answers are kept for the next defect.
_KEPT = 150
# Questions like those that killed a defect before, which are asked first.
_PROMISING = 30
# The checks that look at nothing but a kernel's answers.
_OF_ANSWERS = ("forward", "lse", "gradients", "determinism", "poison")
# What the trials of one case have in common, whichever defect is judged.
_SHARED = ("built", "answer", "predictions", "repeated_predictions", "coarse_predictions")


class Judge:
    """Judges mutants; keeps what the trials of a case share, and what the kernel without a defect answers."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], dict[str, Any]] = OrderedDict()
        self._clean: dict[tuple[str, str], dict[str, bytes]] = {}
        self._kernels: dict[str, Planted] = {}
        self._planted = ExitStack()

    def first_red(self, kernel: Planted, case: Case, checks: Iterable[str]) -> Result | None:
        """Return the first red result on a case."""
        trial = Trial(kernel.subject, case)
        key = (case.id, trial.numerics.splits)
        trial.__dict__.update(self._kept.get(key, {}))
        # A mutant is asked for red verdicts alone, and an INCONCLUSIVE one is none.
        trial.__dict__["blind_spots"] = ()
        red = None
        for check in checks:
            (result,) = judge_trial(trial, [check])
            if result.verdict.red:
                red = result
                break
        self._kept[key] = {name: trial.__dict__[name] for name in _SHARED if name in trial.__dict__}
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return red

    def shows(self, mutant: Mutant, kernel: Planted, case: Case) -> bool:
        """Return whether the defect changes a bit of the answer to a case, with or without its poison."""
        both = (replace(case, poison=poison) for poison in {False, case.poison})
        return any(_bits(kernel, one) != self._clean_bits(mutant.variant, one) for one in both)

    def clean(self, variant: str) -> Planted:
        """Return the kernel without a defect, which is kept."""
        if variant not in self._kernels:
            clean = planted_kernel(clean_mutant(variant=variant))
            self._kernels[variant] = self._planted.enter_context(clean)
        return self._kernels[variant]

    def _clean_bits(self, variant: str, case: Case) -> dict[str, bytes]:
        key = (variant, case.id)
        if key not in self._clean:
            self._clean[key] = _bits(self.clean(variant), case)
        return self._clean[key]


def clean_mutant(lacks: tuple[str, ...] = (), variant: str = "plain") -> Mutant:
    """Return the clean kernel as a mutant without edits."""
    return Mutant(change="", group="nulls", lacks=lacks, variant=variant)


def _bits(kernel: Planted, case: Case) -> dict[str, bytes]:
    """Return a digest of each output, or the error that was raised."""
    assert kernel.answer is not None
    try:
        answer = kernel.answer(build(case))
    except Exception as error:
        return {"raised": repr(error).encode()}
    return {name: hashlib.sha256(np.ascontiguousarray(x)).digest() for name, x in answer.items()}


def scored(judge: Judge, mutant: Mutant, profile: str, seed: int, kills: Kills) -> Score:
    """Return the score of a mutant.

    kills: by name, profile and seed, what killed mutants before; the most similar cases are judged first.
    """
    planned = drawn(mutant, profile, seed)
    with planted_kernel(mutant) as kernel:
        results, red = _first_kill(judge, mutant, kernel, planned, kills)
    plain = survivor(mutant, profile, seed, results)
    return plain if red is None else replace(plain, **decided_by(red))


def _first_kill(
    judge: Judge, mutant: Mutant, kernel: Planted, planned: Sequence[Planned], kills: Kills
) -> tuple[int, Result | None]:
    """Return the number of results that were judged, and the first red one.

    First come the questions most like those that killed the defect before. Then the checks of answers alone,
    on the cases where the defect changes an answer. Then the other checks.
    """
    count = 0
    for case, check in _promising(kills.get(mutant.name, {}), planned):
        count += 1
        red = _red(judge, mutant, kernel, case, [check])
        if red is not None:
            return count, red
    ordered = sorted(planned, key=lambda one: _rank(mutant, one))
    answers = kernel.answer is not None
    if answers:
        for case, checks in ordered:
            asked = [check for check in checks if check in _OF_ANSWERS]
            if asked and judge.shows(mutant, kernel, case):
                count += len(asked)
                red = _red(judge, mutant, kernel, case, asked)
                if red is not None:
                    return count, red
    for case, checks in ordered:
        asked = [check for check in checks if not answers or check not in _OF_ANSWERS]
        count += len(asked)
        red = _red(judge, mutant, kernel, case, asked)
        if red is not None:
            return count, red
    return count, None


def _red(judge: Judge, mutant: Mutant, kernel: Planted, case: Case, checks: Sequence[str]) -> Result | None:
    """Return the first red result that is red again where nothing has been called before.

    A defect may keep something from one call to the next. What no replay shows is no kill.
    """
    for number, check in enumerate(checks):
        # All at once, since they share what they compute; one by one behind a red one that was not confirmed.
        red = judge.first_red(kernel, case, checks if number == 0 else [check])
        if red is None and number == 0:
            return None
        if red is not None:
            with planted_kernel(mutant) as fresh:
                if judge.first_red(fresh, case, [red.check]) is not None:
                    return red
    return None


def _promising(kills: Mapping[str, Mapping[str, Any]], planned: Sequence[Planned]) -> list[tuple[Case, str]]:
    """Return the questions of a profile that differ least from those that killed the defect before."""
    killers: dict[str, list[dict[str, Any]]] = {}
    for seeds in kills.values():
        for kill in seeds.values():
            killers.setdefault(kill["check"], []).append(kill["case"])

    def distance(question: tuple[Case, str]) -> tuple[int, str, str]:
        case, check = question
        fields = case.to_json()
        differ = (
            sum(fields.get(field) != old.get(field) for field in fields.keys() | old.keys())
            for old in killers[check]
        )
        return min(differ), case.id, check

    questions = [(case, check) for case, checks in planned for check in checks if check in killers]
    return sorted(questions, key=distance)[:_PROMISING]


def drawn(mutant: Mutant, profile: str, seed: int) -> list[Planned]:
    """Return the cases of a profile for a mutant, each with its checks."""
    return _drawn(mutant.lacks, mutant.variant, profile, seed)


@cache
def _drawn(lacks: tuple[str, ...], variant: str, profile: str, seed: int) -> list[Planned]:
    with planted_kernel(clean_mutant(lacks, variant)) as kernel:
        return [one for task in tasks(kernel.subject, load_profile(profile), seed) for one in task.cases]


def _rank(mutant: Mutant, planned: Planned) -> tuple[bool, int, str]:
    """Return what sorts cases near the defect first, then the cheap ones."""
    case, checks = planned
    near = not mutant.near or bool(case.features & set(mutant.near))
    pairs = case.batch * case.q_heads * (case.q_len + 64) * (case.kv_len + 64) * len(checks)
    return not near, pairs, case.id


def read_kills() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what killed each mutant when the scores were last made: by name, profile and seed."""
    return json.loads(KILLS.read_text(encoding="utf-8"))


def with_kills(scores: Iterable[Score]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the kills with those of some scores in the place of older ones of the same profile and seed."""
    kills = read_kills()
    for found in scores:
        if found.group != "clean_kernel":
            continue
        of_profile = kills.setdefault(found.name, {}).setdefault(found.profile, {})
        of_profile.pop(str(found.seed), None)
        if found.killed:
            of_profile[str(found.seed)] = {"check": found.check, "case": found.case}
    return kills
