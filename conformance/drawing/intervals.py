"""The arguments of a drawn case that count along the keys: chunks, ranges and the slopes of ALiBi."""

from collections.abc import Callable
from typing import Any

from attest.conformance.cases.case import ALIBI_PATTERNS, RANGE_PATTERNS, Case
from attest.conformance.drawing.dice import Dice


def _chunk(case: Case, _row: object, _offer: object, dice: Dice) -> dict[str, Any]:
    """Return a size that leaves some keys to the rows and hides some, beside a power of two or anywhere."""
    most = max(case.kv_len - 1, 1)
    sizes = (16, 5, 33, 64, 3, case.kv_len // 2 + 1, 15, max(case.q_len, case.kv_len) // 3 + 1)
    return {"chunk_size": min(dice.pick("chunk size", sizes), most)}


# The fields of a case for each of these features; from the case, two things that they need not, and dice.
INTERVALS: dict[str, Callable[[Case, object, object, Dice], dict[str, Any]]] = {
    "chunks": _chunk,
    "ranges": lambda _case, _row, _offer, dice: {"ranges": dice.pick("ranges", RANGE_PATTERNS)},
    "alibi": lambda _case, _row, _offer, dice: {"alibi": dice.pick("alibi", ALIBI_PATTERNS)},
}
