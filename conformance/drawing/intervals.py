"""The arguments of a drawn case that count along the keys: chunks, ranges and the slopes of ALiBi."""

from collections.abc import Callable
from typing import Any

from attest.conformance.cases.case import ALIBI_PATTERNS, RANGE_PATTERNS, Case
from attest.conformance.drawing.dice import Deck


def _chunk(case: Case, _row: object, _offer: object, deck: Deck, _dice: object) -> dict[str, Any]:
    """Return a size that leaves some keys to the rows and hides some, beside a power of two or anywhere."""
    most = max(case.kv_len - 1, 1)
    sizes = (16, 5, 33, 64, 3, case.kv_len // 2 + 1, 15, max(case.q_len, case.kv_len) // 3 + 1)
    return {"chunk_size": min(deck.deal("chunks", "size", sizes), most)}


def _ranges(_case: Case, _row: object, _offer: object, deck: Deck, _dice: object) -> dict[str, Any]:
    return {"ranges": deck.deal("ranges", "pattern", RANGE_PATTERNS)}


def _alibi(_case: Case, _row: object, _offer: object, deck: Deck, _dice: object) -> dict[str, Any]:
    return {"alibi": deck.deal("alibi", "pattern", ALIBI_PATTERNS)}


# The fields of a case for each of these features; see _Draw in recipes.py.
INTERVALS: dict[str, Callable[[Case, Any, Any, Deck, Any], dict[str, Any]]] = {
    "chunks": _chunk,
    "ranges": _ranges,
    "alibi": _alibi,
}
