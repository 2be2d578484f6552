"""Cases: small recipes that rebuild an attention problem bit for bit on any machine.

Hypothesis draws and shrinks Cases, failures print them, the corpus stores them; array elements are never
drawn. `attest.conformance.cases.families` turns a Case into a Problem.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, get_args

from attest.conformance.cases.axes import BIASES, MASKS, has_pattern, own_axes
from attest.conformance.cases.families import FAMILIES
from attest.conformance.cases.features import DTYPES
from attest.reference.dropout import SHARED
from attest.reference.problem import POSITIONS

Window = tuple[int | None, int | None]
Lengths = tuple[tuple[int, int], ...]
Origin = tuple[int, int, int, int]
Offset = int | tuple[int, ...]

MASK_PATTERNS = ("random", "first", "middle", "last", "rows")
BIAS_PATTERNS = ("normal", "large", "lowest", "lowest rows", "first", "middle", "last", "rows")
SEGMENT_PATTERNS = ("runs", "mixed")
SINK_PATTERNS = ("ones", "logits", "extreme")
POSITION_PATTERNS = ("shard", "shuffled", "repeated", "reversed", "far", "queries", "keys")
RANGE_PATTERNS = ("band", "starts", "ends", "scattered", "starts of entries", "shared ends")
ALIBI_PATTERNS = ("heads", "entries")

# The largest values of fields that decide how much is allocated: beyond any model, below any machine.
LIMITS = {
    "batch": 1 << 12,
    "q_len": 1 << 24,
    "kv_len": 1 << 24,
    "q_heads": 1 << 10,
    "kv_heads": 1 << 10,
    "head_dim": 1 << 12,
    "value_dim": 1 << 12,
    "segments": 1 << 12,
    "sinks": 1 << 12,
    "tiling": 1 << 10,
}
MOST_SEQUENCES = 1 << 12
WIDEST_SIDE = (1 << 31) - 1
ORIGINS = 1 << 32  # each number of the origin, and all that is counted from it, is below
LARGEST_FLOAT = 3.4e38  # what float32 holds
# Elements of one array of the call: four times as many as any problem of production.toml has.
MOST_ELEMENTS = 1 << 33


@dataclass(frozen=True)
class Case:
    """One recipe. Every field is JSON; a field at its default is left out of it.

    value_dim: None where it is head_dim.
    mask: which of the axes batch and head the mask has of its own, one of MASK_AXES, or of all four axes,
        one of BROADCAST_MASK_AXES; None without a mask.
    mask_pattern: what is hidden besides random pairs: the first, middle or last third of the keys, or all
        keys of the first third of the rows; one of MASK_PATTERNS.
    bias: the same for batch, head and query row, one of BIAS_AXES, or of all four, BROADCAST_BIAS_AXES.
        bias_hides: some entries are -inf.
    bias_pattern: "large": some thirty times as large. "lowest": the most negative number of the dtype in the
        middle third of the keys, or in the first third of the rows: "lowest rows". Else -inf in a third of
        the keys or of the rows; one of BIAS_PATTERNS.
    segments: the number of segments, some tokens padding; None without. segment_pattern: "runs" of equal ids
        in order, or "mixed": any id anywhere, large and negative ones too, in the queries and the keys.
    lengths: (query, key) tokens of each sequence. One for each batch row: padded; batch 1: packed.
    sinks: how many sink logits. sinks_per_head: each head has its own. sink_pattern: around 1, around the
        largest "logits" of the family, or there with one "extreme" that weighs nothing.
    scale: None is the default of S1. normalized False: out is only the numerator.
    integer_mask: the mask is handed over as int32, non-zero where visible; needs a mask.
    empty_rows: some query rows see nothing, hidden by the mask; needs a mask.
    poison: NaN and inf are stored wherever nothing may be read: under masks, past lengths.
    dropout_seed: None: one that follows from the seed. dropout_shared: what one mask of dropout serves, the
        batch entries "b", the heads "h" or both, one of SHARED.
    q_offset: where the first query stands among the keys: one integer, or a tuple with one for each sequence,
        which the kernel gets as an int32 array. None: the last query has the position of the last key.
    positions: those of a "shard" in the middle of longer sequences, "shuffled", "repeated" by several tokens,
        "reversed", "far" from 0, or of the "queries" or the "keys" alone, out of order; one of
        POSITION_PATTERNS. None: as tokens are counted.
    origin: the batch entry, query head, row and key of the whole arrays at which the call begins, or None.
    chunk_size: positions in a chunk, or None.
    ranges: both ends of each row's keys, around the diagonal in a "band" or "scattered" anywhere, where some
        are empty; only "starts" or "shared ends", which all batch entries share, or only "ends" or "starts of
        entries"; one of RANGE_PATTERNS, or None.
    alibi: slopes of the "heads", as in the paper, or of the heads of each of the batch "entries", or None.
    tiling: which of the subject's tilings runs; -1 is the last, the production one. seed: of all values.
    """

    dtype: str = "float32"
    batch: int = 1
    q_len: int = 1
    kv_len: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    value_dim: int | None = None
    family: str = "normal"
    causal: bool = False
    window: Window | None = None
    mask: str | None = None
    integer_mask: bool = False
    empty_rows: bool = False
    bias: str | None = None
    bias_hides: bool = False
    segments: int | None = None
    lengths: Lengths | None = None
    sinks: int = 0
    sinks_per_head: bool = False
    soft_cap: float | None = None
    dropout: float = 0.0
    scale: float | None = None
    normalized: bool = True
    poison: bool = False
    tiling: int = 0
    seed: int = 0
    mask_pattern: str = "random"
    bias_pattern: str = "normal"
    segment_pattern: str = "runs"
    sink_pattern: str = "ones"
    dropout_seed: int | None = None
    q_offset: Offset | None = None
    positions: str | None = None
    origin: Origin | None = None
    chunk_size: int | None = None
    ranges: str | None = None
    alibi: str | None = None
    dropout_shared: str | None = None

    def __post_init__(self) -> None:
        if self.value_dim == self.head_dim:  # one recipe, one name
            object.__setattr__(self, "value_dim", None)
        for name, wrong, expected in _faults(self):
            if wrong:
                raise ValueError(f"case field {name}: got {getattr(self, name)!r}, expected {expected}")

    @cached_property
    def id(self) -> str:
        """The name by content: 12 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def value_width(self) -> int:
        """Elements of a value vector."""
        return self.value_dim or self.head_dim

    @property
    def sequences(self) -> int:
        """Sequences that may have an offset each: those of the lengths, or else the batch entries."""
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def features(self) -> frozenset[str]:
        """The features of ALL_FEATURES that a kernel must support to be given this case."""
        return features_of(vars(self))

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, tuples as lists."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.loads(json.dumps(values))


