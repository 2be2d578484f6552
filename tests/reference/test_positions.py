"""S12, S21, S23: what holds of positions and origins without any arithmetic of ours.

A shard, called with the positions of its tokens and with its origin, is the slice of the whole.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.reference.error_model import predict
from attest.reference.numerics import Numerics
from attest.reference.oracle import Answer, Cotangents, Sample, attention
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import Semantics
from tests.examples import examples
from tests.reference.answers import answer_of, assert_equal, simple
from tests.reference.second_pairs import row_position
from tests.reference.strategies import Drawn, drawn_problems


def rounding(drawn: Drawn, answer: Answer) -> float:
    """What float64 sums in another order may differ by: 1e-14 of the largest terms, which may cancel.

    Weights are known to as many digits as lse, of the values and of the keys that they multiply.
    """
    problem = drawn.problem
    factors = (problem.value, drawn.d_out, answer.lse, *([] if drawn.d_lse is None else [drawn.d_lse]))
    sizes = [largest(array) for array in factors]
    sizes.append(max(largest(problem.query), largest(problem.key)) * max(abs(problem.softmax_scale or 1), 1))
    return 1e-14 * float(np.prod(sizes))


def largest(array: np.ndarray) -> float:
    """The largest magnitude, or 1."""
    numbers = array.astype(np.float64)
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=1.0))


def default_positions(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The positions [B, Sq] and [B, Sk] that a problem has without being given any, by the clause."""
    q, k = (np.zeros((problem.batch, length), np.int64) for length in (problem.q_len, problem.kv_len))
    for batch in range(problem.batch):
        k[batch] = np.arange(problem.kv_len)
        if problem.cum_seqlens_k is not None and problem.batch == 1:
            for start, stop in pairwise(problem.cum_seqlens_k):
                k[batch, start:stop] = np.arange(stop - start)
        for row in range(problem.q_len):
            if not is_behind(problem, batch, row):
                q[batch, row] = row_position(problem, "bottom_right", batch, row)
    return q, k


def is_behind(problem: Problem, batch: int, row: int) -> bool:
    """Whether a row lies behind its length."""
    cum = problem.cum_seqlens_q
    if cum is None:
        return False
    return row >= (cum[-1] if problem.batch == 1 else cum[batch + 1] - cum[batch])


def with_positions(problem: Problem) -> Problem:
    """The same problem with the positions of all its tokens given."""
    q, k = default_positions(problem)
    q = q if problem.q_positions is None else problem.q_positions
    k = k if problem.kv_positions is None else problem.kv_positions
    return replace(problem, q_offset=None, q_positions=q, kv_positions=k)


def part(array: np.ndarray | None, axis: int, here: slice) -> np.ndarray | None:
    """A slice along an axis, unless the array is broadcast along it."""
    if array is None or array.shape[axis] == 1:
        return array
    return array[(slice(None),) * axis + (here,)]


def lengths_of(problem: Problem, cum: np.ndarray, tokens: slice | None, entries: slice) -> np.ndarray:
    """The cumulative lengths of some tokens of each sequence, or of some sequences of a padded batch."""
    if problem.batch == 1:
        return (
            cum if tokens is None else (np.clip(cum, tokens.start, tokens.stop) - tokens.start).astype("i4")
        )
    lengths = np.diff(cum)[entries]
    if tokens is not None:
        lengths = np.clip(lengths - tokens.start, 0, tokens.stop - tokens.start)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


# Arrays that all batch entries may have in common.
_SHARED = ("q_positions", "kv_positions", "kv_start", "kv_end", "alibi_slopes")


