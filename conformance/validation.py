"""`validate_call`: the refusals of clause S20, for kernels that have none of their own."""

import math
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.subject import Subject
from attest.reference.defined import CAP_RANGE, SCALE_RANGE, cap_in_range, scale_in_range
from attest.reference.leading import fold
from attest.reference.semantics import OPTIONS

_QKV = ("query", "key", "value")
_ARRAYS = (
    *_QKV,
    "attention_mask",
    "bias",
    "q_segment_ids",
    "kv_segment_ids",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "softmax_aux",
    "q_positions",
    "kv_positions",
    "kv_start",
    "kv_end",
    "alibi_slopes",
)
# Arrays whose values are checked where they are concrete.
_CONCRETE = ("cum_seqlens_q", "cum_seqlens_k", "q_offset", "origin", "alibi_slopes")
_NUMBERS = ("softmax_scale", "logits_soft_cap", "dropout_prob")
_RANGES = {
    "softmax_scale": (SCALE_RANGE, scale_in_range, "0, or a number from {} in size"),
    "logits_soft_cap": (CAP_RANGE, cap_in_range, "a number from {}"),
}
_FLAGS = ("causal", "normalize_output")
_LARGEST = float(np.finfo(np.float32).max)


def validate_call(
    query: Any, key: Any, value: Any, *, supports: Subject | None = None, **options: Any
) -> None:
    """Refuse a malformed or unsupported attention call; call it first in a kernel's adapter.

    query [..., Sq, Hq, D], key [..., Sk, Hkv, D], value [..., Sk, Hkv, Dv], with any number of batch
    dimensions (S27). options: those of docs/reference/semantics.md by name; None, and an option's default,
    mean that it is not given. supports: what the kernel declares. Without it every well-formed call passes.

    Works on NumPy arrays, JAX arrays and tracers alike. Shapes, dtypes and options are always checked; of
    values only those of concrete cumulative lengths, offsets, origins and slopes are.

    Raises ValueError for a malformed argument, NotImplementedError for a call that `supports` does not
    declare, and TypeError for an option that does not exist. Each names the argument.
    """
    _refuse_unknown(options)
    given = {"query": query, "key": key, "value": value}
    given |= {name: option for name, option in options.items() if option is not None}
    for name in _ARRAYS:
        if name in given and not isinstance(given[name], jax.Array | np.ndarray):
            _refuse(name, f"a {type(given[name]).__name__}", "an array")
    for name in _NUMBERS:
        if name in given:
            _check_number(name, given[name])
            _check_range(name, given[name])
    for name in _FLAGS:
        if name in given and not isinstance(given[name], bool | np.bool_):
            _refuse(name, repr(given[name]), "True or False")
    if "sliding_window" in given:
        _check_window(given["sliding_window"])
    if "dropout_seed" in given:
        _check_seed(given["dropout_seed"])
    fold(**_stand_ins(given, supports))
    if supports is not None:
        for argument, sentence in _unsupported(given, supports):
            raise NotImplementedError(f"{argument}: {supports.name} {sentence}")


def _refuse(name: str, got: str, expected: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}, expected {expected}")


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise TypeError(f"{unknown[0]}: is no option of attention; the options are {', '.join(OPTIONS)}")


def _check_number(name: str, number: Any) -> None:
    """Check a number, which float32 must hold; a traced one is taken on trust."""
    if isinstance(number, Tracer):
        return
    try:
        wide = float(number)
    except (TypeError, ValueError, OverflowError):
        wide = math.nan
    if not abs(wide) <= _LARGEST:
        got = repr(number)
        _refuse(name, got if len(got) < 40 else f"{got[:20]}...", "one finite number that float32 holds")


def _check_range(name: str, number: Any) -> None:
    """Refuse a scale or a cap whose products overflow or vanish in float32 (S1, S3)."""
    if isinstance(number, Tracer) or name not in _RANGES:
        return
    (low, high), fits, form = _RANGES[name]
    # A cap of 0 or below is refused with the form of all arguments.
    if not fits(float(number)) and (name == "softmax_scale" or float(number) > 0):
        _refuse(name, repr(number), form.format(f"{low:.2g} to {high:.2g}"))


