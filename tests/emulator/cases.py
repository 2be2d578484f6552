"""Draws the attention calls that the error model is tried on: values, shapes and features, from a seed."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.families import FAMILIES as CONFORMANCE_FAMILIES
from attest.conformance.cases.families import Stream, Wanted
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics

# The suite's own families, and three more.
FAMILIES = (*CONFORMANCE_FAMILIES, "positive", "tiny", "large_logits")
# Those that a kernel of the standard may be given; the others are dialects.
STANDARD_FEATURES = (
    "causal",
    "window",
    "mask",
    "segments",
    "lengths",
    "bias",
    "broadcast_bias",
    "cap_15",
    "cap_50",
    "cap_0.8",
    "sinks",
    "shared_sinks",
    "dropout",
    "no_d_lse",
    "unnormalised",
    "alibi",
)
DIALECTS = ("bias_after_cap", "bias_before_scale", "capped_sinks", "base_two", "sentinel", "mean_rows")

CAPS = {"cap_15": 15.0, "cap_50": 50.0, "cap_0.8": 0.8}

Array = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a call."""

    batch: int = 1
    q_len: int = 64
    kv_len: int = 64
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64


# Of several batch entries and heads, with a group, and with lengths and head dims that differ.
SMALL = Shape(batch=2, q_len=19, kv_len=40, q_heads=4, kv_heads=2, head_dim=24, value_dim=16)


@dataclass(frozen=True)
class Drawn:
    """One call: what the oracle, the model and a kernel are given."""

    problem: Problem
    semantics: Semantics
    cotangents: Cotangents


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def values(
    family: str, seed: int, shape: Shape, soft_cap: float | None, dtype: np.dtype[Any]
) -> tuple[Array, Array, Array, Array]:
    """query, key, value and the cotangent of out.

    positive: a constant in V and in dO, so that D is large beside dP - D. tiny: outputs that float16 holds
    as subnormals. large_logits: of the order of 1e4.
    """
    wanted = Wanted(
        query=(shape.batch, shape.q_len, shape.q_heads, shape.head_dim),
        key=(shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim),
        value=(shape.batch, shape.kv_len, shape.kv_heads, shape.value_dim),
        scale=1 / np.sqrt(shape.head_dim),
        soft_cap=soft_cap,
    )
    streams = [Stream(seed, number) for number in range(4)]
    make = CONFORMANCE_FAMILIES.get(family, CONFORMANCE_FAMILIES["normal"])
    query, key, value = make(wanted, *streams[:3])
    d_out = streams[3].normal((*wanted.query[:3], shape.value_dim))
    if family == "positive":
        value, d_out = value * 0.25 + 1, d_out * 0.25 + 1
    elif family == "tiny":
        query, key, value, d_out = query * 1e-3, key * 1e-3, value * 1e-5, d_out * 1e-3
    elif family == "large_logits":
        query, key = query * 60, key * 60
    return query.astype(dtype), key.astype(dtype), value.astype(dtype), d_out.astype(dtype)


