"""Integers that 32 bits do not hold, in place of one that they do: refused by name, or taken as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

_ABOVE = (2**32, 2**40)


@dataclass(frozen=True)
class Case:
    """One integer argument of a function.

    name: with which its refusal begins. call: the result, from the argument. base: the argument, whose entry
    `at` is replaced by its aliases. above, below: what the entry means where it is far above or below all
    others; None where such an entry has no meaning. unsigned: whether all of uint32 has one.
    """

    name: str
    call: Callable[[Any], Any]
    base: Any
    above: int | None = None
    below: int | None = None
    at: tuple[int, ...] = ()
    unsigned: bool = False

    def with_entry(self, entry: int, dtype: str | None = None) -> Any:
        """The argument with another entry; as a Python int or list, or as an array of a dtype."""
        if not isinstance(self.base, np.ndarray):
            return entry if dtype is None else np.dtype(dtype).type(entry)
        array = np.array(self.base, object)
        array[self.at] = entry
        return array.astype(dtype or "int64")


@st.composite
def aliases(draw: Any, case: Case) -> tuple[int, str | None, bool]:
    """An entry that narrows to the one of the case, or to -1; its dtype; and whether it is far above."""
    entry = int(np.asarray(case.base)[case.at])
    shift = draw(st.sampled_from([*_ABOVE, *(-x for x in _ABOVE), *([] if case.unsigned else [None])]))
    alias = 2**32 - 1 if shift is None else entry + shift
    dtypes = (
        ["int64"] if alias < 0 else ["int64", "uint64", "uint32"] if alias < 2**32 else ["int64", "uint64"]
    )
    forms = dtypes if isinstance(case.base, np.ndarray) else [*dtypes, None]
    return alias, draw(st.sampled_from(forms)), alias > 0


def check_taken_as_given(case: Case, alias: int, dtype: str | None, above: bool) -> None:
    """Hold a call with an alias to a refusal by name, or to the result of what it means."""
    got = refusal = None
    try:
        got = case.call(case.with_entry(alias, dtype))
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith((f"{case.name}: got ", f"mask_info.{case.name}: got ")), refusal
        return
    meant = case.above if above else case.below
    assert meant is not None, f"{case.name}: {alias} of {dtype} was taken"
    np.testing.assert_array_equal(got, case.call(case.with_entry(meant)))


def check_makes_a_difference(case: Case) -> None:
    """Hold the results of a case to differ, so that an alias which is taken wrongly is seen."""
    base = np.asarray(case.call(case.base))
    for meant in (case.above, case.below):
        if meant is not None:
            assert not np.array_equal(base, case.call(case.with_entry(meant))), (case.name, meant)
