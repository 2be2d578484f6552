"""The sides of a drawn window: at least one hides keys; the other may be open, or wider than everything."""

from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.drawing.covering import Facts
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.shapes import Offer, blocks_of, class_of

# What a side is: None, open. "any": beyond some keys but not all, in most cases up to a block's edge
# for the first row of every block of rows, or one beside it. "wide": beyond everything.
_Side = str | None

# The kinds of windows that are dealt to rows: by whether causal order bounds the right side as well, which
# must not go unseen behind it, and whether a row has features that show only in rows of several keys.
_KINDS: dict[str, tuple[tuple[_Side, _Side], ...]] = {
    "window": (("zero", "zero"), ("any", "zero"), ("zero", "any"), (None, "zero")),
    "window of several keys": (
        ("any", None),
        (None, "any"),
        ("any", "wide"),
        ("wide", "any"),
        ("zero", "any"),
    ),
    "causal window": (("zero", None), ("any", "any")),
    "causal window of several keys": (("any", "any"), ("any", "wide"), ("any", None)),
}
_WEIGHING = frozenset({"bias", "mask", "scale", "soft_cap", "alibi"})
# Beyond what a byte holds.
_FAR = 256


def draw_window(case: Case, row: Facts, offer: Offer, deck: Deck, dice: Dice) -> dict[str, Any]:
    """Return the window of a row's cases: of the sides, and from the corner, that the subject declares."""
    most_left, most_right = _farthest(case, offer.window)

    def shows(pair: tuple[_Side, _Side]) -> bool:
        """Return whether a window of this kind hides keys here."""
        left, right = pair
        return _binds(left, most_left) or (not case.causal and _binds(right, most_right))

    name = dealt_as(row)
    kinds = _KINDS[name]
    if offer.window_sides == "left":
        right = None if case.causal else "zero"
        kinds = (("any", right), ("any", right) if row & _WEIGHING else ("zero", right))
    left, right = deck.deal(name, "sides", kinds, shows)
    least = _FAR if class_of(row, "lengths") in ("wide", "long") else 1
    offset = 0 if offer.window == "top_left" else case.kv_len - case.q_len
    align, blocks = dice.pick("align", (0, -1, 1)), blocks_of(row, offer, dice)
    wide = case.q_len + case.kv_len + dice.pick("beyond", (0, 1000))
    ends = (
        _bounded(dice, "left", offset + align, blocks.key, most_left, least),
        _bounded(dice, "right", align - offset, blocks.key, most_right, 1),
    )
    sizes = ({None: None, "zero": 0, "wide": wide, "any": bounded} for bounded in ends)
    return {"window": tuple(size[side] for size, side in zip(sizes, (left, right), strict=True))}


def _binds(side: _Side, most: int) -> bool:
    """Return whether a side of this kind hides keys where one of at most so many tokens does."""
    return (side == "zero" and most >= 0) or (side == "any" and most >= 1)


def _farthest(case: Case, corner: str) -> tuple[int, int]:
    """Return the largest sides that hide a key from some row of every sequence; below 0 if none does.

    corner: where the diagonal starts or ends if no offset is given.
    """
    # Of packed tokens only half are sure to be in one sequence.
    parts = 2 if case.lengths is not None and case.batch == 1 else 1
    q_len, kv_len = case.q_len // parts, case.kv_len // parts
    usual = 0 if corner == "top_left" else kv_len - q_len
    firsts = (usual,) if case.q_offset is None else case.q_offset
    chunk = case.chunk_size or (1 << 31)
    left, right = kv_len, kv_len
    for first in (firsts,) if isinstance(firsts, int) else firsts:
        rows = range(first, first + q_len)
        before = (row - max(row // chunk * chunk, 0) for row in rows)
        behind = (min((row // chunk + 1) * chunk, kv_len) - 1 - row for row in rows)
        left, right = min(left, max(before, default=0)), min(right, max(behind, default=0))
    return left - 1, right - 1


def dealt_as(row: Facts) -> str:
    """Return the kinds of windows that a row is dealt one of."""
    causal, several = "causal " if "causal" in row else "", " of several keys" if row & _WEIGHING else ""
    return f"{causal}window{several}"


def _bounded(dice: Dice, name: str, edge: int, block: int, most: int, least: int) -> int:
    """Return a side of `least` to `most` tokens, in most cases whole blocks away from `edge`."""
    most = max(most, 0)
    least = min(max(least, 1), max(most, 1))
    anywhere = min(dice.spread(f"{name} any", least, max(most, least)), most)
    if dice.chance(f"{name} anywhere", 0.3):
        return anywhere
    at_edge = anywhere - (anywhere - edge) % block
    return min(at_edge if at_edge >= 0 else at_edge + block, most)
