"""The fit of a request: what a subject does not support, or no profile poses, before a run begins."""

from collections.abc import Sequence

from attest.conformance.checks import all_checks
from attest.conformance.kinds import REFUSED
from attest.conformance.record import Result, Verdict
from attest.conformance.running.plan import Profile, Restriction, load_profile, profile_names
from attest.conformance.subject import Subject


class RequestError(Exception):
    """The request cannot be met; the message is one sentence."""


def refuse_unfit(subject: Subject, profile: Profile, only: Restriction) -> None:
    """Raise RequestError for a check that was named and that no case of a profile would be judged by."""
    known = all_checks()
    tables = profile.kinds_for(subject)
    for name in only.checks:
        if name not in known:
            raise RequestError(f"unknown check {name!r}: known are {', '.join(sorted(known))}")
        check = known[name]
        reason = check.applies(subject)
        table = check.kind.table
        if reason is None and table not in tables:
            others = [other for other in profile_names() if table in load_profile(other).kinds_for(subject)]
            where = f"{' or '.join(others)} does" if others else "nor does any other"
            reason = f"the profile {profile.name} poses no case to it, {where}"
        if reason is not None:
            raise RequestError(f"--check {name} fits nothing: {subject.name} {_joined(reason)}")


def _joined(reason: str) -> str:
    return f"is not held to it, since {reason}" if reason.startswith("the profile") else reason


def not_judged(subject: Subject, results: Sequence[Result]) -> str | None:
    """Return why not a single check judged a case that was replayed, in one clause; None if one did.

    A refusal of what a subject does not declare is UNSUPPORTED, too, and was judged.
    """
    known = all_checks()
    for result in results:
        reason = subject.why_not(result.case) or known[result.check].applies(subject)
        judged = known[result.check].kind is REFUSED and reason is None
        if result.verdict is not Verdict.UNSUPPORTED or judged:
            return None
    return results[0].message if results else "has no checks"
