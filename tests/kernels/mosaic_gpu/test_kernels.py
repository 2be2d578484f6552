"""The Hopper kernels: they lower for CUDA with every feature, refuse by name, and on a GPU are right."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attest.kernels import xla
from attest.kernels.pallas.mosaic_gpu import (
    BackwardBlocks,
    BackwardSizes,
    Blocks,
    flash_attention,
    flash_attention_with_lse,
)
from attest.kernels.pallas.mosaic_gpu.blocks import head_dims
from tests.kernels.kernel_cases import normal, split_options

SMALL = Blocks(k=64, stages=2, consumers=2, registers=(240, 24), partial_sums=False)
PERSISTENT = replace(SMALL, partial_sums=True, programs=3)
PING_PONG = BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24), ping_pong=True)
BATCH, Q, K, HEADS, K_HEADS = 2, 200, 300, 4, 2

# Ways of cutting and scheduling: None is the table's, the others go through rings and tiles more than once.
SCHEDULES: dict[str, dict[str, Any]] = {
    "table": {},
    "small, ping-pong": {
        "fwd_params": SMALL,
        "bwd_params": BackwardSizes(
            backward_query=PING_PONG, backward_key=replace(PING_PONG, separate=True), backward_bias=PING_PONG
        ),
    },
    "persistent": {"fwd_params": PERSISTENT},
}


DIMS = pytest.mark.parametrize("dims", head_dims(), ids=lambda dims: "-".join(map(str, dict.fromkeys(dims))))
OTHER_DIMS = pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"), [(40, 96, "float16"), (130, 24, "bfloat16")]
)


def ids(length: int) -> np.ndarray:
    return np.repeat(np.array([[0, 1, 2, -1]] * BATCH, np.int32), length // 4, axis=1)


# name: options of a call with the sizes above; every clause that the kernels take is in one of them.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (70, 21)},
    "causal, window, cap, negative scale": {
        "causal": True,
        "sliding_window": (90, None),
        "logits_soft_cap": 2.0,
        "softmax_scale": -0.2,
    },
    "cap": {"logits_soft_cap": 20.0},
    "cap that most logits are near, causal, window": {
        "logits_soft_cap": 3.0,
        "causal": True,
        "sliding_window": (90, None),
    },
    "segments, causal": {"q_segment_ids": ids(Q), "kv_segment_ids": ids(K), "causal": True},
    "lengths, causal": {
        "cum_seqlens_q": np.array([0, 150, 350], np.int32),
        "cum_seqlens_k": np.array([0, 300, 431], np.int32),
        "causal": True,
    },
    "mask": {"attention_mask": np.random.default_rng(1).random((BATCH, 1, Q, K)) < 0.7},
    "bias, cap, window": {
        "bias": normal(1, HEADS, Q, K),
        "logits_soft_cap": 2.0,
        "sliding_window": (150, None),
    },
    "bias over rows, mask, sinks": {
        "bias": jnp.where(normal(BATCH, 1, 1, K, seed=3) < -1.0, -jnp.inf, 0.5),
        "attention_mask": np.random.default_rng(2).random((1, HEADS, Q, K)) < 0.7,
        "softmax_aux": normal(HEADS, 2),
    },
    "mask of keys": {"attention_mask": np.random.default_rng(2).random((BATCH, 1, 1, K)) < 0.7},
    "mask of rows of heads, bias of rows": {
        "attention_mask": np.random.default_rng(2).random((1, HEADS, Q, 1)) < 0.7,
        "bias": normal(BATCH, HEADS, Q, 1),
    },
    "bias of one row and key": {"bias": normal(BATCH, HEADS, 1, 1)},
    "chunks, causal": {"chunk_size": 100, "causal": True},
    "ranges": {"kv_start": np.arange(Q)[None], "kv_end": np.arange(BATCH * Q).reshape(BATCH, Q) + 50},
    "ALiBi": {"alibi_slopes": np.linspace(0.1, 0.5, HEADS, dtype=np.float32)},
    "ALiBi of each batch row, causal, cap": {
        "alibi_slopes": np.linspace(-0.3, 0.5, BATCH * HEADS, dtype=np.float32).reshape(BATCH, HEADS),
        "causal": True,
        "logits_soft_cap": 20.0,
    },
    "bias of all, causal": {"bias": normal(1, 1, 1, K, seed=4, dtype="bfloat16"), "causal": True},
    "not normalised, sinks, causal": {
        "normalize_output": False,
        "softmax_aux": normal(1, HEADS),
        "causal": True,
    },
    "rounded logits, bias of a batch row": {"logits_dtype": "bfloat16", "bias": normal(BATCH, HEADS, Q, K)},
}


def tensors(head_dim: int, value_dim: int | None = None, dtype: str = "bfloat16") -> Any:
    query = normal(BATCH, Q, HEADS, head_dim, dtype=dtype)
    key = normal(BATCH, K, K_HEADS, head_dim, seed=1, dtype=dtype)
    return query, key, normal(BATCH, K, K_HEADS, value_dim or head_dim, seed=2, dtype=dtype)


def both_passes(call: Any, options: dict[str, Any], arrays: Any, floats: Any) -> Any:
    """(out, lse) and the cotangents of arrays and floats, for cotangents that are fixed."""
    outputs, pull = jax.vjp(lambda arrays, floats: call(*arrays, **floats, **options), arrays, floats)
    out, lse = outputs
    return outputs, pull((normal(*out.shape, seed=5, dtype=out.dtype), normal(*lse.shape, seed=6)))


def lowered(arrays: Any, options: dict[str, Any]) -> str:
    """The program of both passes that a GPU would be given, made on a machine that need not have one."""
    floats, rest = split_options(options)
    run = jax.jit(partial(both_passes, flash_attention_with_lse, rest))
    return export.export(run, platforms=["cuda"])(arrays, floats).mlir_module()


def lowered_on_mesh(arrays: Any, options: dict[str, Any]) -> str:
    """The same inside of `jax.shard_map`, where JAX keeps account of what varies over the axes of a mesh."""
    floats, rest = split_options(options)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def local(arrays: Any, floats: Any) -> Any:
        return flash_attention_with_lse(*arrays, **floats, **rest)

    def call(*arrays: Any, **floats: Any) -> Any:
        over = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        return over(arrays, floats)

    run = jax.jit(partial(both_passes, call, {}))
    return export.export(run, platforms=["cuda"])(arrays, floats).mlir_module()


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_lowers_for_cuda(name: str) -> None:
    program = lowered_on_mesh(tensors(64), FEATURES[name])
    for kernel in ("flash_forward", "flash_backward_joint"):
        assert kernel in program
    assert ("flash_backward_bias" in program) == ("bias" in FEATURES[name])


def test_one_query_takes_one_launch_where_nothing_hides() -> None:
    """Causal order hides nothing from the last query; its program is that of a call without it."""
    query, key, value = tensors(64)
    run = export.export(jax.jit(partial(flash_attention, causal=True)), platforms=["cuda"])
    program = run(query[:, :1], key, value).mlir_module()
    assert launches(program) == ["flash_forward"]
    assert "xi32>" not in next(line for line in program.splitlines() if "mosaic_gpu_v2" in line)


def launches(program: str) -> list[str]:
    """The kernels that a program launches, in its order."""
    calls = [line for line in program.splitlines() if "mosaic_gpu_v2" in line]
    return [re.findall(r"flash_\w+?(?=_mosaic_gpu)", line)[0] for line in calls]


JOINT = BackwardSizes(
    backward_query=BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24)),
    backward_key=BackwardBlocks(step=64, stages=2, consumers=2, registers=(240, 24), joint=True),
)


@pytest.mark.parametrize("name", FEATURES)
def test_a_repair_is_no_launch_of_its_own(name: str) -> None:
    """It is in the kernel whose results it repairs."""
    found = launches(lowered(tensors(64), {**FEATURES[name], "bwd_params": JOINT}))
    of_bias = ["flash_backward_bias"] if "bias" in FEATURES[name] else []
    assert sorted(found) == sorted(["flash_forward", "flash_backward_joint", *of_bias])


FUSED = BackwardSizes(
    backward_key=BackwardBlocks(step=128, stages=2, consumers=2, registers=(232, 24), fused=True)
)


def test_what_is_changed_in_place_is_kept_apart() -> None:
    """XLA hands slices to a launch: of what it is to change, and of where a scan stacks what it returns."""
    program = lowered(tensors(64), {"causal": True, "bwd_params": FUSED})
    barriers = set(re.findall(r"(%\d+)(?::\d+)? = stablehlo\.optimization_barrier ", program))
    guarded = set(re.findall(r"%\d+", " ".join(re.findall(r"optimization_barrier ([^:]+) :", program))))
    changing = re.findall(
        r"(%\d+)(?::\d+)? = stablehlo\.custom_call @\w+\(([^)]*)\)(.*output_operand_aliases.*)", program
    )
    repairs = [launch for launch in changing if "flash_repair" in launch[2]]
    assert len(repairs) == 2
    for result, operands, rest in repairs:
        assert result in guarded
        for index in re.findall(r"operand_index = (\d+)", rest):
            assert operands.split(", ")[int(index)].partition("#")[0] in barriers


@pytest.mark.parametrize("schedule", SCHEDULES)
@DIMS
def test_blocks_fit(dims: tuple[int, int], schedule: str) -> None:
    if dims[0] > 128 and schedule != "table":
        pytest.skip("two slots of a ring do not fit")
    # Beside two slots of head dim 128 there is no room for tiles of a bias of every pair.
    rows = 1 if dims[0] == 128 and schedule == "small, ping-pong" else Q
    options = {"bias": normal(1, 1, rows, K), **SCHEDULES[schedule]}
    assert "flash_backward_bias" in lowered(tensors(*dims), options)


@OTHER_DIMS
def test_other_head_dims_are_padded(head_dim: int, value_dim: int, dtype: str) -> None:
    assert "flash_forward" in lowered(tensors(head_dim, value_dim, dtype), {"causal": True})


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "float32": (tensors(64, dtype="float32"), {}, "takes bfloat16 and float16, and the call has float32"),
    "head_dim": (tensors(264), {}, "takes head dims up to 256, and the call has 264"),
    "value head_dim": (tensors(64, 264), {}, "takes head dims up to 256, and the call has 264"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_refused_by_name(name: str) -> None:
    arrays, options, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=rf"^mosaic_gpu: {words}.*platform=.xla"):
        flash_attention(*arrays, **options)


MALFORMED = [
    ("fwd_params", 64, "fwd_params: got a int; expected Blocks"),
    ("bwd_params", SMALL, "bwd_params: got a Blocks; expected BackwardSizes"),
    ("precision", "tf32", "precision: got 'tf32'"),
]


@pytest.mark.parametrize(("name", "value", "words"), MALFORMED)
def test_parameters_of_its_own_are_checked(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flash_attention(*tensors(64), **{name: value})


def hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


needs_hopper = pytest.mark.gpu("9.0")


@pytest.mark.skipif(hopper(), reason="here is a Hopper GPU")
def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"compiled for .*, expected an NVIDIA GPU of compute"):
        flash_attention(*tensors(64))


@pytest.mark.parametrize("lengths", [(0, K), (Q, 0)])
def test_without_queries_or_keys_only_the_sinks_speak(lengths: tuple[int, int]) -> None:
    query, key, value = (x[:, :n] for x, n in zip(tensors(64), (*lengths, lengths[1]), strict=True))
    sinks = jnp.zeros((HEADS, 2))
    outputs, gradients = both_passes(
        flash_attention_with_lse, {}, (query, key, value), {"softmax_aux": sinks}
    )
    out, lse = outputs
    assert out.shape == query.shape
    assert not out.any()
    np.testing.assert_allclose(lse, np.full((BATCH, HEADS, lengths[0]), np.log(2.0)), rtol=1e-6)
    assert all(not x.any() for x in gradients[0])


def assert_right(arrays: Any, options: dict[str, Any]) -> None:
    """Both passes are those of attest.kernels.xla in float32, within what 16 bits cost."""
    floats, rest = split_options(options)
    got = jax.jit(partial(both_passes, flash_attention_with_lse, rest))(arrays, floats)
    common = {name: x for name, x in rest.items() if name not in ("fwd_params", "bwd_params")}
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    # On a GPU the products would else be of TF32, which the lse shows.
    exact = partial(xla.flash_attention_with_lse, precision="highest")
    (out, lse), gradients = both_passes(exact, common, wide, floats)
    np.testing.assert_allclose(got[0][1], lse, atol=2e-4, rtol=1e-5)
    wanted = jax.tree.leaves((out, gradients))
    for a, b in zip(jax.tree.leaves((got[0][0], got[1])), wanted, strict=True):
        largest = max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=4e-2 * largest, rtol=2e-2)


@needs_hopper
@DIMS
@pytest.mark.parametrize("name", FEATURES)
def test_both_passes_are_those_of_the_clauses(name: str, dims: tuple[int, int]) -> None:
    assert_right(tensors(*dims), FEATURES[name])


@needs_hopper
@pytest.mark.parametrize("queries", [1, 17])
@pytest.mark.parametrize("name", FEATURES)
def test_few_queries_are_right(name: str, queries: int) -> None:
    """Both passes are those of the clauses, whether heads are packed, where nothing is hidden, or not."""
    query, key, value = tensors(128)
    options = {option: of_first_rows(option, x, queries) for option, x in FEATURES[name].items()}
    assert_right((query[:, :queries], key, value), options)


@needs_hopper
@DIMS
def test_few_queries_are_right_at_each_head_dim(dims: tuple[int, int]) -> None:
    query, key, value = tensors(*dims)
    assert_right((query[:, :17], key, value), {"causal": True})


def of_first_rows(name: str, x: Any, queries: int) -> Any:
    """An option of a call with Q queries, for a call with the first of them."""
    if name in ("attention_mask", "bias"):
        return x[:, :, :queries]
    if name in ("q_segment_ids", "kv_start", "kv_end"):
        return x[:, :queries]
    return np.minimum(x, queries * np.arange(len(x))).astype(np.int32) if name == "cum_seqlens_q" else x


@needs_hopper
@pytest.mark.parametrize("schedule", ["small, ping-pong", "persistent"])
@pytest.mark.parametrize("name", FEATURES)
def test_schedules_change_nothing(name: str, schedule: str) -> None:
    assert_right(tensors(64), FEATURES[name] | SCHEDULES[schedule])


@needs_hopper
@OTHER_DIMS
def test_padded_head_dims_change_nothing(head_dim: int, value_dim: int, dtype: str) -> None:
    assert_right(tensors(head_dim, value_dim, dtype), {"causal": True})


def poisoned(arrays: Any, name: str) -> Any:
    """Key 290 and value 290 are NaN, or query 3."""
    query, key, value = arrays
    if name == "keys":
        return query, key.at[:, 290].set(jnp.nan), value.at[:, 290].set(jnp.inf)
    return query.at[:, 3].set(jnp.nan), key, value


@needs_hopper
@DIMS
def test_what_nobody_sees_changes_nothing(dims: tuple[int, int]) -> None:
    """S4, in every second operand: of out, dquery, dkey and dvalue."""
    mask = np.ones((BATCH, 1, Q, K), bool)
    mask[..., 290] = False
    mask[:, :, 3] = False
    arrays = tensors(*dims)
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {"attention_mask": mask}))
    want = run(arrays, {})
    for name in ("keys", "queries"):
        jax.tree.map(np.testing.assert_array_equal, run(poisoned(arrays, name), {}), want)


@needs_hopper
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["plain", "causal", "cap", "not normalised, sinks, causal"])
def test_references_follow_logits_that_grow(name: str, schedule: str) -> None:
    query, key, value = tensors(64)
    key = key * jnp.linspace(0.1, 12.0, K)[None, :, None, None].astype(key.dtype)
    assert_right((query, key, value), FEATURES[name] | SCHEDULES[schedule])


@needs_hopper
@pytest.mark.parametrize("name", ["plain", "causal", "cap", "not normalised, sinks, causal"])
def test_the_reference_of_a_row_is_its_own(name: str) -> None:
    """Row 3's logits move its reference, and are large for the cap; the warp's other rows keep their bits."""
    query, key, value = tensors(64)
    run = jax.jit(partial(flash_attention_with_lse, **FEATURES[name]))
    want, got = (run(x, key, value) for x in (query, query.at[:, 3].multiply(40.0)))
    others = np.arange(Q) != 3
    np.testing.assert_array_equal(got[0][:, others], want[0][:, others])
    np.testing.assert_array_equal(got[1][..., others], want[1][..., others])


@needs_hopper
def test_a_nan_reaches_the_rows_that_see_it_and_no_others() -> None:
    """S4, under causal order: key 290 is seen by the last ten rows, query 3 sees keys up to 103."""
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {"causal": True}))
    arrays = tensors(64)
    (out, lse), (gradients, _) = run(poisoned(arrays, "keys"), {})
    strange = np.isnan(out.astype(jnp.float32)).any((0, 2, 3))
    np.testing.assert_array_equal(strange, np.arange(Q) >= 190)
    np.testing.assert_array_equal(np.isnan(lse).any((0, 1)), np.arange(Q) >= 190)
    np.testing.assert_array_equal(
        np.isnan(gradients[0].astype(jnp.float32)).any((0, 2, 3)), np.arange(Q) >= 190
    )
    _, (gradients, _) = run(poisoned(arrays, "queries"), {})
    for gradient in gradients[1:]:
        strange = np.isnan(gradient.astype(jnp.float32)).any((0, 2, 3))
        np.testing.assert_array_equal(strange, np.arange(K) <= 103)


@needs_hopper
def test_a_cap_is_the_same_beside_what_is_large_or_hidden() -> None:
    """S4: rows that do not see key 290, in warps that do, where small logits are computed in another way."""
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {"causal": True, "logits_soft_cap": 20.0}))
    arrays = tensors(64)
    want, got = (run(x, {})[0][0] for x in (arrays, poisoned(arrays, "keys")))
    np.testing.assert_array_equal(got[:, :190], want[:, :190])


@needs_hopper
@DIMS
def test_a_scan_stacks_what_a_call_gives(dims: tuple[int, int]) -> None:
    """S22, for head dims and lengths of which nothing is cut off behind the kernels."""
    widths = (dims[0], dims[0], dims[1])
    stack = tuple(normal(2, BATCH, 256, HEADS, x, seed=i, dtype="bfloat16") for i, x in enumerate(widths))
    run = partial(both_passes, flash_attention_with_lse, {"causal": True})
    stacked = jax.jit(lambda stack: jax.lax.scan(lambda _, x: (None, run(x, {})), None, stack)[1])(stack)
    for i in range(2):
        alone = jax.jit(run)(jax.tree.map(lambda x, i=i: x[i], stack), {})
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), stacked, alone)


@needs_hopper
def test_the_same_inputs_give_the_same_bits() -> None:
    """S17."""
    run = jax.jit(partial(both_passes, flash_attention_with_lse, {"causal": True}))
    arrays = tensors(128)
    jax.tree.map(np.testing.assert_array_equal, run(arrays, {}), run(arrays, {}))