def draw(family: str, features: tuple[str, ...], shape: Shape, dtype: str, seed: int) -> Drawn:
    """A call of the given family, features and shape."""
    rng = np.random.default_rng(seed)
    kind = dtype_of(dtype)
    soft_cap = next((cap for name, cap in CAPS.items() if name in features), None)
    query, key, value, d_out = values(family, seed, shape, soft_cap, kind)
    full = (shape.batch, shape.q_heads, shape.q_len, shape.kv_len)
    options: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    if "causal" in features:
        options["causal"] = True
    if "window" in features:
        # Set by the shape alone, as the seed of dropout is, so that compiled kernels serve many seeds.
        options["sliding_window"] = (shape.kv_len // 3, shape.q_len // 4)
    if "mask" in features:
        options["attention_mask"] = rng.random((1, *full[1:])) < 0.7
    if "segments" in features:
        options["q_segment_ids"] = np.sort(rng.integers(-1, 3, (shape.batch, shape.q_len)), axis=1)
        options["kv_segment_ids"] = np.sort(rng.integers(-1, 3, (shape.batch, shape.kv_len)), axis=1)
    if "lengths" in features:
        for name, length in (("cum_seqlens_q", shape.q_len), ("cum_seqlens_k", shape.kv_len)):
            if shape.batch > 1:
                lengths = rng.integers(0, length + 1, shape.batch)
                options[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            else:
                cuts = np.sort(rng.integers(0, length + 1, 3))
                options[name] = np.concatenate([[0], cuts]).astype(np.int32)
    if "bias" in features or "broadcast_bias" in features:
        bias_shape = full if "bias" in features else (1, shape.q_heads, 1, shape.kv_len)
        bias = rng.standard_normal(bias_shape).astype(np.float32)
        options["bias"] = np.where(rng.random(bias_shape) < 0.1, -np.inf, bias).astype(kind)
    if soft_cap is not None:
        options["logits_soft_cap"] = soft_cap
    if "sinks" in features:
        options["softmax_aux"] = rng.standard_normal((shape.q_heads, 2)).astype(np.float32)
    if "shared_sinks" in features:
        options["softmax_aux"] = rng.standard_normal(3).astype(kind)
    if "dropout" in features:
        options |= {"dropout_prob": 0.2, "dropout_seed": 2**40 + shape.kv_len}
    if "alibi" in features:
        slopes = 2.0 ** -rng.uniform(0, 8, (shape.batch, shape.q_heads))
        options["alibi_slopes"] = slopes.astype(np.float32)
    if "unnormalised" in features:
        options["normalize_output"] = False
    if "bias_after_cap" in features:
        choices["bias"] = "after_cap"
    if "bias_before_scale" in features:
        choices["bias"] = "before_scale"
    if "capped_sinks" in features:
        choices["sinks"] = "capped"
    if "base_two" in features:
        choices["lse_base"] = "two"
    if "sentinel" in features:
        choices |= {"hidden": "sentinel", "sentinel": -1e30, "empty_rows": "mean_of_values"}
    if "mean_rows" in features:
        choices["empty_rows"] = "mean_of_values"
    d_lse = None if "no_d_lse" in features else rng.standard_normal(full[:3]).astype(np.float32)
    semantics = Semantics(**choices) if choices else STANDARD
    return Drawn(make_problem(query, key, value, **options), semantics, Cotangents(d_out, d_lse))


def draw_small(dtype: str, seed: int, dialects: bool = True) -> tuple[Drawn, str, tuple[str, ...], bool]:
    """Any small call: (what is drawn, family, features, whether a materialised kernel should answer it)."""
    rng = np.random.default_rng([seed, 1])
    family = str(rng.choice(FAMILIES))
    pool = [*STANDARD_FEATURES, *(DIALECTS if dialects else ())]
    chosen = {str(f) for f in rng.choice(pool, size=int(rng.integers(0, 5)), replace=False)}
    if dtype == "float16" and family == "large_logits":
        family = "peaked"
    # A row that is the mean of all values has no lse from which a flash backward recomputes it.
    materialised = bool(rng.random() < 0.3) or bool(chosen & {"sentinel", "mean_rows"})
    group = int(rng.integers(1, 4))
    kv_heads = int(rng.integers(1, 3))
    shape = Shape(
        batch=int(rng.integers(1, 3)),
        q_len=int(rng.choice([1, 3, 16, 33, 64, 100])),
        kv_len=int(rng.choice([1, 2, 5, 16, 33, 64, 129, 200])),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=int(rng.choice([1, 3, 8, 16, 32, 64, 96, 128])),
        value_dim=int(rng.choice([1, 8, 32, 64, 80])),
    )
    # Sentinels beside an output that is not normalised: exp(lse - m) says nothing at 1e30.
    features = tuple(sorted(chosen - {"unnormalised"} if "sentinel" in chosen else chosen))
    return draw(family, features, shape, dtype, seed), family, features, materialised
