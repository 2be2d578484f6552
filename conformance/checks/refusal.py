"""Whether what is unsupported or malformed is refused by name, never silently ignored (S20).

One small well-formed call is spoiled in one way a check. A kernel passes if it raises and its message
names the argument; an undeclared feature that is refused so is UNSUPPORTED, as the kernel declared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.build import build
from conformance.checks import Check, Finding
from conformance.execute import Call, call_of, describe, invoke, to_jax
from conformance.features import DTYPES, FEATURES
from conformance.record import Verdict
from conformance.subject import Subject
from conformance.trial import Trial

Arguments = dict[str, Any]
_REFUSALS = (ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Malformed:
    """One way to spoil a call.

    spoil: the arguments to replace, made from the well-formed ones. names: words one of which the refusal
    must hold. feature: what the subject must support for this to make sense.
    """

    spoil: Callable[[Arguments], Arguments]
    names: tuple[str, ...]
    feature: str | None = None


def _set(**arguments: Any) -> Callable[[Arguments], Arguments]:
    return lambda _given: arguments


def _lengths(cum_q: list[int], dtype: str = "int32") -> Callable[[Arguments], Arguments]:
    return _set(cum_seqlens_q=np.array(cum_q, dtype), cum_seqlens_k=np.array([0, 3, 6], np.int32))


def _heads(a: Arguments) -> Arguments:
    return {name: np.concatenate([a[name], a[name][:, :, :1]], axis=2) for name in ("key", "value")}


def _integers(a: Arguments) -> Arguments:
    return {name: np.ones(a[name].shape, np.int32) for name in ("query", "key", "value")}


def _plane(a: Arguments, dtype: Any, extra: int = 0) -> np.ndarray[Any, Any]:
    return np.ones((1, 1, a["query"].shape[1] + extra, a["key"].shape[1] + extra), dtype)


def _ids(a: Arguments, extra: int) -> Arguments:
    q_shape, kv_shape = a["query"].shape[:2], a["key"].shape[:2]
    return {
        "q_segment_ids": np.zeros((q_shape[0], q_shape[1] + extra), np.int32),
        "kv_segment_ids": np.zeros(kv_shape, np.int32),
    }


# Where arrays contradict each other, any of them may be the one that is named.
_QKV = ("query", "key", "value")

MALFORMED: Mapping[str, Malformed] = {
    "query_rank": Malformed(lambda a: {"query": a["query"][0, 0]}, ("query",)),
    "key_batch": Malformed(lambda a: {"key": a["key"][:1]}, _QKV),
    "key_head_dim": Malformed(lambda a: {"key": np.repeat(a["key"], 2, axis=3)}, _QKV),
    "value_length": Malformed(lambda a: {"value": a["value"][:, 1:]}, _QKV),
    "heads_not_divisible": Malformed(_heads, _QKV),
    "key_dtype": Malformed(lambda a: {"key": a["key"].astype(np.int8)}, ("key", "dtype")),
    "integer_inputs": Malformed(_integers, ("query", "dtype")),
    "scale_nan": Malformed(_set(softmax_scale=float("nan")), ("scale",), "scale"),
    "mask_shape": Malformed(lambda a: {"attention_mask": _plane(a, bool, 1)}, ("mask",), "mask"),
    "mask_float": Malformed(lambda a: {"attention_mask": _plane(a, np.float32)}, ("mask",), "mask"),
    "bias_shape": Malformed(lambda a: {"bias": _plane(a, np.float32, 1)}, ("bias",), "bias"),
    "bias_bool": Malformed(lambda a: {"bias": _plane(a, bool)}, ("bias",), "bias"),
    "window_negative": Malformed(_set(sliding_window=(-1, 1)), ("window",), "window"),
    "window_triple": Malformed(_set(sliding_window=(1, 1, 1)), ("window",), "window"),
    "soft_cap_zero": Malformed(_set(logits_soft_cap=0.0), ("cap",), "soft_cap"),
    "soft_cap_nan": Malformed(_set(logits_soft_cap=float("nan")), ("cap",), "soft_cap"),
    "dropout_one": Malformed(_set(dropout_prob=1.0, dropout_seed=1), ("dropout",), "dropout"),
    "dropout_negative": Malformed(_set(dropout_prob=-0.1, dropout_seed=1), ("dropout",), "dropout"),
    "dropout_seedless": Malformed(_set(dropout_prob=0.5), ("seed", "rng"), "dropout"),
    "dropout_seed_range": Malformed(_set(dropout_prob=0.5, dropout_seed=2**64), ("seed",), "dropout"),
    "segments_one_sided": Malformed(
        lambda a: {"q_segment_ids": _ids(a, 0)["q_segment_ids"]}, ("segment",), "segments"
    ),
    "segments_shape": Malformed(lambda a: _ids(a, 1), ("segment",), "segments"),
    "lengths_one_sided": Malformed(
        _set(cum_seqlens_q=np.array([0, 3, 6], np.int32)), ("cum_seqlens", "lengths"), "padded"
    ),
    "lengths_decreasing": Malformed(_lengths([0, 5, 2]), ("cum_seqlens_q", "lengths"), "padded"),
    "lengths_not_from_zero": Malformed(_lengths([1, 3, 6]), ("cum_seqlens_q", "lengths"), "padded"),
    "lengths_too_long": Malformed(_lengths([0, 3, 60]), ("cum_seqlens_q", "lengths"), "padded"),
    "lengths_count": Malformed(_lengths([0, 1, 2, 3, 4]), ("cum_seqlens", "lengths"), "padded"),
    "lengths_float": Malformed(_lengths([0, 3, 6], "float32"), ("cum_seqlens_q", "lengths"), "padded"),
    "sinks_shape": Malformed(_set(softmax_aux=np.ones((7, 2), np.float32)), ("softmax_aux", "sink"), "sinks"),
    "sinks_int": Malformed(_set(softmax_aux=np.ones(2, np.int32)), ("softmax_aux", "sink"), "sinks"),
}

# The smallest change to a case that switches a feature on, for calls that should be refused.
_ON: Mapping[str, Mapping[str, Any]] = {
    "scale": {"scale": 0.5},
    "bias": {"bias": "111"},
    "soft_cap": {"soft_cap": 2.0},
    "mask": {"mask": "11"},
    "integer_mask": {"mask": "11", "integer_mask": True},
    "causal": {"causal": True},
    "window": {"window": (1, 1)},
    "segments": {"segments": 2},
    "padded": {"lengths": ((2, 3), (4, 5))},
    "packed": {"batch": 1, "lengths": ((2, 3), (2, 1))},
    "sinks": {"sinks": 1},
    "dropout": {"dropout": 0.5},
    "unnormalized": {"normalized": False},
    "gqa": {"q_heads": 4, "kv_heads": 2},
}
# What a refusal may name where no argument is a feature's own.
_OTHER_WORDS = {"gqa": ("head", "key"), "value_dim": ("value",), "integer_mask": ("mask",)}


def _judge(trial: Trial, call: Call, spoilt: Arguments, names: tuple[str, ...], good: Verdict) -> Finding:
    """Call with the spoilt arguments, which should raise and name one of `names`."""
    given = {**call.arrays, **dict(call.options), **spoilt}
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    options = {name: value for name, value in given.items() if name not in arrays}
    try:
        invoke(trial.subject, trial.case.tiling, to_jax(arrays), options)
    except _REFUSALS as error:
        if any(name in str(error) for name in names):
            return Finding(good, message=describe(error))
        expected = f"expected a refusal that names {' or '.join(names)}"
        return Finding(Verdict.FAIL, message=f"{expected}, got {describe(error)}")
    except Exception as error:
        expected = f"expected ValueError, TypeError or NotImplementedError naming {' or '.join(names)}"
        return Finding(Verdict.FAIL, message=f"{expected}, got {describe(error)}")
    return Finding(
        Verdict.FAIL, message=f"silently accepted; expected a refusal that names {' or '.join(names)}"
    )


def _malformed_check(name: str, malformed: Malformed) -> Check:
    def run(trial: Trial) -> Finding:
        call = call_of(trial.built)
        spoilt = malformed.spoil(dict(call.arrays))
        return _judge(trial, call, spoilt, malformed.names, Verdict.PASS)

    def applies(subject: Subject) -> str | None:
        missing = malformed.feature is not None and malformed.feature not in subject.features
        return f"does not declare {malformed.feature}" if missing else None

    return Check(f"refusal.{name}", "refused", lambda _trial: ("S20",), run, applies)


def _undeclared_check(feature: str) -> Check:
    def run(trial: Trial) -> Finding:
        change = _ON.get(feature, {"value_dim": trial.case.head_dim + 1})
        call = call_of(build(replace(trial.case, **change), trial.subject.semantics))
        names = _OTHER_WORDS.get(feature, FEATURES[feature].arguments)
        return _judge(trial, call, {}, names, Verdict.UNSUPPORTED)

    def applies(subject: Subject) -> str | None:
        return "declares it" if feature in subject.features else None

    return Check(f"refusal.undeclared_{feature}", "refused", lambda _trial: ("S20",), run, applies)


def _undeclared_dtype(trial: Trial) -> Finding:
    dtype = next(dtype for dtype in DTYPES if dtype not in trial.subject.dtypes)
    call = call_of(build(replace(trial.case, dtype=dtype), trial.subject.semantics))
    return _judge(trial, call, {}, ("dtype", dtype, "query"), Verdict.UNSUPPORTED)


CHECKS = (
    *(_malformed_check(name, malformed) for name, malformed in MALFORMED.items()),
    *(_undeclared_check(feature) for feature in FEATURES),
    Check(
        "refusal.undeclared_dtype",
        "refused",
        lambda _trial: ("S20",),
        _undeclared_dtype,
        lambda subject: "declares every dtype" if set(DTYPES) <= set(subject.dtypes) else None,
    ),
)
