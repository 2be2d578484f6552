"""The operation `RingAttention`, run by an executor inside and outside of `jax.shard_map`."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels import flash_attention, xla
from attest.kernels.operations import FlashAttentionConfig, FwdParams, RingAttention, create_default_executor
from tests.kernels.kernel_cases import normal

DEVICES = 4
here = pytest.mark.process(devices=DEVICES)
SPEC = P("data", "x", None, None)


def mesh() -> Any:
    return jax.make_mesh((2, 2), ("data", "x"), axis_types=(AxisType.Auto,) * 2)


def arrays() -> tuple[jax.Array, ...]:
    return normal(2, 32, 4, 8), normal(2, 32, 2, 8, seed=2), normal(2, 32, 2, 8, seed=3)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@here
def test_the_specs_say_which_axis_splits_the_sequence(tmp_path: Any) -> None:
    executor = create_default_executor(str(tmp_path))
    options = {"causal": True, "dropout_prob": 0.3, "dropout_seed": 4}
    where = {"mesh": mesh(), "in_specs": (SPEC, SPEC, SPEC), "out_specs": SPEC}
    call = jax.jit(lambda *given: executor(RingAttention(), *given, **options, **where))
    same(call(*arrays()), flash_attention(*arrays(), **options))
    assert "collective-permute" in call.lower(*arrays()).compile().as_text()


@here
def test_inside_of_shard_map_it_takes_the_name_of_the_axis(tmp_path: Any) -> None:
    run = partial(create_default_executor(str(tmp_path)), RingAttention(), axis_name="x", strategy="ring")
    spread = jax.shard_map(run, mesh=mesh(), in_specs=(SPEC,) * 3, out_specs=SPEC)
    same(jax.jit(spread)(*arrays()), flash_attention(*arrays()))


@here
def test_a_configuration_reaches_the_pairs(tmp_path: Any) -> None:
    executor = create_default_executor(str(tmp_path))
    where = {"mesh": mesh(), "in_specs": (SPEC,) * 3, "out_specs": SPEC}
    config = FlashAttentionConfig(config=xla.Config(forward=xla.ChunkSizes(q=8, k=8)))

    def program(cfg: Any) -> str:
        call = jax.jit(lambda *given: executor(RingAttention(), *given, cfg=cfg, **where))
        same(call(*arrays()), flash_attention(*arrays()))
        return call.lower(*arrays()).as_text()

    assert program(config) != program(FlashAttentionConfig(platform="xla"))


@here
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_arrays_have_any_number_of_batch_dimensions(batch: tuple[int, ...], tmp_path: Any) -> None:
    given = tuple(normal(*batch, 32, heads, 8, seed=heads) for heads in (4, 2, 2))
    spec = P(*["data", None][: len(batch)], "x", None, None)
    where = {"mesh": mesh(), "in_specs": (spec,) * 3, "out_specs": spec}
    out = create_default_executor(str(tmp_path))(RingAttention(), *given, causal=True, **where)
    same(out, flash_attention(*given, causal=True))


@here
def test_of_several_batch_dimensions_the_first_is_split(tmp_path: Any) -> None:
    given = tuple(normal(3, 2, 32, 2, 8, seed=seed) for seed in range(3))
    spec = P(None, "data", "x")
    where = {"mesh": mesh(), "in_specs": (spec,) * 3, "out_specs": spec}
    with pytest.raises(
        ValueError, match=r"^in_specs of query: got .* expected the first batch dimension split alone"
    ):
        create_default_executor(str(tmp_path))(RingAttention(), *given, **where)


@here
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"in_specs": (P("data"),)}, "in_specs of query: got .* expected one axis of the mesh for the seq"),
        ({"in_specs": (SPEC, P("data"))}, "in_specs of key: got .* expected .* that of query"),
        ({"out_specs": P("data")}, "out_specs: got .* expected .* that of query"),
        ({"in_specs": 3}, "in_specs: got a int; expected a tuple of specs"),
        ({"in_specs": ()}, "in_specs: got .* expected a tuple of 1 to 7 specs"),
        ({"in_specs": (SPEC, "x")}, "in_specs of key: got a str; expected a jax.sharding.PartitionSpec"),
        ({"out_specs": "x"}, "out_specs: got a str; expected a jax.sharding.PartitionSpec"),
        ({"in_specs": (*(SPEC,) * 3, "x")}, "in_specs of bias: got a str; expected a jax.sharding.Part"),
        (
            {"in_specs": (*(SPEC,) * 3, P(None, None, None, "x"))},
            "in_specs of bias: got axis 3 over x; expected axis 3 whole",
        ),
        (
            {"in_specs": (*(SPEC,) * 3, P("x"))},
            "in_specs of bias: got axis 0 over x; expected data, as for query, or None",
        ),
        (
            {"cfg": FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=64))},
            "cfg: got fwd_params or bwd_params; expected config",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str, tmp_path: Any) -> None:
    bias = normal(1, 1, 32, 32)
    where = {"mesh": mesh(), "in_specs": (SPEC,) * 3, "out_specs": SPEC, "bias": bias}
    with pytest.raises(ValueError, match=words):
        create_default_executor(str(tmp_path))(RingAttention(), *arrays(), **{**where, **changes})


@here
def test_a_second_derivative_is_refused_in_its_name(tmp_path: Any) -> None:
    executor = create_default_executor(str(tmp_path))
    where = {"mesh": mesh(), "in_specs": (SPEC,) * 3, "out_specs": SPEC}
    _, key, value = arrays()
    with pytest.raises(NotImplementedError, match=r"^ring_attention: got a second derivative"):
        jax.hessian(lambda x: executor(RingAttention(), x, key, value, **where).sum())(arrays()[0])


def test_an_argument_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="colour: no such argument; expected some of query, key, value"):
        RingAttention().prepare(*arrays(), colour=3)
