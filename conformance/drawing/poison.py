"""Cases with NaN and inf wherever nothing may be read: keys that no row sees, rows that see no key."""

from dataclasses import replace
from typing import Any

from attest.conformance.cases.axes import has_pattern
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import OPTIONAL
from attest.conformance.drawing.dice import Dice

# Features that hide a key from every row, in the patterns that `poisoned` chooses.
_HIDING = frozenset({"mask", "segments", "bias"})


def poisoned(case: Case, seed: int) -> Case | None:
    """Return the case with poison in keys that no row sees and rows that see no key; None without such."""
    third = Dice(seed, "poison").pick("third", ("first", "middle", "last"))
    changes: dict[str, Any] = {"poison": True}
    hiding = _HIDING
    if case.mask is not None:
        changes["mask_pattern"] = _hiding(third, case.mask, "random")
    elif case.bias is not None:
        changes["bias_pattern"] = _hiding(third, case.bias, "normal")
        if changes["bias_pattern"] == "normal":
            hiding -= {"bias"}
    hides = (
        case.features & hiding
        or _lengths_hide(case)
        or case.ranges not in (None, "band", "scattered")
        or _sides_hide(case)
    )
    return replace(case, **changes) if hides else None


def _hiding(third: str, axes: str, otherwise: str) -> str:
    """Return a pattern of a mask or bias that hides keys from every row, or rows from every key."""
    return next((pattern for pattern in (third, "rows") if has_pattern(pattern, axes)), otherwise)


def _lengths_hide(case: Case) -> bool:
    """Return whether lengths leave padding, or one side of a sequence without the other."""
    lengths = case.lengths or ()
    parts = [lengths] if case.batch == 1 else [(pair,) for pair in lengths]
    return any(
        sum(q for q, _ in part) < case.q_len
        or sum(k for _, k in part) < case.kv_len
        or any((q == 0) != (k == 0) for q, k in part)
        for part in parts
        if part
    )


def _sides_hide(case: Case) -> bool:
    """Return whether unequal lengths leave a key before every window, or a row before every key."""
    if case.lengths is not None or case.features & set(OPTIONAL):
        return False
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    keys_before = case.kv_len - case.q_len
    return (left is not None and keys_before > left) or (right is not None and -keys_before > right)
