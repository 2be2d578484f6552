"""The annotations of the public functions: complete, true of legal calls, and enforced in tests."""

import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import AbstractArray

from attest.kernels import flash_attention_with_lse
from attest.kernels.xla import attention
from attest.reference import oracle
from attest.reference.oracle import Cotangents, Sample
from attest.reference.problem import make_problem
from tests import annotated
from tests.examples import examples

# The public names of these are what is annotated.
PACKAGES = (
    "attest.kernels",
    "attest.kernels.operations",
    "attest.kernels.pallas.mosaic_gpu",
    "attest.kernels.pallas.tpu",
    "attest.kernels.triton",
    "attest.kernels.xla",
    "attest.kernels.operations.easydel",
    "attest.reference.oracle",
    "attest.reference.problem",
)
# Arguments of attention functions that may be anything, and hold no arrays.
UNTYPED = {
    "args", "bwd_params", "config", "dtype", "fwd_params", "in_specs", "kwargs", "logits_dtype", "mesh",
    "options", "others", "out_specs", "precision", "softmax_dtype",
}  # fmt: skip

TOY = """
from jaxtyping import Array, Float
from numpy import ndarray

def first(query: Float[Array | ndarray, "*batch Sq D"], key: Float[Array | ndarray, "*batch Sk D"]) -> RESULT:
    if query.shape[-2] == 0:
        raise ValueError("query: no rows")
    return query
"""
RIGHT, WRONG = 'Float[Array | ndarray, "*batch Sq D"]', 'Float[Array | ndarray, "*batch Sk D"]'


