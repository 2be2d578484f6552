"""Calls of a subject on a case's arrays, and the contract of its outputs' shapes."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from attest.conformance.cases.build import Built
from attest.conformance.process.phases import phase
from attest.conformance.process.signals import Interrupted
from attest.conformance.subject import Subject
from attest.conformance.text import exception_text
from attest.conformance.user_frames import raised
from attest.reference.problem import Problem

Array = NDArray[Any]

_OPTION_ARRAYS = (
    "attention_mask",
    "bias",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "softmax_aux",
    "q_segment_ids",
    "kv_segment_ids",
    "q_positions",
    "kv_positions",
    "kv_start",
    "kv_end",
    "alibi_slopes",
)
_OPTION_SCALARS = (
    "softmax_scale",
    "dropout_prob",
    "dropout_seed",
    "dropout_shared",
    "causal",
    "sliding_window",
    "logits_soft_cap",
    "normalize_output",
    "q_offset",
    "origin",
    "chunk_size",
)

_NO_ROOM = "RESOURCE_EXHAUSTED"  # in the exception of XLA when the memory of a device is full


class SubjectError(Exception):
    """The subject raised an exception or broke its contract; the message is one sentence for the verdict.

    clauses: the broken clauses, where they do not depend on the check.
    """

    def __init__(self, message: str, clauses: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.clauses = clauses


@dataclass(frozen=True)
class Call:
    """The arguments of one call: arrays by name, query, key and value among them, and static options."""

    arrays: Mapping[str, Array]
    options: tuple[tuple[str, Any], ...]

    def keywords(self) -> dict[str, Any]:
        """Return the arrays and options together."""
        return {**self.arrays, **dict(self.options)}


def call_of(built: Built) -> Call:
    """Return the arguments that a case switches on; an argument at its default is not passed."""
    problem = built.problem
    arrays = {"query": problem.query, "key": problem.key, "value": problem.value}
    for name in _OPTION_ARRAYS:
        if getattr(problem, name) is not None:
            arrays[name] = getattr(problem, name)
    if built.integer_mask is not None:
        arrays["attention_mask"] = built.integer_mask
    fields = Problem.__dataclass_fields__
    scalars = {name: getattr(problem, name) for name in _OPTION_SCALARS}
    if isinstance(problem.q_offset, np.ndarray):
        arrays["q_offset"] = scalars.pop("q_offset")
    options = tuple((name, value) for name, value in scalars.items() if value != fields[name].default)
    return Call(arrays, options)


def differentiated(subject: Subject, call: Call) -> tuple[str, ...]:
    """Return the arrays of a call that the subject declares gradients for."""
    return tuple(name for name in call.arrays if name in subject.semantics.gradients)


def execute(subject: Subject, built: Built, tiling: int, gradients: bool = True) -> dict[str, Array]:
    """Return out, lse if returned, and with `gradients` dquery, dkey, ... of one compiled call.

    Raises SubjectError.
    """
    call = call_of(built)
    wanted = differentiated(subject, call) if gradients else ()
    compiled = _compiled(_Hashable(subject), tiling, call.options, wanted)
    d_out, d_lse = built.cotangents.out, built.cotangents.lse
    assert d_lse is not None
    with blaming(subject):
        outputs = compiled(to_jax(call.arrays), jnp.asarray(d_out), jnp.asarray(d_lse))
        return to_numpy(outputs)


@dataclass(frozen=True)
class Plain:
    """An eager call, not differentiated: out and lse if returned, and the inputs that it modified."""

    outputs: Mapping[str, Array]
    modified: tuple[str, ...]


def call_plainly(subject: Subject, built: Built, tiling: int) -> Plain:
    """Call the subject eagerly, without differentiation. Raises SubjectError."""
    call = call_of(built)
    inputs = {name: jnp.array(array, copy=True) for name, array in call.arrays.items()}
    with blaming(subject):
        result = invoke(subject, tiling, inputs, dict(call.options))
        returned = {
            name: array for name, array in zip(("out", "lse"), result, strict=True) if array is not None
        }
        for name, array in returned.items():
            if isinstance(array, Tracer):
                raise SubjectError(f"returned {name} as a tracer from an eager call")
        outputs = to_numpy(returned)
    modified = tuple(
        name
        for name, array in call.arrays.items()
        if np.asarray(inputs[name]).tobytes() != np.ascontiguousarray(array).tobytes()
    )
    return Plain(outputs, modified)


def invoke(subject: Subject, tiling: int, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call the subject once, check its results and return (out, lse); lse is None if not returned."""
    keywords = {**arrays, **options, **subject.tilings[tiling].options}
    query, key, value = (keywords.pop(name) for name in ("query", "key", "value"))
    with phase("running"):
        result = subject.call(query, key, value, **keywords)
    return _checked(subject, query, value, result)


