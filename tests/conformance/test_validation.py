"""`validate_call`: it refuses exactly what a Subject does not take, and works on tracers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.conformance import validate_call
from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES, FEATURES
from attest.conformance.judging.execute import call_of, to_jax
from attest.conformance.subject import Limits, Subject

# The choices of a case that ask for a feature; windows and sinks in every form that a subject may not take.
SWITCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "scale": ({"scale": 0.5}, {"scale": -2.0}),
    "bias": ({"bias": "11q"}, {"bias": "bhq", "bias_hides": True}),
    "soft_cap": ({"soft_cap": 3.0},),
    "mask": ({"mask": "b1"}, {"mask": "11", "integer_mask": True}),
    "causal": ({"causal": True},),
    "window": tuple({"window": window} for window in ((2, 0), (2, None), (None, 1), (1, 3), (None, None))),
    "segments": ({"segments": 2},),
    "padded": ({"batch": 2, "lengths": ((1, 2), (3, 0))},),
    "packed": ({"batch": 1, "lengths": ((1, 2), (0, 1), (2, 0))},),
    "sinks": ({"sinks": 1}, {"sinks": 3}, {"sinks": 1, "sinks_per_head": True}),
    "dropout": ({"dropout": 0.5},),
    "unnormalized": ({"normalized": False},),
    "gqa": ({"q_heads": 4},),
    "value_dim": ({"value_dim": 3},),
    "q_offset": ({"q_offset": 1, "positions": None}, {"q_offset": -3, "positions": None}),
    "positions": ({"positions": "shard", "q_offset": None}, {"positions": "shuffled", "q_offset": None}),
    "origin": ({"origin": (1, 0, 0, 4)}, {"origin": (0, 2, 3, 6)}),
    "broadcast": ({"mask": "b11k"}, {"mask": "11", "bias": "bhq1"}, {"mask": "bhq1"}),
    "chunks": ({"chunk_size": 2}, {"chunk_size": 7}),
    "ranges": ({"ranges": "band"}, {"ranges": "starts"}, {"ranges": "ends"}),
    "alibi": ({"alibi": "heads"}, {"alibi": "entries"}),
    "shared_dropout": tuple({"dropout": 0.5, "dropout_shared": shared} for shared in ("b", "h", "bh")),
}
NARROW: tuple[dict[str, Any], ...] = (
    {"window_sides": "left"},
    {"length_multiple": 2},
    {"head_dim_multiple": 2},
    {"sinks": "shared"},
    {"sinks": "per_head"},
    {"excludes": (frozenset({"mask", "bias"}), frozenset({"causal", "window", "scale"}))},
    {"origin_multiple": 4},
)
OF_SIZE_OR_DTYPE: tuple[dict[str, Any], ...] = ({}, {"dtypes": ("bfloat16",)}, {"head_dims": (4, 8)})


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Small well-formed cases with any features."""
    case = Case(
        dtype=draw(st.sampled_from(DTYPES)),
        batch=draw(st.integers(1, 2)),
        q_len=draw(st.integers(3, 6)),
        kv_len=draw(st.integers(3, 6)),
        q_heads=2,
        kv_heads=2,
        head_dim=draw(st.sampled_from((2, 4))),
    )
    for feature in draw(st.sets(st.sampled_from(sorted(SWITCHES)), max_size=5)):
        if not (feature in ("padded", "packed") and case.lengths is not None):
            case = replace(case, **draw(st.sampled_from(SWITCHES[feature])))
    return case


@st.composite
def subjects(draw: st.DrawFn) -> Subject:
    """Declarations that lack some features, and forms of others."""
    declared: dict[str, Any] = {"dtypes": DTYPES} | draw(st.sampled_from(OF_SIZE_OR_DTYPE))
    limits: dict[str, Any] = {}
    for narrow in draw(st.lists(st.sampled_from(NARROW), max_size=2)):
        limits |= narrow
    declared["limits"] = Limits(**limits)
    missing = draw(st.sets(st.sampled_from(sorted(ALL_FEATURES)), max_size=2))
    return Subject("drawn", call=print, features=frozenset(ALL_FEATURES) - missing, **declared)


