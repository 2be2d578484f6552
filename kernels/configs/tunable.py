"""The choice of an implementation's block sizes: its tables, what a tuner may try, and neutral sizes.

A neutral size is one that every implementation understands, or refuses by name: `q_blocksize`,
`kv_blocksize`, `num_warps` and `num_stages`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.configs.rows import Row

# Sizes by name, such as {"q_blocksize": 128}; those that are left to the implementation are absent.
type Neutral = Mapping[str, int]

# Beside the choice of the table, a tuner tries at most so many sizes of each kernel by default.
MOST_CANDIDATES = 12


@dataclass(frozen=True)
class Tunable:
    """The ways to cut the calls of an implementation. Calls are checked; their arrays may be abstract.

    chosen: the `Config` that the implementation takes for a call which gives none, with every size that it
    chooses itself. candidates: configurations worth timing, the likeliest first and `chosen` the very first,
    and at most so many sizes of each kernel; None is MOST_CANDIDATES. translated: a configuration from
    neutral sizes of forward and backward; those left out are as in `chosen`. It raises ValueError naming a
    size that the implementation does not have. understood: the names that it has. capped: `chosen` with
    forward blocks of at most so many rows and keys, as far as blocks can be that small. rows: those of the
    implementation's table by which calls like this one get a configuration, one for each kernel whose sizes
    it has.
    """

    chosen: Callable[[Call], Any]
    candidates: Callable[[Call, int | None], tuple[Any, ...]]
    translated: Callable[[Call, Neutral, Neutral], Any]
    understood: frozenset[str]
    capped: Callable[[Call, int, int], Any]
    rows: Callable[[Call, Any], tuple[Row, ...]]


def check_understood(platform: str, argument: str, sizes: Neutral, understood: frozenset[str]) -> None:
    """Refuse a neutral size that an implementation does not have.

    Raises: ValueError naming the field.
    """
    for name, size in sizes.items():
        if name not in understood:
            expected = f"{platform!r} to choose it, whose sizes are {', '.join(sorted(understood))}"
            refuse(f"{argument}.{name}", size, expected, "Leave it None.")


def distinct(first: Any, most: int | None, *others: Iterable[Any]) -> tuple[Any, ...]:
    """Return `first`, then at most so many of each of the others, each configuration once.

    most: None is MOST_CANDIDATES.
    """
    most = MOST_CANDIDATES if most is None else most
    found = (islice((x for x in dict.fromkeys(each) if x != first), most) for each in others)
    return tuple(dict.fromkeys(chain((first,), *found)))


def key_span(call: Call) -> int:
    """Return how many keys one row may see: all, or those of its window."""
    left, right = call.sliding_window
    right = 0 if call.causal else right
    if left is None or right is None:
        return call.key.shape[1]
    return min(call.key.shape[1], left + right + 1)


def useful(size: int, length: int, smallest: int) -> bool:
    """Return whether blocks of a size are worth trying: they are not twice as long as what they cut."""
    return size <= smallest or size < 2 * length