def forward_and_gradients(
    subject: Subject,
    tiling: int,
    options: tuple[tuple[str, Any], ...],
    wanted: tuple[str, ...],
    transform: Callable[[Any], Any] = lambda function: function,
) -> Callable[[Mapping[str, Any], Any, Any], dict[str, Any]]:
    """Return the function from arrays and cotangents to outputs by name; `transform` applies to forward."""

    def run(arrays: Mapping[str, Any], d_out: Any, d_lse: Any) -> dict[str, Any]:
        fixed = {name: array for name, array in arrays.items() if name not in wanted}

        def forward(varied: Mapping[str, Any]) -> Any:
            return invoke(subject, tiling, {**fixed, **varied}, dict(options))

        varied = {name: arrays[name] for name in wanted}
        (out, lse), pull = jax.vjp(transform(forward), varied)
        outputs = {"out": out} if lse is None else {"out": out, "lse": lse}
        if wanted:
            with phase("gradients"):
                (gradients,) = pull((d_out, None if lse is None else d_lse.astype(lse.dtype)))
            for name, gradient in gradients.items():
                dtype = arrays[name].dtype if subject.gradient_dtype == "input" else jnp.float32
                _check_array(f"d{name}", gradient, arrays[name].shape, dtype)
            outputs |= {f"d{name}": gradient for name, gradient in gradients.items()}
        return outputs

    return run


def to_jax(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Convert NumPy arrays to JAX arrays."""
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def to_numpy(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Copy JAX outputs to the host; waits for them, so that a failing launch fails here."""
    return {name: np.asarray(array) for name, array in jax.device_get(dict(outputs)).items()}


@contextmanager
def blaming(subject: Subject) -> Generator[None]:
    """Turn every exception and every violation of the subject within the block into a SubjectError.

    The block must wait for its results. Otherwise a later block is blamed for them.
    """
    subject.violations()  # drop those of earlier calls, such as refused ones
    try:
        with phase("running"):
            yield
    except SubjectError:
        raise
    except jax.errors.UnexpectedTracerError as error:
        raise SubjectError("returned a tracer of another call, so it keeps state between calls") from error
    except Interrupted:
        raise
    except BaseException as error:  # a subject may raise SystemExit, which must not end the run
        no_room = _NO_ROOM in exception_text(error)
        advice = " (other workers may hold this memory: use -n 1)" if no_room else ""
        raise SubjectError(raised(error, advice)) from error
    violations = "; ".join(map(str, subject.violations()))
    if violations:
        raise SubjectError(violations, clauses=("S19",))


class _Hashable:
    """A subject as a cache key, by identity: subjects hold dicts and have no hash."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and other.subject is self.subject

    def __hash__(self) -> int:
        return id(self.subject)


@lru_cache(maxsize=256)
def _compiled(
    subject: _Hashable, tiling: int, options: tuple[tuple[str, Any], ...], wanted: tuple[str, ...]
) -> Callable[..., Any]:
    return jax.jit(forward_and_gradients(subject.subject, tiling, options, wanted))


def _checked(subject: Subject, query: Any, value: Any, result: Any) -> tuple[Any, Any]:
    out, lse = result, None
    if subject.returns_lse:
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise SubjectError(f"returned {type(result).__name__}, expected (out, lse) as it declares")
        out, lse = result
    *batch, q_len, q_heads, _ = query.shape
    _check_array("out", out, (*batch, q_len, q_heads, value.shape[-1]), query.dtype)
    if lse is not None:
        _check_array("lse", lse, (*batch, q_heads, q_len), None)
    return out, lse


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if not isinstance(array, (jax.Array, np.ndarray)):
        raise SubjectError(f"returned {name} as {type(array).__name__}, expected an array")
    if array.shape != shape:
        raise SubjectError(f"returned {name} of shape {array.shape}, expected {shape}")
    if dtype is not None and array.dtype != dtype:
        raise SubjectError(f"returned {name} of dtype {array.dtype}, expected {dtype}")
