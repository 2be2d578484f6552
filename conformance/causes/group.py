"""The grouping of failures by cause: wrong outputs and features, an exception and its line, a message."""

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.causes.conditions import Condition, explaining
from attest.conformance.record import ACCURACY, Result, Verdict, in_order
from attest.conformance.user_frames import frames_of
from attest.reference.oracle import OUTPUTS

_FORWARD = frozenset(OUTPUTS)


@dataclass(frozen=True)
class Cause:
    """Failures of one subject that probably have one cause.

    results: all of them, the one to show first. outputs: whether each output that their cases have is wrong;
    empty for failures without numbers. stage: what is probably wrong, in words. condition: what the failing
    cases have in common.
    """

    subject: str
    results: tuple[Result, ...]
    outputs: Mapping[str, bool]
    stage: str = ""
    condition: Condition | None = None

    @property
    def example(self) -> Result:
        """The failure to show: the simplest."""
        return self.results[0]

    @property
    def of_several_blocks(self) -> Result | None:
        """The simplest failure of several blocks, where the example has a case of one; else None."""
        example = self.example
        if example.several_blocks or example.check not in ACCURACY:
            return None
        larger = (r for r in self.results if r.several_blocks and r.check in ACCURACY)
        return min(
            (result for result in larger if result.semantic >= example.semantic),
            key=lambda result: (result.check != example.check, _simplicity(result)),
            default=None,
        )

    @property
    def follows(self) -> tuple[Result, ...]:
        """The failures of other checks, which fail because the kernel fails an accuracy check."""
        if self.example.check not in ACCURACY:
            return ()
        return tuple(result for result in self.results if result.check not in ACCURACY)

    @property
    def of_precision(self) -> bool:
        """Whether lost precision explains all of it."""
        return bool(self.outputs) and not any(result.semantic for result in self.results)


def causes(results: Iterable[Result]) -> tuple[Cause, ...]:
    """Return the causes of what failed, the clearest of each subject first; a timeout has none.

    The order of the results does not matter.
    """
    by_subject: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_subject[result.subject].append(result)
    return tuple(cause for _, own in sorted(by_subject.items()) for cause in _of_subject(own))


def _of_subject(results: Sequence[Result]) -> list[Cause]:
    failed = [r for r in results if r.verdict.red and r.verdict is not Verdict.TIMEOUT]
    numeric = [r for r in failed if r.check in ACCURACY and _wrong(r)]
    others = [r for r in failed if r.check not in ACCURACY or not _wrong(r)]
    found, rest = _with_followers(_numeric(numeric, results), others)
    return found + _by_message(rest)


def _numeric(failed: Sequence[Result], results: Sequence[Result]) -> list[Cause]:
    """Return causes of wrong numbers: by the outputs that are wrong, then by what their cases share."""
    wrong: defaultdict[Case, set[str]] = defaultdict(set)
    for result in failed:
        wrong[result.case] |= _wrong(result)
    judged = {r.case for r in results if r.check in ACCURACY and not r.minimal and r.measurements}
    groups: dict[frozenset[str], list[Case]] = {}
    counted = Counter(_first_wrong(outputs) for outputs in wrong.values())
    for outputs, _ in sorted(counted.items(), key=lambda item: (-item[1], len(item[0]), sorted(item[0]))):
        home = next((known for known in groups if known <= outputs or outputs <= known), outputs)
        groups.setdefault(home, []).extend(case for case in wrong if _first_wrong(wrong[case]) == outputs)
    found: list[Cause] = []
    for home, cases in groups.items():
        typical = {case for case in cases if _first_wrong(wrong[case]) == home}
        found += _split(set(cases), typical, failed, results, judged)
    return sorted(found, key=lambda cause: (not cause.outputs.get("out"), -len(cause.results)))


def _first_wrong(outputs: set[str]) -> frozenset[str]:
    """Return the outputs of the earliest pass that is wrong: what follows it is wrong with it."""
    return frozenset(outputs & _FORWARD or outputs)


