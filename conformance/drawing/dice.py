"""Seeded choices, each drawn under its own name, so that a new choice moves no other."""

import hashlib
from collections.abc import Sequence


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
