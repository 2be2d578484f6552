"""Which Cases are drawn: Hypothesis strategies over recipes, simplest choices first.

Everything shrinks towards one batch row, one head, one token, head dim 1 and no features; lengths are
drawn around the edges of the blocks of the tiling under test.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.case import BIAS_AXES, MASK_AXES, Case
from conformance.families import FAMILIES
from conformance.subject import Subject

# Head dims from 1 to 256: powers of two, their neighbours and what models use in between.
HEAD_DIMS = (1, 2, 3, 8, 16, 20, 31, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
SOFT_CAPS = (1.0, 5.0, 30.0, 50.0, 0.25)
DROPOUTS = (0.1, 0.5, 0.9)
SCALES = (0.5, 1.0, 0.1, 0.37)
BATCHES = (1, 2, 3)
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (3, 1))  # (query, key)
LONG_HEAD_DIMS = (64, 32, 96, 128)
LONG_LENGTHS = (1024, 1280, 1536, 2048)
LONG_QUERIES = (128, 192, 256)
SHORT_BLOCK = 16  # stands in for the block of a kernel that works in one piece
BLOCKS_CROSSED = 3

# Features that hide keys: with one of these there is somewhere to put poison.
HIDING = ("mask", "causal", "window", "segments", "padded", "packed", "bias")

# Features that exclude each other in one case.
_EXCLUSIVE = (("padded", "packed"),)

# Features that make no sense without another.
_NEEDS = {"integer_mask": "mask"}


@st.composite
def cases(
    draw: st.DrawFn,
    subject: Subject,
    dtype: str,
    required: frozenset[str] = frozenset(),
    combine: bool = True,
) -> Case:
    """Short cases of a subject: `required` features on, others too if `combine`."""
    features = draw(_feature_sets(subject, required, combine))
    number = draw(st.integers(0, len(subject.tilings) - 1))
    tiling = subject.tilings[number]
    q_len = draw(_lengths(tiling.query_block))
    kv_len = draw(st.one_of(st.just(q_len), _lengths(tiling.key_block)))
    case = Case(
        dtype=dtype,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=draw(_head_dims(subject, HEAD_DIMS)),
        family=draw(_families(features)),
        tiling=number,
        seed=draw(_SEEDS),
    )
    return _with_features(draw, case, features, subject)


@st.composite
def long_cases(draw: st.DrawFn, subject: Subject, dtype: str) -> Case:
    """Cases of 1024 keys and more, where the statistics of rounding errors can be judged.

    They run the subject's last tiling, the production one. Features that leave few keys to a row are left
    out, since few keys are what short cases are for.
    """
    dense = frozenset({"bias", "soft_cap", "sinks", "gqa", "dropout", "causal", "mask"})
    features = draw(_feature_sets(subject, frozenset(), combine=True)) & dense
    kv_len = draw(st.sampled_from([length for length in LONG_LENGTHS if length <= subject.longest]))
    case = Case(
        dtype=dtype,
        q_len=draw(st.sampled_from(LONG_QUERIES)),
        kv_len=kv_len,
        head_dim=draw(_head_dims(subject, LONG_HEAD_DIMS)),
        family=draw(st.sampled_from(("normal", "uniform"))),
        tiling=len(subject.tilings) - 1,
        seed=draw(_SEEDS),
    )
    return replace(_with_features(draw, case, features, subject), batch=1, bias_hides=False)


_SEEDS = st.integers(0, 2**32 - 1)


def _feature_sets(
    subject: Subject, required: frozenset[str], combine: bool
) -> st.SearchStrategy[frozenset[str]]:
    optional = sorted(subject.features - required) if combine else []
    switches = st.tuples(*(st.sampled_from((False, False, True)) for _ in optional))

    def pick(chosen: tuple[bool, ...]) -> frozenset[str]:
        features = required | {name for name, on in zip(optional, chosen, strict=True) if on}
        for feature, needed in _NEEDS.items():
            if feature in features:
                features |= {needed}
        for first, second in _EXCLUSIVE:
            if {first, second} <= features:
                features -= {second if first in required else first}
        return features

    return switches.map(pick)


def _lengths(block: int | None) -> st.SearchStrategy[int]:
    """Lengths that straddle block edges, smallest first, and any length up to two blocks.

    Longer ones take time without a new way to be wrong.
    """
    edge = block or SHORT_BLOCK
    straddling = (1, 2, 3, edge - 1, edge, edge + 1, 2 * edge + 1, BLOCKS_CROSSED * edge + 2)
    return st.one_of(st.sampled_from(sorted({n for n in straddling if n > 0})), st.integers(1, 2 * edge))


def _head_dims(subject: Subject, dims: tuple[int, ...]) -> st.SearchStrategy[int]:
    low, high = subject.head_dims
    return st.sampled_from([d for d in dims if low <= d <= high] or [low])


def _families(features: frozenset[str]) -> st.SearchStrategy[str]:
    names = [name for name in FAMILIES if name != "cap_scaled"]
    return st.sampled_from(["cap_scaled", *names] if "soft_cap" in features else names)


def _with_features(draw: st.DrawFn, case: Case, features: frozenset[str], subject: Subject) -> Case:
    if "packed" not in features:
        case = replace(case, batch=draw(st.sampled_from(BATCHES)))
    for name in sorted(features, key=lambda name: (name in _NEEDS, name)):
        case = replace(case, **_SETTINGS[name](draw, case, subject))
    return case


def _window(draw: st.DrawFn, case: Case, _subject: Subject) -> dict[str, Any]:
    side = st.one_of(st.integers(0, 3), st.integers(0, max(case.kv_len, 1)), st.none())
    return {"window": draw(st.tuples(side, side).filter(lambda sides: sides != (None, None)))}


def _mask(draw: st.DrawFn, _case: Case, _subject: Subject) -> dict[str, Any]:
    return {"mask": draw(st.sampled_from(MASK_AXES)), "empty_rows": draw(st.booleans())}


def _bias(draw: st.DrawFn, _case: Case, _subject: Subject) -> dict[str, Any]:
    return {"bias": draw(st.sampled_from(BIAS_AXES)), "bias_hides": draw(st.booleans())}


def _padded(draw: st.DrawFn, case: Case, _subject: Subject) -> dict[str, Any]:
    pairs = st.tuples(st.integers(0, case.q_len), st.integers(0, case.kv_len))
    batch = max(case.batch, 2)
    return {"batch": batch, "lengths": tuple(draw(pairs) for _ in range(batch))}


def _packed(draw: st.DrawFn, case: Case, _subject: Subject) -> dict[str, Any]:
    """Two sequences or more in one batch row, with room for padding at the end."""
    count = draw(st.integers(2, 4))
    left_q, left_k, lengths = case.q_len, case.kv_len, []
    for _ in range(count):
        q, k = draw(st.integers(0, left_q)), draw(st.integers(0, left_k))
        left_q, left_k = left_q - q, left_k - k
        lengths.append((q, k))
    return {"batch": 1, "lengths": tuple(lengths)}


def _gqa(draw: st.DrawFn, _case: Case, _subject: Subject) -> dict[str, Any]:
    q_heads, kv_heads = draw(st.sampled_from([pair for pair in HEADS if pair[0] != pair[1]]))
    return {"q_heads": q_heads, "kv_heads": kv_heads}


def _sinks(draw: st.DrawFn, _case: Case, _subject: Subject) -> dict[str, Any]:
    return {"sinks": draw(st.integers(1, 4)), "sinks_per_head": draw(st.booleans())}


def _value_dim(draw: st.DrawFn, case: Case, subject: Subject) -> dict[str, Any]:
    dims = _head_dims(subject, HEAD_DIMS).filter(lambda dim: dim != case.head_dim)
    return {"value_dim": draw(dims)}


def _choice(field: str, values: tuple[Any, ...]) -> Callable[[st.DrawFn, Case, Subject], dict[str, Any]]:
    return lambda draw, _case, _subject: {field: draw(st.sampled_from(values))}


_SETTINGS: dict[str, Callable[[st.DrawFn, Case, Subject], dict[str, Any]]] = {
    "bias": _bias,
    "causal": _choice("causal", (True,)),
    "dropout": _choice("dropout", DROPOUTS),
    "gqa": _gqa,
    "integer_mask": _choice("integer_mask", (True,)),
    "mask": _mask,
    "packed": _packed,
    "padded": _padded,
    "scale": _choice("scale", SCALES),
    "segments": _choice("segments", (1, 2, 3, 5)),
    "sinks": _sinks,
    "soft_cap": _choice("soft_cap", SOFT_CAPS),
    "unnormalized": _choice("normalized", (False,)),
    "value_dim": _value_dim,
    "window": _window,
}


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
        empty_rows=trimmed.empty_rows and draw(st.booleans()),
        bias_hides=trimmed.bias_hides and draw(st.booleans()),
        poison=trimmed.poison and draw(st.booleans()),
        family=draw(st.sampled_from(("normal", case.family) if case.family != "normal" else ("normal",))),
        seed=draw(st.sampled_from((0, case.seed) if case.seed else (0,))),
    )


# The fields that a feature's absence sets back.
_FIELDS: dict[str, tuple[str, ...]] = {
    "bias": ("bias", "bias_hides"),
    "causal": ("causal",),
    "dropout": ("dropout",),
    "gqa": (),
    "integer_mask": ("integer_mask",),
    "mask": ("mask", "integer_mask", "empty_rows"),
    "packed": ("lengths",),
    "padded": ("lengths",),
    "scale": ("scale",),
    "segments": ("segments",),
    "sinks": ("sinks", "sinks_per_head"),
    "soft_cap": ("soft_cap",),
    "unnormalized": ("normalized",),
    "value_dim": ("value_dim",),
    "window": ("window",),
}


def _room(lengths: tuple[tuple[int, int], ...] | None, side: int, packed: bool) -> int:
    counts = [pair[side] for pair in lengths or ()]
    return sum(counts) if packed else max(counts, default=0)


def _side(draw: st.DrawFn, side: int | None) -> int | None:
    return None if side is None else draw(st.integers(0, side))