def _split(
    cases: set[Case],
    typical: set[Case],
    failed: Sequence[Result],
    results: Sequence[Result],
    judged: set[Case],
) -> list[Cause]:
    """Return one cause for the cases of each condition that explains some of them, and one for the rest.

    typical: the cases whose outputs show what is wrong; in others, a second mistake may be wrong, too.
    """
    drawn = sorted(cases & judged, key=lambda case: case.id)
    passing = sorted(judged - {r.case for r in failed}, key=lambda case: case.id)
    parts: list[tuple[Condition | None, set[Case]]] = []
    left = drawn
    while left:
        explained = explaining(left, [*left, *passing])
        if explained is None:
            break
        condition, met = explained
        hit = set(met)
        parts.append((condition, hit))
        left = [case for case in left if case not in hit]
    if left or not parts:
        # What no condition explains by itself may be one cause, of which the conditions are accidents.
        accidental = not parts or len(left) > len(drawn) // 2
        parts = [(None, set(drawn))] if accidental else [*parts, (None, set(left))]
    origin = {r.case: r.shrunk_from for r in failed if r.minimal}
    for case in cases - judged:
        home = next((p for p in parts if any(c.id == origin.get(case) for c in p[1])), parts[0])
        home[1].add(case)
    return [_cause(condition, part, typical & part or part, failed, results) for condition, part in parts]


def _cause(
    condition: Condition | None,
    cases: set[Case],
    typical: set[Case],
    failed: Sequence[Result],
    results: Sequence[Result],
) -> Cause:
    own = sorted((r for r in failed if r.case in cases), key=_simplicity)
    outputs: dict[str, bool] = {}
    for result in results:
        if result.case in typical and result.check in ACCURACY:
            for measurement in result.measurements:
                broken = bool(measurement.broken)
                outputs[measurement.output] = outputs.get(measurement.output, False) or broken
    outputs = {name: outputs[name] for name in in_order(outputs)}
    return Cause(own[0].subject, tuple(own), outputs, _stage(outputs), condition)


def _with_followers(found: list[Cause], rest: Sequence[Result]) -> tuple[list[Cause], list[Result]]:
    """Return the causes with the failures of other checks that have wrong numbers too, and those left."""
    followers: defaultdict[int, list[Result]] = defaultdict(list)
    left: list[Result] = []
    for result in rest:
        home = next((n for n, cause in enumerate(found) if _follows(result, cause)), None)
        if home is None:
            left.append(result)
        else:
            followers[home].append(result)
    return [
        replace(cause, results=(*cause.results, *sorted(followers[n], key=_simplicity)))
        for n, cause in enumerate(found)
    ], left


def _follows(result: Result, cause: Cause) -> bool:
    """Return whether a cause explains a failure of another check: the same outputs, on such a case."""
    alike = any(cause.outputs.get(name) for name in _wrong(result))
    met = cause.condition is None or cause.condition.met(result.case)
    return alike and met and not (result.semantic and cause.of_precision)


def _by_message(failed: Sequence[Result]) -> list[Cause]:
    groups: defaultdict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in failed:
        groups[_key(result)].append(result)
    found = [Cause(own[0].subject, tuple(sorted(own, key=_simplicity)), {}) for own in groups.values()]
    return sorted(found, key=lambda cause: (-len(cause.results), cause.example.sort_key))


def _key(result: Result) -> tuple[str, ...]:
    """Return what failures without numbers of one cause share: the message, and an exception's line."""
    first = result.message.partition("\n")[0]
    frames = frames_of(result.message)
    family = result.check.partition(".")[0]
    plain = re.sub(r"[0-9]+", "#", first)
    if frames:
        return (result.verdict, re.sub(r"\W.*", "", plain.removeprefix("raised ")), frames[-1].text)
    if family == "refusal":
        return (result.verdict, family, plain.partition(";")[0])
    return (result.verdict, result.check, plain)


def _wrong(result: Result) -> set[str]:
    return {measurement.output for measurement in result.measurements if measurement.broken}


def _simplicity(result: Result) -> tuple[Any, ...]:
    case = result.case
    return (
        result.check not in ACCURACY,
        not result.minimal,
        not result.semantic,
        case.batch * (case.q_len + case.kv_len),
        len(case.features),
        len(case.to_json()),
        ACCURACY.index(result.check) if result.check in ACCURACY else 0,
        result.check,
        case.id,
    )


def _stage(outputs: Mapping[str, bool]) -> str:
    wrong = {name for name, broken in outputs.items() if broken}
    for row in _stages():
        exactly, some, right = (set(row.get(key, ())) for key in ("wrong", "any_of", "right"))
        fits = wrong == exactly or (wrong & some and not wrong & right)
        if fits and outputs.keys() >= set(row.get("compared", ())):
            return row["name"]
    return ""


@cache
def _stages() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("stages.toml").read_text())["stage"]
