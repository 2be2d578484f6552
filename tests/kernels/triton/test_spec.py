"""The specification that a Triton kernel is compiled for."""

import ast
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from inspect import getsource
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import pytest

from attest.kernels import triton
from attest.kernels.triton import spec
from attest.kernels.triton.compiled import Source
from attest.kernels.triton.spec import KernelSpec, PairAxes, RowLayout, Softmax
from attest.kernels.triton.target import Launch, recorded


def launches(**options) -> list[Launch]:
    """What a call launches forward and backward; its heads of 24 are wider than a power of two."""
    query = jax.ShapeDtypeStruct((1, 64, 6, 24), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 48, 2, 24), jnp.float32)
    value = jax.ShapeDtypeStruct((1, 48, 2, 8), jnp.float32)

    def both(*arrays):
        out, pull = jax.vjp(lambda *arrays: triton.flash_attention(*arrays, **options), *arrays)
        return pull(out)

    with recorded("sm_90") as found:
        jax.eval_shape(both, query, key, value)
    return found


def spec_of(launch: Launch) -> KernelSpec:
    (spec,) = launch.constants.values()
    assert isinstance(spec, KernelSpec)
    return spec


def test_what_follows_from_the_sizes():
    shape = spec_of(launches()[0]).shape
    assert (shape.head_dim, shape.value_dim, shape.k_heads, shape.group, shape.heads) == (24, 8, 2, 3, 6)
    assert [x.stride for x in (shape.query, shape.key, shape.value, shape.out)] == [144, 48, 16, 48]
    assert [x.width for x in (shape.query, shape.key, shape.value, shape.out)] == [24, 24, 8, 8]
    assert [x.block for x in (shape.query, shape.key, shape.value, shape.out)] == [32, 32, 16, 16]
    assert [Softmax(sinks=n).block_sinks for n in (0, 1, 2, 3, 5)] == [1, 1, 2, 4, 8]


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_prob": 0.5, "dropout_seed": 3}])
def test_equal_calls_share_their_kernels(options):
    ones, others = launches(**options), launches(**options)
    assert {x.kernel.__name__ for x in ones} == {"forward", "backward_query", "backward_key"}
    assert [hash(spec_of(x)) for x in ones] == [hash(spec_of(x)) for x in others]
    assert [spec_of(x) for x in ones] == [spec_of(x) for x in others]


def _arguments(function: ast.AST) -> Iterator[str]:
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            yield from map(ast.unparse, [*call.args, *(keyword.value for keyword in call.keywords)])


@pytest.mark.parametrize("module", sorted(path.stem for path in Path(spec.__file__).parent.glob("*.py")))
def test_records_of_the_spec_are_passed_on_by_a_name(module):
    """Triton 3.6 does not take an attribute of a constant for a constant, unless it is a number."""
    tree = ast.parse((Path(spec.__file__).parent / f"{module}.py").read_text())
    given = [a for a in _arguments(tree) if re.fullmatch(r"SPEC(\.\w+)+", a)]
    assert [a for a in given if _is_record(a.split(".")[1:])] == []


def _is_record(names: list[str]) -> bool:
    kind: Any = KernelSpec
    for name in names:
        found = get_type_hints(kind).get(name) or get_type_hints(getattr(kind, name).fget)["return"]
        kind = next((x for x in (get_args(found) or (found,)) if x is not NoneType), NoneType)
    return is_dataclass(kind)


def test_different_calls_do_not():
    calls = [{}, {"causal": True}, {"logits_soft_cap": 2.0}, {"logits_dtype": "bfloat16"}]
    found = {Source.of(launches(**options)[0]) for options in calls}
    assert len(found) == len(calls)


def test_a_launch_names_the_blocks_of_its_spec():
    (forward, *_) = launches(fwd_params=triton.BlockSizes(64, 16))
    assert forward.blocks == {"BLOCK_Q": 64, "BLOCK_K": 16, "BLOCK_D": 32, "BLOCK_DV": 16}
    assert "BLOCK_Q=64 BLOCK_K=16 BLOCK_D=32 BLOCK_DV=16 warps=" in forward.name


def attributes(record: type) -> dict[str, Any]:
    """The types of the fields and of the public properties of a record, without None."""
    found = get_type_hints(record)
    properties = {name: x for name, x in vars(record).items() if isinstance(x, property)}
    found |= {name: get_type_hints(x.fget)["return"] for name, x in properties.items()}
    return {
        name: next(x for x in (*get_args(kind), kind) if x is not NoneType) for name, kind in found.items()
    }


def read_in(source: str, variable: str, record: type) -> set[tuple[type, str]]:
    """The attributes that a source reads of a variable that holds a record, and of the records in it."""
    found = set()
    for path in re.findall(rf"\b{variable}((?:\.\w+)+)", source):
        owner = record
        for name in path.split(".")[1:]:
            found.add((owner, name))
            owner = attributes(owner)[name]
            if not is_dataclass(owner):
                break
    return found


def test_some_kernel_reads_every_field_and_no_kernel_reads_another():
    """By itself, or by a property of its record: an unknown name has no type."""
    folder = Path(triton.__file__).parent
    kernels = "\n".join(x.read_text() for x in folder.glob("*.py") if "@triton.jit" in x.read_text())
    records = [x for x in vars(spec).values() if is_dataclass(x)]
    holders = {"SPEC": KernelSpec, "AXES": PairAxes, "LAYOUT": RowLayout}
    read = set().union(*(read_in(kernels, name, record) for name, record in holders.items()))
    read |= set().union(*(read_in(getsource(record), "self", record) for record in records))
    assert read == {(record, name) for record in records for name in attributes(record) if name != "blocks"}
