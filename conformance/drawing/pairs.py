"""The mask and the bias of a drawn case: their axes, and what they hide."""

from typing import Any

from attest.conformance.cases.axes import (
    BIAS_AXES,
    BROADCAST_BIAS_AXES,
    BROADCAST_MASK_AXES,
    MASK_AXES,
    has_pattern,
    own_axes,
)
from attest.conformance.cases.case import Case
from attest.conformance.drawing.covering import Facts
from attest.conformance.drawing.dice import Deck, Dice


def draw_mask(_case: Case, row: Facts, _offer: object, deck: Deck, _dice: object) -> dict[str, Any]:
    """Return the axes of a mask, and whether it holds integers."""
    name, axes = ("broadcast", BROADCAST_MASK_AXES) if "broadcast" in row else ("mask", MASK_AXES)
    return {"mask": deck.deal(name, "mask", axes), "integer_mask": "integer_mask" in row}


def draw_bias(_case: Case, row: Facts, _offer: object, deck: Deck, dice: Dice) -> dict[str, Any]:
    """Return the axes of a bias; in half of the rows with masks that are shared, keys share it, too."""
    shared = "broadcast" in row and dice.chance("keys share the bias", 0.5)
    return {"bias": deck.deal("bias", "axes", BROADCAST_BIAS_AXES if shared else BIAS_AXES)}


def draw_patterns(static: Case, deck: Deck, number: int, dice: Dice) -> dict[str, Any]:
    """Return, for a filling by number, what mask and bias hide.

    A third of the keys or of the rows is hidden by one of the two.
    """
    changes: dict[str, Any] = {}
    # A window leaves rows few keys, which a third of them may hold; so does causal, at either end.
    thirds = ("middle",) if static.causal else ("first", "middle", "last")
    hides = "rows" if static.window else dice.pick("hides", (*thirds, "rows"))
    by_bias = static.mask is None or (static.bias is not None and dice.chance("hidden by bias", 0.5))
    if static.mask is not None and static.kv_len > 2:
        pattern = "random" if by_bias or dice.chance("random mask", 0.25) else hides
        changes["mask_pattern"] = pattern if has_pattern(pattern, static.mask) else "random"
        empty_rows = hides != "rows" and dice.chance("empty rows", 0.3)
        changes["empty_rows"] = empty_rows and own_axes(static.mask)[2]
    if static.bias is not None and static.kv_len > 2:
        axes = static.bias
        patterns = ("normal", "lowest", "large", "lowest rows")
        mild = deck.deal("bias", f"pattern {number}", patterns, lambda pattern: has_pattern(pattern, axes))
        may_hide = by_bias and (hides != "rows" or (own_axes(static.bias)[2] and static.q_len > 2))
        pattern = hides if may_hide and dice.chance("bias hides a third", 0.5) else mild
        changes["bias_pattern"] = pattern if has_pattern(pattern, static.bias) else "normal"
        changes["bias_hides"] = dice.chance("bias hides", 0.3)
    return changes