@given(drawn_cases(), subjects(), st.booleans())
@settings(deadline=None)
def test_it_refuses_what_the_subject_does_not_take(case: Case, subject: Subject, jitted: bool) -> None:
    call = call_of(build(case))
    options = dict(call.options)

    def validate(arrays: dict[str, Any]) -> None:
        validate_call(**arrays, supports=subject, **options)

    try:
        jax.eval_shape(validate, to_jax(call.arrays)) if jitted else validate(dict(call.arrays))
    except NotImplementedError:
        assert subject.why_not(case) is not None
    else:
        assert subject.why_not(case) is None


SUMS = np.array([0, 1, 4], np.int32)
ARRAY = np.ones((2, 4, 2, 4), np.float32)
WELL_FORMED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "everything at its default": {
        "causal": False,
        "dropout_prob": 0.0,
        "bias": None,
        "normalize_output": True,
    },
    "a window of one number": {"sliding_window": 2},
    "NumPy scalars": {"softmax_scale": np.float32(0.5), "causal": np.True_, "sliding_window": np.int64(1)},
    "one sink a head": {"softmax_aux": np.ones((2, 1), np.float32)},
    "as many shared sinks as heads": {"softmax_aux": np.ones((1, 2), np.float32)},
    "other shared sinks": {"softmax_aux": np.ones(3, np.float32)},
    "the words of a seed": {"dropout_prob": 0.5, "dropout_seed": np.array([1, 2], np.uint32)},
    "a PRNG key": {"dropout_prob": 0.5, "dropout_seed": jax.random.key(3)},
    "the largest seed": {"dropout_prob": 0.5, "dropout_seed": 2**64 - 1},
    "an offset": {"q_offset": np.int64(-3)},
    "offsets": {"q_offset": jnp.array([1, -2], jnp.int32)},
    "packed offsets": {"cum_seqlens_q": SUMS, "cum_seqlens_k": SUMS, "q_offset": np.array([1, 2], np.int32)},
    "positions": {"q_positions": np.zeros((1, 4), np.int32), "kv_positions": np.zeros((2, 4), np.int32)},
    "an origin": {"origin": (1, np.int64(2), jnp.uint32(3), 2**32 - 4)},
    "the array of an origin": {"origin": jnp.array([1, 2, 3, 4], jnp.uint32)},
}


@pytest.mark.parametrize("options", WELL_FORMED)
def test_well_formed_calls_pass(options: str) -> None:
    validate_call(ARRAY, ARRAY, ARRAY, **WELL_FORMED[options])


