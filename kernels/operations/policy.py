"""The steps that a `ConfigSelectorChain` may take when no cache has a configuration."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from attest.kernels.call.options import check_flag, refuse, shown

type Fallback = Literal["autotune", "heuristics"]


@dataclass(frozen=True)
class AutotunePolicy:
    """The reaction to a miss of all caches.

    allow_autotune: whether candidates may be timed. allow_heuristics: whether the operation may choose by its
    tables. cache_miss_fallback: which of the two comes first; "heuristics" never times in the middle of a
    program. validate_backward: whether candidates are judged and timed with their gradients.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: Fallback = "autotune"
    validate_backward: bool = False

    def __post_init__(self) -> None:
        for name in ("allow_autotune", "allow_heuristics", "validate_backward"):
            check_flag(name, getattr(self, name))
        choices = get_args(Fallback.__value__)
        if self.cache_miss_fallback not in choices:
            expected = " or ".join(map(repr, choices))
            refuse("cache_miss_fallback", shown(self.cache_miss_fallback), expected, "Correct the name.")


@contextmanager
def policy_override(selector: Any, **changes: Any) -> Generator[None]:
    """Change fields of the policy of a selector in the block.

    Raises: ValueError for a field that `AutotunePolicy` does not have.
    """
    names = [x.name for x in fields(AutotunePolicy)]
    for name in changes:
        if name not in names:
            refuse(
                "policy_override", f"the field {name!r}", f"one of {', '.join(names)}", "Correct the name."
            )
    before = selector.policy
    selector.policy = replace(before, **changes)
    try:
        yield
    finally:
        selector.policy = before
