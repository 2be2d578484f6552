"""MaskInfos that Hypothesis draws, and the problems of the oracle that say the same."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from attest.kernels.operations import MaskInfo
from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD
from attest.reference.visibility import allowed, key_positions, padding_rows, row_positions

# Batch, query heads, Sq, Sk: few, as each shape is compiled anew.
SHAPES = ((2, 2, 3, 4), (1, 2, 4, 4))
CONDITIONS = ("mask", "tokens", "segments", "lengths", "kv_lengths", "causal", "window", "chunk", "ranges")
LETTERS = {"bhqk": "bhqk", "bqk": "bqk", "hqk": "hqk", "qk": "qk", "bk": "bk"}


@dataclass(frozen=True)
class Drawn:
    """What was applied, in its order; where tokens stand; and the sizes."""

    shape: tuple[int, int, int, int]
    steps: tuple[tuple[str, object], ...]
    places: dict[str, object]


@st.composite
def drawn(draw, shapes=SHAPES):
    shape = batch, _, q_length, k_length = draw(st.sampled_from(shapes))
    # The batch of all that need not have that of the call: each mixture is compiled anew.
    entries = draw(st.sampled_from((1, batch)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = draw(st.lists(st.sampled_from(CONDITIONS), max_size=4))
    steps = []
    for name in names:
        before = [other for other, _ in steps]
        if name == "mask":
            axes = draw(st.sampled_from(sorted(LETTERS)))
            sizes = dict(zip("bhqk", shape, strict=True))
            own = tuple(1 if draw(st.booleans()) else sizes[axis] for axis in axes)
            steps.append((name, ((rng.random(own) < 0.7) * rng.integers(1, 5), axes)))
        elif name == "tokens" and q_length == k_length:
            steps.append((name, rng.random((entries, q_length)) < 0.7))
        elif name == "segments" and not {"segments", "tokens"} & set(before):
            sides = [(entries, length) for length in (q_length, k_length)]
            steps.append((name, tuple(rng.integers(-1, 2, side).astype(np.int8) for side in sides)))
        elif name == "lengths" and name not in before:
            packed = batch == 1
            count = draw(st.integers(1, 3)) if packed else batch
            steps.append((name, tuple(_cumulative(rng, count, n, packed) for n in (q_length, k_length))))
        elif name == "kv_lengths":
            # Beyond the last key, too, which hides nothing.
            steps.append((name, rng.integers(0, k_length + 2, entries)))
        elif name == "causal":
            steps.append((name, None))
        elif name == "window":
            side = st.sampled_from((None, 0, 1, 2, 2**40))
            steps.append((name, draw(st.one_of(st.tuples(side, side), st.integers(0, 2)))))
        elif name == "chunk":
            steps.append((name, draw(st.sampled_from((1, 2, 3, 4, 2**40)))))
        elif name == "ranges":
            given = draw(st.sampled_from((("kv_start",), ("kv_end",), ("kv_start", "kv_end"))))
            ends = {side: rng.integers(-1, k_length + 2, (entries, q_length)) for side in given}
            steps.append((name, ends))
    return Drawn(shape, tuple(steps), _places(draw, rng, shape, entries, dict(steps)))


def _cumulative(rng, count, length, packed):
    if packed:
        return np.concatenate([[0], np.sort(rng.integers(0, length + 1, count))]).astype(np.int32)
    return np.concatenate([[0], np.cumsum(rng.integers(0, length + 1, count))]).astype(np.int32)


def _places(draw, rng, shape, entries, steps):
    batch, _, q_length, k_length = shape
    places = {}
    if draw(st.booleans()):
        places["kv_positions"] = rng.integers(-3, 4, (entries, k_length))
    kind = draw(st.sampled_from(("default", "offset", "offsets", "positions")))
    sequences = len(steps["lengths"][0]) - 1 if "lengths" in steps else batch
    if kind == "offset":
        places["q_offset"] = int(rng.integers(-3, 4))
    elif kind == "offsets":
        places["q_offset"] = rng.integers(-3, 4, sequences)
    elif kind == "positions":
        places["q_positions"] = rng.integers(-3, 4, (entries, q_length))
    return places


def built(case):
    """The MaskInfo of what was drawn."""
    info = MaskInfo()
    lengths = dict(case.steps).get("lengths")
    if lengths is not None:
        info = MaskInfo.from_cu_seqlens(*lengths, padded=case.shape[0] > 1)
    for name, what in case.steps:
        if name == "mask":
            info = info.apply_attention_mask(what[0], axes=what[1])
        elif name == "tokens":
            info = info.apply_attention_mask(what)
        elif name == "segments":
            info = info.apply_segments(*what)
        elif name == "kv_lengths":
            info = info.apply_kv_lengths(what)
        elif name == "causal":
            info = info.apply_causal()
        elif name == "window":
            info = info.apply_sliding_window(what)
        elif name == "chunk":
            info = info.apply_chunked(what)
        elif name == "ranges":
            info = info.apply_kv_ranges(**what)
    return info.with_positions(**case.places)


def problem_of(shape, **options):
    batch, heads, q_length, k_length = shape
    keys = np.zeros((batch, k_length, 1, 1), np.float32)
    return make_problem(np.zeros((batch, q_length, heads, 1), np.float32), keys, keys, **options)


def expected(case):
    """The problem with equal arguments: what the oracle has no argument for is in its mask."""
    batch, _, q_length, k_length = shape = case.shape
    mask = np.ones(shape, bool)
    options = dict(case.places)
    ids = None
    left, right = [], []
    steps = dict(case.steps)
    if "lengths" in steps:
        options["cum_seqlens_q"], options["cum_seqlens_k"] = steps["lengths"]
    bare = problem_of(shape, **options)
    rows, keys = positions(bare)
    for name, what in case.steps:
        if name == "mask":
            array, axes = what
            mask &= array.reshape([dict(zip(axes, array.shape, strict=True)).get(a, 1) for a in "bhqk"]) != 0
        elif name == "segments":
            ids = [np.broadcast_to(x, (batch, x.shape[1])).astype(np.int32) for x in what]
        elif name == "tokens":
            ids = [np.zeros((batch, q_length), np.int32)] * 2 if ids is None else ids
            ids = [np.where(what, x, -1).astype(np.int32) for x in ids]
        elif name == "kv_lengths":
            mask &= (np.arange(k_length) < what[:, None])[:, None, None, :]
        elif name == "causal":
            options["causal"] = True
        elif name == "window":
            one, other = (what, what) if isinstance(what, int) else what
            left += [one] if one is not None else []
            right += [other] if other is not None else []
        elif name == "chunk":
            mask &= (rows[:, :, None] // what == keys[:, None, :] // what)[:, None]
        elif name == "ranges":
            index = np.arange(k_length)
            mask &= (what.get("kv_start", np.int64([[0]]))[..., None] <= index)[:, None]
            mask &= (index < what.get("kv_end", np.int64([[k_length]]))[..., None])[:, None]
    if ids is not None:
        options["q_segment_ids"], options["kv_segment_ids"] = ids
    options["sliding_window"] = min(left, default=None), min(right, default=None)
    return problem_of(shape, attention_mask=mask, **options)


def positions(problem):
    entries = range(problem.batch)
    rows = [row_positions(problem, "bottom_right", entry) for entry in entries]
    return np.stack(rows), np.stack([key_positions(problem, entry) for entry in entries])


def shown(problem):
    """The visible pairs [B, Hq, Sq, Sk] and the padding rows [B, Sq] of the oracle."""
    rows = np.arange(problem.q_len)
    pairs = [
        [allowed(problem, STANDARD, entry, head, rows) for head in range(problem.q_heads)]
        for entry in range(problem.batch)
    ]
    padding = [padding_rows(problem, STANDARD, entry) for entry in range(problem.batch)]
    return np.array(pairs), np.array(padding)


def like_arrays(shape):
    batch, heads, q_length, k_length = shape
    query = jax.ShapeDtypeStruct((batch, q_length, heads, 8), jnp.float32)
    return query, jax.ShapeDtypeStruct((batch, k_length, 1, 8), jnp.float32)


def as_numpy(arguments):
    return {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in arguments.items()}


def lengths(q_lengths, k_lengths):
    return "lengths", (np.array(q_lengths, np.int32), np.array(k_lengths, np.int32))
