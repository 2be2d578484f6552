"""Cases made of one row of a covering array: one set of shapes and options, and several fillings of values.

Compiling a kernel takes longer than calling it, and longer than the oracle takes for a small case. So the
cases of a row share all that a program is compiled for, and differ in all else: values, lengths, ids, masks.
Every feature of a row must show in its cases: windows hide some keys, caps meet logits of their size.
"""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.cases.case import Case, Lengths, Window
from attest.conformance.cases.features import APART, DTYPES, FEATURES, NEEDS, OPTIONAL
from attest.conformance.drawing.coordinates import COORDINATES, draw_shared_dropout
from attest.conformance.drawing.covering import Facts, Model
from attest.conformance.drawing.dice import Dice
from attest.conformance.drawing.intervals import INTERVALS
from attest.conformance.drawing.pairs import draw_bias, draw_mask, draw_patterns

LENGTH_CLASSES = ("few", "edge", "many", "tall", "long")
# Features that show only in rows of several keys.
_WEIGHING = frozenset({"bias", "mask", "scale", "soft_cap"})
_LONG_KEYS = (1024, 1025, 1151, 1280)
_LONG_QUERIES = (128, 150, 129)
_TRIES = 4
_ROWS_OF_A_TILE = 64  # what a kernel keeps from one block of rows to the next shows only beyond them
_DROPPED = 4  # pairs of a head that dropout must drop, to be seen


@dataclass(frozen=True)
class Blocks:
    """The blocks whose edges matter: where a length or a window's side ends."""

    query: int
    key: int


@dataclass(frozen=True)
class Offer:
    """The part of a row that a subject takes: its dtype, and which of its tilings runs with which blocks.

    blocks: None for those of conformance/drawing/drawing.toml. head_dims: the smallest and the largest. The
    others are as in `attest.conformance.subject.Subject`.
    """

    dtype: str
    tiling: int = -1
    blocks: Blocks | None = None
    head_dims: tuple[int, int] = (1, 256)
    longest: int = 2048
    length_multiple: int = 1
    sinks: str = "any"
    window_sides: str = "both"


@cache
def drawing() -> dict[str, Any]:
    """Return the tables of conformance/drawing/drawing.toml."""
    return tomllib.loads(Path(__file__).with_name("drawing.toml").read_text())


@cache
def model(declared: frozenset[str] = frozenset()) -> Model:
    """Return the model of rows: features, of OPTIONAL those declared, a dtype, families and lengths."""
    return Model(
        switches=tuple(sorted(declared.intersection(OPTIONAL).union(FEATURES))),
        choices={"dtype": DTYPES, "family": tuple(drawing()["families"]), "lengths": LENGTH_CLASSES},
        needs=NEEDS,
        excludes=APART,
        also=tuple(frozenset(facts) for facts in drawing()["together"]["sets"]),
    )


def fillings(
    row: Facts, offer: Offer, seed: int, count: int, is_sensitive: Callable[[Case], bool] = lambda _case: True
) -> list[Case]:
    """Return `count` cases of a row that share one program, each of another group of families in turn.

    Of a few tries for each the first that `is_sensitive` accepts, or else the last.
    """
    dice = Dice(seed, "row")
    static = _static(row, offer, dice)
    groups = list(drawing()["families"])
    first = next((number for number, group in enumerate(groups) if group in row), 0)
    cases: list[Case] = []
    for number in range(count):
        group = groups[(first + number) % len(groups)]
        tries = (
            _filled(static, group, _blocks(row, offer, dice), Dice(seed, f"filling {number} {attempt}"))
            for attempt in range(_TRIES)
        )
        cases.append(_first(tries, is_sensitive))
    return cases


def _first(tries: Iterator[Case], is_sensitive: Callable[[Case], bool]) -> Case:
    case = next(tries)
    while not is_sensitive(case):
        another = next(tries, None)
        if another is None:
            return case
        case = another
    return case


def _blocks(row: Facts, offer: Offer, dice: Dice) -> Blocks:
    if offer.blocks is not None:
        return offer.blocks
    usual, largest = drawing()["blocks"], drawing()["lengths"][class_of(row)]["largest_block"]
    return Blocks(
        dice.pick(
            "query block", [n for n in usual["query"] if n <= largest and 3 * n <= offer.longest] or [16]
        ),
        dice.pick("key block", [n for n in usual["key"] if n <= largest and 10 * n <= offer.longest] or [16]),
    )


def class_of(row: Facts) -> str:
    """Return the class of lengths of a row."""
    return next((name for name in LENGTH_CLASSES if name in row), "edge")


