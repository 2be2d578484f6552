"""Cases made of one row of a covering array: one set of shapes and options, and several fillings of values.

Compiling a kernel takes longer than calling it, and longer than the oracle takes for a small case. So the
cases of a row share all that a program is compiled for, and differ in all else: values, lengths, ids, masks.
Every feature of a row must show in its cases: windows hide some keys, caps meet logits of their size.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from attest.conformance.cases.case import Case, Lengths
from attest.conformance.cases.features import APART, DTYPES, FEATURES, NEEDS, OPTIONAL
from attest.conformance.drawing.coordinates import COORDINATES, draw_shared_dropout
from attest.conformance.drawing.covering import Facts, Model
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.intervals import INTERVALS
from attest.conformance.drawing.pairs import draw_bias, draw_mask, draw_patterns
from attest.conformance.drawing.shapes import Blocks, Offer, blocks_of, head_dim_from, sizes
from attest.conformance.drawing.tables import drawing
from attest.conformance.drawing.windows import dealt_as, draw_window

_TRIES = 4
_REDRAWS = 8  # of a row, the first one included
_ROWS_OF_A_TILE = 64  # what a kernel keeps from one block of rows to the next shows only beyond them
_DROPPED = 4  # pairs of a head that dropout must drop, to be seen
_MANY_KEYS = 1024

# What a feature draws from: the case so far, the row, the offer, the deck of the plan and the row's own dice.
type _Draw = Callable[[Case, Facts, Offer, Deck, Dice], dict[str, Any]]


@cache
def model(declared: frozenset[str] = frozenset()) -> Model:
    """Return the model of rows: features, of OPTIONAL those declared; dtype, families, classes of sizes."""
    classes = ("families", "lengths", "batches", "heads", "head_dims")
    return Model(
        switches=tuple(sorted(declared.intersection(OPTIONAL).union(FEATURES))),
        choices={"dtype": DTYPES, **{name: tuple(drawing()[name]) for name in classes}},
        needs=NEEDS,
        excludes=APART,
        also=tuple(frozenset(facts) for facts in drawing()["together"]),
    )


def fillings(
    row: Facts, offer: Offer, seed: int, count: int, is_sensitive: Callable[[Case], bool] = lambda _case: True
) -> list[Case]:
    """Return `count` cases of a row that share one program, each of another group of families in turn.

    Of a few tries for each the first that `is_sensitive` accepts, or else the last. A row whose first case
    is not sensitive is drawn again, with other sizes and options, a few times.
    """
    deck = offer.deck or Deck(seed)
    for redraw in range(_REDRAWS):
        drawn = _fillings(row, offer, deck.turned(redraw), seed, redraw)
        first, sensitive = _first(next(drawn), is_sensitive)
        if sensitive:
            return [first, *(_first(next(drawn), is_sensitive)[0] for _ in range(count - 1))]
    drawn = _fillings(row, offer, deck, seed, 0)
    return [_first(next(drawn), is_sensitive)[0] for _ in range(count)]


def _fillings(row: Facts, offer: Offer, deck: Deck, seed: int, redraw: int) -> Iterator[Iterator[Case]]:
    """Yield the tries of each filling of a row, without end."""
    again = f" redraw {redraw}" if redraw else ""
    dice = Dice(seed, f"row{again}")
    static, blocks = _static(row, offer, deck, dice), blocks_of(row, offer, dice)
    groups = list(drawing()["families"])
    first = next((number for number, group in enumerate(groups) if group in row), 0)
    for number in itertools.count():
        group = groups[(first + number) % len(groups)]
        throws = [Dice(seed, f"filling {number} {attempt}{again}") for attempt in range(_TRIES)]
        yield (_filled(static, group, blocks, deck, number, throw) for throw in throws)


def _first(tries: Iterator[Case], is_sensitive: Callable[[Case], bool]) -> tuple[Case, bool]:
    """Return the first sensitive case, or else the last one, and whether it is sensitive."""
    case = next(tries)
    while not is_sensitive(case):
        another = next(tries, None)
        if another is None:
            return case, False
        case = another
    return case, True


def _static(row: Facts, offer: Offer, deck: Deck, dice: Dice) -> Case:
    """Return a case with everything that a program is compiled for."""
    case = Case(dtype=offer.dtype, tiling=offer.tiling, **asdict(sizes(row, offer, deck, dice)))
    for name in sorted(row & set(_STATIC)):
        case = replace(case, **_STATIC[name](case, row, offer, deck, dice))
    return case


def _window(case: Case, row: Facts, offer: Offer, deck: Deck, dice: Dice) -> dict[str, Any]:
    return draw_window(case, row, offer, deck, dice)


def _value_dim(case: Case, _row: Facts, offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    dims = drawing()["arguments"]["value_dims"]
    return {"value_dim": head_dim_from(offer, dims, deck, "value_dim", case.head_dim)}


def _caps(row: Facts) -> str:
    """Return which caps show in a row: a large one is seen only where logits are large."""
    return "large_caps" if row & {"large", "trend"} else "small_caps"


def _cap(_case: Case, row: Facts, _offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    return {"soft_cap": deck.deal(_caps(row), "soft_cap", drawing()["arguments"][_caps(row)])}


def dealt(row: Facts) -> Facts:
    """Return the names by which values are dealt to a row: facts, and kinds of windows, caps and scales."""
    kinds = {"window": dealt_as, "soft_cap": _caps, "scale": _scales}
    return row | {kind(row) for feature, kind in kinds.items() if feature in row}


def _dropout(case: Case, _row: Facts, _offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    arguments = drawing()["arguments"]

    def is_seen(rate: float) -> bool:
        return rate * case.q_len * case.kv_len > _DROPPED

    rate = deck.deal("dropout", "rate", arguments["dropouts"], is_seen)
    return {
        "dropout": rate if is_seen(rate) else 0.5,
        "dropout_seed": deck.deal("dropout", "seed", arguments["dropout_seeds"]),
    }


def _scales(row: Facts) -> str:
    """Return which scales show in a row: 0 leaves no gradients of query and key, and a cap nothing to do."""
    return "scales" if row & {"soft_cap", "window"} else "rare_scales"


def _scale(_case: Case, row: Facts, _offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    return {"scale": deck.deal(_scales(row), "scale", drawing()["arguments"][_scales(row)])}


def _sinks(_case: Case, _row: Facts, offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    arguments = drawing()["arguments"]
    per_head = deck.deal("sinks", "per head", (True, False))
    return {
        "sinks": deck.deal("sinks", "count", arguments["sinks"]),
        "sinks_per_head": per_head if offer.sinks == "any" else offer.sinks == "per_head",
        "sink_pattern": "logits",
    }


def _sequences(case: Case, row: Facts, _offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    """Return stand-ins of as many sequences; each filling has its own lengths."""
    if "padded" in row:
        return {"lengths": ((0, 0),) * case.batch}
    counts = drawing()["arguments"]["packed"]
    return {
        "lengths": ((0, 0),) * deck.deal("packed", "count", counts, lambda count: 2 * count <= case.q_len)
    }


def _segments(_case: Case, _row: Facts, _offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    return {"segments": deck.deal("segments", "count", drawing()["arguments"]["segments"])}


_STATIC: dict[str, _Draw] = {
    "bias": draw_bias,
    "causal": lambda _case, _row, _offer, _deck, _dice: {"causal": True},
    "dropout": _dropout,
    "mask": draw_mask,
    "packed": _sequences,
    "padded": _sequences,
    "scale": _scale,
    "segments": _segments,
    "sinks": _sinks,
    "shared_dropout": draw_shared_dropout,
    "soft_cap": _cap,
    "unnormalized": lambda _case, _row, _offer, _deck, _dice: {"normalized": False},
    "value_dim": _value_dim,
    "window": _window,
    **COORDINATES,
    **INTERVALS,
}


def _filled(static: Case, group: str, blocks: Blocks, deck: Deck, number: int, dice: Dice) -> Case:
    """Return the case with values, and whatever else a compiled program takes as data."""
    families = drawing()["families"][group]
    if static.soft_cap is not None and static.soft_cap > max(drawing()["arguments"]["small_caps"]):
        families = drawing()["arguments"]["large_cap_families"]
    if group == "large" and static.q_len > _ROWS_OF_A_TILE:
        families = ["huge"]
    if static.kv_len >= _MANY_KEYS:
        # A constant among many keys leaves nothing else to see, nor does a cap that all logits are beyond.
        families = [family for family in families if family != "offset"]
        families = families if static.soft_cap is None else ["cap_scaled"]
    changes: dict[str, Any] = {
        "family": dice.pick("family", families),
        "seed": dice.between("seed", 1, 2**32 - 1),
    }
    changes |= draw_patterns(static, deck, number, dice)
    if static.segments is not None:
        mixed = static.window is not None or dice.chance("mixed segments", 0.6)
        changes["segment_pattern"] = "mixed" if mixed else "runs"
    if static.sinks > 1 and dice.chance("extreme sink", 0.3):
        changes["sink_pattern"] = "extreme"
    if static.lengths is not None:
        share = _share_packed if static.batch == 1 else _share_padded
        changes["lengths"] = share(static, blocks, dice)
    return replace(static, **changes)


def _share_padded(case: Case, blocks: Blocks, dice: Dice) -> Lengths:
    """Return a length for each batch row: one ends inside the last block, others anywhere, some are 0."""
    pairs = [
        (
            _length(case.q_len, blocks.query, dice, f"q {row}"),
            _length(case.kv_len, blocks.key, dice, f"k {row}"),
        )
        for row in range(case.batch)
    ]
    # One row is long and not full, so that the features beside the lengths show there; another has some keys.
    full = dice.between("long row", 0, case.batch - 1)
    other = (full + 1) % case.batch
    pairs[other] = (max(pairs[other][0], (case.q_len + 1) // 2), max(pairs[other][1], (case.kv_len + 1) // 2))
    short_q, short_k = dice.between("short q", 0, 1), dice.between("short k", 1, 3)
    pairs[full] = (max(case.q_len - short_q, 1), max(case.kv_len - short_k, 1))
    return tuple(pairs)


def _length(length: int, block: int, dice: Dice, name: str) -> int:
    options = (
        length - 1,
        block,
        0,
        length,
        4 * block + 1,
        block + 1,
        1,
        dice.between(f"{name} any", 0, length),
    )
    return min(max(dice.pick(name, options), 0), length)


def _share_packed(case: Case, _blocks: Blocks, dice: Dice) -> Lengths:
    """Return consecutive sequences, some empty on one side or both, and sometimes padding at the end."""
    assert case.lengths is not None
    count = len(case.lengths)
    longest = dice.between("longest", 0, count - 1)
    sides = [
        _cuts(length, count, longest, dice, name) for name, length in (("q", case.q_len), ("k", case.kv_len))
    ]
    return tuple((q, k) for q, k in zip(*sides, strict=True))


def _cuts(length: int, count: int, longest: int, dice: Dice, name: str) -> list[int]:
    """Return lengths that sum to the whole or a little less; the longest has half of it."""
    end = length - (dice.between(f"{name} padding", 0, 3) if dice.chance(f"{name} pad", 0.5) else 0)
    end = max(end, length // 2 + 1)
    rest = end // 2
    ends = sorted(dice.between(f"{name} {number}", 0, rest) for number in range(count - 1))
    lengths = [stop - start for start, stop in zip([0, *ends], [*ends, rest], strict=True)]
    lengths[longest] += end - rest
    return lengths