def shard(drawn: Drawn, axis: str, here: slice) -> Drawn:
    """Some batch entries, KV heads with their queries, rows or keys of a problem `with_positions`."""
    problem = drawn.problem
    entries = here if axis == "batch" else slice(0, problem.batch)
    rows, keys = (here if axis == name else None for name in ("rows", "keys"))
    heads = slice(here.start * problem.group, here.stop * problem.group)
    at = {"batch": (0, here), "heads": (1, heads), "rows": (2, here), "keys": (3, here)}[axis]
    origin = [0, 0, 0, 0]
    origin[at[0]] = at[1].start
    changed: dict[str, Any] = {"origin": tuple(a + b for a, b in zip(problem.origin, origin, strict=True))}
    changed |= {name: part(getattr(problem, name), *at) for name in ("attention_mask", "bias")}
    d_out, d_lse = drawn.d_out, drawn.d_lse
    for name, place in (
        ("query", {"batch": (0, here), "heads": (2, heads), "rows": (1, here)}),
        ("key", {"batch": (0, here), "heads": (2, here), "keys": (1, here)}),
        ("value", {"batch": (0, here), "heads": (2, here), "keys": (1, here)}),
        ("q_segment_ids", {"batch": (0, here), "rows": (1, here)}),
        ("kv_segment_ids", {"batch": (0, here), "keys": (1, here)}),
        ("q_positions", {"batch": (0, here), "rows": (1, here)}),
        ("kv_positions", {"batch": (0, here), "keys": (1, here)}),
        ("kv_start", {"batch": (0, here), "rows": (1, here)}),
        ("kv_end", {"batch": (0, here), "rows": (1, here)}),
        ("alibi_slopes", {"batch": (0, here), "heads": (1, heads)}),
    ):
        if axis in place:
            along, some = place[axis]
            array = getattr(problem, name)
            broadcast = array is not None and along == 0 and name in _SHARED and len(array) == 1
            if array is not None and not broadcast:
                changed[name] = array[(slice(None),) * along + (some,)]
    if axis == "keys":  # which ranges count, as they do not count positions
        starts = {name: getattr(problem, name) for name in ("kv_start", "kv_end")}
        changed |= {name: array - here.start for name, array in starts.items() if array is not None}
    if axis == "heads" and problem.softmax_aux is not None and not problem.shares_sinks:
        changed["softmax_aux"] = problem.softmax_aux[heads]
    if problem.cum_seqlens_q is not None and problem.cum_seqlens_k is not None:
        changed["cum_seqlens_q"] = lengths_of(problem, problem.cum_seqlens_q, rows, entries)
        changed["cum_seqlens_k"] = lengths_of(problem, problem.cum_seqlens_k, keys, entries)
    if axis != "keys":
        out_axis, lse_axis = {"batch": (0, 0), "heads": (2, 1), "rows": (1, 2)}[axis]
        d_out = d_out[(slice(None),) * out_axis + (at[1],)]
        d_lse = None if d_lse is None else d_lse[(slice(None),) * lse_axis + (at[1],)]
    return replace(drawn, problem=replace(problem, **changed), d_out=d_out, d_lse=d_lse)


def cuts(data: st.DataObject, length: int) -> list[slice]:
    """A length in up to three parts, none of them empty."""
    inner = data.draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else set()
    return [slice(*ends) for ends in pairwise([0, *sorted(inner), length])]


def joined(whole: Answer, parts: list[Answer], axis: str, drawn: Drawn) -> Answer:
    """The parts put together: outputs side by side, gradients of what is shared summed."""
    along = {
        "batch": dict.fromkeys(("out", "lse", "dquery", "dkey", "dvalue"), 0),
        "heads": {"out": 2, "lse": 1, "dquery": 2, "dkey": 2, "dvalue": 2},
        "rows": {"out": 1, "lse": 2, "dquery": 1},
    }[axis]
    place = {"batch": 0, "heads": 1, "rows": 2}[axis]
    if drawn.problem.bias is not None and drawn.problem.bias.shape[place] > 1:
        along["dbias"] = place
    if axis == "heads" and drawn.problem.softmax_aux is not None and not drawn.problem.shares_sinks:
        along["dsoftmax_aux"] = 0
    arrays = {}
    for name in whole.items():
        pieces = [piece.items()[name] for piece in parts]
        arrays[name] = np.concatenate(pieces, along[name]) if name in along else sum(pieces)
    return Answer(**arrays)  # type: ignore[arg-type]


