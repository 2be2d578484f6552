"""Small problems for the oracle: every clause and every dialect, alone and combined.

Drawn are the features, the shapes and a seed; the elements of the arrays follow from the seed, so that
shrinking removes features and tokens instead of polishing numbers.
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD, Semantics

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
FEATURES = (
    "mask",
    "bias",
    "scale",
    "dropout",
    "causal",
    "lengths",
    "window",
    "cap",
    "sinks",
    "segments",
    "not_normalised",
    "q_offset",
    "positions",
    "origin",
    "chunks",
    "ranges",
    "alibi",
)

# Each choice of a dialect and the features without which it makes no difference.
DIALECTS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "default_scale": (("one",), ()),
    "bias": (("before_scale", "after_cap"), ("bias", "cap")),
    "hidden": (("sentinel",), ("mask",)),
    "precedence": (("bias_over_mask", "causal_over_mask"), ("mask", "bias", "causal")),
    "causal": (("top_left",), ("causal",)),
    "window": (("top_left",), ("window",)),
    "window_zero": (("unbounded",), ("window",)),
    "window_edges": (("exclusive",), ("window",)),
    "segments": (("equality",), ("segments",)),
    "empty_rows": (("mean_of_values", "nan", "unspecified"), ("mask",)),
    "sinks": (("capped",), ("sinks", "cap")),
    "dropout": (("linear_offset", "shared_heads", "chunk_keys"), ("dropout",)),
    "lse_base": (("two",), ()),
    "gradients": (
        (frozenset({"query", "key", "value"}), frozenset({"bias"}), frozenset()),
        ("bias", "sinks"),
    ),
    "lse_gradient": ((False,), ()),
    "deterministic": ((False,), ()),
    "hidden_nonfinite": (("leaks",), ()),
    "row_max_gradient": (("differentiated",), ("not_normalised",)),
    "ignored_arguments": (
        (
            frozenset({"causal", "softmax_scale"}),
            frozenset({"bias", "softmax_aux"}),
            frozenset({"attention_mask", "dropout_prob", "logits_soft_cap"}),
            frozenset({"dropout_shared"}),
            frozenset({"cum_seqlens_q", "cum_seqlens_k", "sliding_window"}),
            frozenset({"q_segment_ids", "kv_segment_ids", "normalize_output"}),
            frozenset({"q_offset", "q_positions", "kv_positions", "origin"}),
            frozenset({"chunk_size", "kv_start", "kv_end"}),
            frozenset({"alibi_slopes"}),
        ),
        (),
    ),
}


@dataclass(frozen=True)
class Drawn:
    """A problem, the semantics to answer it by, and cotangents."""

    problem: Problem
    semantics: Semantics
    d_out: np.ndarray
    d_lse: np.ndarray | None
    features: frozenset[str] = field(default=frozenset())


@st.composite
def semantics(draw: st.DrawFn) -> tuple[Semantics, frozenset[str]]:
    """The standard with a few answers changed, and the features that show the change."""
    changed = draw(st.sets(st.sampled_from(sorted(DIALECTS)), min_size=1, max_size=5))
    choices = {name: draw(st.sampled_from(DIALECTS[name][0])) for name in sorted(changed)}
    if "hidden" in choices:
        choices["sentinel"] = draw(st.sampled_from((-1e9, -3.0, -1e4, -3.4e38)))
    if choices.get("dropout") == "chunk_keys":
        choices["dropout_chunk"] = draw(st.sampled_from((1, 2, 3, 4, 5, 128)))
    needed = frozenset(feature for name in changed for feature in DIALECTS[name][1])
    return Semantics(**choices), needed  # type: ignore[arg-type]


@st.composite
def drawn_problems(draw: st.DrawFn, dialects: bool = False, largest: int = 6) -> Drawn:
    """A problem with cotangents; of the standard, or of a drawn dialect. `largest` bounds Sq and Sk."""
    chosen, needed = draw(semantics()) if dialects else (STANDARD, frozenset())
    features = frozenset(draw(st.sets(st.sampled_from(FEATURES), max_size=8))) | needed
    batch, group, kv_heads = (draw(st.integers(1, n)) for n in (2, 3, 2))
    q_len, kv_len = (draw(st.integers(0, largest)) for _ in range(2))
    dims = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(DTYPES))
    # 70^2 times four products of normals makes logits of up to 1e4 and more.
    amplitudes = [draw(st.sampled_from((1.0, 0.01, 10.0, 70.0))) for _ in range(2)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int, amplitude: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * amplitude).astype(dtype)

    heads = group * kv_heads
    pairs = (batch, heads, q_len, kv_len)
    options: dict[str, object] = {}
    if "mask" in features:
        shape = _broadcast(draw, pairs)
        options["attention_mask"] = (rng.random(shape) < draw(st.sampled_from((0.7, 0.2, 0.0)))).astype(
            draw(st.sampled_from((np.bool_, np.int32)))
        )
    if "bias" in features:
        options["bias"] = _bias(draw, rng, _broadcast(draw, pairs))
    if "scale" in features:
        options["softmax_scale"] = draw(st.sampled_from((1.0, 0.3, -0.5, 1e-3, 0.0)))
    if "dropout" in features:
        options["dropout_prob"] = draw(st.sampled_from((0.5, 0.1, 0.9, 2.0**-33, 1 - 2.0**-33)))
        options["dropout_seed"] = draw(st.integers(0, 2**64 - 1))
        options["dropout_shared"] = draw(st.sampled_from((None, "b", "h", "bh")))
    options["causal"] = "causal" in features
    if "lengths" in features:
        options["cum_seqlens_q"], options["cum_seqlens_k"] = _lengths(draw, batch, q_len, kv_len)
    if "window" in features:
        side = st.sampled_from((1, 0, 2, 7, None))
        options["sliding_window"] = draw(st.one_of(st.tuples(side, side), st.integers(0, 3)))
    if "cap" in features:
        options["logits_soft_cap"] = draw(st.sampled_from((1.0, 30.0, 1e-3, 1e4)))
    if "sinks" in features:
        sinks = draw(st.integers(1, 3))
        shape = draw(st.sampled_from(((sinks,), (1, sinks), (heads, sinks))))
        amplitude = draw(st.sampled_from((1.0, 1e3)))
        options["softmax_aux"] = (rng.standard_normal(shape) * amplitude).astype(np.float32)
    if "segments" in features:
        ids = draw(st.sampled_from((np.int32, np.int8, np.int64)))
        options["q_segment_ids"] = rng.integers(-1, 2, (batch, q_len)).astype(ids)
        options["kv_segment_ids"] = rng.integers(-1, 2, (batch, kv_len)).astype(ids)
    options["normalize_output"] = "not_normalised" not in features
    if "q_offset" in features:
        cum = options.get("cum_seqlens_q")
        each = rng.integers(-kv_len - 2, kv_len + 3, batch if cum is None else len(cum) - 1)
        options["q_offset"] = draw(st.sampled_from((each, each.astype(np.int8), int(each[0]))))
    if "positions" in features:
        options |= _positions(draw, rng, batch, q_len, kv_len, beside_offset="q_offset" in features)
    if "chunks" in features:
        options["chunk_size"] = draw(st.sampled_from((1, 2, 3, 5, 2**31 - 1)))
    if "ranges" in features:
        options |= _ranges(draw, rng, batch, q_len, kv_len)
    if "alibi" in features:
        shape = draw(st.sampled_from(((heads,), (1, heads), (batch, heads))))
        slopes = rng.standard_normal(shape) * draw(st.sampled_from((1.0, 2.0**-8, 1e3)))
        options["alibi_slopes"] = slopes.astype(np.float32)
    # A linear offset needs the shape of the whole array.
    if "origin" in features and chosen.dropout != "linear_offset":
        options["origin"] = tuple(draw(st.sampled_from((0, 1, 5, 2**32 - 100))) for _ in range(4))

    problem = make_problem(
        normal(batch, q_len, heads, dims[0], amplitude=amplitudes[0]),
        normal(batch, kv_len, kv_heads, dims[0], amplitude=amplitudes[1]),
        normal(batch, kv_len, kv_heads, dims[1], amplitude=draw(st.sampled_from((1.0, 300.0)))),
        **options,
    )
    d_out = normal(batch, q_len, heads, dims[1])
    d_out[:, rng.random(q_len) < draw(st.sampled_from((0.0, 0.5)))] = 0
    d_lse = rng.standard_normal((batch, heads, q_len)).astype(np.float32)
    return Drawn(problem, chosen, d_out, draw(st.sampled_from((d_lse, None))), features)


def _broadcast(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = [draw(st.booleans()) for _ in shape]
    return tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))


def _positions(
    draw: st.DrawFn, rng: np.random.Generator, batch: int, q_len: int, kv_len: int, beside_offset: bool
) -> dict[str, np.ndarray]:
    """Positions of the keys, of the rows or of both: in no order, some of them more than once."""
    sides = {"kv_positions": kv_len} if beside_offset else {"q_positions": q_len, "kv_positions": kv_len}
    given = draw(st.sets(st.sampled_from(sorted(sides)), min_size=1))
    dtype = draw(st.sampled_from((np.int32, np.int8, np.int64)))
    return {
        name: rng.integers(-2, kv_len + 2, (draw(st.sampled_from((1, batch))), sides[name])).astype(dtype)
        for name in sorted(given)
    }


def _ranges(
    draw: st.DrawFn, rng: np.random.Generator, batch: int, q_len: int, kv_len: int
) -> dict[str, np.ndarray]:
    """The first key of each row, the end of its keys, or both: beyond all keys and empty, too."""
    given = draw(st.sets(st.sampled_from(("kv_start", "kv_end")), min_size=1))
    dtype = draw(st.sampled_from((np.int32, np.int8, np.int64)))
    return {
        name: rng.integers(-2, kv_len + 3, (draw(st.sampled_from((1, batch))), q_len)).astype(dtype)
        for name in sorted(given)
    }


def _bias(draw: st.DrawFn, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    dtype = draw(st.sampled_from((*DTYPES, np.dtype(np.float64))))
    bias = (rng.standard_normal(shape) * draw(st.sampled_from((1.0, 1e4)))).astype(dtype)
    bias[rng.random(shape) < draw(st.sampled_from((0.0, 0.3)))] = -np.inf
    return bias


def _lengths(draw: st.DrawFn, batch: int, q_len: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded sequences, or several packed into one batch row; zero lengths and padding included."""
    count = batch if batch > 1 else draw(st.integers(1, 3))
    cums = []
    for length in (q_len, kv_len):
        if batch > 1:
            sizes = [draw(st.integers(0, length)) for _ in range(count)]
        else:
            cuts = sorted(draw(st.integers(0, length)) for _ in range(count))
            sizes = np.diff([0, *cuts]).tolist()
        cums.append(np.cumsum([0, *sizes]).astype(np.int32))
    return cums[0], cums[1]
