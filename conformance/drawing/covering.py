"""Covering arrays: few rows of features and choices that hold every allowed pair together at least once.

A row is a set of facts: switches that are on, and one value of each choice. Of two switches some row holds
both, and some row each of them without the other. The greedy construction is that of AETG (Cohen, Dalal,
Fredman and Patton, 1997), deterministic by its seed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count

from attest.conformance.drawing.dice import Dice

Facts = frozenset[str]

_OFF = "no "  # before a switch that a row must not hold
_CANDIDATES = 10  # rows tried for each row taken: more make few rows fewer


@dataclass(frozen=True)
class Model:
    """The model that rows are made of.

    switches: facts that are there or not. choices: for each name, the facts one of which every row holds.
    needs: switches that make no sense without one of some others.
    excludes: facts that no row may hold together.
    also: larger sets of facts to be held together by some row.
    most: switches in one row, unless more are required.
    """

    switches: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    excludes: tuple[Facts, ...] = ()
    also: tuple[Facts, ...] = ()
    most: int = 6

    def allows(self, facts: Facts) -> bool:
        """Return whether a row may hold these facts together."""
        return self.is_possible(self.completed(facts))

    def is_possible(self, completed: Facts) -> bool:
        """Return whether a row may hold facts that are complete."""
        return not any(excluded <= completed for excluded in self.excludes)

    def completed(self, facts: Facts) -> Facts:
        """Return the facts with the switches that they need: the first of those that would do."""
        lacking = (self.needs[fact] for fact in facts if fact in self.needs)
        return facts | {needed[0] for needed in lacking if facts.isdisjoint(needed)}

    def whole(self, row: Facts) -> Facts:
        """Return a row with what it does not hold, each as a fact of its own."""
        return row | {_OFF + switch for switch in self.switches if switch not in row}


def wanted_sets(model: Model, strength: int) -> set[Facts]:
    """Return each allowed set of up to `strength` facts with a switch, and those of `also` from 2 on.

    From 2 on also each switch without each other one. Two values of choices are not wanted together for
    their own sake, nor two values of one choice.
    """
    switches = set(model.switches)
    facts = [*model.switches, *(value for values in model.choices.values() for value in values)]
    sets = {frozenset(chosen) for size in range(1, strength + 1) for chosen in combinations(facts, size)}
    wanted = {chosen for chosen in sets if chosen & switches or len(chosen) == 1}
    one_each = [set(values) for values in model.choices.values()]
    wanted = {chosen for chosen in wanted if all(len(chosen & values) <= 1 for values in one_each)}
    if strength > 1:
        wanted |= set(model.also)
    wanted = {chosen for chosen in wanted if model.allows(chosen)}
    if strength > 1:
        wanted |= {
            frozenset({switch, _OFF + other})
            for switch in switches
            if model.allows(frozenset({switch}))
            for other in switches - model.completed(frozenset({switch}))
        }
    return wanted


def covering_rows(model: Model, strength: int, seed: int, required: Facts = frozenset()) -> Iterator[Facts]:
    """Yield rows that hold every wanted set, the required switches in each of them."""
    allowed = (
        chosen
        for chosen in wanted_sets(model, strength)
        if model.allows(held := _on(chosen) | required) and _off(chosen).isdisjoint(model.completed(held))
    )
    # In one order, since a row begins with one of them.
    wanted = sorted(allowed, key=sorted)
    dice = Dice(seed, "covering")
    for number in count():
        if not wanted:
            return
        by_fact = _by_fact(wanted)
        candidates = (
            _row(model, wanted, by_fact, required, Dice(dice.number(f"{number} {candidate}"), "row"))
            for candidate in range(_CANDIDATES)
        )
        best = max(map(model.whole, candidates), key=lambda whole: sum(map(whole.issuperset, wanted)))
        wanted = [chosen for chosen in wanted if not chosen <= best]
        yield _on(best)


def _by_fact(wanted: Iterable[Facts]) -> dict[str, list[Facts]]:
    """Return the wanted sets of each fact."""
    found = defaultdict[str, list[Facts]](list)
    for chosen in wanted:
        for fact in chosen:
            found[fact].append(chosen)
    return found


def _on(chosen: Facts) -> Facts:
    """Return the facts of a set that a row must hold."""
    return frozenset(fact for fact in chosen if not fact.startswith(_OFF))


def _off(chosen: Facts) -> Facts:
    """Return the switches that a row must not hold to hold a set."""
    return frozenset(fact.removeprefix(_OFF) for fact in chosen if fact.startswith(_OFF))


def _row(
    model: Model, wanted: Sequence[Facts], by_fact: Mapping[str, list[Facts]], required: Facts, dice: Dice
) -> Facts:
    """Return one row that holds a wanted set and otherwise what gains most."""
    first = dice.pick("first", wanted)
    row, avoided = model.completed(required | _on(first)), _off(first)
    for _, values in sorted(model.choices.items()):
        if not row & set(values):
            allowed = [value for value in values if model.allows(row | {value})]
            row |= {_best(row, allowed, by_fact, dice)}
    room = max(model.most, len(required) + 2)
    while sum(fact in model.switches for fact in row) < room:
        longer = {
            switch: completed
            for switch in model.switches
            if switch not in row
            and model.is_possible(completed := model.completed(row | {switch}))
            and avoided.isdisjoint(completed)
        }
        if not longer:
            break
        best = _best(row, list(longer), by_fact, dice)
        if not _gain(row, best, by_fact):
            break
        row = longer[best]
    return row


def _best(row: Facts, options: Sequence[str], by_fact: Mapping[str, list[Facts]], dice: Dice) -> str:
    """Return the fact with which a row gains most, a random one of those that gain as much."""
    gains = [_gain(row, option, by_fact) for option in options]
    most = max(gains)
    best = [index for index, gain in enumerate(gains) if gain == most]
    return options[min(best, key=lambda index: dice.number(f"{len(row)} {index}"))]


def _gain(row: Facts, fact: str, by_fact: Mapping[str, list[Facts]]) -> int:
    """Return how many wanted sets a row holds with one more fact, and not without it."""
    return sum(map((row | {fact}).issuperset, by_fact.get(fact, ())))


def reduced(
    rows: list[Facts], lacking: Facts, excludes: tuple[Facts, ...], needs: Mapping[str, tuple[str, ...]]
) -> Iterator[Facts]:
    """Yield the rows without facts that are lacking, and without those that need them.

    A row that holds an excluded set becomes several. Each of those lacks one fact of the set, so that every
    allowed pair of a row is still in one of them.
    """
    for row in rows:
        left = [row - lacking]
        for excluded in excludes:
            left = [
                less
                for kept in left
                for less in ([kept - {fact} for fact in sorted(excluded)] if excluded <= kept else [kept])
            ]
        yield from dict.fromkeys(
            frozenset(fact for fact in kept if fact not in needs or not kept.isdisjoint(needs[fact]))
            for kept in left
        )
