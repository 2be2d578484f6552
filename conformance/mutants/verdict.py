"""The score of one mutant under one profile and seed."""

from dataclasses import dataclass
from typing import Any, Literal

from attest.conformance.mutants.catalogue import Mutant
from attest.conformance.record import Result, Verdict

# wrong: a number is wrong. crash: the kernel raised or died. refusal: it refused a call, or did not refuse
# one. time: it did not end in time.
How = Literal["", "wrong", "crash", "refusal", "time"]

_CRASHES = ("raised", "the process died", "the check itself raised")
_REFUSALS = "refusal."


@dataclass(frozen=True)
class Score:
    """The score of one mutant: killed by a check on a case, or not after so many results.

    results: those judged until the kill, or all. how: what killed it; empty if it survived. subject: of this
    package, whose kernel has the defect; empty for a clean kernel and for what judges.
    """

    name: str
    group: str
    null: bool
    defect_class: str
    profile: str
    seed: int
    results: int
    how: How = ""
    check: str = ""
    case: dict[str, Any] | None = None
    message: str = ""
    subject: str = ""

    @property
    def killed(self) -> bool:
        """Whether a result was red."""
        return bool(self.how)


def survivor(mutant: Mutant, profile: str, seed: int, results: int = 0) -> Score:
    """Return the score of a mutant that survived so many results."""
    return Score(
        mutant.name,
        mutant.group,
        mutant.null,
        mutant.defect_class,
        profile,
        seed,
        results,
        subject=mutant.subject,
    )


def decided_by(red: Result) -> dict[str, Any]:
    """Return the fields of a score that a red result decides, as JSON data."""
    return {"how": _how(red), "check": red.check, "case": red.case.to_json(), "message": red.message}


def _how(red: Result) -> How:
    if red.verdict is Verdict.TIMEOUT:
        return "time"
    if red.check.startswith(_REFUSALS):
        return "refusal"
    return "crash" if red.message.startswith(_CRASHES) else "wrong"
