"""Refusals: unsupported and malformed calls are rejected by name, never silently ignored (S20).

Each check makes one small well-formed call malformed in one way. A kernel passes if it raises an exception
whose text names the argument. A refusal of an undeclared feature or form is UNSUPPORTED, as the kernel
declared. The checks do not apply to a subject that declares that it does not validate its arguments.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, APART, DTYPES, NEEDS
from attest.conformance.checks import Check, Finding
from attest.conformance.judging.execute import call_of, to_jax
from attest.conformance.judging.malformed import MALFORMED, Arguments, Malformed
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import REFUSED
from attest.conformance.process.phases import phase
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject
from attest.conformance.text import exception_text, message_of

# Any other exception is a defect of the kernel, not a refusal.
_REFUSALS = (ValueError, TypeError, NotImplementedError)

# The smallest change to a case that switches a feature on, for calls that should be refused.
# Not those of masks that rows share: a kernel that adds masks by NumPy's rules reads them right undeclared.
_ON: Mapping[str, Mapping[str, Any]] = {
    "scale": {"scale": 0.5},
    "bias": {"bias": "111"},
    "soft_cap": {"soft_cap": 2.0},
    "mask": {"mask": "11"},
    "integer_mask": {"mask": "11", "integer_mask": True},
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "segments": {"segments": 2},
    "padded": {"lengths": ((2, 3), (4, 5))},
    "packed": {"batch": 1, "lengths": ((2, 3), (2, 1))},
    "sinks": {"sinks": 1},
    "dropout": {"dropout": 0.5},
    "unnormalized": {"normalized": False},
    "gqa": {"q_heads": 4, "kv_heads": 2},
    "value_dim": {"value_dim": 3},
    "q_offset": {"causal": True, "q_offset": 1},
    "positions": {"causal": True, "positions": "shard"},
    "origin": {"dropout": 0.5, "dropout_seed": 1, "origin": (1, 2, 3, 4)},
    "chunks": {"chunk_size": 2},
    "ranges": {"ranges": "scattered"},
    "alibi": {"alibi": "heads"},
    "shared_dropout": {"dropout": 0.5, "dropout_seed": 1, "dropout_shared": "bh"},
}
# The words that a refusal may contain, for features without an argument of their own.
_OTHER_WORDS = {"gqa": ("head", "key"), "value_dim": ("value",), "integer_mask": ("mask",)}
# This word contains the name of an argument, `key`, but does not mean it.
_KEYWORD = "keyword"


def _words(feature: str) -> tuple[str, ...]:
    return _OTHER_WORDS.get(feature, ALL_FEATURES[feature].arguments)


def _refused_words(feature: str, subject: Subject) -> tuple[str, ...]:
    """Return what the refusal of a feature may name: its arguments, or those of a feature that it needs."""
    needed = NEEDS.get(feature, ())
    return _words(feature) + (_words(needed[0]) if needed and subject.features.isdisjoint(needed) else ())


def said(error: BaseException) -> str:
    """Return the text of an exception in lower case: type, message, notes, and the same of its causes.

    The names of Python's own types are left out: ValueError would name `value`.
    """
    texts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        own = type(cause).__module__ != "builtins"
        texts += [type(cause).__name__ if own else "", message_of(cause), *getattr(cause, "__notes__", ())]
        cause = cause.__cause__
    return "\n".join(texts).lower().replace(_KEYWORD, "")


def _judge(trial: Trial, given: Arguments, names: tuple[str, ...], good: Verdict) -> Finding:
    """Make the call, which should raise an exception that names one of `names`."""
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    keywords = given | to_jax(arrays) | dict(trial.subject.tilings[trial.case.tiling].options)
    query, key, value = (keywords.pop(name) for name in ("query", "key", "value"))
    wanted = " or ".join(names)
    try:
        with phase("running"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overflow, before or instead of a refusal
            jax.block_until_ready(trial.subject.call(query, key, value, **keywords))
    except _REFUSALS as error:
        if any(name.lower() in said(error) for name in names):
            return Finding(good, message=exception_text(error))
        return Finding(
            Verdict.FAIL, message=f"expected a refusal that names {wanted}, got {exception_text(error)}"
        )
    except (Exception, SystemExit) as error:
        expected = f"expected ValueError, TypeError or NotImplementedError naming {wanted}"
        return Finding(Verdict.FAIL, message=f"{expected}, got {exception_text(error)}")
    return Finding(Verdict.FAIL, message=f"silently accepted; expected a refusal that names {wanted}")


def _arguments(trial: Trial, case: Case) -> Arguments:
    return call_of(build(case, trial.subject.semantics)).keywords()


def _validating(
    run: Callable[[Trial], Finding], applies: Callable[[Subject], str | None], name: str
) -> Check:
    def applies_to_validating(subject: Subject) -> str | None:
        if not subject.limits.validates:
            return "declares that it does not validate its arguments"
        return applies(subject)

    return Check(f"refusal.{name}", REFUSED, lambda _trial: ("S20",), run, applies_to_validating)


def _malformed_check(name: str, malformed: Malformed) -> Check:
    def run(trial: Trial) -> Finding:
        call = call_of(trial.built)
        spoilt = malformed.spoil(dict(call.arrays))
        return _judge(trial, call.keywords() | spoilt, malformed.names, Verdict.PASS)

    def applies(subject: Subject) -> str | None:
        if malformed.feature is not None and malformed.feature not in subject.features:
            return f"does not declare {malformed.feature}"
        if malformed.values and subject.limits.traces:
            return "traces its arrays, whose values it cannot see"
        return None if malformed.applies(subject) else "declares that it supports this call"

    return _validating(run, applies, name)


def _undeclared_check(feature: str) -> Check:
    def run(trial: Trial) -> Finding:
        case = replace(trial.case, **_ON[feature])
        words = _refused_words(feature, trial.subject)
        return _judge(trial, _arguments(trial, case), words, Verdict.UNSUPPORTED)

    def applies(subject: Subject) -> str | None:
        if feature in subject.unjudged:
            return "supports the feature without declaring anything about it"
        return "declares the feature" if feature in subject.features else None

    return _validating(run, applies, f"undeclared_{feature}")


def _undeclared_dtype(trial: Trial) -> Finding:
    dtype = next(dtype for dtype in DTYPES if dtype not in trial.subject.dtypes)
    case = replace(trial.case, dtype=dtype)
    return _judge(trial, _arguments(trial, case), ("dtype", dtype, "query"), Verdict.UNSUPPORTED)


def _excluded(trial: Trial) -> Finding:
    """Judge one call for each set of features that the subject excludes; return the first failure."""
    finding = Finding(Verdict.UNSUPPORTED)
    for together, case in _excluded_cases(trial.subject, trial.case):
        names = tuple(name for feature in sorted(together) for name in _words(feature))
        finding = _judge(trial, _arguments(trial, case), names, Verdict.UNSUPPORTED)
        if finding.verdict is Verdict.FAIL:
            return replace(finding, message=f"{' and '.join(sorted(together))}: {finding.message}")
    return finding


def _excluded_cases(subject: Subject, base: Case) -> Iterator[tuple[frozenset[str], Case]]:
    for together in subject.limits.excludes:
        if not any(apart <= together for apart in APART):
            change: dict[str, Any] = {}
            for feature in sorted(together):
                change |= _ON[feature]
            yield together, replace(base, **change)


@dataclass(frozen=True)
class Narrow:
    """A form of a declared feature that a subject may declare as unsupported.

    declares: whether a subject declares that. call: the arguments of the call that it must refuse.
    names: the refusal must contain one of these words.
    """

    declares: Callable[[Subject], bool]
    call: Callable[[Trial], Arguments]
    names: tuple[str, ...]


def _with(**change: Any) -> Callable[[Trial], Arguments]:
    return lambda trial: _arguments(trial, replace(trial.case, **change))


def _longer(trial: Trial) -> Arguments:
    case = trial.case
    return _arguments(trial, replace(case, q_len=case.q_len + 1, kv_len=case.kv_len + 1))


def _wider(trial: Trial) -> Arguments:
    case = trial.case
    return _arguments(trial, replace(case, head_dim=case.head_dim + 1))


def _odd_origin(trial: Trial) -> Arguments:
    key = trial.subject.limits.origin_multiple + 1
    return _arguments(trial, replace(trial.case, dropout=0.5, dropout_seed=1, origin=(0, 0, 0, key)))


def _long_seed(trial: Trial) -> Arguments:
    return call_of(trial.built).keywords() | {
        "dropout_prob": 0.5,
        "dropout_seed": 2**trial.subject.limits.seed_bits,
    }


NARROW: Mapping[str, Narrow] = {
    "window_right": Narrow(
        lambda subject: "window" in subject.features and subject.limits.window_sides == "left",
        _with(window=(1, 1)),
        ("window",),
    ),
    "length": Narrow(
        lambda subject: subject.limits.length_multiple > 1,
        _longer,
        ("length", "seq", "query", "key", "multiple"),
    ),
    "head_dim": Narrow(
        lambda subject: subject.limits.head_dim_multiple > 1, _wider, ("head", "dim", "query", "multiple")
    ),
    "seed": Narrow(
        lambda subject: "dropout" in subject.features and subject.limits.seed_bits < 64, _long_seed, ("seed",)
    ),
    "origin_key": Narrow(
        lambda subject: "origin" in subject.features and subject.limits.origin_multiple > 1,
        _odd_origin,
        ("origin",),
    ),
    "sinks_per_head": Narrow(
        lambda subject: "sinks" in subject.features and subject.limits.sinks == "shared",
        _with(sinks=3, sinks_per_head=True),
        ("softmax_aux", "sink"),
    ),
    "sinks_shared": Narrow(
        lambda subject: "sinks" in subject.features and subject.limits.sinks == "per_head",
        _with(sinks=3),
        ("softmax_aux", "sink"),
    ),
}


def _narrow_check(name: str, narrow: Narrow) -> Check:
    def run(trial: Trial) -> Finding:
        return _judge(trial, narrow.call(trial), narrow.names, Verdict.UNSUPPORTED)

    def applies(subject: Subject) -> str | None:
        return None if narrow.declares(subject) else "declares this form, or not the feature at all"

    return _validating(run, applies, f"undeclared_{name}")


CHECKS = (
    *(_malformed_check(name, malformed) for name, malformed in MALFORMED.items()),
    *(_undeclared_check(feature) for feature in _ON),
    *(_narrow_check(name, narrow) for name, narrow in NARROW.items()),
    _validating(
        _undeclared_dtype,
        lambda subject: "declares every dtype" if set(DTYPES) <= set(subject.dtypes) else None,
        "undeclared_dtype",
    ),
    _validating(
        _excluded,
        lambda subject: None if subject.limits.excludes else "declares no features that exclude each other",
        "undeclared_combination",
    ),
)
