"""The failures of a comparison that base does not have, grouped by cause.

The causes are those of head as a whole: what passes there, too, shows which feature a cause has.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attest.conformance.record import Result, Verdict
from attest.conformance.text import plural
from attest.reports.cards import Card, cards
from attest.reports.pairing import Fate, Pair


@dataclass(frozen=True)
class Numbers:
    """One output of a case, before and after; None where a run did not measure it."""

    output: str
    worst_ratio: tuple[float | None, float | None]
    rms_ratio: tuple[float | None, float | None]
    wrong: bool


@dataclass(frozen=True)
class NewCause:
    """A cause of head.

    pairs: its failures that base does not have, or has otherwise. known: the number of others.

    Simpler cases of a search that the clock cut have no pair, but are as new as the failures that they began
    with.
    """

    card: Card
    pairs: tuple[Pair, ...]
    known: int

    @property
    def new(self) -> int:
        """The number of new failures."""
        return len(self.card.cause.results) - self.known

    @property
    def counts(self) -> str:
        """The number of new failures among all of the cause, in words."""
        every, new = len(self.card.cause.results), self.new
        changed = sum(pair.fate is not Fate.BROKEN for pair in self.pairs)
        words = f"{new} of {plural(every, 'failure')} {'is' if new == 1 else 'are'} new"
        return words + (f"; {changed} failed otherwise in base" if changed else "")

    @property
    def example(self) -> Pair:
        """The simplest failure whose case base has, too; the simplest of all if there is none."""
        return next((pair for pair in self.pairs if pair.base is not None), self.pairs[0])

    @property
    def numbers(self) -> tuple[Numbers, ...]:
        """The outputs of the example before and after."""
        sides = (self.example.base, self.example.head)
        found = [{m.output: m for m in side.measurements} if side is not None else {} for side in sides]
        before, after = found
        return tuple(
            Numbers(
                output,
                (before[output].worst_ratio if output in before else None, measured.worst_ratio),
                (before[output].rms_ratio if output in before else None, measured.rms_ratio),
                bool(measured.broken),
            )
            for output, measured in after.items()
        )


def new_causes(results: Iterable[Result], pairs: Iterable[Pair]) -> tuple[NewCause, ...]:
    """Return the causes of what failed in head, those with a failure that base does not have so."""
    pair_of = {_name(pair.head): pair for pair in pairs if pair.head is not None}
    found: list[NewCause] = []
    for card in cards(results):
        names = (_name(result) for result in card.cause.results)
        paired = [pair_of[name] for name in names if name in pair_of]
        own = tuple(pair for pair in paired if pair.fate is Fate.BROKEN or otherwise(pair))
        if own:
            found.append(NewCause(card, own, len(paired) - len(own)))
    return tuple(found)


def _name(result: Result) -> tuple[str, str, str, str, bool, str]:
    """Return what tells a result from others; not its numbers, since NaN is not equal to itself."""
    return (*result.sort_key, result.minimal, result.message)


def newly_wrong(pair: Pair) -> Sequence[str]:
    """Return the outputs that are wrong, were right before, and belong to a case that failed before, too."""
    base, head = pair.base, pair.head
    if base is None or head is None or not (base.verdict is head.verdict is Verdict.FAIL):
        return ()
    right = {m.output for m in base.measurements if not m.broken}
    return [m.output for m in head.measurements if m.broken and m.output in right]


def otherwise(pair: Pair) -> bool:
    """Return whether a case fails in both runs, but not in the same way: another output or message."""
    base, head = pair.base, pair.head
    if base is None or head is None or not (_failed(base) and _failed(head)):
        return False
    numeric = [any(m.broken for m in result.measurements) for result in (base, head)]
    if all(numeric):
        return bool(newly_wrong(pair))
    return any(numeric) or base.verdict is not head.verdict or _said(base) != _said(head)


def _failed(result: Result) -> bool:
    return result.verdict in (Verdict.FAIL, Verdict.ERROR)


def _said(result: Result) -> str:
    """Return the first line of a message without its numbers, such as addresses and shapes."""
    return re.sub(r"(0x[0-9a-f]+|[0-9]+)", "#", result.message.partition("\n")[0])
