"""The sizes of a drawn case, by the classes of its row: lengths, batch entries, heads and head dims."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from attest.conformance.drawing.covering import Facts
from attest.conformance.drawing.dice import Deck, Dice
from attest.conformance.drawing.tables import drawing

_TRIES = 6
_MANY_ENTRIES = 5


@dataclass(frozen=True)
class Blocks:
    """The blocks whose edges matter: where a length or a window's side ends."""

    query: int
    key: int


@dataclass(frozen=True)
class Offer:
    """The part of a row that a subject takes: its dtype, and which of its tilings runs with which blocks.

    blocks: None for those of conformance/drawing/drawing.toml. head_dims: the smallest and the largest. deck:
    deals values to the rows of the plan; None where a row is drawn by itself. window: the corner of its
    diagonal, as in `attest.Semantics`. The others are as in `attest.conformance.subject.Subject`.
    """

    dtype: str
    tiling: int = -1
    blocks: Blocks | None = None
    head_dims: tuple[int, int] = (1, 256)
    longest: int = 2048
    length_multiple: int = 1
    head_dim_multiple: int = 1
    origin_multiple: int = 1
    sinks: str = "any"
    window_sides: str = "both"
    window: str = "bottom_right"
    deck: Deck | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes of the arrays of a call."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int


def class_of(row: Facts, choice: str) -> str:
    """Return the class of a row among those of one choice, such as "lengths", or else the usual one."""
    classes: dict[str, object] = drawing()[choice]
    return next((name for name in classes if name in row), drawing()["usual"][choice])


def sizes(row: Facts, offer: Offer, deck: Deck, dice: Dice) -> Sizes:
    """Return the sizes of a row's cases; fewer entries and heads where they make more work than fits."""
    blocks = blocks_of(row, offer, dice)
    lengths = [
        _lengths(row, offer, blocks, Dice(dice.number(f"lengths {attempt}"), "lengths"))
        for attempt in range(_TRIES)
    ]
    head_dim = _head_dim(row, offer, deck)
    tried = [
        Sizes(batch, q_len, kv_len, *heads, head_dim)
        for batch, heads in _fewer(row, deck)
        for q_len, kv_len in lengths
    ]
    return next((one for one in tried if _fits(one, row, offer)), tried[-1])


def blocks_of(row: Facts, offer: Offer, dice: Dice) -> Blocks:
    """Return the blocks that a row's lengths and windows are drawn around: the subject's, or usual ones."""
    if offer.blocks is not None:
        return offer.blocks
    usual, largest = drawing()["blocks"], drawing()["lengths"][class_of(row, "lengths")]["largest_block"]
    if row & {"five_entries", "many_heads"}:  # several blocks of each must fit the budget
        largest = min(largest, usual["largest_of_many"])
    return Blocks(
        dice.pick(
            "query block", [n for n in usual["query"] if n <= largest and 3 * n <= offer.longest] or [16]
        ),
        dice.pick("key block", [n for n in usual["key"] if n <= largest and 10 * n <= offer.longest] or [16]),
    )