DEFAULTS = {field.name: field.default for field in fields(Case)}


def features_of(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the features of a case. given: all its fields by name, as Case or JSON has them."""
    packed = given["lengths"] is not None and given["batch"] == 1
    switches = {
        "causal": given["causal"],
        "window": given["window"] is not None,
        "mask": given["mask"] is not None,
        "integer_mask": given["integer_mask"],
        "bias": given["bias"] is not None,
        "segments": given["segments"] is not None,
        "padded": given["lengths"] is not None and not packed,
        "packed": packed,
        "sinks": given["sinks"] > 0,
        "soft_cap": given["soft_cap"] is not None,
        "dropout": given["dropout"] > 0,
        "scale": given["scale"] is not None,
        "gqa": given["q_heads"] != given["kv_heads"],
        "value_dim": given["value_dim"] not in (None, given["head_dim"]),
        "unnormalized": not given["normalized"],
        "q_offset": given["q_offset"] is not None,
        "positions": given["positions"] is not None,
        "origin": given["origin"] is not None,
        "broadcast": any(len(axes) == 4 for axes in (given["mask"] or "", given["bias"] or "")),
        "chunks": given["chunk_size"] is not None,
        "ranges": given["ranges"] is not None,
        "alibi": given["alibi"] is not None,
        "shared_dropout": given["dropout_shared"] is not None,
    }
    return frozenset(name for name, on in switches.items() if on)


def case_from_json(data: object) -> Case:
    """Read a Case. Raises ValueError that names the field, what was got and what was expected."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a case is a JSON object of fields, got {type(data).__name__}")
    values: dict[str, Any] = dict(data)
    known = {f.name: f for f in fields(Case)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f"case field {unknown[0]!r} does not exist; the fields are {', '.join(sorted(known))}"
        )
    for name, value in values.items():
        if not _has_type(value, known[name].type):
            raise ValueError(f"case field {name}: got {value!r}, expected {known[name].type}")
    if values.get("window") is not None:
        values["window"] = tuple(values["window"])
    if values.get("lengths") is not None:
        values["lengths"] = tuple((q, k) for q, k in values["lengths"])
    if values.get("origin") is not None:
        values["origin"] = tuple(values["origin"])
    if isinstance(values.get("q_offset"), list):
        values["q_offset"] = tuple(values["q_offset"])
    return Case(**values)