def _static(row: Facts, offer: Offer, dice: Dice) -> Case:
    """Return a case with everything that a program is compiled for."""
    lengths = class_of(row)
    table = drawing()["lengths"][lengths]
    heads = drawing()["arguments"]["grouped_heads" if "gqa" in row else "heads"]
    blocks = _blocks(row, offer, dice)
    q_len, kv_len = _LENGTHS[lengths](blocks, dice)
    if row & {"causal", "window"}:  # one row that sees all, or nothing, shows neither
        floor = 9 if row & {"segments", "many"} else 3
        q_len, kv_len = max(q_len, floor), max(kv_len, floor)
    if "packed" in row:  # several sequences, one of which has a few tokens
        q_len, kv_len = max(q_len, 9), max(kv_len, 11)
    q_len, kv_len = (-(-n // offer.length_multiple) * offer.length_multiple for n in (q_len, kv_len))
    batches = [batch for batch in table["batches"] if batch > 1] or [2]
    batch = 1 if "packed" in row else dice.pick("batch", batches if "padded" in row else table["batches"])
    q_heads, kv_heads = dice.pick("heads", heads)
    room = table["elements"] // max(q_len * kv_len, 1)
    while batch * q_heads > room and batch > (2 if "padded" in row else 1):
        batch -= 1
    if batch * q_heads > room:
        q_heads, kv_heads = (2, 1) if "gqa" in row else (2, 2)
    case = Case(
        dtype=offer.dtype,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(offer, table["head_dims"], dice, "head_dim"),
        tiling=offer.tiling,
    )
    for name in sorted(row & set(_STATIC)):
        case = replace(case, **_STATIC[name](case, row, offer, dice))
    return case


def _few(_blocks: Blocks, dice: Dice) -> tuple[int, int]:
    return dice.pick("q_len", (3, 1, 2, 5)), dice.pick("kv_len", (5, 4, 7, 9, 3))


def _edge(blocks: Blocks, dice: Dice) -> tuple[int, int]:
    q, k = blocks.query, blocks.key
    lengths = (3 * q + 2, 3 * k + 2), (2 * q + 1, 3 * k - 1), (3 * q - 1, 2 * k + 1), (3 * q, 3 * k + 1)
    q_len, kv_len = dice.pick("lengths", (*lengths, (2 * q + 1, 2 * k + 1)))
    return max(q_len, 2), max(kv_len, 3)


def _many(blocks: Blocks, dice: Dice) -> tuple[int, int]:
    q_len = dice.pick("q_len", (blocks.query + 1, 5, 17, 3, min(blocks.query, 64)))
    return max(q_len, 3), dice.pick("count", (5, 6, 9)) * blocks.key + dice.pick("past", (1, 2, -1, 0, 3))


def _tall(blocks: Blocks, dice: Dice) -> tuple[int, int]:
    q_len = dice.pick("q_len", (2 * blocks.query + 1, 2 * blocks.query + 3, 3 * blocks.query - 1))
    return max(q_len, 5), dice.pick("kv_len", (blocks.key + 1, 9, blocks.key - 1, 33))


def _long(_blocks: Blocks, dice: Dice) -> tuple[int, int]:
    return dice.pick("q_len", _LONG_QUERIES), dice.pick("kv_len", _LONG_KEYS)


_LENGTHS: dict[str, Callable[[Blocks, Dice], tuple[int, int]]] = {
    "few": _few,
    "edge": _edge,
    "many": _many,
    "tall": _tall,
    "long": _long,
}


def _head_dim(offer: Offer, dims: Sequence[int], dice: Dice, name: str, other: int | None = None) -> int:
    low, high = offer.head_dims
    fitting = [dim for dim in dims if low <= dim <= high and dim != other]
    return dice.pick(name, fitting or [dim for dim in (low, high) if dim != other] or [low])


def _window(case: Case, row: Facts, offer: Offer, dice: Dice) -> dict[str, Any]:
    """Return sides that end at a block's edge for the first row of every block of rows, or one beside it.

    At least one side hides keys; the other may be open, or wider than everything.
    """
    block, offset = _blocks(row, offer, dice).key, case.kv_len - case.q_len
    align = dice.pick("align", (0, -1, 1))
    left = (offset + align) % block if dice.chance("aligned", 0.6) else dice.pick("left", (0, 1, 2, 3))
    right = (align - offset) % block if dice.chance("aligned right", 0.4) else dice.pick("right", (0, 1, 2))
    # Of packed tokens only half are sure to be in one sequence.
    parts = 2 if "packed" in row else 1
    left = min(left, max(case.kv_len // parts - 5, 0))
    right = min(right, max(case.q_len // parts - 3, 0))
    if row & _WEIGHING:  # a row of one key has the weight 1 whatever its logit
        left = max(left, 1)
    wide = case.q_len + case.kv_len
    windows: tuple[Window, ...] = (
        (left, right),
        (left, None),
        (0, 0) if left == 0 else (left, 0),
        (None, right),
        (left, wide),
        (0, None),
        (wide, right),
        (None, 0),
    )
    if case.causal:  # which bounds the right side as well, and must not go unseen behind it
        windows = ((left, None), (left, max(right, 1)), (left, wide))
    if offer.window_sides == "left":
        windows = ((left, None),) if case.causal else ((left, 0),)
    return {"window": dice.pick("window", windows)}


def _gap(case: Case, row: Facts, offer: Offer, dice: Dice) -> dict[str, Any]:
    return {"value_dim": _head_dim(offer, (8, 3, 40, 16, 96, 64, 192), dice, "value_dim", case.head_dim)}


def _cap(_case: Case, row: Facts, _offer: Offer, dice: Dice) -> dict[str, Any]:
    caps = "large_caps" if row & {"large", "trend"} else "small_caps"
    return {"soft_cap": dice.pick("soft_cap", drawing()["arguments"][caps])}


def _dropout(case: Case, _row: Facts, _offer: Offer, dice: Dice) -> dict[str, Any]:
    arguments = drawing()["arguments"]
    rates = [rate for rate in arguments["dropouts"] if rate * case.q_len * case.kv_len > _DROPPED]
    return {
        "dropout": dice.pick("dropout", rates or [0.5]),
        "dropout_seed": dice.pick("dropout_seed", arguments["dropout_seeds"]),
    }


def _scale(_case: Case, row: Facts, _offer: Offer, dice: Dice) -> dict[str, Any]:
    """Return a scale, not 0 under a cap, which has nothing to do then."""
    scales = drawing()["arguments"]["scales"]
    return {"scale": dice.pick("scale", [scale for scale in scales if scale or "soft_cap" not in row])}


def _sinks(_case: Case, _row: Facts, offer: Offer, dice: Dice) -> dict[str, Any]:
    count = dice.pick("sinks", drawing()["arguments"]["sinks"])
    per_head = dice.chance("per head", 0.5) if offer.sinks == "any" else offer.sinks == "per_head"
    return {"sinks": count, "sinks_per_head": per_head, "sink_pattern": "logits"}


def _lengths(case: Case, row: Facts, _offer: Offer, dice: Dice) -> dict[str, Any]:
    """Return stand-ins of as many sequences; each filling has its own."""
    if "padded" in row:
        return {"lengths": ((0, 0),) * case.batch}
    few = [count for count in drawing()["arguments"]["packed"] if 2 * count <= case.q_len]
    return {"lengths": ((0, 0),) * dice.pick("packed", few)}


def _one(field: str, options: str) -> Callable[[Case, Facts, Offer, Dice], dict[str, Any]]:
    return lambda _case, _row, _offer, dice: {field: dice.pick(field, drawing()["arguments"][options])}


_STATIC: dict[str, Callable[[Case, Facts, Offer, Dice], dict[str, Any]]] = {
    "bias": draw_bias,
    "causal": lambda _case, _row, _offer, _dice: {"causal": True},
    "dropout": _dropout,
    "mask": draw_mask,
    "packed": _lengths,
    "padded": _lengths,
    "scale": _scale,
    "segments": _one("segments", "segments"),
    "sinks": _sinks,
    "shared_dropout": draw_shared_dropout,
    "soft_cap": _cap,
    "unnormalized": lambda _case, _row, _offer, _dice: {"normalized": False},
    "value_dim": _gap,
    "window": _window,
    **COORDINATES,
    **INTERVALS,
}


def _filled(static: Case, group: str, blocks: Blocks, dice: Dice) -> Case:
    """Return the case with values, and whatever else a compiled program takes as data."""
    families = drawing()["families"][group]
    if static.soft_cap is not None and static.soft_cap > max(drawing()["arguments"]["small_caps"]):
        families = drawing()["arguments"]["large_cap_families"]
    if group == "large" and static.q_len > _ROWS_OF_A_TILE:
        families = ["huge"]
    if static.kv_len >= min(_LONG_KEYS):
        # A constant among many keys leaves nothing else to see, nor does a cap that all logits are beyond.
        families = [family for family in families if family != "offset"]
        families = families if static.soft_cap is None else ["cap_scaled"]
    changes: dict[str, Any] = {
        "family": dice.pick("family", families),
        "seed": dice.between("seed", 1, 2**32 - 1),
    }
    changes |= draw_patterns(static, dice)
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