def _check_window(window: Any) -> None:
    """Check the form of a window; `make_problem` checks its sides."""
    if not isinstance(window, Integral | tuple | list):
        _refuse("sliding_window", repr(window), "an int or a pair (left, right)")


def _check_seed(seed: Any) -> None:
    """Check the dtype of a seed that is an array; `make_problem` checks numbers."""
    if isinstance(seed, jax.Array | np.ndarray) and not (
        jnp.issubdtype(seed.dtype, np.integer) or jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    ):
        _refuse("dropout_seed", f"dtype {seed.dtype}", "an integer dtype")


def _is_integer(array: Any) -> bool:
    return array.dtype.kind in "iu"


def _stand_ins(given: Mapping[str, Any], supports: Subject | None) -> dict[str, Any]:
    """Return the arguments for `fold`: arrays of their shapes and dtypes that take no memory.

    Concrete lengths, offsets, origins and slopes stand for themselves. What is traced gets a value that is
    right.
    """
    found: dict[str, Any] = dict(given)
    for name in _ARRAYS:
        if name in given:
            found[name] = _zeros(given[name])
    for name in _CONCRETE:
        if isinstance(given.get(name), jax.Array | np.ndarray):
            found[name] = _concrete(given[name])
    if isinstance(given.get("origin"), tuple | list):
        found["origin"] = tuple(_start(start) for start in given["origin"])
    for name in _NUMBERS:
        if isinstance(given.get(name), Tracer):
            found[name] = 0.5
    if isinstance(given.get("dropout_seed"), jax.Array | np.ndarray):
        found["dropout_seed"] = 0
    if "softmax_aux" in found:
        found["softmax_aux"] = _sinks(found["softmax_aux"], given["query"], supports)
    return found


def _zeros(array: Any) -> NDArray[Any]:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _concrete(array: Any) -> NDArray[Any]:
    """Return the values of an array, 0 where it is traced."""
    return _zeros(array) if isinstance(array, Tracer) else np.asarray(array)


def _start(number: Any) -> Any:
    """Return one number of an origin, which may be an array without axes."""
    return _concrete(number)[()] if isinstance(number, jax.Array | np.ndarray) else number


def _sinks(aux: NDArray[Any], query: Any, supports: Subject | None) -> NDArray[Any]:
    """Return the sinks as [n] or [Hq, n], once it is clear which of the two they are.

    [n] with n = Hq > 1 is either n sinks that all heads share or one for each head. A kernel that takes only
    one of the two is in no doubt.
    """
    form = "any" if supports is None else supports.limits.sinks
    if query.ndim < 3 or aux.ndim not in (1, 2):
        return aux
    heads = query.shape[-2]
    if aux.ndim == 1 and aux.shape[0] == heads > 1:
        if form == "any":
            expected = f"[1, {heads}] for sinks that all heads share, or [{heads}, 1] for one a head"
            _refuse("softmax_aux", f"shape {aux.shape}", expected)
        return aux[:1]
    return aux[0, :1] if aux.ndim == 2 and aux.shape[0] == 1 else aux


