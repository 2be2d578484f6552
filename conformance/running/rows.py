"""The rows of a subject's covering arrays, and what the subject offers each of them."""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from typing import Any

from attest.conformance.cases.features import FEATURES, NEEDS
from attest.conformance.drawing.covering import Facts, covering_rows, reduced
from attest.conformance.drawing.dice import Deck
from attest.conformance.drawing.recipes import dealt, model
from attest.conformance.drawing.shapes import Blocks, Offer, class_of
from attest.conformance.subject import Subject, Tiling

_SHORT_BLOCK = 16  # stands in for the block of a tiling that works in one piece


@dataclass(frozen=True)
class Row:
    """One row of a covering array.

    number: of the rows of the same class of lengths. place: among all rows. seed: of what is drawn for this
    row alone. deck: deals the values that the rows of a plan share out.
    """

    number: int
    place: int
    facts: Facts
    seed: int
    deck: Deck


def rows_of(
    subject: Subject, numbers: Mapping[str, Any], seed: int, required: Facts, endless: bool
) -> Iterator[Row]:
    """Yield the rows of the covering arrays of a profile, without features that the subject lacks.

    A row is left out if earlier rows have each of its pairs of facts. required: facts of every row. endless:
    whether arrays follow without end.
    """
    lacking, every = frozenset(FEATURES) - subject.features, model(subject.features)
    numbered, turns = Counter[str](), Counter[str]()
    for array in count() if endless else range(numbers["arrays"]):
        of_array = salt(seed, "array", str(array))
        models = [(every, numbers["strength"])]
        if array < numbers["alone"]:
            models.append((replace(every, most=1, also=()), 1))
        for made_of, strength in models:
            seen: set[Facts] = set()
            for index, whole in enumerate(covering_rows(made_of, strength, of_array, required)):
                # By the whole row, so that subjects share cases wherever both support them.
                names = sorted(dealt(whole))
                deck = Deck(salt(seed, "deck"), tuple((name, turns[name]) for name in names))
                turns.update(names)
                for variant, row in enumerate(reduced([whole], lacking, subject.limits.excludes, NEEDS)):
                    held = {frozenset(facts) for facts in combinations(sorted(row), strength)}
                    if required <= row and not held <= seen:
                        seen |= held
                        words = (str(array), str(made_of.most), str(index), str(variant))
                        lengths = class_of(row, "lengths")
                        yield Row(numbered[lengths], numbered.total(), row, salt(seed, *words), deck)
                        numbered[lengths] += 1


def offer_of(subject: Subject, row: Row, dtypes: Sequence[str]) -> Offer:
    """Return the supported choices of a row: one tiling after the other, the last one for long cases."""
    # Of a subject that spreads a sequence few rows are planned: each strategy has its turn among them all.
    facts, number = row.facts, row.place if subject.sharding.sequence else row.number
    explicit = [index for index, tiling in enumerate(subject.tilings) if tiling.options]
    tilings = explicit if subject.tilings[-1].options else [*explicit, -1]
    if facts & {"many", "tall"}:
        # Several blocks in both directions: smaller blocks are as good, and cheaper.
        smallest = min(explicit, key=lambda index: _tokens(subject.tilings[index]), default=-1)
        small = [index for index in explicit if _alike(subject.tilings[index], subject.tilings[smallest])]
        tilings = [*(small or [smallest]), -1] if tilings[-1] == -1 else small
    tiling = -1 if "long" in facts else tilings[number % len(tilings)]
    chosen = subject.tilings[tiling]
    return Offer(
        dtype=next((dtype for dtype in dtypes if dtype in facts), dtypes[number % len(dtypes)]),
        tiling=tiling,
        blocks=_blocks(chosen) if chosen.options else None,
        head_dims=subject.head_dims,
        longest=subject.limits.longest,
        length_multiple=subject.limits.length_multiple,
        head_dim_multiple=subject.limits.head_dim_multiple,
        origin_multiple=subject.limits.origin_multiple,
        sinks=subject.limits.sinks,
        window_sides=subject.limits.window_sides,
        window=subject.semantics.window,
        deck=row.deck,
    )


def salt(seed: int, *words: str) -> int:
    """Return a separate seed for each purpose, so that more cases of one kind do not change the others."""
    return zlib.crc32(" ".join((str(seed), *words)).encode())


def _blocks(tiling: Tiling) -> Blocks:
    return Blocks(tiling.query_block or _SHORT_BLOCK, tiling.key_block or _SHORT_BLOCK)


def _alike(tiling: Tiling, other: Tiling) -> bool:
    """Return whether two tilings have the same blocks; they may differ in the number of devices."""
    return _blocks(tiling) == _blocks(other)


def _tokens(tiling: Tiling) -> int:
    blocks = _blocks(tiling)
    return blocks.query * blocks.key