@examples(60)
@given(drawn=drawn_problems(), axis=st.sampled_from(("batch", "heads", "rows")), data=st.data())
def test_a_shard_is_the_slice_of_the_whole(drawn: Drawn, axis: str, data: st.DataObject) -> None:
    whole = answer_of(drawn)
    drawn = replace(drawn, problem=with_positions(drawn.problem))
    problem = drawn.problem
    length = {"batch": problem.batch, "heads": problem.kv_heads, "rows": problem.q_len}[axis]
    if length == 0 or (axis == "batch" and problem.batch == 1):
        return
    parts = cuts(data, length)
    # A padded batch of one is a packed batch: it reads its lengths otherwise, and to the same effect.
    answers = [answer_of(shard(drawn, axis, here)) for here in parts]
    assert_equal(joined(whole, answers, axis, drawn), whole, rounding(drawn, whole))


@examples(60)
@given(drawn=drawn_problems(), data=st.data())
def test_shards_of_the_keys_merge_by_lse(drawn: Drawn, data: st.DataObject) -> None:
    """Sinks go with the first shard. Each shard's cotangents are those that the merge passes on to it."""
    drawn = replace(drawn, problem=replace(drawn.problem, normalize_output=True))
    whole = answer_of(drawn)
    drawn = replace(drawn, problem=with_positions(drawn.problem))
    if drawn.problem.kv_len == 0:
        return
    shards = [shard(drawn, "keys", here) for here in cuts(data, drawn.problem.kv_len)]
    shards[1:] = [replace(one, problem=replace(one.problem, softmax_aux=None)) for one in shards[1:]]
    answers = [answer_of(one) for one in shards]
    with np.errstate(all="ignore"):
        lse = np.logaddexp.reduce([answer.lse for answer in answers])
        shares = [np.where(np.isneginf(lse), 0.0, np.exp(answer.lse - lse)) for answer in answers]
    by_row = [share.transpose(0, 2, 1)[..., None] for share in shares]
    out = sum(share * answer.out for share, answer in zip(by_row, answers, strict=True))
    d_out = drawn.d_out.astype(np.float64)
    d_lse = np.zeros(lse.shape) if drawn.d_lse is None else drawn.d_lse.astype(np.float64)
    gradients = []
    for one, answer, share, share_by_row in zip(shards, answers, shares, by_row, strict=True):
        moved = (d_out * (answer.out - out)).sum(axis=3).transpose(0, 2, 1)
        gradients.append(
            attention(one.problem, one.semantics, Cotangents(share_by_row * d_out, share * (d_lse + moved)))
        )
    first = gradients[0]
    merged = {
        "out": out,
        "lse": lse,
        "dquery": sum(gradient.dquery for gradient in gradients),
        "dkey": np.concatenate([gradient.dkey for gradient in gradients], 1),
        "dvalue": np.concatenate([gradient.dvalue for gradient in gradients], 1),
        "dsoftmax_aux": first.dsoftmax_aux,
    }
    if whole.dbias is not None:
        pieces = [gradient.dbias for gradient in gradients]
        shared = drawn.problem.bias.shape[3] == 1 < drawn.problem.kv_len
        merged["dbias"] = sum(pieces) if shared else np.concatenate(pieces, 3)
    assert_equal(Answer(**merged), whole, rounding(drawn, whole))


