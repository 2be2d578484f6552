"""The Hopper forward pass: it lowers for CUDA with every feature, refuses by name, and on a GPU is right."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from kernel_cases import normal

from kernels import xla
from kernels.arguments import check_call
from kernels.flash import Settings
from kernels.pallas.mosaic_gpu.blocks import Blocks, choose, head_dims
from kernels.pallas.mosaic_gpu.launch import forward

SETTINGS = Settings(
    forward=None, backward=None, normalize_output=True, precision=None, logits_dtype="float32"
)
SMALL = Blocks(k=64, stages=2, consumers=2, registers=(240, 24), partial_sums=False)
PERSISTENT = replace(SMALL, partial_sums=True, programs=3)
BATCH, Q, K, HEADS, K_HEADS = 2, 200, 300, 4, 2

# name: options of a call with the sizes above; every clause that the kernel takes is in one of them.
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
    "segments, causal": {
        "q_segment_ids": np.repeat(np.array([[0, 1, 2, -1]], np.int32), Q // 4, axis=1).repeat(BATCH, axis=0),
        "kv_segment_ids": np.repeat(np.array([[0, 1, 2, -1]], np.int32), K // 4, axis=1).repeat(
            BATCH, axis=0
        ),
        "causal": True,
    },
    "lengths, causal": {
        "cum_seqlens_q": np.array([0, 150, 350], np.int32),
        "cum_seqlens_k": np.array([0, 300, 431], np.int32),
        "causal": True,
    },
    "mask": {"attention_mask": np.random.default_rng(1).random((BATCH, 1, Q, K)) < 0.7},
    "bias, cap": {"bias": normal(1, HEADS, Q, K), "logits_soft_cap": 2.0},
    "bias over rows, mask, sinks": {
        "bias": jnp.where(normal(BATCH, 1, 1, K, seed=3) < -1.0, -jnp.inf, 0.5),
        "attention_mask": np.random.default_rng(2).random((1, HEADS, Q, K)) < 0.7,
        "softmax_aux": normal(HEADS, 2),
    },
}


def tensors(head_dim: int, dtype: str = "bfloat16") -> Any:
    query = normal(BATCH, Q, HEADS, head_dim, dtype=dtype)
    key, value = (normal(BATCH, K, K_HEADS, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    return query, key, value


def lowered(arrays: Any, options: dict[str, Any], blocks: Blocks | None = None) -> str:
    """The program that a GPU would be given, made on a machine that need not have one."""
    settings = replace(SETTINGS, forward=blocks)
    call = check_call(*arrays, **options)

    def run(query: Any, key: Any, value: Any) -> Any:
        return forward(settings, replace(call, query=query, key=key, value=value))

    return export.export(jax.jit(run), platforms=["cuda"])(*arrays).mlir_module()


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_lowers_for_cuda(name: str) -> None:
    assert "mosaic_gpu" in lowered(tensors(64), FEATURES[name], SMALL)


@pytest.mark.parametrize("options", [{}, {"bias": normal(1, 1, Q, K)}], ids=["plain", "bias"])
@pytest.mark.parametrize("head_dim", head_dims())
def test_the_blocks_of_the_table_fit(head_dim: int, options: dict[str, Any]) -> None:
    assert "mosaic_gpu" in lowered(tensors(head_dim), options)


def test_float16_and_programs_that_go_on_to_further_tiles_lower_for_cuda() -> None:
    assert "mosaic_gpu" in lowered(tensors(64, "float16"), {"causal": True}, PERSISTENT)


def test_the_table_lets_programs_share_tiles_only_where_all_are_as_long() -> None:
    plain, other = choose(128, plain=True), choose(128, plain=False)
    assert plain is not None
    assert other is not None
    assert plain.programs is not None
    assert replace(plain, programs=None) == other
    assert choose(96, plain=True) is None


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "float32": (tensors(64, "float32"), {}, {}, "float32 is not supported"),
    "head_dim": (tensors(96), {}, {}, "head_dim 96 is not supported, 64, 128, 256 are"),
    "head_dim, with blocks": (tensors(96), {}, {"forward": SMALL}, "head_dim 96 is not supported"),
    "value head_dim": ((*tensors(64)[:2], tensors(128)[2]), {}, {}, "value head_dim 128 with head_dim 64"),
    "dropout": (tensors(64), {"dropout_prob": 0.1, "dropout_seed": 1}, {}, "dropout_prob above 0"),
    "numerator": (tensors(64), {}, {"normalize_output": False}, "normalize_output=False"),
    "rounded logits": (tensors(64), {}, {"logits_dtype": "bfloat16"}, "logits_dtype bfloat16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_refused_by_name(name: str) -> None:
    arrays, options, settings, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=rf"kernels\.pallas\.mosaic_gpu: {words}.*kernels\.xla"):
        forward(replace(SETTINGS, **settings), check_call(*arrays, **options))


@pytest.mark.parametrize("lengths", [(0, K), (Q, 0)])
def test_without_queries_or_keys_only_the_sinks_speak(lengths: tuple[int, int]) -> None:
    query, key, value = (x[:, :n] for x, n in zip(tensors(64), (*lengths, lengths[1]), strict=True))
    sinks = jnp.zeros((HEADS, 2))
    out, lse, row_max = forward(SETTINGS, check_call(query, key, value, softmax_aux=sinks))
    assert out.shape == query.shape
    assert not out.any()
    np.testing.assert_allclose(lse, np.full((BATCH, HEADS, lengths[0]), np.log(2.0)), rtol=1e-6)
    assert (row_max == -jnp.inf).all()


def hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


# The table's blocks for every head dim, and blocks that go through their rings and tiles more than once.
ON_A_GPU = [*((head_dim, None) for head_dim in head_dims()), (64, SMALL), (64, PERSISTENT)]


@pytest.mark.skipif(not hopper(), reason="the kernel runs on Hopper GPUs alone")
@pytest.mark.parametrize(("head_dim", "blocks"), ON_A_GPU)
@pytest.mark.parametrize("name", FEATURES)
def test_out_and_lse_are_those_of_the_clauses(name: str, head_dim: int, blocks: Blocks | None) -> None:
    arrays = tensors(head_dim)
    call = check_call(*arrays, **FEATURES[name])
    out, lse, _ = jax.jit(forward, static_argnums=0)(replace(SETTINGS, forward=blocks), call)
    wide = (x.astype(jnp.float32) for x in arrays)
    want_out, want_lse = xla.flash_attention_with_lse(*wide, **FEATURES[name])
    np.testing.assert_allclose(out.astype(jnp.float32), want_out, atol=2e-2, rtol=2e-2)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, rtol=1e-5)
