"""What became of one mutant under one profile and seed."""

from dataclasses import dataclass
from typing import Any, Literal

from attest.conformance.record import Result, Verdict

# wrong: a number is wrong. crash: the kernel raised or died. refusal: it refused a call, or did not refuse
# one. time: it did not end in time.
How = Literal["", "wrong", "crash", "refusal", "time"]

_CRASHES = ("raised", "the process died", "the check itself raised")
_REFUSALS = "refusal."


@dataclass(frozen=True)
class Score:
    """What became of one mutant: killed by a check on a case, or not after so many results.

    results: those judged until the kill, or all. how: what killed it; empty if it survived.
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

    @property
    def killed(self) -> bool:
        """Whether a result was red."""
        return bool(self.how)


def how_killed(red: Result) -> How:
    """Return what a red result says of a mutant."""
    if red.verdict is Verdict.TIMEOUT:
        return "time"
    if red.check.startswith(_REFUSALS):
        return "refusal"
    return "crash" if red.message.startswith(_CRASHES) else "wrong"
