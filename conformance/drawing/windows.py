"""The sides of a drawn window: at least one hides keys; the other may be open, or wider than everything."""

from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.drawing.covering import Facts
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.shapes import Blocks, class_of

# What a side is: None, open. "any": beyond some keys but not all, in half of the cases up to a block's edge
# for the first row of every block of rows, or one beside it. "wide": beyond everything.
_Side = str | None

_ALONE: tuple[tuple[_Side, _Side], ...] = (
    ("any", None),
    ("zero", "any"),
    (None, "any"),
    ("any", "wide"),
    ("any", "zero"),
    ("wide", "any"),
)
# Causal order bounds the right side as well, which must not go unseen behind it.
_CAUSAL: tuple[tuple[_Side, _Side], ...] = (("any", "any"), ("zero", None), ("any", "wide"), ("any", None))
# Features that show only in rows of several keys.
_WEIGHING = frozenset({"bias", "mask", "scale", "soft_cap", "alibi"})
# Beyond what a byte holds.
_FAR = 256


def draw_window(case: Case, row: Facts, sides: str, blocks: Blocks, deck: Deck, dice: Dice) -> dict[str, Any]:
    """Return the window of a row's cases. sides: those that the subject takes, as in its limits."""
    # Of packed tokens only half are sure to be in one sequence.
    parts = 2 if "packed" in row else 1
    most_left, most_right = case.kv_len // parts - 2, case.q_len // parts - 2

    def shows(pair: tuple[_Side, _Side]) -> bool:
        """Return whether a window of this kind hides keys here, and leaves rows what their features need."""
        left, right = pair
        if left == "zero" and (case.causal or right == "zero"):
            return not row & _WEIGHING
        binds_left = left == "zero" or (left == "any" and most_left >= 1)
        binds_right = not case.causal and (right == "zero" or (right == "any" and most_right >= 1))
        return binds_left or binds_right

    kinds = _CAUSAL if case.causal else _ALONE
    if sides == "left":
        right = None if case.causal else "zero"
        kinds = (("any", right), ("zero", right), ("any", right))
    left, right = deck.deal(turn_of(row), "sides", kinds, shows)
    least = _FAR if class_of(row, "lengths") in ("wide", "long") else 1
    offset, align = case.kv_len - case.q_len, deck.deal(turn_of(row), "align", (0, -1, 1))
    wide = case.q_len + case.kv_len + dice.pick("beyond", (0, 1000))
    ends = (
        _bounded(dice, "left", offset + align, blocks.key, most_left, least),
        _bounded(dice, "right", align - offset, blocks.key, most_right, 1),
    )
    sizes = ({None: None, "zero": 0, "wide": wide, "any": bounded} for bounded in ends)
    return {"window": tuple(size[side] for size, side in zip(sizes, (left, right), strict=True))}


def turn_of(row: Facts) -> str:
    """Return the name by which a row gets a window in its turn: windows of causal rows are dealt apart."""
    return "causal window" if "causal" in row else "window alone"


def _bounded(dice: Dice, name: str, edge: int, block: int, most: int, least: int) -> int:
    """Return a side of `least` to `most` tokens, in half of the cases whole blocks away from `edge`."""
    most = max(most, 0)
    least = min(max(least, 1), max(most, 1))
    anywhere = min(dice.spread(f"{name} any", least, max(most, least)), most)
    if dice.chance(f"{name} anywhere", 0.5):
        return anywhere
    at_edge = anywhere - (anywhere - edge) % block
    return min(at_edge if at_edge >= 0 else at_edge + block, most)
