"""The check of a request before a run: whether subject and profile have cases for the named checks."""

from collections.abc import Sequence

from attest.conformance.checks import all_checks, unknown_check
from attest.conformance.kinds import REFUSED
from attest.conformance.record import Result, Verdict
from attest.conformance.running.plan import Profile, Restriction, load_profile, profile_names
from attest.conformance.subject import Subject


class RequestError(Exception):
    """The request cannot be met; the message is one sentence."""


def refuse_unfit(subject: Subject, profile: Profile, only: Restriction) -> None:
    """Raise RequestError for a named check if the profile has no case of it for this subject."""
    known = all_checks()
    tables = profile.kinds_for(subject)
    for name in only.checks:
        if name not in known:
            raise RequestError(unknown_check(name))
        check = known[name]
        reason = check.applies(subject)
        table = check.kind.table
        if reason is not None:
            raise RequestError(f"--check {name} does not apply: {subject.name} {reason}")
        if table not in tables:
            others = [other for other in profile_names() if table in load_profile(other).kinds_for(subject)]
            advice = f"use --profile {' or '.join(others)}" if others else "no other profile has them"
            raise RequestError(
                f"--check {name}: the profile {profile.name} has no such cases for {subject.name}; {advice}"
            )


def left_out(subject: Subject, name: str, profile: Profile, only: Restriction) -> tuple[str, ...]:
    """Return the checks that a run does not ask a subject for, one text for each reason.

    name: of the subject in the run. Refusals are not named: most are of options that it does not declare.
    """
    tables = profile.kinds_for(subject)
    reasons: dict[str, list[str]] = {}
    for check, found in all_checks().items():
        if found.kind is REFUSED or (only.checks and check not in only.checks):
            continue
        reason = found.applies(subject)
        if reason is None and found.kind.table not in tables:
            reason = f"the profile {profile.name} has no such cases"
        if reason is not None:
            reasons.setdefault(reason, []).append(check)
    return tuple(f"{name}: {reason}: {', '.join(sorted(checks))}" for reason, checks in reasons.items())


def not_judged(subject: Subject, results: Sequence[Result]) -> str | None:
    """Return why no check judged a replayed case, in one clause; None if one did.

    The refusal of an undeclared feature is UNSUPPORTED, too, but it was judged.
    """
    known = all_checks()
    for result in results:
        reason = subject.why_not(result.case) or known[result.check].applies(subject)
        judged = known[result.check].kind is REFUSED and reason is None
        if result.verdict is not Verdict.UNSUPPORTED or judged:
            return None
    return results[0].message if results else "has no checks"
