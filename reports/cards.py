"""The causes of a run as reports show them: numbered, each with an id that is the same in every run."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from attest.conformance.causes.card import Parts, card, headline, parts
from attest.conformance.causes.group import Cause, causes
from attest.conformance.record import Result
from attest.reports.words import family

_ID_DIGITS = 10


@dataclass(frozen=True)
class Card:
    """One cause of a run. number, count: which of how many it is. id: names it in links and other runs."""

    cause: Cause
    number: int
    count: int
    id: str

    @cached_property
    def parts(self) -> Parts:
        """The parts of the card, to lay out."""
        return parts(self.cause)

    @property
    def text(self) -> str:
        """The card as plain text."""
        return card(self.cause, self.number, self.count)

    @property
    def example(self) -> Result:
        """The failure to show: the simplest."""
        return self.cause.example

    @property
    def families(self) -> tuple[str, ...]:
        """The families of the checks that fail, in order."""
        return tuple(sorted({family(result.check) for result in self.cause.results}))

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdicts of the failures, in order."""
        return tuple(sorted({result.verdict.value for result in self.cause.results}))


def cards(results: Iterable[Result]) -> tuple[Card, ...]:
    """Return a card for each cause of what failed, in the order of `causes`."""
    found = causes(results)
    met: Counter[str] = Counter()
    shown: list[Card] = []
    for number, cause in enumerate(found, 1):
        name = _name(cause)
        met[name] += 1
        unique = name if met[name] == 1 else f"{name}-{met[name]}"
        shown.append(Card(cause, number, len(found), unique))
    return tuple(shown)


def _name(cause: Cause) -> str:
    """Return an id from what stays the same when other cases fail: subject, check and headline."""
    said = "\0".join((cause.subject, cause.example.check, headline(cause)))
    return f"cause-{hashlib.sha256(said.encode('utf-8', 'backslashreplace')).hexdigest()[:_ID_DIGITS]}"