@examples(60)
@given(drawn=drawn_problems(), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_the_keys_is_in_their_positions_alone(drawn: Drawn, seed: int) -> None:
    """Keys of one sequence in any order, with all that belongs to them, change no output."""
    off = {"cum_seqlens_q": None, "cum_seqlens_k": None, "dropout_prob": 0.0}
    off |= {"kv_start": None, "kv_end": None}  # they count keys in the order of the array
    if isinstance(drawn.problem.q_offset, np.ndarray):
        off["q_offset"] = None
    drawn = replace(drawn, problem=with_positions(replace(drawn.problem, **off)))
    problem, answer = drawn.problem, answer_of(drawn)
    order = np.random.default_rng(seed).permutation(problem.kv_len)
    axes = {"key": 1, "value": 1, "kv_positions": 1, "kv_segment_ids": 1, "attention_mask": 3, "bias": 3}

    def moved(array: np.ndarray, axis: int) -> np.ndarray:
        return np.take(array, order, axis) if array.shape[axis] == problem.kv_len else array

    arrays = {name: getattr(problem, name) for name in axes}
    changed = {name: moved(array, axes[name]) for name, array in arrays.items() if array is not None}
    got = answer_of(replace(drawn, problem=replace(problem, **changed)))
    permuted = {"dkey": 1, "dvalue": 1, "dbias": 3}
    want = {
        name: moved(array, permuted[name]) if name in permuted else array
        for name, array in answer.items().items()
    }
    assert_equal(got, Answer(**want), rounding(drawn, answer))


@examples(50)
@given(drawn=drawn_problems(dialects=True))
def test_offsets_and_defaults_equal_the_positions_that_they_stand_for(drawn: Drawn) -> None:
    """Bit for bit; a dialect that counts from the top left does so only where no positions are given."""
    semantics = replace(drawn.semantics, causal="bottom_right", window="bottom_right")
    semantics = replace(semantics, ignored_arguments=frozenset())
    drawn = replace(drawn, semantics=semantics)
    explicit = replace(drawn, problem=with_positions(drawn.problem))
    for name, array in answer_of(drawn).items().items():
        np.testing.assert_array_equal(answer_of(explicit).items()[name], array, err_msg=name)
    top_left = replace(semantics, causal="top_left", window="top_left")
    assert_equal(answer_of(replace(explicit, semantics=top_left)), answer_of(explicit))


@pytest.mark.parametrize("sample", [None, Sample(np.array([4, 1]), np.array([0, 5]))])
def test_the_error_model_follows(sample: Sample | None) -> None:
    """A shard of the rows is predicted as the slice of the whole is, and hidden keys as exact."""
    drawn = simple(6, 9, causal=True, dropout_prob=0.5, dropout_seed=3)
    numerics = Numerics(output_dtype="float32")
    explicit = with_positions(drawn.problem)
    want = predict(drawn.problem, drawn.semantics, numerics, Cotangents(drawn.d_out, drawn.d_lse), sample)
    got = predict(explicit, drawn.semantics, numerics, Cotangents(drawn.d_out, drawn.d_lse), sample)
    for name, prediction in want.items():
        np.testing.assert_array_equal(got[name].bound, prediction.bound)
        np.testing.assert_array_equal(got[name].std, prediction.std)
    last = shard(replace(drawn, problem=explicit), "rows", slice(3, 6))
    part_of = predict(last.problem, last.semantics, numerics)
    whole = predict(drawn.problem, drawn.semantics, numerics)
    np.testing.assert_allclose(part_of["out"].bound, whole["out"].bound[:, 3:], rtol=1e-12)
    np.testing.assert_allclose(part_of["lse"].std, whole["lse"].std[..., 3:], rtol=1e-12)


def test_a_sample_counts_rows_not_positions() -> None:
    drawn = simple(6, 9, causal=True, q_positions=np.array([[8, 0, 3, 3, 99, -1]]))
    whole = answer_of(drawn)
    some = answer_of(drawn, Sample(np.array([4, 1]), np.array([8])))
    np.testing.assert_allclose(some.out, whole.out[:, [4, 1]], rtol=1e-13)
    assert np.isneginf(whole.lse[0, 0, 5])
    assert (whole.out[:, 5] == 0).all()


def test_positions_say_nothing_to_dropout() -> None:
    """The pattern stays with the array; an origin moves it."""
    options: dict[str, Any] = {"dropout_prob": 0.5, "dropout_seed": 3}
    drawn = simple(6, 9, **options)
    moved = replace(drawn, problem=replace(drawn.problem, q_positions=np.arange(6)[None] + 7))
    assert_equal(answer_of(moved), answer_of(drawn))
    elsewhere = replace(drawn, problem=replace(drawn.problem, origin=(0, 0, 0, 4)))
    assert not np.array_equal(answer_of(elsewhere).out, answer_of(drawn).out)


def test_a_linear_offset_refuses_an_origin() -> None:
    drawn = simple(dropout_prob=0.5, dropout_seed=3, origin=(0, 0, 0, 4))
    with pytest.raises(ValueError, match="origin: got"):
        attention(drawn.problem, Semantics(dropout="linear_offset"))
    silent = make_problem(drawn.problem.query, drawn.problem.key, drawn.problem.value, origin=(0, 0, 0, 4))
    attention(silent, Semantics(dropout="linear_offset"))