def head_dim_from(offer: Offer, dims: Sequence[int], deck: Deck, fact: str, other: int | None = None) -> int:
    """Return one of the head dims that the subject takes, not `other`; its smallest or largest otherwise."""
    multiple = offer.head_dim_multiple
    low, high = -(-offer.head_dims[0] // multiple) * multiple, offer.head_dims[1] // multiple * multiple
    fitting = [dim for dim in dims if low <= dim <= high and dim % multiple == 0 and dim != other]
    return deck.deal(fact, "head dim", fitting or [dim for dim in (low, high) if dim != other] or [low])


def _head_dim(row: Facts, offer: Offer, deck: Deck) -> int:
    name = class_of(row, "head_dims")
    return head_dim_from(offer, drawing()["head_dims"][name], deck, name)


def _fewer(row: Facts, deck: Deck) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the entries and heads of a row, then fewer, at last as few as show what the row holds."""
    fewest, entries = (2 if "padded" in row else 1), [1]
    if "packed" not in row:
        name = class_of(row, "batches")
        several = [count for count in drawing()["batches"][name] if count >= fewest] or [fewest]
        dealt = deck.deal(name, "batch", several)
        entries = [dealt, *(count for count in (_MANY_ENTRIES, 3, 2, 1) if fewest <= count < dealt)]
    name, kind = class_of(row, "heads"), "grouped" if "gqa" in row else "alike"
    options = [(q_heads, kv_heads) for q_heads, kv_heads in drawing()["heads"][name][kind]]
    heads = deck.deal(name, kind, options)
    fewest_heads = min(heads, (2, 1) if kind == "grouped" else (2, 2))
    one_key_head = (2, 1) if kind == "grouped" else (1, 1)
    for batch in entries:
        if batch >= _MANY_ENTRIES:  # they matter more than the heads
            yield batch, heads
            yield batch, fewest_heads
            yield batch, one_key_head
    if name != "many_heads":
        yield entries[0], heads
        yield entries[0], fewest_heads
    for batch in entries:
        yield batch, heads
    for others in sorted(options, reverse=True):
        yield entries[-1], others
    for batch in entries:
        yield batch, fewest_heads
    yield entries[-1], one_key_head


def _fits(one: Sizes, row: Facts, offer: Offer) -> bool:
    """Return whether a case of these sizes is within the budget of its class of lengths."""
    budget = drawing()["budget"]["long" if class_of(row, "lengths") == "long" else "usual"]
    blocks = offer.blocks or Blocks(max(one.q_len, 1), max(one.kv_len, 1))
    heads = one.batch * one.q_heads
    tokens = one.batch * (one.q_len * one.q_heads + one.kv_len * one.kv_heads)
    return (
        heads <= budget["heads"]
        and heads * one.q_len * one.kv_len <= budget["logits"]
        and heads * -(-one.q_len // blocks.query) * -(-one.kv_len // blocks.key) <= budget["tiles"]
        and tokens * one.head_dim <= budget["elements"]
    )


def _lengths(row: Facts, offer: Offer, blocks: Blocks, dice: Dice) -> tuple[int, int]:
    name = class_of(row, "lengths")
    q_len, kv_len = _LENGTHS[name](blocks, dice)
    q_len, kv_len = min(q_len, offer.longest), min(kv_len, offer.longest)
    if name == "few" and row & {"causal", "window"}:  # one row that sees all, or nothing, shows neither
        q_len, kv_len = max(q_len, 3), max(kv_len, 3)
    if row & {"causal", "window"} and row & {"segments", "many"}:
        q_len, kv_len = max(q_len, 9), max(kv_len, 9)
    if "packed" in row:  # several sequences, one of which has a few tokens
        q_len, kv_len = max(q_len, dice.pick("packed queries", (9, 19))), max(kv_len, 11)
    multiple = offer.length_multiple
    return -(-q_len // multiple) * multiple, -(-kv_len // multiple) * multiple


def _few(_blocks: Blocks, dice: Dice) -> tuple[int, int]:
    return dice.pick("q_len", (3, 1, 2, 5)), dice.pick("kv_len", (5, 4, 7, 9, 3))


def _edge(blocks: Blocks, dice: Dice) -> tuple[int, int]:
    q, k = blocks.query, blocks.key
    lengths = (3 * q + 2, 3 * k + 2), (2 * q + 1, 3 * k - 1), (3 * q - 1, 2 * k + 1), (3 * q, 3 * k + 1)
    q_len, kv_len = dice.pick("lengths", (*lengths, (2 * q + 1, 2 * k + 1)))
    return max(q_len, 2), max(kv_len, 3)


def _many(blocks: Blocks, dice: Dice) -> tuple[int, int]:
    q_len = dice.pick("q_len", (blocks.query + 1, 5, 17, 3, min(blocks.query, 64)))
    return max(q_len, 3), dice.pick("count", (5, 6, 9)) * blocks.key + dice.pick("past", (1, 2, -1, 0, 3))


def _tall(blocks: Blocks, dice: Dice) -> tuple[int, int]:
    q = blocks.query
    q_len = dice.pick("q_len", (2 * q + 1, 2 * q + 3, 3 * q - 1, 5 * q + 1))
    return max(q_len, 5), dice.pick("kv_len", (blocks.key + 1, 9, blocks.key - 1, 33))


def _wide(_blocks: Blocks, dice: Dice) -> tuple[int, int]:
    return dice.pick("q_len", (1, 3, 2)), dice.spread("kv_len", 258, 1100)


def _deep(_blocks: Blocks, dice: Dice) -> tuple[int, int]:
    return dice.spread("q_len", 258, 1100), dice.pick("kv_len", (3, 9, 5, 20))


def _long(_blocks: Blocks, dice: Dice) -> tuple[int, int]:
    lengths = drawing()["lengths"]["long"]
    return dice.pick("q_len", lengths["queries"]), dice.pick("kv_len", lengths["keys"])


_LENGTHS: dict[str, Callable[[Blocks, Dice], tuple[int, int]]] = {
    "few": _few,
    "edge": _edge,
    "many": _many,
    "tall": _tall,
    "wide": _wide,
    "deep": _deep,
    "long": _long,
}
