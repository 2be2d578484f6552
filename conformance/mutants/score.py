"""Counts the planted defects that a profile kills: each is judged until the first red verdict.

    python -m tests.planted_defects.score --profile quick --seed 0 1 2 --workers 2 --out scores.json

--kills adds what was killed to kills.json, from which the test suite judges those cases again.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Result
from attest.conformance.running.judge import judge_trial
from attest.conformance.running.plan import load_profile, tasks
from tests.alarms.processes import SINGLE_THREADED
from tests.planted_defects.planting import Mutant, Planted, load, planted_kernel

Planned = tuple[Case, tuple[str, ...]]

KILLS = Path(__file__).with_name("kills.json")
# Cases whose arrays and exact answers are kept for the next defect.
_KEPT = 150
# Questions like those that killed a defect before, which are asked first.
_PROMISING = 30
# Characters of a message that are printed.
_SHOWN = 200
# The checks that look at nothing but a kernel's answers.
_OF_ANSWERS = ("forward", "lse", "gradients", "determinism", "poison")
# How messages begin where a subject raised, or the check itself.
_CRASHES = ("raised", "the check itself raised")
# What the trials of one case have in common, whichever defect is judged.
_SHARED = ("built", "answer", "predictions", "repeated_predictions", "coarse_predictions")


@dataclass(frozen=True)
class Score:
    """What became of one mutant: killed by a check on a case, or not after so many cases.

    crashed: what was red is that it raised, which is no wrong answer: the mutant itself is wrong.
    """

    name: str
    profile: str
    seed: int
    killed: bool
    cases: int
    check: str = ""
    case: dict[str, Any] | None = None
    message: str = ""
    crashed: bool = False


class Judge:
    """Judges mutants; keeps what the trials of a case share, and what the kernel without a defect answers."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], dict[str, Any]] = OrderedDict()
        self._clean: dict[tuple[str, str], dict[str, bytes]] = {}
        self._kernels: dict[str, Planted] = {}
        self._planted = ExitStack()

    def first_red(self, kernel: Planted, case: Case, checks: Iterable[str]) -> Result | None:
        """The first red result on a case."""
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
        """Whether the defect changes a bit of the answer, to a poisoned case with or without its poison."""
        both = (replace(case, poison=poison) for poison in {False, case.poison})
        return any(_bits(kernel, one) != self._clean_bits(mutant.variant, one) for one in both)

    def _clean_bits(self, variant: str, case: Case) -> dict[str, bytes]:
        key = (variant, case.id)
        if variant not in self._kernels:
            clean = planted_kernel(Mutant("", "", (), variant=variant))
            self._kernels[variant] = self._planted.enter_context(clean)
        if key not in self._clean:
            self._clean[key] = _bits(self._kernels[variant], case)
        return self._clean[key]


def _bits(kernel: Planted, case: Case) -> dict[str, bytes]:
    """A digest of each output, or the error that was raised."""
    assert kernel.answer is not None
    try:
        answer = kernel.answer(build(case))
    except Exception as error:
        return {"raised": repr(error).encode()}
    return {name: hashlib.sha256(np.ascontiguousarray(x)).digest() for name, x in answer.items()}


def score(
    judge: Judge, mutant: Mutant, kernel: Planted, planned: Sequence[Planned]
) -> tuple[int, Result | None]:
    """How many cases were judged, and the first red result.

    First come the questions most like those that killed the defect before. Then the checks of answers alone,
    on the cases where the defect changes an answer: on others they say what they say of a clean kernel. Then
    the other checks.
    """
    for number, (case, check) in enumerate(_promising(mutant.name, planned), start=1):
        red = judge.first_red(kernel, case, [check])
        if red is not None:
            return number, red
    ordered = sorted(planned, key=lambda one: _rank(mutant, one))
    if kernel.answer is not None:
        for number, (case, checks) in enumerate(ordered, start=1):
            asked = [check for check in checks if check in _OF_ANSWERS]
            if asked and judge.shows(mutant, kernel, case):
                red = judge.first_red(kernel, case, asked)
                if red is not None:
                    return number, red
    for number, (case, checks) in enumerate(ordered, start=1):
        asked = [check for check in checks if kernel.answer is None or check not in _OF_ANSWERS]
        red = judge.first_red(kernel, case, asked)
        if red is not None:
            return number, red
    return len(ordered), None


