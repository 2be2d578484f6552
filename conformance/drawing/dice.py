"""Seeded choices, each drawn under its own name, so that a new choice moves no other."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Dice:
    """Independent choices, the same for the same seed, purpose and name on every machine."""

    def __init__(self, seed: int, purpose: str) -> None:
        self._prefix = f"{seed} {purpose} "

    def number(self, name: str) -> int:
        """Return an integer of 63 bits."""
        return int.from_bytes(hashlib.sha256((self._prefix + name).encode()).digest()[:8]) >> 1

    def between(self, name: str, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + self.number(name) % (high - low + 1)

    def spread(self, name: str, low: int, high: int) -> int:
        """Return an integer from `low`, at least 1, to `high`, both included.

        Of the ranges from low to 2 low, from there to 4 low and so on each is as likely as the next.
        """
        doublings = max(high // low, 1).bit_length()
        first = low << self.between(f"{name} doublings", 0, doublings - 1)
        return self.between(f"{name} within", first, max(min(2 * first - 1, high), first))

    def pick[T](self, name: str, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self.number(name) % len(options)]

    def chance(self, name: str, share: float) -> bool:
        """Return True in a share of all seeds."""
        return self.number(name) < share * 2**63

    def shuffled[T](self, name: str, items: Sequence[T]) -> list[T]:
        """Return the items in another order."""
        return [
            item for _, item in sorted(enumerate(items), key=lambda pair: self.number(f"{name} {pair[0]}"))
        ]


@dataclass(frozen=True)
class Deck:
    """Values that are dealt to the rows of a plan in turn: each is used before one comes again.

    seed: of the order in which values are dealt. turns: by fact, how many rows before this one hold the fact;
    a fact without a number gets the first value.
    """

    seed: int
    turns: tuple[tuple[str, int], ...] = ()

    def turned(self, by: int) -> "Deck":
        """Return the deck so many turns later for every fact."""
        return Deck(self.seed, tuple((fact, turn + by) for fact, turn in self.turns)) if by else self

    def deal[T](
        self, fact: str, name: str, options: Sequence[T], fits: Callable[[T], bool] = lambda _option: True
    ) -> T:
        """Return the option whose turn it is in a row with the fact, or else the next one that fits.

        Where none fits, the first of the options is returned.
        """
        turn = dict(self.turns).get(fact, 0)
        # In another order each time round, so that an option which did not fit in its turn gets another one.
        order = Dice(self.seed, "deck").shuffled(f"{fact} {name} {turn // len(options)}", options)
        turn %= len(options)
        return next((option for option in (*order[turn:], *order[:turn]) if fits(option)), options[0])