def public_functions() -> Iterator[tuple[str, Any]]:
    """The functions and methods that the packages offer."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or sorted(vars(module)):
            x = getattr(module, name)
            x = x.func if isinstance(x, partial) else x
            if name.startswith("_") or not getattr(x, "__module__", "").startswith("attest."):
                continue
            if inspect.isfunction(x):
                yield f"{package}.{name}", x
            elif inspect.isclass(x):
                for method, found in vars(x).items():
                    found = getattr(found, "__func__", found)
                    if inspect.isfunction(found) and not method.startswith("_"):
                        yield f"{package}.{name}.{method}", found


FUNCTIONS = dict(public_functions())


def mentioned(hint: Any) -> Iterator[Any]:
    """The types that an annotation is made of; those of the oracle as jaxtyping has them."""
    if isinstance(hint, typing.TypeAliasType):
        yield from mentioned(hint.__value__)
    elif typing.get_origin(hint) is typing.Annotated:
        yield annotated.as_jaxtyping(hint)
    elif isinstance(hint, list | tuple):
        for part in hint:
            yield from mentioned(part)
    else:
        yield hint
        yield from mentioned(typing.get_args(hint))


def is_bare_array(x: Any) -> bool:
    return x is jax.Array or x is np.ndarray or typing.get_origin(x) is np.ndarray


def is_annotated_array(x: Any) -> bool:
    return inspect.isclass(x) and issubclass(x, AbstractArray)


def test_arrays_of_public_functions_have_their_shapes_in_the_signature():
    for name, function in FUNCTIONS.items():
        hints = typing.get_type_hints(function, include_extras=True)
        parts = {argument: list(mentioned(hint)) for argument, hint in hints.items()}
        bare = [argument for argument, types in parts.items() if any(map(is_bare_array, types))]
        assert (name, bare) == (name, [])
        if "query" in hints:
            named = inspect.signature(function).parameters.keys() - {"self"}
            assert (name, {x for x in named if Any in parts.get(x, [Any])} - UNTYPED) == (name, set())


def test_functions_with_arrays_are_enforced():
    with_arrays = {
        name
        for name, function in FUNCTIONS.items()
        for hint in typing.get_type_hints(function, include_extras=True).values()
        if any(map(is_annotated_array, mentioned(hint)))
    }
    kinds = {"apply_segments", "attention", "flash_attention", "forward_native", "make_problem", "run"}
    assert {name.rpartition(".")[2] for name in with_arrays} >= kinds
    assert {name for name in with_arrays if not hasattr(FUNCTIONS[name], "__wrapped__")} == set()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return the enforced `first` of a new module, with a result of some annotation."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def build(result: str) -> Any:
        (tmp_path / "toy_annotated.py").write_text(TOY.replace("RESULT", result))
        annotated.install({"toy_annotated": ["first"]})
        return importlib.import_module("toy_annotated").first

    yield build
    sys.modules.pop("toy_annotated", None)


QUERY, KEY = np.zeros((2, 5, 8), "float32"), np.zeros((2, 7, 8), "float32")


def test_a_right_annotation_changes_nothing(toy):
    assert toy(RIGHT)(QUERY, KEY) is QUERY


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_a_wrong_annotation_is_found(toy, transform):
    with pytest.raises(annotated.AnnotationError, match=r"first: return is float32\[.*5, 8\] and not"):
        transform(toy(WRONG))(QUERY, KEY)


@pytest.mark.parametrize("key", [KEY[:1], KEY[..., 1:], KEY[0], KEY.astype(int), KEY.tolist(), None])
def test_a_call_that_is_not_annotated_is_found(toy, key):
    with pytest.raises(annotated.AnnotationError, match="first: key is "):
        toy(RIGHT)(QUERY, key)


def test_a_function_that_refuses_a_call_is_heard(toy):
    with pytest.raises(ValueError, match="query: no rows"):
        toy(RIGHT)(QUERY[:, :0], None)


def test_what_is_imported_already_is_not_enforced_too_late(toy):
    toy(RIGHT)
    with pytest.raises(RuntimeError, match="toy_annotated is imported already"):
        annotated.install({"toy_annotated": ["first"]})


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Legal arguments of `attest.flash_attention`, of any number of batch dimensions."""
    size = st.integers(1, 3)
    batch = tuple(draw(st.lists(size, max_size=3)))
    q_length, k_length, k_heads, head_dim, value_dim = (draw(size) for _ in range(5))
    heads = k_heads * draw(size)

    def broadcast(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from([1, full])) for full in axes)

    def pairs() -> tuple[int, ...]:
        axes = broadcast((*batch, heads, q_length, k_length))
        return axes[draw(st.integers(0, len(axes) - 2)) :]

    arguments: dict[str, Any] = {
        "query": np.zeros((*batch, q_length, heads, head_dim), "float32"),
        "key": np.zeros((*batch, k_length, k_heads, head_dim), "float32"),
        "value": np.zeros((*batch, k_length, k_heads, value_dim), "float32"),
    }
    optional = {
        "attention_mask": lambda: np.ones(pairs(), draw(st.sampled_from(["bool", "int8", "uint32"]))),
        "bias": lambda: np.zeros(pairs(), draw(st.sampled_from(["float32", "float16"]))),
        "softmax_aux": lambda: np.zeros((draw(st.sampled_from([1, heads])), draw(size)), "float32"),
        "q_positions": lambda: np.zeros((*broadcast(batch), q_length), "int32"),
        "kv_positions": lambda: np.zeros((*broadcast(batch), k_length), "int8"),
        "kv_start": lambda: np.zeros((*broadcast(batch), q_length), "int32"),
        "kv_end": lambda: np.zeros((*broadcast(batch), q_length), "int64"),
        "origin": lambda: np.zeros(4, "int32"),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        arguments[name] = optional[name]()
    if draw(st.booleans()):
        arguments["q_segment_ids"] = np.zeros((*batch, q_length), "int32")
        arguments["kv_segment_ids"] = np.zeros((*batch, k_length), "int16")
    if len(batch) == 1 and draw(st.booleans()):
        arguments["cum_seqlens_q"] = arguments["cum_seqlens_k"] = np.arange(batch[0] + 1)
    if "q_positions" not in arguments:
        offsets = [None, 3, np.int16(3), np.array(3), np.zeros(batch, "int32")]
        arguments["q_offset"] = draw(st.sampled_from(offsets))
    if draw(st.booleans()):
        seeds = [2**63, np.uint64(7), np.zeros(2, "uint32"), jax.random.key(1)]
        arguments |= {"dropout_prob": 0.5, "dropout_seed": draw(st.sampled_from(seeds))}
    return arguments


def results(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a function returns, as shapes; the arrays of the call are traced, as a check of them would be."""
    return jax.eval_shape(lambda: function(**arguments))


@examples(20)
@given(calls(), st.data())
def test_legal_calls_fit_and_an_axis_of_another_size_does_not(arguments, data):
    # Enforced here as everywhere: this alone would fail for a legal call that is not annotated.
    out, lse = (np.zeros(x.shape, x.dtype) for x in results(flash_attention_with_lse, arguments))
    call = {**arguments, "return": (jax.numpy.asarray(out), jax.numpy.asarray(lse))}
    function = inspect.unwrap(flash_attention_with_lse)
    annotated.check_call(function, call)
    # An offset may have any length, for the sequences; the number of sinks and where a call begins are free.
    axes = [
        (name, axis)
        for name, x in arguments.items()
        for axis in range(np.ndim(x) - (name == "softmax_aux"))
        if name != "q_offset" and isinstance(x, np.ndarray)
    ]
    name, axis = data.draw(st.sampled_from(axes))
    shape = list(arguments[name].shape)
    shape[axis] += 12
    with pytest.raises(annotated.AnnotationError):
        annotated.check_call(function, {**call, name: np.zeros(shape, arguments[name].dtype)})


@settings(max_examples=10)
@given(calls())
def test_legal_calls_that_return_weights_fit(arguments):
    batch, heads = arguments["query"].shape[:-3], arguments["query"].shape[-2]
    _, weights = results(attention, arguments)
    assert weights.shape == (*batch, heads, arguments["query"].shape[-3], arguments["key"].shape[-3])


def oracle_call() -> dict[str, Any]:
    query, key = np.zeros((2, 5, 4, 3), "float32"), np.zeros((2, 7, 2, 3), "float32")
    bias, sinks = np.zeros((1, 4, 5, 1), "float32"), np.zeros((4, 2), "float32")
    problem = make_problem(query, key, key[..., :1], bias=bias, softmax_aux=sinks)
    cotangents = Cotangents(np.ones((2, 5, 4, 1)), np.ones((2, 4, 5)))
    return {
        "problem": problem,
        "cotangents": cotangents,
        "return": oracle.attention(problem, cotangents=cotangents),
    }


@pytest.mark.parametrize(
    ("record", "field"),
    [
        *(("return", field.name) for field in dataclasses.fields(oracle.Answer)),
        *(("cotangents", field.name) for field in dataclasses.fields(Cotangents)),
        *(("problem", name) for name in ("query", "key", "value", "bias", "softmax_aux")),
    ],
)
def test_an_answer_of_another_shape_does_not_fit(record, field):
    """Even if it is a gradient that has its sizes from no argument."""
    call = oracle_call()
    annotated.check_call(oracle.attention, call)
    array = getattr(call[record], field)
    for axis in range(array.ndim - (field in ("softmax_aux", "dsoftmax_aux"))):
        wrong = np.repeat(array, 9, axis)
        with pytest.raises(annotated.AnnotationError):
            annotated.check_call(
                oracle.attention, {**call, record: dataclasses.replace(call[record], **{field: wrong})}
            )


def test_a_sample_of_the_answer_fits():
    problem = oracle_call()["problem"]
    answer = oracle.attention(problem, sample=Sample(np.array([1, 3]), np.array([6])))
    assert answer.out.shape == (2, 2, 4, 1)
