"""The few lines of a script compute what the oracle computes, whatever the options."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cases.axes import BIASES, MASKS
from attest.conformance.cases.case import Case
from attest.conformance.judging.script.expected import expected_lines
from attest.conformance.judging.script.literals import ScriptError
from attest.conformance.judging.trial import Trial
from attest.reference.semantics import Semantics
from tests import toys
from tests.examples import examples

# Of the size of what is summed: some hundred roundings of float64.
TOLERANCE = 256 * 2.0**-53
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
SIDES = st.none() | st.integers(0, 6)
BATCHES = st.sampled_from([1, 2])


@st.composite
def cases(draw: st.DrawFn, sequences: str) -> Case:
    """Small cases with any of the options that a script computes.

    A row of padding has no sinks, which the lines do not know; `reproducer` refuses what they get wrong.
    """
    batch = {"padded": 2, "packed": 1}.get(sequences) or draw(BATCHES)
    (q_heads, kv_heads), q_len, kv_len = draw(HEADS), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    masked, added = draw(st.booleans()), draw(st.booleans())
    lengths = None
    if sequences != "whole":
        halves = (st.integers(0, q_len // 2), st.integers(0, kv_len // 2))
        lengths = tuple(draw(st.tuples(*halves)) for _ in range(2))
    segments = draw(st.sampled_from([None, 2]))
    sinks = 0 if lengths or segments else draw(st.integers(0, 2))
    return Case(
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        value_dim=draw(st.sampled_from([None, 3])),
        family=draw(st.sampled_from(["normal", "uniform", "outlier", "integers"])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(SIDES, SIDES)),
        mask=draw(st.sampled_from(MASKS)) if masked else None,
        integer_mask=masked and draw(st.booleans()),
        bias=draw(st.sampled_from(BIASES)) if added else None,
        bias_hides=added and draw(st.booleans()),
        segments=segments,
        lengths=lengths,
        sinks=sinks,
        sinks_per_head=sinks > 0 and draw(st.booleans()),
        soft_cap=draw(st.sampled_from([None, 0.7, 20.0])),
        scale=draw(st.sampled_from([None, 0.3, -1.5])),
        chunk_size=draw(st.sampled_from([None, 3])),
        ranges=draw(st.sampled_from([None, "band", "starts", "ends"])),
        seed=draw(st.integers(0, 2**32)),
    )


def computed(trial: Trial) -> dict[str, np.ndarray]:
    """What the lines of a script leave in variables, for all outputs."""
    built, wanted = trial.built, trial.answer.items()
    names = ("query", "key", "value", "attention_mask", "bias", "softmax_aux", "kv_start", "kv_end")
    names += ("q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k")
    space = {name: getattr(built.problem, name) for name in names}
    space |= {"np": np, "d_out": built.cotangents.out, "d_lse": built.cotangents.lse}
    lines = expected_lines(built.problem, trial.subject.semantics, wanted, trial.has_empty_rows)
    with np.errstate(all="ignore"):
        exec("\n".join(lines), space)
    return {name: space[name] for name in wanted}


def assert_near(trial: Trial) -> None:
    found = computed(trial)
    for name, want in trial.answer.items().items():
        assert found[name].shape == want.shape, name
        finite = np.isfinite(want)
        assert np.array_equal(found[name][~finite], want[~finite]), name
        size = max(np.abs(want[finite]).max(initial=0.0), *(np.abs(x).max() for x in trial_arrays(trial)))
        assert np.abs(found[name][finite] - want[finite]).max(initial=0.0) <= TOLERANCE * size**2, name


def trial_arrays(trial: Trial) -> list[np.ndarray]:
    built = trial.built
    arrays = (built.problem.query, built.problem.key, built.problem.value, built.cotangents.out)
    return [np.ones(1), *(array.astype(np.float64) for array in arrays)]


CORNERS = st.sampled_from(["bottom_right", "top_left"])
DIALECTS = st.builds(Semantics, causal=CORNERS, window=CORNERS, lse_base=st.sampled_from(["natural", "two"]))


@pytest.mark.parametrize("sequences", ["whole", "padded", "packed"])
@examples(60)
@given(st.data())
def test_the_lines_are_the_oracle(sequences, data):
    semantics = data.draw(DIALECTS)
    trial = Trial(toys.toy(returns_lse=True, semantics=semantics), data.draw(cases(sequences)))
    if sequences != "whole" and semantics.causal != semantics.window:
        with pytest.raises(ScriptError, match="two diagonals"):
            computed(trial)
    else:
        assert_near(trial)
