"""The Cases that shrinking searches: the few smallest, then Hypothesis strategies over recipes.

Everything shrinks towards one batch row, one head, one token, head dim 1, no features and the first tiling.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from attest.conformance.cases.case import Case, Offset


@st.composite
def simpler(draw: st.DrawFn, case: Case) -> Case:
    """Return cases that are nowhere more complicated than a given one; what shrinking searches."""
    keep = {name: draw(st.booleans()) for name in sorted(case.features)}
    plain = Case()
    trimmed = without(case, (feature for feature, kept in keep.items() if not kept))
    lengths = trimmed.lengths
    if lengths is not None:
        lengths = tuple((draw(st.integers(0, q)), draw(st.integers(0, k))) for q, k in lengths)
    packed = lengths is not None and trimmed.batch == 1
    floor_q = _room(lengths, 0, packed)
    floor_k = _room(lengths, 1, packed)
    batch = 1 if packed or lengths is None else trimmed.batch
    if lengths is None:
        batch = draw(st.integers(1, trimmed.batch))
    heads = draw(st.integers(1, trimmed.kv_heads))
    group = trimmed.q_heads // trimmed.kv_heads
    head_dim = draw(st.integers(1, trimmed.head_dim))
    return replace(
        trimmed,
        batch=batch,
        q_len=draw(st.integers(min(max(floor_q, 1), trimmed.q_len), trimmed.q_len)),
        kv_len=draw(st.integers(min(max(floor_k, 1), trimmed.kv_len), trimmed.kv_len)),
        kv_heads=heads,
        q_heads=heads * (draw(st.integers(1, group)) if keep.get("gqa") else 1),
        head_dim=head_dim,
        value_dim=None if trimmed.value_dim is None else draw(st.integers(1, trimmed.value_dim)),
        lengths=lengths,
        window=None if trimmed.window is None else tuple(_side(draw, side) for side in trimmed.window),
        q_offset=_simpler_offset(draw, trimmed.q_offset, batch if lengths is None else len(lengths)),
        origin=trimmed.origin and tuple(draw(st.integers(0, start)) for start in trimmed.origin),
        chunk_size=draw(st.integers(1, trimmed.chunk_size)) if trimmed.chunk_size else None,
        segments=draw(st.integers(1, trimmed.segments)) if trimmed.segments else trimmed.segments,
        sinks=draw(st.integers(1, trimmed.sinks)) if trimmed.sinks else 0,
        mask_pattern=draw(st.sampled_from(_plain_first(trimmed.mask_pattern, plain.mask_pattern))),
        bias_pattern=draw(st.sampled_from(_plain_first(trimmed.bias_pattern, plain.bias_pattern))),
        segment_pattern=draw(st.sampled_from(_plain_first(trimmed.segment_pattern, plain.segment_pattern))),
        sink_pattern=draw(st.sampled_from(_plain_first(trimmed.sink_pattern, plain.sink_pattern))),
        empty_rows=trimmed.empty_rows and draw(st.booleans()),
        bias_hides=trimmed.bias_hides and draw(st.booleans()),
        poison=trimmed.poison and draw(st.booleans()),
        family=draw(st.sampled_from(("normal", case.family) if case.family != "normal" else ("normal",))),
        seed=draw(st.sampled_from((0, case.seed) if case.seed else (0,))),
        tiling=draw(st.sampled_from((0, case.tiling) if case.tiling else (0,))),
    )


def smallest(case: Case) -> Iterator[Case]:
    """Yield the smallest cases with no feature of a given one, with one, and with all: fewest tokens first.

    Only the smallest of all has no feature, and only the smaller ones have a single one.

    A failure is often not monotone in the lengths: it needs a whole block, or an odd one. Then no search
    that takes one step at a time ends here. A cap is lowered so far that it bends the logits of few tokens.
    """
    every = case.features
    if case.soft_cap is not None:
        case = replace(case, soft_cap=min(case.soft_cap, _BENDING_CAP))
    for q_len, kv_len in _FEW_TOKENS:
        if q_len > case.q_len or kv_len > case.kv_len:
            continue
        alone = [frozenset({name}) for name in sorted(every)] if (q_len, kv_len) != _FEW_TOKENS[-1] else []
        none = [frozenset[str]()] if (q_len, kv_len) == _FEW_TOKENS[0] else []
        for kept in dict.fromkeys([*none, *alone, every]):
            with suppress(ValueError):  # the case would lack what its features need
                yield _with_only(case, kept, q_len, kv_len)


# Queries and keys of the smallest cases.
_FEW_TOKENS = ((1, 1), (2, 3), (3, 3))
# A soft cap below the usual logits.
_BENDING_CAP = 0.25


def _with_only(case: Case, kept: frozenset[str], q_len: int, kv_len: int) -> Case:
    plain = Case()
    small = without(case, case.features - kept)
    pairs = None if small.lengths is None else tuple((min(q, 1), min(k, 1)) for q, k in small.lengths)
    packed = pairs is not None and small.batch == 1
    return replace(
        small,
        batch=1 if pairs is None else small.batch,
        q_len=max(q_len, _room(pairs, 0, packed)),
        kv_len=max(kv_len, _room(pairs, 1, packed)),
        q_heads=case.q_heads // case.kv_heads if "gqa" in kept else 1,
        kv_heads=1,
        head_dim=min(case.head_dim, 2),
        value_dim=None if small.value_dim is None else 1 if case.head_dim > 1 else 2,
        lengths=pairs,
        q_offset=_first_offset(small.q_offset) if pairs is None else small.q_offset,
        segments=small.segments and 1,
        sinks=min(small.sinks, 1),
        chunk_size=small.chunk_size and min(small.chunk_size, 2),
        window=None if small.window is None else tuple(side and min(side, 1) for side in small.window),
        mask_pattern=plain.mask_pattern,
        bias_pattern=plain.bias_pattern,
        segment_pattern=plain.segment_pattern,
        sink_pattern=plain.sink_pattern,
        family=plain.family,
        seed=plain.seed,
        poison=plain.poison,
    )


# The fields that a feature's absence sets back.
_FIELDS: dict[str, tuple[str, ...]] = {
    "bias": ("bias", "bias_hides", "bias_pattern"),
    "causal": ("causal",),
    "dropout": ("dropout", "dropout_seed", "dropout_shared"),
    "gqa": (),
    "integer_mask": ("integer_mask",),
    "mask": ("mask", "integer_mask", "empty_rows", "mask_pattern"),
    "packed": ("lengths",),
    "padded": ("lengths",),
    "scale": ("scale",),
    "segments": ("segments", "segment_pattern"),
    "sinks": ("sinks", "sinks_per_head", "sink_pattern"),
    "soft_cap": ("soft_cap",),
    "unnormalized": ("normalized",),
    "value_dim": ("value_dim",),
    "window": ("window",),
    "q_offset": ("q_offset",),
    "positions": ("positions",),
    "origin": ("origin",),
    "broadcast": (),
    "chunks": ("chunk_size",),
    "ranges": ("ranges",),
    "alibi": ("alibi",),
    "shared_dropout": ("dropout_shared",),
}


def without(case: Case, features: Iterable[str]) -> Case:
    """Return a case with features off.

    A feature without fields of its own, as gqa, is the caller's. Raises ValueError if that is no case.
    """
    plain, features = Case(), frozenset(features)
    changes: dict[str, Any] = {
        name: getattr(plain, name) for feature in features for name in _FIELDS[feature]
    }
    if "lengths" in changes and isinstance(case.q_offset, tuple):
        changes.setdefault("q_offset", case.q_offset[: case.batch])
    if "broadcast" in features:
        changes = {"mask": case.mask and case.mask[:2], "bias": case.bias and case.bias[:3], **changes}
    return replace(case, **changes)


def _plain_first(pattern: str, plain: str) -> tuple[str, ...]:
    return (plain,) if pattern == plain else (plain, pattern)


def _room(lengths: tuple[tuple[int, int], ...] | None, side: int, packed: bool) -> int:
    counts = [pair[side] for pair in lengths or ()]
    return sum(counts) if packed else max(counts, default=0)


def _side(draw: st.DrawFn, side: int | None) -> int | None:
    return None if side is None else draw(st.integers(0, side))


def _first_offset(offset: Offset | None) -> int | None:
    return offset[0] if isinstance(offset, tuple) else offset


def _simpler_offset(draw: st.DrawFn, offset: Offset | None, sequences: int) -> Offset | None:
    """Return one offset for all sequences where that is enough, each nearer to 0."""
    if isinstance(offset, tuple) and draw(st.booleans()):
        return tuple(_towards_zero(draw, each) for each in offset[:sequences])
    first = _first_offset(offset)
    return None if first is None else _towards_zero(draw, first)


def _towards_zero(draw: st.DrawFn, number: int) -> int:
    return draw(st.integers(min(number, 0), max(number, 0)))
