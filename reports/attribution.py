"""The clauses that failures break: of those that a failing case exercises, the ones that its cause points to.

A check such as `forward` names the clause of every feature of its case, and a failure breaks few of them. The
failures of one cause are judged together, so that each breaks the same clauses:

- Of failures of checks of one property, such as `determinism`: the clauses of the check.
- Where a check of accuracy fails, too: those of the features of the simplest case, if a search made it as
  simple as it can be. Else those of the condition that tells failing cases from passing ones. If none does,
  those of the features that all failing cases share. If they share none, those of the check, such as S1 and
  S16 of `forward`. Two at most: those of the condition first, then those that the fewest passing cases
  exercise.
- Beside these S14 where gradients alone are wrong, and S13 where lse is, and out is right.

Expected failures of one link and reason are one cause; if their expectation names clauses, they break those.
A failure breaks only clauses that its Subject declares.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.causes.conditions import Condition, explaining
from attest.conformance.causes.group import causes
from attest.conformance.clauses import CLAUSES
from attest.conformance.record import ACCURACY, Result, Verdict
from attest.reports.pairing import ordered

# The clauses that a check of accuracy names whatever its case switches on.
_OF_CHECKS = frozenset({"S1", "S13", "S14", "S16", "S18"})
# The likeliest clauses of a cause, as on its card.
_MOST = 2


@dataclass(frozen=True)
class Attributed:
    """Failures of one cause, the simplest first, and the clauses that they break.

    known: whether they are expected. link, reason: of the expectation.
    """

    results: tuple[Result, ...]
    clauses: tuple[str, ...]
    known: bool = False
    link: str = ""
    reason: str = ""


def attributed(results: Iterable[Result], declared: Collection[str]) -> tuple[Attributed, ...]:
    """Return the failures of one subject by cause.

    results: all failures, and passing cases beside them. declared: the clauses that a failure can break.
    """
    every = [
        replace(result, clauses=tuple(clause for clause in result.clauses if clause in declared))
        for result in ordered(results)
    ]
    passing = [r for r in every if r.verdict is Verdict.PASS and r.check in ACCURACY and r.measurements]
    found = [
        Attributed(cause.results, _clauses(cause.results, cause.condition, passing))
        for cause in causes(r for r in every if r.verdict in (Verdict.FAIL, Verdict.PASS))
    ]
    expected: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in every:
        if result.verdict is Verdict.XFAIL:
            expected[result.link, reason_of(result)].append(result)
    for (link, reason), own in sorted(expected.items()):
        simplest = tuple(sorted(own, key=_simplicity))
        named = {clause for result in own for clause in result.breaks}
        if named:
            broken = tuple(clause for clause in CLAUSES if clause in named and clause in declared)
        else:
            broken = _clauses(simplest, _condition(simplest, passing), passing)
        found.append(Attributed(simplest, broken, True, link, reason))
    return tuple(found)


def reason_of(result: Result) -> str:
    """Return why a failure was expected, without what was found on this one case."""
    return result.message.partition("; found: ")[0].removeprefix("expected: ")


def _condition(failing: Sequence[Result], passing: Sequence[Result]) -> Condition | None:
    """Return what tells the failing cases of checks of accuracy from the passing ones of the same checks."""
    checks = {result.check for result in failing} & set(ACCURACY)
    bad = list(dict.fromkeys(result.case for result in failing if result.check in checks))
    good = list(dict.fromkeys(result.case for result in passing if result.check in checks))
    explained = explaining(bad, [*bad, *(case for case in good if case not in set(bad))]) if bad else None
    if explained is None or len(explained[1]) < len(bad):
        return None
    return explained[0]


def _clauses(
    results: Sequence[Result], condition: Condition | None, passing: Sequence[Result]
) -> tuple[str, ...]:
    accurate = [result for result in results if result.check in ACCURACY]
    if not accurate:
        return results[0].clauses
    named = {clause for result in accurate for clause in result.clauses}
    of_condition = [clause for clause in condition.clauses if clause in named] if condition else []
    of_features = _shared(accurate[:1] if accurate[0].minimal else accurate, passing)
    if accurate[0].minimal and of_features:
        likely = sorted(of_features, key=lambda clause: clause not in of_condition)
    else:
        of_check = [clause for clause in accurate[0].clauses if clause in _OF_CHECKS - {"S18"}]
        likely = of_condition or of_features or of_check
    return tuple(dict.fromkeys([*likely[:_MOST], *_of_pass(accurate)]))


def _shared(failing: Sequence[Result], passing: Sequence[Result]) -> list[str]:
    """Return the clauses of what all cases share; first those that the fewest passing cases exercise."""
    features = frozenset[str].intersection(*(result.case.features for result in failing))
    named = frozenset[str].intersection(*(frozenset(result.clauses) for result in failing))
    shared = {ALL_FEATURES[name].clause for name in features} | (named - _OF_CHECKS)
    exercised = Counter(clause for result in passing for clause in set(result.clauses))
    return sorted((clause for clause in CLAUSES if clause in shared), key=lambda clause: exercised[clause])


def _of_pass(failing: Sequence[Result]) -> list[str]:
    wrong = {m.output for result in failing for m in result.measurements if m.broken}
    if not wrong or "out" in wrong:
        return []
    return ["S13"] if "lse" in wrong else ["S14"]


def _simplicity(result: Result) -> tuple[bool, int, int, str]:
    case = result.case
    size = case.batch * (case.q_len + case.kv_len)
    return result.check not in ACCURACY, len(case.features), size, case.id
