"""A correct kernel in a few lines, and kernels with one habit each, for tests of what judges them."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.conformance.subject import Subject
from attest.reference.numerics import Numerics
from attest.reference.semantics import STANDARD


def toy_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    shift: int | None = None,
) -> Any:
    """Materialised attention in float32, zero for empty rows.

    shift: how far causal order is from that in which row i sees the keys up to i; None for bottom-right.
    """
    if key.shape[:1] + key.shape[3:] != query.shape[:1] + query.shape[3:]:
        raise ValueError(f"key: got shape {key.shape}, expected batch and head dim of query {query.shape}")
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * scale
    rows, columns = logits.shape[2:]
    seen = jnp.ones((rows, columns), bool)
    if causal:
        last = jnp.arange(rows)[:, None] + (columns - rows if shift is None else shift)
        seen = jnp.arange(columns)[None, :] <= last
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest").astype(query.dtype)


def toy(call: Callable[..., Any] = toy_attention, **declared: Any) -> Subject:
    """A subject of the toy or of a broken version of it."""
    declarations: dict[str, Any] = {
        "name": "toy",
        "features": frozenset({"causal", "scale", "gqa"}),
        "numerics": lambda dtype, tiling: Numerics(output_dtype=dtype, materialised=True),
    }
    return Subject(call=call, **(declarations | declared))


def without_kernels(query: Any, key: Any, value: Any, **_options: Any) -> Any:
    """An out and an lse that no kernel computes, for any device."""
    return query * 2, jnp.zeros(query.shape[:3], jnp.float32)


def refusing(query: Any, key: Any, value: Any, **_options: Any) -> Any:
    raise NotImplementedError("query: got a toy, expected a tensor")


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def _hangs(*_arrays: Any, **_options: Any) -> Any:
    time.sleep(600)


def _dies_if_causal(*arrays: Any, causal: bool = False) -> Any:
    if causal:
        os._exit(3)
    return toy_attention(*arrays)


def _patches_numpy(*arrays: Any, **options: Any) -> Any:
    """Leaves NumPy and JAX broken for whatever runs in this process afterwards."""
    out = toy_attention(*arrays, **options)
    np.exp = np.einsum = lambda *_arguments, **_options: np.zeros(())
    jnp.exp = jnp.einsum = lambda *_arguments, **_options: jnp.zeros(())
    return out


def _wrong_at_two_queries_else_hangs(query: Any, *others: Any, **options: Any) -> Any:
    if query.shape[1] != 2:
        time.sleep(600)
    return toy_attention(query, *others, **options) + 1


def modifies_its_input(query: Any, *others: Any, **options: Any) -> Any:
    """Writes into the query's buffer, as a kernel with a wrong pointer does."""
    out = toy_attention(query, *others, **options)
    if not isinstance(query, jax.core.Tracer):
        out.block_until_ready()
        ctypes.memset(query.unsafe_buffer_pointer(), 0xFF, 4)
    return out


class LeaksTracers:
    """Keeps the result of its first traced call, and returns it ever after."""

    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, query: Any, *others: Any, **options: Any) -> Any:
        if isinstance(query, jax.core.Tracer) and self.first is None:
            self.first = toy_attention(query, *others, **options)
        return toy_attention(query, *others, **options) if self.first is None else self.first


def _talks(*arrays: Any, **options: Any) -> Any:
    print("a kernel's own words")
    return toy_attention(*arrays, **options)


def _subject(name: str, call: Callable[..., Any]) -> Subject:
    return Subject(f"toys.{name}", call, features=frozenset({"causal"}))


def _changed(name: str, change: Callable[[Any], Any]) -> Subject:
    """A kernel whose result is changed."""
    return _subject(name, lambda *arrays, **options: change(toy_attention(*arrays, **options)))


def _raising(name: str, error: Callable[[], BaseException]) -> Subject:
    def call(*_arrays: Any, **_options: Any) -> Any:
        raise error()

    return _subject(name, call)


right = _subject("right", toy_attention)
top_left = _subject("top_left", lambda *arrays, **options: toy_attention(*arrays, **options, shift=0))
raises = _raising("raises", lambda: RuntimeError("out of luck\nsecond line"))
wants_memory = _raising(
    "wants_memory",
    lambda: RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 26.20GiB"),
)
exits = _raising("exits", lambda: SystemExit("no"))
hangs = _subject("hangs", _hangs)
dies = _subject("dies", lambda *_arrays, **_options: os._exit(3))
dies_if_causal = _subject("dies_if_causal", _dies_if_causal)
patches_numpy = _subject("patches_numpy", _patches_numpy)
interrupts = _raising("interrupts", lambda: KeyboardInterrupt("not the user"))
gives_up = _raising("gives_up", GeneratorExit)
raves = _raising("raves", lambda: RuntimeError("on and on\n" * 100_000))
shouts = _raising("shouts", lambda: RuntimeError("\x1b[31m\x9b2J\x07\r\u202e\u2028\x7f loud"))
speaks_badly = _raising("speaks_badly", SpeechlessError)
refuses_bias = _raising("refuses_bias", lambda: NotImplementedError("bias"))
leaves = _subject("leaves", lambda *_arrays, **_options: os._exit(0))
promises_little = replace(right, semantics=replace(STANDARD, empty_rows="unspecified"))
wrong_at_two_queries_else_hangs = _subject(
    "wrong_at_two_queries_else_hangs", _wrong_at_two_queries_else_hangs
)
one_query_short = _changed("one_query_short", lambda out: out[:, 1:])
another_dtype = _changed("another_dtype", lambda out: out.astype(jnp.float16))
nothing = _changed("nothing", lambda out: None)
modifies = _subject("modifies", modifies_its_input)
hoarder = _subject("hoarder", LeaksTracers())
talks = _subject("talks", _talks)
not_a_subject = 3
