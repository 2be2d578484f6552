"""Which problem a test poses: a small recipe that rebuilds its arrays bit for bit on any machine.

Hypothesis draws and shrinks Cases, failures print them, the corpus stores them; array elements are never
drawn. `conformance.families` turns a Case into a Problem.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, get_args

from conformance.families import FAMILIES
from conformance.features import DTYPES

Window = tuple[int | None, int | None]
Lengths = tuple[tuple[int, int], ...]

MASK_AXES = ("11", "1h", "b1", "bh")
BIAS_AXES = ("111", "11q", "1h1", "1hq", "b11", "b1q", "bh1", "bhq")


@dataclass(frozen=True)
class Case:
    """One recipe. Every field is JSON; a field at its default is left out of it.

    value_dim: None where it is head_dim.
    mask: which of the axes batch and head the mask has of its own, one of MASK_AXES; None without a mask.
    bias: the same for batch, head and query row, one of BIAS_AXES. bias_hides: some entries are -inf.
    segments: the number of segments, laid out in runs, some tokens padding; None without.
    lengths: (query, key) tokens of each sequence. One for each batch row: padded; batch 1: packed.
    sinks: how many sink logits. sinks_per_head: each head has its own.
    scale: None is the default of S1. normalized False asks for the numerator alone.
    integer_mask: the mask is handed over as int32, non-zero where visible; needs a mask.
    empty_rows: some query rows see nothing, hidden by the mask; needs a mask.
    poison: NaN and inf are stored wherever nothing may be read: under masks, past lengths.
    tiling: which of the subject's tilings runs. seed: of all values.
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
    def features(self) -> frozenset[str]:
        """What a kernel must support to be asked this, of `conformance.features.FEATURES`."""
        packed = self.lengths is not None and self.batch == 1
        switches = {
            "causal": self.causal,
            "window": self.window is not None,
            "mask": self.mask is not None,
            "integer_mask": self.integer_mask,
            "bias": self.bias is not None,
            "segments": self.segments is not None,
            "padded": self.lengths is not None and not packed,
            "packed": packed,
            "sinks": self.sinks > 0,
            "soft_cap": self.soft_cap is not None,
            "dropout": self.dropout > 0,
            "scale": self.scale is not None,
            "gqa": self.q_heads != self.kv_heads,
            "value_dim": self.value_dim is not None,
            "unnormalized": not self.normalized,
        }
        return frozenset(name for name, on in switches.items() if on)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, tuples as lists."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.loads(json.dumps(values))


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
    return Case(**values)


def _has_type(value: object, annotation: Any) -> bool:
    if annotation == Window | None:
        return value is None or _is_list(value, 2, lambda side: side is None or _is_int(side))
    if annotation == Lengths | None:
        return value is None or _is_list(value, None, lambda pair: _is_list(pair, 2, _is_int))
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
    """(field, whether it is wrong, what was expected)."""
    sides = case.window or ()
    lengths = case.lengths or ()
    packed = case.batch == 1
    q_room = case.q_len - (sum(q for q, _ in lengths) if packed else max((q for q, _ in lengths), default=0))
    k_room = case.kv_len - (sum(k for _, k in lengths) if packed else max((k for _, k in lengths), default=0))
    return [
        ("dtype", case.dtype not in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("batch", case.batch < 1, "at least 1"),
        ("q_len", case.q_len < 0, "at least 0"),
        ("kv_len", case.kv_len < 0, "at least 0"),
        ("kv_heads", case.kv_heads < 1, "at least 1"),
        ("q_heads", case.q_heads < 1 or case.q_heads % max(case.kv_heads, 1) != 0, "a multiple of kv_heads"),
        ("head_dim", case.head_dim < 1, "at least 1"),
        ("value_dim", case.value_dim is not None and case.value_dim < 1, "at least 1"),
        ("family", case.family not in FAMILIES, f"one of {', '.join(sorted(FAMILIES))}"),
        ("window", any(side is not None and side < 0 for side in sides), "sides of at least 0"),
        ("mask", case.mask not in (None, *MASK_AXES), f"one of {', '.join(MASK_AXES)}"),
        ("integer_mask", case.integer_mask and case.mask is None, "false without a mask"),
        ("empty_rows", case.empty_rows and case.mask is None, "false without a mask"),
        ("bias", case.bias not in (None, *BIAS_AXES), f"one of {', '.join(BIAS_AXES)}"),
        ("bias_hides", case.bias_hides and case.bias is None, "false without a bias"),
        ("segments", case.segments is not None and case.segments < 1, "at least 1"),
        ("lengths", case.lengths == (), "at least one sequence"),
        ("lengths", any(q < 0 or k < 0 for q, k in lengths), "lengths of at least 0"),
        ("lengths", not packed and len(lengths) not in (0, case.batch), "one sequence for each batch row"),
        ("lengths", bool(lengths) and (q_room < 0 or k_room < 0), "lengths that fit q_len and kv_len"),
        ("sinks", case.sinks < 0, "at least 0"),
        ("sinks_per_head", case.sinks_per_head and case.sinks == 0, "false without sinks"),
        ("soft_cap", case.soft_cap is not None and not 0 < case.soft_cap < float("inf"), "a number above 0"),
        ("dropout", not 0 <= case.dropout < 1, "a probability in [0, 1)"),
        ("scale", case.scale is not None and not abs(case.scale) < float("inf"), "a finite number"),
        ("tiling", case.tiling < 0, "at least 0"),
        ("seed", not 0 <= case.seed < 2**64, "an integer of 64 bits"),
    ]
