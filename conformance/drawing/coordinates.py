"""The coordinates of a drawn case's tokens: offsets, positions, origins and what dropout makes of them."""

from collections.abc import Callable
from typing import Any

from attest.conformance.cases.case import POSITION_PATTERNS, Case
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.shapes import Offer

# Each moves some of the coordinates that dropout counts by: keys by multiples of the four that share one call
# of its generator, and by others.
_ORIGINS = (
    (0, 0, 0, 4),
    (1, 2, 3, 7),
    (1, 2, 3, 8),
    (0, 0, 0, 1),
    (0, 5, 4096, 0),
    (3, 0, 1 << 31, (1 << 20) + 2),
    (3, 0, 1 << 31, 1 << 20),
)
# The same where dropout is shared, so that no batch entry and no head is 0 by itself.
_SHARED_ORIGINS = ((1, 2, 3, 8), (3, 5, 1 << 31, 1 << 20))


def draw_shared_dropout(case: Case, _row: object, _offer: object, deck: Deck, dice: Dice) -> dict[str, Any]:
    """Return what shares a mask of dropout: what there are several of, or what the origin moves."""
    changes: dict[str, Any] = {}
    if case.origin is not None:
        changes["origin"] = dice.pick("origin of shared dropout", _SHARED_ORIGINS)
    elif case.batch == case.q_heads == 1:
        changes |= {"q_heads": 2, "kv_heads": 2}
    several = {
        "b": case.batch > 1 or case.origin is not None,
        "h": case.q_heads > 1 or bool(changes),
    }
    shown = [shared for shared in ("bh", "h", "b") if all(several[letter] for letter in shared)]
    return {**changes, "dropout_shared": deck.deal("shared_dropout", "shared", shown)}


def _offset(case: Case, _row: object, _offer: object, _deck: object, dice: Dice) -> dict[str, Any]:
    """Return an offset other than the default, in most rows neither before all keys nor behind them.

    Of several sequences, half of the cases have an offset for each, no two neighbours the same.
    """
    usual = case.kv_len - case.q_len
    offsets = [offset for offset in (usual - 1, usual + 1, 0, -1, case.kv_len // 2) if offset != usual]
    if case.sequences > 1 and dice.chance("an offset for each sequence", 0.5):
        distinct = dice.shuffled("q_offsets", list(dict.fromkeys(offsets)))
        return {"q_offset": tuple(distinct[number % len(distinct)] for number in range(case.sequences))}
    return {"q_offset": dice.pick("q_offset", offsets)}


def _origin(_case: Case, _row: object, offer: Offer, deck: Deck, _dice: Dice) -> dict[str, Any]:
    """Return where the call begins in larger arrays, at a key that the subject takes."""
    taken = [origin for origin in _ORIGINS if origin[3] % offer.origin_multiple == 0]
    return {"origin": deck.deal("origin", "origin", taken)}


def _positions(_case: Case, _row: object, _offer: object, deck: Deck, _dice: Dice) -> dict[str, Any]:
    return {"positions": deck.deal("positions", "pattern", POSITION_PATTERNS)}


# The fields of a case for each of these features; see _Draw in recipes.py.
COORDINATES: dict[str, Callable[[Case, Any, Offer, Deck, Dice], dict[str, Any]]] = {
    "q_offset": _offset,
    "positions": _positions,
    "origin": _origin,
}