def _unsupported(given: Mapping[str, Any], subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield (argument, what the subject does not take) for a well-formed call's undeclared features."""
    on = _features(given)
    for feature in ALL_FEATURES:
        if feature in on - subject.features - subject.unjudged:
            yield _argument(feature, given), f"does not support {feature}"
    for together in subject.limits.excludes:
        if together <= on:
            yield (
                " and ".join(_argument(feature, given) for feature in sorted(together)),
                "does not combine them",
            )
    query, value = given["query"], given["value"]
    dtype = np.dtype(query.dtype).name
    if dtype not in subject.dtypes:
        yield "query", f"does not support dtype {dtype}, only {', '.join(subject.dtypes)}"
    if query.ndim != 4 and not subject.limits.batch_dims:
        yield "query", f"takes one batch dimension, got shape {query.shape}"
    low, high = subject.head_dims
    for name, size in (("query", query.shape[-1]), ("value", value.shape[-1])):
        if not low <= size <= high:
            yield name, f"takes head dims {low} to {high}, got {size}"
    limits = subject.limits
    for name, what, axis, multiple in (
        ("query", "lengths", -3, limits.length_multiple),
        ("key", "lengths", -3, limits.length_multiple),
        ("query", "head dims", -1, limits.head_dim_multiple),
        ("value", "head dims", -1, limits.head_dim_multiple),
    ):
        size = given[name].shape[axis]
        if size % multiple:
            yield name, f"takes {what} that are multiples of {multiple}, got {size}"
    yield from _narrower(given, subject, on)


def _narrower(given: Mapping[str, Any], subject: Subject, on: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the forms of supported features that the subject does not take."""
    if "window" in on and subject.limits.window_sides == "left":
        window = given["sliding_window"]
        left, right = (window, window) if isinstance(window, Integral) else window
        if left is None or not (right == 0 or (right is None and "causal" in on)):
            expected = "(left, 0), or (left, None) with causal=True"
            yield "sliding_window", f"takes {expected}, got {window!r}"
    if "dropout" in on and subject.limits.seed_bits < 64:
        seed = given["dropout_seed"]
        if isinstance(seed, Integral) and int(seed) >= 2**subject.limits.seed_bits:
            yield "dropout_seed", f"takes seeds of {subject.limits.seed_bits} bits, got {seed}"
    if "origin" in on and not isinstance(given["origin"], Tracer):
        key = given["origin"][3]
        if not isinstance(key, Tracer) and int(key) % subject.limits.origin_multiple:
            yield "origin", f"takes keys that are multiples of {subject.limits.origin_multiple}, got {key}"
    if "sinks" in on and subject.limits.sinks != "any":
        aux, heads = given["softmax_aux"], given["query"].shape[-2]
        shapes = {
            "shared": aux.ndim == 1 or aux.shape[0] == 1,
            "per_head": aux.shape == (heads,) or (aux.ndim == 2 and aux.shape[0] == heads),
        }
        if not shapes[subject.limits.sinks]:
            yield "softmax_aux", f"takes {subject.limits.sinks} sinks, got shape {aux.shape}"


def _argument(feature: str, given: Mapping[str, Any]) -> str:
    """Return the arguments that a feature goes by, as far as they are given."""
    if feature in ("gqa", "value_dim"):
        return {"gqa": "key heads", "value_dim": "value head dim"}[feature]
    return " and ".join(name for name in ALL_FEATURES[feature].arguments if name in given)


def _is_elsewhere(origin: Any) -> bool:
    """Return whether an origin may be another than the default, all zeros."""
    return isinstance(origin, Tracer) or any(isinstance(start, Tracer) or start != 0 for start in origin)


def _shares_pairs(given: Mapping[str, Any]) -> bool:
    """Return whether rows or keys share a mask, or keys a bias."""
    lengths = (given["query"].shape[-3], given["key"].shape[-3])
    mask, bias = given.get("attention_mask"), given.get("bias")
    of_mask = mask is not None and mask.shape[-2:] != lengths
    return of_mask or (bias is not None and bias.shape[-1] != lengths[1])


def _features(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the features of `attest.conformance.cases.features` that a well-formed call switches on."""
    query, key, value = (given[name] for name in _QKV)
    rate = given.get("dropout_prob", 0.0)
    packed = math.prod(query.shape[:-3]) == 1
    switches = {
        "scale": "softmax_scale" in given,
        "bias": "bias" in given,
        "soft_cap": "logits_soft_cap" in given,
        "mask": "attention_mask" in given,
        "integer_mask": "attention_mask" in given and _is_integer(given["attention_mask"]),
        "causal": bool(given.get("causal", False)),
        "window": "sliding_window" in given,
        "segments": "q_segment_ids" in given,
        "padded": "cum_seqlens_q" in given and not packed,
        "packed": "cum_seqlens_q" in given and packed,
        "sinks": "softmax_aux" in given,
        "dropout": isinstance(rate, Tracer) or rate > 0,
        "unnormalized": not given.get("normalize_output", True),
        "gqa": query.shape[-2] != key.shape[-2],
        "value_dim": value.shape[-1] != query.shape[-1],
        "q_offset": "q_offset" in given,
        "positions": "q_positions" in given or "kv_positions" in given,
        "origin": "origin" in given and _is_elsewhere(given["origin"]),
        "broadcast": _shares_pairs(given),
        "chunks": "chunk_size" in given,
        "ranges": "kv_start" in given or "kv_end" in given,
        "alibi": "alibi_slopes" in given,
        "shared_dropout": "dropout_shared" in given,
    }
    return frozenset(name for name, on in switches.items() if on)