def _promising(name: str, planned: Sequence[Planned]) -> list[tuple[Case, str]]:
    """The questions of a profile that differ least from those that killed the defect with other seeds."""
    killers: dict[str, list[dict[str, Any]]] = {}
    for seeds in _kills().get(name, {}).values():
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


def _kills() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(KILLS.read_text(encoding="utf-8"))


def drawn(mutant: Mutant, profile: str, seed: int) -> list[Planned]:
    """The cases of a profile, each with its checks, for a mutant; they depend on its declarations alone."""
    return _drawn(mutant.lacks, mutant.variant, profile, seed)


@cache
def _drawn(lacks: tuple[str, ...], variant: str, profile: str, seed: int) -> list[Planned]:
    with planted_kernel(Mutant("", "", (), lacks=lacks, variant=variant)) as kernel:
        return [one for task in tasks(kernel.subject, load_profile(profile), seed) for one in task.cases]


def _rank(mutant: Mutant, planned: Planned) -> tuple[bool, int, str]:
    """Cases near the defect first, then the cheap ones."""
    case, checks = planned
    near = not mutant.near or bool(case.features & set(mutant.near))
    pairs = case.batch * case.q_heads * (case.q_len + 64) * (case.kv_len + 64) * len(checks)
    return not near, pairs, case.id


def _work(argument: tuple[Mutant, str, int, list[Planned]]) -> Score:
    mutant, profile, seed, planned = argument
    with planted_kernel(mutant) as kernel:
        cases, red = score(_judge(), mutant, kernel, planned)
    if red is None:
        return Score(mutant.name, profile, seed, False, cases)
    crashed = red.message.startswith(_CRASHES)
    case = red.case.to_json()
    return Score(mutant.name, profile, seed, not crashed, cases, red.check, case, red.message, crashed)


@cache
def _judge() -> Judge:
    return Judge()


def main(arguments: list[str]) -> int:
    """Score the mutants; 1 if a defect survived or a correct rewrite did not."""
    options = _parse(arguments)
    defects, nulls = load("in_clean_kernel.toml"), load("nulls.toml")
    chosen = [m for m in (*defects.values(), *nulls.values()) if not options.only or m.name in options.only]
    jobs = [
        (mutant, options.profile, seed, drawn(mutant, options.profile, seed))
        for seed in options.seed
        for mutant in chosen
    ]
    scores: list[Score] = []
    for found in _scored(jobs, options.workers):
        scores.append(found)
        how = (
            f"killed by {found.check} {json.dumps(found.case)}: {found.message}"
            if found.killed
            else "survived"
        )
        print(f"{found.seed} {found.name}: {how} ({found.cases} cases)", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps([asdict(s) for s in scores], indent=1) + "\n")
    if options.kills:
        _add_kills(Path(options.kills), [s for s in scores if s.name in defects])
    wrong = [s for s in scores if s.crashed or s.killed == (s.name in nulls)]
    print(f"{len(scores)} scores, {len(wrong)} wrong: {', '.join(f'{s.name} ({s.seed})' for s in wrong)}")
    return int(bool(wrong))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", help="a JSON file of all scores")
    parser.add_argument(
        "--kills", nargs="?", const=str(KILLS), help="a file to add the kills to, by default ours"
    )
    return parser.parse_args(arguments)


def _scored(jobs: list[Any], workers: int) -> Iterator[Score]:
    # Of processes alone: NumPy reads how many threads it may use when it is first imported.
    os.environ.update(SINGLE_THREADED)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_work, jobs)


def _add_kills(path: Path, scores: Sequence[Score]) -> None:
    """Put the scores of defects in the place of older ones of the same profile and seed."""
    kills = _kills()
    for found in scores:
        of_profile = kills.setdefault(found.name, {}).setdefault(found.profile, {})
        of_profile.pop(str(found.seed), None)
        if found.killed:
            of_profile[str(found.seed)] = {"check": found.check, "case": found.case}
    path.write_text(json.dumps(kills, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