def _has_type(value: object, annotation: Any) -> bool:
    if annotation == Window | None:
        return value is None or _is_list(value, 2, lambda side: side is None or _is_int(side))
    if annotation == Lengths | None:
        return value is None or _is_list(value, None, lambda pair: _is_list(pair, 2, _is_int))
    if annotation == Origin | None:
        return value is None or _is_list(value, 4, _is_int)
    if annotation == Offset | None:
        return value is None or _is_int(value) or _is_list(value, None, _is_int)
    if isinstance(value, bool):
        return annotation is bool
    options = get_args(annotation) or (annotation,)
    numeric = float in options and isinstance(value, int)
    return numeric or any(isinstance(value, option) for option in options)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, length: int | None, each: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return (length is None or len(value) == length) and all(each(item) for item in value)


def _faults(case: Case) -> list[tuple[str, bool, str]]:
    """Return (field, whether it is wrong, what was expected)."""
    too_large = [
        (name, (getattr(case, name) or 0) > largest, f"at most {largest}") for name, largest in LIMITS.items()
    ]
    if any(wrong for _, wrong, _ in too_large):
        return too_large
    elements = _most_elements(case)
    sides = case.window or ()
    lengths = case.lengths or ()
    packed = case.batch == 1
    q_room = case.q_len - (sum(q for q, _ in lengths) if packed else max((q for q, _ in lengths), default=0))
    k_room = case.kv_len - (sum(k for _, k in lengths) if packed else max((k for _, k in lengths), default=0))
    return [
        ("q_len", elements > MOST_ELEMENTS, f"arrays of at most {MOST_ELEMENTS} elements, not {elements}"),
        ("dtype", case.dtype not in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("batch", case.batch < 1, "at least 1"),
        ("q_len", case.q_len < 0, "at least 0"),
        ("kv_len", case.kv_len < 0, "at least 0"),
        ("kv_heads", case.kv_heads < 1, "at least 1"),
        ("q_heads", case.q_heads < 1 or case.q_heads % max(case.kv_heads, 1) != 0, "a multiple of kv_heads"),
        ("head_dim", case.head_dim < 1, "at least 1"),
        ("value_dim", case.value_dim is not None and case.value_dim < 1, "at least 1"),
        ("family", case.family not in FAMILIES, f"one of {', '.join(sorted(FAMILIES))}"),
        (
            "window",
            any(side is not None and not 0 <= side <= WIDEST_SIDE for side in sides),
            f"sides of 0 to {WIDEST_SIDE}",
        ),
        ("mask", case.mask not in (None, *MASKS), f"one of {', '.join(MASKS)}"),
        ("integer_mask", case.integer_mask and case.mask is None, "false without a mask"),
        ("empty_rows", case.empty_rows and case.mask is None, "false without a mask"),
        ("bias", case.bias not in (None, *BIASES), f"one of {', '.join(BIASES)}"),
        ("bias_hides", case.bias_hides and case.bias is None, "false without a bias"),
        ("bias_pattern", case.bias_pattern not in BIAS_PATTERNS, f"one of {', '.join(BIAS_PATTERNS)}"),
        ("bias_pattern", case.bias_pattern != "normal" and case.bias is None, "normal without a bias"),
        (
            "bias_pattern",
            not _has_pattern(case.bias_pattern, case.bias),
            "not what all rows, or all keys, of the bias share",
        ),
        ("mask_pattern", case.mask_pattern not in MASK_PATTERNS, f"one of {', '.join(MASK_PATTERNS)}"),
        ("mask_pattern", case.mask_pattern != "random" and case.mask is None, "random without a mask"),
        (
            "mask_pattern",
            not _has_pattern(case.mask_pattern, case.mask),
            "not what all rows, or all keys, of the mask share",
        ),
        (
            "empty_rows",
            case.empty_rows and case.mask in MASKS and not own_axes(case.mask or "")[2],
            "false where all rows share the mask",
        ),
        ("segments", case.segments is not None and case.segments < 1, "at least 1"),
        (
            "segment_pattern",
            case.segment_pattern not in SEGMENT_PATTERNS,
            f"one of {', '.join(SEGMENT_PATTERNS)}",
        ),
        (
            "segment_pattern",
            case.segment_pattern != "runs" and case.segments is None,
            "runs without segments",
        ),
        ("lengths", case.lengths == (), "at least one sequence"),
        ("lengths", len(lengths) > MOST_SEQUENCES, f"at most {MOST_SEQUENCES} sequences"),
        ("lengths", any(q < 0 or k < 0 for q, k in lengths), "lengths of at least 0"),
        ("lengths", not packed and len(lengths) not in (0, case.batch), "one sequence for each batch row"),
        ("lengths", bool(lengths) and (q_room < 0 or k_room < 0), "lengths that fit q_len and kv_len"),
        ("sinks", case.sinks < 0, "at least 0"),
        ("sinks_per_head", case.sinks_per_head and case.sinks == 0, "false without sinks"),
        ("sink_pattern", case.sink_pattern not in SINK_PATTERNS, f"one of {', '.join(SINK_PATTERNS)}"),
        ("sink_pattern", case.sink_pattern != "ones" and case.sinks == 0, "ones without sinks"),
        (
            "soft_cap",
            case.soft_cap is not None and not 0 < case.soft_cap <= LARGEST_FLOAT,
            f"a number above 0, at most {LARGEST_FLOAT}",
        ),
        ("dropout", not 0 <= case.dropout < 1, "a probability in [0, 1)"),
        (
            "scale",
            case.scale is not None and not abs(case.scale) <= LARGEST_FLOAT,
            f"a number of at most {LARGEST_FLOAT}",
        ),
        ("dropout_seed", case.dropout_seed is not None and not case.dropout, "none without dropout"),
        ("dropout_seed", not 0 <= (case.dropout_seed or 0) < 2**64, "an integer of 64 bits"),
        ("dropout_shared", case.dropout_shared is not None and not case.dropout, "none without dropout"),
        ("dropout_shared", case.dropout_shared not in SHARED, '"b", "h", "bh" or null'),
        *_coordinate_faults(case),
        (
            "chunk_size",
            not 1 <= (case.chunk_size or 1) <= WIDEST_SIDE or case.chunk_size == 0,
            f"a size from 1 to {WIDEST_SIDE}",
        ),
        ("ranges", case.ranges not in (None, *RANGE_PATTERNS), f"one of {', '.join(RANGE_PATTERNS)}"),
        ("alibi", case.alibi not in (None, *ALIBI_PATTERNS), f"one of {', '.join(ALIBI_PATTERNS)}"),
        ("tiling", case.tiling < -1, "at least -1"),
        ("seed", not 0 <= case.seed < 2**64, "an integer of 64 bits"),
    ]


def _has_pattern(pattern: str, axes: str | None) -> bool:
    return axes not in (*MASKS, *BIASES) or has_pattern(pattern, axes or "")


def _coordinate_faults(case: Case) -> list[tuple[str, bool, str]]:
    """Return the same of the fields that give the tokens' coordinates."""
    least, most = POSITIONS[0], POSITIONS[-1] + 1 - case.q_len
    each = case.q_offset if isinstance(case.q_offset, tuple) else None
    offsets = (case.q_offset,) if isinstance(case.q_offset, int) else each or ()
    ends = zip(case.origin or (), (case.batch, case.q_heads, case.q_len, case.kv_len), strict=False)
    return [
        (
            "q_offset",
            any(not least <= offset <= most for offset in offsets),
            f"integers from {least} to {most}",
        ),
        (
            "q_offset",
            each is not None and len(each) != case.sequences,
            f"an integer, or {case.sequences} of them, one for each sequence",
        ),
        ("q_offset", case.q_offset is not None and case.positions is not None, "none beside positions"),
        (
            "positions",
            case.positions not in (None, *POSITION_PATTERNS),
            f"one of {', '.join(POSITION_PATTERNS)}",
        ),
        (
            "origin",
            any(not 0 <= start <= ORIGINS - size for start, size in ends),
            "integers of at least 0, from which nothing is counted to 2**32",
        ),
    ]


def _most_elements(case: Case) -> int:
    """Return the number of elements of the largest array of the call."""
    pairs = case.q_len * case.kv_len
    planes = [
        (case.batch if axes[0] == "b" else 1) * (case.q_heads if axes[1] == "h" else 1)
        for axes in (case.mask, case.bias)
        if axes in (*MASKS, *BIASES)
    ]
    width = max(case.head_dim, case.value_width)
    tokens = max(case.q_len * case.q_heads, case.kv_len * case.kv_heads)
    return max(case.batch * tokens * width, pairs * max(planes, default=0))
