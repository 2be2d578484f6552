"""Calls and candidates for a judge: right ones, and wrong ones with one defect each, drawn by a seed."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest import flash_attention
from attest.kernels import xla
from attest.kernels.operations.judging import CandidateCall
from attest.kernels.operations.programs import compiled

type Run = Callable[..., Any]

FEATURES = ("causal", "window", "bias", "sinks", "dropout", "cap", "segments", "mask")


def draw_call(stream: np.random.Generator, *features: str) -> dict[str, Any]:
    """A small call with these features, floats as shapes."""
    batch, k_heads, group = int(stream.integers(1, 3)), int(stream.integers(1, 3)), int(stream.integers(1, 3))
    length, dim = int(stream.integers(20, 70)), int(stream.choice([8, 16, 24]))
    heads = k_heads * group
    dtype = "bfloat16" if stream.integers(2) else "float32"

    def floats(*shape: int, kind: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    call: dict[str, Any] = {
        "query": floats(batch, length, heads, dim),
        "key": floats(batch, length, k_heads, dim),
        "value": floats(batch, length, k_heads, dim),
    }
    ids = np.sort(stream.integers(0, 3, (batch, length)), axis=1).astype(np.int32)
    ids[:, -3:] = -1
    more: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"sliding_window": (int(stream.integers(2, 9)), int(stream.integers(0, 3)))},
        "bias": {"bias": floats(batch, heads, length, length, kind="float32")},
        "sinks": {"softmax_aux": floats(heads, 2, kind="float32")},
        "dropout": {"dropout_prob": 0.3, "dropout_seed": int(stream.integers(1 << 40))},
        "cap": {"logits_soft_cap": 1.5},
        "segments": {"q_segment_ids": ids, "kv_segment_ids": ids},
        "mask": {"attention_mask": stream.random((batch, 1, length, length)) < 0.8},
    }
    for feature in features:
        call |= more[feature]
    return call


def right(arguments: Mapping[str, Any], stream: np.random.Generator) -> Run:
    """The XLA kernels with chunks of some size."""
    sizes = xla.ChunkSizes(int(stream.integers(16, 80)), int(stream.integers(16, 80)))
    config = xla.Config(sizes, sizes)
    return lambda **given: flash_attention(**given, config=config)


def candidate_call(run: Run, arguments: Mapping[str, Any], seed: int, backward: bool = True) -> CandidateCall:
    """A candidate that a function computes, with or without gradients."""
    return CandidateCall(compiled(run, arguments, backward), arguments, "xla", backward, seed)


@dataclass(frozen=True)
class Defect:
    """A defect: what it does to a right candidate, the features that show it, and those that may hide it."""

    features: tuple[str, ...]
    plant: Callable[[Run, np.random.Generator, Mapping[str, Any]], Run]
    float32: bool = False
    hidden_by: frozenset[str] = frozenset()


def _changed(**changes: Callable[[Any], Any]) -> Callable[..., Run]:
    """Arguments are others than those of the call."""

    def plant(run: Run, stream: np.random.Generator, arguments: Mapping[str, Any]) -> Run:
        def wrong(**given: Any) -> Any:
            changed = {name: change(given.get(name)) for name, change in changes.items()}
            return run(**{**given, **changed})

        return wrong

    return plant


def _result(change: Callable[[Any], Any]) -> Callable[..., Run]:
    return lambda run, stream, arguments: lambda **given: change(run(**given))


def _stale_block(run: Run, stream: np.random.Generator, arguments: Mapping[str, Any]) -> Run:
    """The second block of keys takes the numbers of the first."""
    size = int(stream.integers(4, 9))

    def wrong(**given: Any) -> Any:
        key, value = (
            given[name].at[:, size : 2 * size].set(given[name][:, :size]) for name in ("key", "value")
        )
        return run(**{**given, "key": key, "value": value})

    return wrong


def _unwritten(name: str) -> Callable[..., Run]:
    """One row of a gradient stays 0."""

    def plant(run: Run, stream: np.random.Generator, arguments: Mapping[str, Any]) -> Run:
        row = int(stream.integers(0, arguments[name].shape[1] - 4))

        def wrong(**given: Any) -> Any:
            x = given[name]
            return run(**{**given, name: x.at[:, row].set(jax.lax.stop_gradient(x[:, row]))})

        return wrong

    return plant


def _other_inputs(run: Run, stream: np.random.Generator, arguments: Mapping[str, Any]) -> Run:
    """Right for the inputs of one seed alone."""
    known = float(np.random.default_rng(0).standard_normal())

    def wrong(**given: Any) -> Any:
        seen = given["query"].reshape(-1)[0].astype("float32") == known
        return jnp.where(seen, run(**given), run(**{**given, "key": given["key"] * 1.05}))

    return wrong


def _first_time_only(run: Run, stream: np.random.Generator, arguments: Mapping[str, Any]) -> Run:
    """Right the first time that the program runs."""
    count = itertools.count()

    def wrong(**given: Any) -> Any:
        shape = jax.ShapeDtypeStruct((), "float32")
        times = jax.pure_callback(
            lambda _: np.float32(next(count) > 0), shape, jax.lax.stop_gradient(given["query"].reshape(-1)[0])
        )
        return run(**given) * (1 + 0.05 * jax.lax.stop_gradient(times)).astype(given["query"].dtype)

    return wrong


def _wrong_group(run: Run, stream: np.random.Generator, arguments: Mapping[str, Any]) -> Run:
    """Query heads read the key heads in another order; with one key head, a channel is another."""

    def wrong(**given: Any) -> Any:
        axis = 2 if given["value"].shape[2] > 1 else 3
        return run(**{**given, "value": jnp.roll(given["value"], 1, axis)})

    return wrong


def _rounded(x: Any) -> Any:
    return x.astype("bfloat16").astype(x.dtype)


def _shifted(x: Any) -> Any:
    return jnp.roll(x, 1, axis=-1)


def _wider(window: tuple[int, int]) -> tuple[int, int]:
    return window[0], window[1] + 1


def _first_twice(sinks: Any) -> Any:
    return jnp.concatenate([sinks, sinks[:, :1]], 1)


def _half_differentiated(x: Any) -> Any:
    return x * 0.5 + jax.lax.stop_gradient(x * 0.5)


# What is not written is 0. So are the results of padding, the gradients of a row that sees one key alone, and
# what dropout leaves of a row or a key that few others see.
_PADDING = frozenset({"segments"})
_FEW = _PADDING | {"window"}
_ONE_KEY = _FEW | {"causal"}

DEFECTS: dict[str, Defect] = {
    "causal order is off by one": Defect(("causal",), _changed(q_offset=lambda x: -1)),
    "causal order sees one key more": Defect(("causal",), _changed(q_offset=lambda x: 1)),
    "the window is off by one": Defect(("window",), _changed(sliding_window=lambda x: (x[0] - 1, x[1]))),
    "the window reaches too far right": Defect(("window",), _changed(sliding_window=_wider)),
    "a block of keys is stale": Defect((), _stale_block),
    "the last rows are NaN": Defect((), _result(lambda out: out.at[:, -2:].set(jnp.nan))),
    "the last row is not written": Defect((), _result(lambda out: out.at[:, -1].set(0)), hidden_by=_FEW),
    "a row of dkey is not written": Defect((), _unwritten("key"), hidden_by=_PADDING),
    "a row of dvalue is not written": Defect((), _unwritten("value"), hidden_by=_FEW),
    "a row of dquery is not written": Defect((), _unwritten("query"), hidden_by=_ONE_KEY),
    "right for one input only": Defect((), _other_inputs),
    "right the first time only": Defect((), _first_time_only),
    "the value heads are mixed up": Defect((), _wrong_group),
    "the scale is 2 % off": Defect((), _changed(query=lambda x: x * np.asarray(1.02, x.dtype))),
    "dropout goes by other columns": Defect(("dropout",), _changed(origin=lambda x: (0, 0, 0, 4))),
    "dropout has another seed": Defect(("dropout",), _changed(dropout_seed=lambda x: x + 1)),
    "a sink counts twice": Defect(("sinks",), _changed(softmax_aux=_first_twice)),
    "the bias is off by a column": Defect(("bias",), _changed(bias=_shifted)),
    "the cap is forgotten": Defect(("cap",), _changed(logits_soft_cap=lambda x: None)),
    "padding sees padding": Defect(("segments",), _changed(q_segment_ids=abs, kv_segment_ids=abs)),
    "the mask is off by a column": Defect(("mask",), _changed(attention_mask=_shifted)),
    "float32 is rounded to bfloat16": Defect((), _changed(value=_rounded), float32=True),
    "a key is zero": Defect((), _changed(key=lambda x: x.at[:, 0].set(0))),
    "the gradient lacks a factor": Defect((), _changed(value=_half_differentiated)),
}  # fmt: skip


def planted(name: str, seed: int) -> CandidateCall:
    """A candidate with a defect, on a call that shows it."""
    defect = DEFECTS[name]
    stream = np.random.default_rng([seed, *name.encode()])
    features = {*defect.features, *stream.choice(FEATURES, int(stream.integers(0, 3)), replace=False)}
    features -= defect.hidden_by
    if name.startswith(("the window", "causal")):
        features -= {"window", "causal", "segments"}
        features |= set(defect.features)
    arguments = draw_call(stream, *sorted(features))
    while defect.float32 and arguments["query"].dtype != np.float32:
        arguments = draw_call(stream, *sorted(features))
    run = defect.plant(right(arguments, stream), stream, arguments)
    return candidate_call(run, arguments, seed)


def correct(seed: int) -> CandidateCall:
    """A right candidate on a drawn call."""
    stream = np.random.default_rng([seed, 1])
    features = stream.choice(FEATURES, int(stream.integers(0, 4)), replace=False)
    arguments = draw_call(stream, *sorted(features))
    return candidate_call(right(arguments, stream), arguments, seed)