REFUSED: dict[str, dict[str, Any]] = {
    "causal: got 'yes'": {"causal": "yes"},
    "bias: got a list": {"bias": [[1.0]]},
    "sliding_window: got 'ab'": {"sliding_window": "ab"},
    "softmax_scale: got 10000000000000000000...": {"softmax_scale": 10**400},
    r"softmax_scale: got 1e\+38, expected 0, or a number from 7.9e-31 to 1.3e\+30 in size": {
        "softmax_scale": 1e38
    },
    "softmax_scale: got -1e-40, expected 0": {"softmax_scale": -1e-40},
    r"logits_soft_cap: got 1e\+38, expected a number from 7.9e-31 to 1.3e\+30": {"logits_soft_cap": 1e38},
    "softmax_scale: got <object": {"softmax_scale": object()},
    "dropout_seed: got dtype float32": {"dropout_prob": 0.5, "dropout_seed": np.float32([1, 2])},
    r"softmax_aux: got shape \(2,\), expected \[1, 2\] for sinks .* \[2, 1\]": {
        "softmax_aux": np.ones(2, np.float32)
    },
    r"q_offset: got shape \(3,\)": {"q_offset": np.zeros(3, np.int32)},
    r"kv_start: got shape \(3,\)": {"kv_start": np.zeros(3, np.int32)},
    r"kv_end: got dtype float32": {"kv_end": np.zeros((1, 4), np.float32)},
    r"kv_end: got a int, expected an array": {"kv_end": 3},
    r"chunk_size: got 0": {"chunk_size": 0},
    "dropout_shared: got 'hb', expected 'b', 'h', 'bh' or None": {"dropout_shared": "hb"},
    r"alibi_slopes: got nan": {"alibi_slopes": np.array([np.nan, 1], np.float32)},
    r"q_offset: got \[0, 1073741824\]": {"q_offset": jnp.array([0, 2**30], jnp.int32)},
    "q_offset and q_positions: got both": {"q_offset": 1, "q_positions": np.zeros((1, 4), np.int32)},
    "q_positions: got a list": {"q_positions": [[1, 2, 3, 4]]},
    "kv_positions: got dtype float32": {"kv_positions": np.zeros((1, 4), np.float32)},
    "origin: got 3": {"origin": 3},
    "origin: got .* expected four integers": {"origin": np.zeros(4, np.float32)},
    "origin: got .* expected four integers of at least 0": {"origin": (0, 0, jnp.int32(-1), 0)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_call(ARRAY, ARRAY, ARRAY, **REFUSED[message])


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="sliding_windw: is no option of attention"):
        validate_call(ARRAY, ARRAY, ARRAY, sliding_windw=3)


def test_traced_lengths_and_numbers_are_taken_on_trust() -> None:
    """A tracer has no value to check; the same lengths are refused where they are concrete."""
    wrong = jnp.array([0, 3, 1], jnp.int32)

    def validate(cum: Any, scale: Any, rate: Any) -> None:
        options = {"cum_seqlens_q": cum, "cum_seqlens_k": cum, "softmax_scale": scale}
        validate_call(ARRAY, ARRAY, ARRAY, dropout_prob=rate, dropout_seed=1, **options)

    jax.eval_shape(validate, wrong, jnp.float32(2), jnp.float32(0.5))
    with pytest.raises(ValueError, match="cum_seqlens_q"):
        validate(wrong, 2.0, 0.5)


def test_traced_coordinates_are_taken_on_trust_but_for_their_form() -> None:
    def validate(offset: Any, origin: Any) -> None:
        validate_call(ARRAY, ARRAY, ARRAY, q_offset=offset, origin=origin)

    far = jnp.array([2**31 - 1, 0], jnp.int32)
    origin = jnp.array([0, 0, -1, 0], jnp.int32)
    jax.eval_shape(validate, far, origin)
    jax.eval_shape(validate, far, (0, origin[1], 2, origin[2]))
    for arguments in ((far, origin), (0, origin)):
        with pytest.raises(ValueError, match=r"q_offset: got|origin: got"):
            validate(*arguments)
    with pytest.raises(ValueError, match="q_offset"):
        jax.eval_shape(validate, far[:1], origin)
    with pytest.raises(ValueError, match="origin"):
        jax.eval_shape(validate, far, origin[:3])


BATCHES = np.ones((3, 2, 4, 2, 4), np.float32)


def test_any_number_of_batch_dimensions() -> None:
    mask, offsets = np.ones((1, 2, 1, 4, 4), bool), np.zeros((3, 2), np.int32)
    subject = Subject("batches", call=print, features=frozenset(ALL_FEATURES), limits=Limits(batch_dims=True))
    validate_call(BATCHES, BATCHES, BATCHES, supports=subject, attention_mask=mask, q_offset=offsets)
    validate_call(*[BATCHES[0, 0]] * 3, supports=subject, cum_seqlens_q=SUMS, cum_seqlens_k=SUMS)
    with pytest.raises(ValueError, match="attention_mask: got shape"):
        validate_call(BATCHES, BATCHES, BATCHES, supports=subject, attention_mask=mask[0])
    with pytest.raises(ValueError, match="key: got shape"):
        validate_call(BATCHES, BATCHES[0], BATCHES, supports=subject)
    with pytest.raises(NotImplementedError, match="query: batches takes one batch dimension, got shape"):
        validate_call(BATCHES, BATCHES, BATCHES, supports=replace(subject, limits=Limits()))


def test_features_that_are_not_judged_are_not_refused() -> None:
    subject = Subject("some", call=print, unjudged=frozenset({"q_offset"}))
    validate_call(ARRAY, ARRAY, ARRAY, supports=subject, q_offset=1)
    with pytest.raises(NotImplementedError, match="q_offset: some does not support q_offset"):
        validate_call(ARRAY, ARRAY, ARRAY, supports=replace(subject, unjudged=frozenset()), q_offset=1)


def test_lengths_that_a_trace_closes_over_are_concrete() -> None:
    wrong = jnp.array([0, 3, 1], jnp.int32)
    with pytest.raises(ValueError, match="cum_seqlens_q"):
        jax.eval_shape(lambda x: validate_call(x, x, x, cum_seqlens_q=wrong, cum_seqlens_k=wrong), ARRAY)


@pytest.mark.parametrize(
    ("declared", "options", "words"),
    [
        (
            {"features": frozenset()},
            {"sliding_window": (1, 1)},
            "sliding_window: narrow does not support window",
        ),
        (
            {"limits": Limits(excludes=(frozenset({"mask", "bias"}),))},
            {"attention_mask": np.ones((1, 1, 4, 4), bool), "bias": np.ones((1, 1, 4, 4), np.float32)},
            "bias and attention_mask: narrow does not combine them",
        ),
        (
            {"limits": Limits(window_sides="left")},
            {"sliding_window": 2},
            r"sliding_window: narrow takes \(left, 0\)",
        ),
        (
            {"features": frozenset(FEATURES)},
            {"kv_positions": np.zeros((1, 4), np.int32)},
            "kv_positions: narrow does not support positions",
        ),
        (
            {"limits": Limits(origin_multiple=4)},
            {"origin": (0, 0, 0, 6)},
            "origin: narrow takes .* multiples of 4, got 6",
        ),
        (
            {"limits": Limits(seed_bits=8)},
            {"dropout_prob": 0.5, "dropout_seed": 256},
            "dropout_seed: narrow takes seeds of 8",
        ),
        (
            {"limits": Limits(sinks="per_head")},
            {"softmax_aux": np.ones(3, np.float32)},
            "softmax_aux: narrow takes per_head",
        ),
        (
            {"limits": Limits(length_multiple=8)},
            {},
            "query: narrow takes lengths that are multiples of 8, got 4",
        ),
        ({"head_dims": (8, 8)}, {}, "query: narrow takes head dims 8 to 8, got 4"),
        (
            {"limits": Limits(head_dim_multiple=8)},
            {},
            "query: narrow takes head dims that are multiples of 8, got 4",
        ),
        ({"dtypes": ("bfloat16",)}, {}, "query: narrow does not support dtype float32, only bfloat16"),
    ],
)
def test_what_is_not_supported_is_named(
    declared: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    subject = Subject("narrow", call=print, **{"features": frozenset(ALL_FEATURES)} | declared)
    with pytest.raises(NotImplementedError, match=words):
        validate_call(ARRAY, ARRAY, ARRAY, supports=subject, **options)
    validate_call(ARRAY, ARRAY, ARRAY, **options)


@pytest.mark.parametrize("sinks", ["shared", "per_head"])
def test_a_shape_is_ambiguous_only_to_those_who_take_both(sinks: Any) -> None:
    subject = Subject("one_form", call=print, features=frozenset({"sinks"}), limits=Limits(sinks=sinks))
    validate_call(ARRAY, ARRAY, ARRAY, supports=subject, softmax_aux=np.ones(2, np.float32))
