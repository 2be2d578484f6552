"""Which Cases shrinking searches: Hypothesis strategies over recipes, simplest choices first.

Everything shrinks towards one batch row, one head, one token, head dim 1 and no features.
"""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.case import Case


@st.composite
def simpler(draw: st.DrawFn, case: Case) -> Case:
    """Cases that are nowhere more complicated than a given one; what shrinking searches."""
    keep = {name: draw(st.booleans()) for name in sorted(case.features)}
    plain = Case()
    changes: dict[str, Any] = {
        name: getattr(plain, name) for feature, kept in keep.items() if not kept for name in _FIELDS[feature]
    }
    trimmed = replace(case, **changes)
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
    )


# The fields that a feature's absence sets back.
_FIELDS: dict[str, tuple[str, ...]] = {
    "bias": ("bias", "bias_hides", "bias_pattern"),
    "causal": ("causal",),
    "dropout": ("dropout", "dropout_seed"),
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
}


def _plain_first(pattern: str, plain: str) -> tuple[str, ...]:
    return (plain,) if pattern == plain else (plain, pattern)


def _room(lengths: tuple[tuple[int, int], ...] | None, side: int, packed: bool) -> int:
    counts = [pair[side] for pair in lengths or ()]
    return sum(counts) if packed else max(counts, default=0)


def _side(draw: st.DrawFn, side: int | None) -> int | None:
    return None if side is None else draw(st.integers(0, side))
