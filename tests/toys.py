"""Tiny kernels with one habit each, for tests of what judges them."""

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
from attest.reference.semantics import STANDARD

_CAUSAL = frozenset({"causal"})


def _attention(query: Any, key: Any, value: Any, *, causal: bool = False, shift: int | None = None) -> Any:
    wide = (array.astype(jnp.float32) for array in (query, key, value))
    query32, key32, value32 = wide
    q_len, kv_len = query.shape[1], key.shape[1]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query32, key32, precision="highest") * query.shape[3] ** -0.5
    if causal:
        last = jnp.arange(q_len)[:, None] + (kv_len - q_len if shift is None else shift)
        logits = jnp.where((jnp.arange(kv_len)[None] <= last)[None, None], logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True, initial=-1e30))
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value32, precision="highest").astype(query.dtype)


def _top_left(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    return _attention(query, key, value, causal=causal, shift=0)


def _raises(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise RuntimeError("out of luck\nsecond line")


def _wants_memory(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 26.20GiB")


def _exits(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise SystemExit("no")


def _hangs(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    time.sleep(600)


def _dies(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    os._exit(3)


def _dies_if_causal(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    if causal:
        os._exit(3)
    return _attention(query, key, value)


def _patches_numpy(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    """Leaves NumPy and JAX broken for whatever runs in this process afterwards."""
    out = _attention(query, key, value, causal=causal)
    np.exp = np.einsum = lambda *_arguments, **_options: np.zeros(())
    jnp.exp = jnp.einsum = lambda *_arguments, **_options: jnp.zeros(())
    return out


def _interrupts(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise KeyboardInterrupt("not the user")


def _gives_up(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise GeneratorExit


def _raves(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise RuntimeError("on and on\n" * 100_000)


def _shouts(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise RuntimeError("\x1b[31m\x9b2J\x07\r\u202e\u2028\x7f loud")


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def _speaks_badly(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    raise SpeechlessError


def _refuses_bias(query: Any, key: Any, value: Any, *, causal: bool = False, bias: Any = None) -> Any:
    raise NotImplementedError("bias")


def _leaves(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    os._exit(0)


def _wrong_at_two_queries_else_hangs(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    if query.shape[1] != 2:
        time.sleep(600)
    return _attention(query, key, value, causal=causal) + 1


def _one_query_short(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    return _attention(query, key, value, causal=causal)[:, 1:]


def _another_dtype(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    return _attention(query, key, value, causal=causal).astype(jnp.float16)


def _nothing(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    return None


def _modifies(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    out = _attention(query, key, value, causal=causal)
    if not isinstance(query, jax.core.Tracer):
        out.block_until_ready()
        ctypes.memset(query.unsafe_buffer_pointer(), 0xFF, 4)
    return out


class _Hoarder:
    """Keeps the first output that it ever made, and returns it for ever."""

    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
        if isinstance(query, jax.core.Tracer) and self.first is None:
            self.first = _attention(query, key, value, causal=causal)
        return _attention(query, key, value, causal=causal) if self.first is None else self.first


def _talks(query: Any, key: Any, value: Any, *, causal: bool = False) -> Any:
    print("a kernel's own words")
    return _attention(query, key, value, causal=causal)


def _subject(name: str, call: Callable[..., Any]) -> Subject:
    return Subject(f"toys.{name}", call, features=_CAUSAL)


right = _subject(
    "right", lambda query, key, value, causal=False: _attention(query, key, value, causal=causal)
)
top_left = _subject("top_left", _top_left)
raises = _subject("raises", _raises)
wants_memory = _subject("wants_memory", _wants_memory)
exits = _subject("exits", _exits)
hangs = _subject("hangs", _hangs)
dies = _subject("dies", _dies)
dies_if_causal = _subject("dies_if_causal", _dies_if_causal)
patches_numpy = _subject("patches_numpy", _patches_numpy)
interrupts = _subject("interrupts", _interrupts)
gives_up = _subject("gives_up", _gives_up)
raves = _subject("raves", _raves)
shouts = _subject("shouts", _shouts)
speaks_badly = _subject("speaks_badly", _speaks_badly)
refuses_bias = _subject("refuses_bias", _refuses_bias)
leaves = _subject("leaves", _leaves)
promises_little = replace(right, semantics=replace(STANDARD, empty_rows="unspecified"))
wrong_at_two_queries_else_hangs = _subject(
    "wrong_at_two_queries_else_hangs", _wrong_at_two_queries_else_hangs
)
one_query_short = _subject("one_query_short", _one_query_short)
another_dtype = _subject("another_dtype", _another_dtype)
nothing = _subject("nothing", _nothing)
modifies = _subject("modifies", _modifies)
hoarder = _subject("hoarder", _Hoarder())
talks = _subject("talks", _talks)
not_a_subject = 3
