"""Masks and biases of every pair in the Hopper kernels: their tiles come through shared memory, uncopied."""

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attest.kernels.call.call import Call, check_call
from attest.kernels.contract import Settings
from attest.kernels.pallas.mosaic_gpu import BackwardBlocks, BackwardSizes, Blocks, flash_attention_with_lse
from attest.kernels.pallas.mosaic_gpu.blocks import choose, choose_backward, head_dims
from attest.kernels.pallas.mosaic_gpu.launch.operands import pair_lengths
from attest.kernels.pallas.mosaic_gpu.launch.scratch import fits
from attest.kernels.pallas.mosaic_gpu.schedule.order import locate_sharers
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec, describe, tiled_bytes
from attest.kernels.visibility.intervals import describe_rows
from tests.kernels.kernel_cases import normal, split_options
from tests.kernels.mosaic_gpu.test_kernels import (
    BATCH,
    HEADS,
    K,
    Q,
    assert_right,
    both_passes,
    ids,
    needs_hopper,
    poisoned,
    tensors,
)

BF16 = partial(normal, seed=4, dtype="bfloat16")
LOWEST = float(jnp.finfo(jnp.bfloat16).min)
SHORT = BackwardBlocks(step=64, stages=2, consumers=1, registers=(240, 24))


def some(x: Any, value: float) -> Any:
    """x, three of ten of whose elements are the value."""
    chosen = np.random.default_rng(9).random(x.shape) < 0.3
    return jnp.where(chosen, jnp.asarray(value, x.dtype), x)


def mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).random(shape) < 0.7


# name: options of a call with Q queries and K keys; each has a tile of every pair.
PAIRS: dict[str, dict[str, Any]] = {
    "bias of heads": {"bias": BF16(1, HEADS, Q, K)},
    "bias of batch rows and heads": {"bias": BF16(BATCH, HEADS, Q, K)},
    "bias of all, causal": {"bias": BF16(1, 1, Q, K), "causal": True},
    "bias in float32": {"bias": normal(BATCH, 1, Q, K)},
    "bias that hides": {"bias": some(BF16(1, HEADS, Q, K), -np.inf), "causal": True},
    "bias that hides all of a row": {"bias": BF16(1, HEADS, Q, K).at[:, :, 5].set(-np.inf)},
    "bias of the lowest number": {"bias": some(BF16(1, HEADS, Q, K), LOWEST)},
    "bias that hides before a cap": {"bias": some(normal(1, HEADS, Q, K), -np.inf), "logits_soft_cap": 2.0},
    "bias, segments, causal": {
        "bias": BF16(1, 1, Q, K),
        "q_segment_ids": ids(Q),
        "kv_segment_ids": ids(K),
        "causal": True,
    },
    "bias, mask, window": {
        "bias": some(BF16(1, HEADS, Q, K), -np.inf),
        "attention_mask": mask(BATCH, 1, Q, K),
        "sliding_window": (150, None),
    },
    "bias, ALiBi": {
        "bias": BF16(1, HEADS, Q, K),
        "alibi_slopes": np.linspace(0.1, 0.5, HEADS, dtype=np.float32),
    },
    "mask of batch rows and heads, causal": {"attention_mask": mask(BATCH, HEADS, Q, K), "causal": True},
    "mask of heads, bias of keys": {
        "attention_mask": mask(1, HEADS, Q, K),
        "bias": normal(BATCH, 1, 1, K),
    },
    "mask of all, bias of queries": {"attention_mask": mask(1, 1, Q, K), "bias": normal(BATCH, 1, Q, 1)},
    "logits rounded before a bias": {"bias": BF16(1, HEADS, Q, K), "logits_dtype": "bfloat16"},
    "one consumer": {
        "bias": some(BF16(1, HEADS, Q, K), -np.inf),
        "attention_mask": mask(BATCH, 1, Q, K),
        "fwd_params": Blocks(k=64, stages=2, consumers=1, registers=(240, 24), partial_sums=False),
        "bwd_params": BackwardSizes(SHORT, SHORT, SHORT),
    },
    "three consumers": {
        "bias": some(BF16(1, HEADS, Q, K), -np.inf),
        "fwd_params": Blocks(
            k=64, stages=3, consumers=3, registers=(160, 32), partial_sums=True, programs=132
        ),
    },
}


def call_of(query: tuple[int, ...], key: tuple[int, ...], **options: Any) -> Call:
    return check_call(*(jnp.zeros(shape, jnp.bfloat16) for shape in (query, key, key)), **options)


def spec_of(call: Call) -> KernelSpec:
    return describe(
        Settings(None, None, True, None, "float32"), call, describe_rows(call), (64, 64), 128, 128
    )


def lowered(lengths: tuple[int, int], options: dict[str, Any]) -> str:
    query, key, value = (
        normal(BATCH, length, HEADS, 64, dtype="bfloat16") for length in (lengths[0], lengths[1], lengths[1])
    )
    floats, rest = split_options(options)
    run = jax.jit(partial(both_passes, flash_attention_with_lse, rest))
    return export.export(run, platforms=["cuda"])((query, key, value), floats).mlir_module()


def made_of(program: str, operation: str, lengths: Iterable[int]) -> list[str]:
    """The lines of a program with an operation whose result ends in such lengths."""
    ending = "x".join(map(str, lengths))
    return [
        line for line in program.splitlines() if f"stablehlo.{operation}" in line and f"x{ending}x" in line
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bias_is_read_and_its_gradient_written_as_they_are(dtype: str) -> None:
    """Neither padded nor transposed, where the TMA unit takes its lengths."""
    program = lowered((128, 192), {"bias": normal(1, HEADS, 128, 192, dtype=dtype)})
    assert "flash_backward_bias" in program
    for operation in ("pad", "transpose"):
        assert not made_of(program, operation, (128, 192))
        assert not made_of(program, operation, (192, 128))


def test_a_bias_of_other_lengths_is_padded() -> None:
    assert made_of(lowered((100, 200), {"bias": normal(1, HEADS, 100, 200)}), "pad", (104, 224))


@pytest.mark.parametrize(("itemsize", "keys"), [(1, 384), (2, 320), (4, 320)])
def test_lengths_are_padded_to_what_the_tma_unit_takes(itemsize: int, keys: int) -> None:
    assert pair_lengths(Q, K, itemsize) == (Q, keys)
    assert pair_lengths(Q + 1, keys, itemsize) == (Q + 8, keys)


@pytest.mark.parametrize("name", PAIRS)
def test_tiles_of_pairs_lower_for_cuda(name: str) -> None:
    floats, rest = split_options(PAIRS[name])
    run = jax.jit(partial(both_passes, flash_attention_with_lse, rest))
    assert "flash_backward_joint" in export.export(run, platforms=["cuda"])(tensors(64), floats).mlir_module()


def test_only_masks_and_biases_of_every_pair_have_tiles() -> None:
    shapes = product((1, BATCH), (1, HEADS), (1, Q), (1, K))
    for shape in shapes:
        call = call_of(
            (BATCH, Q, HEADS, 64),
            (BATCH, K, HEADS, 64),
            bias=jnp.zeros(shape, jnp.float16),
            attention_mask=jnp.ones(shape, bool),
        )
        both = {"mask": 1, "bias": 2} if shape[2:] == (Q, K) else {}
        assert tiled_bytes(call) == both
        assert list(spec_of(call).tiled_pairs) == list(both)


@pytest.mark.parametrize(
    ("shape", "fastest"),
    [((1, 1), ("head", "entry")), ((1, 4), ("entry",)), ((2, 1), ("head",)), ((2, 4), ("block",))],
)
def test_programs_that_share_a_tile_are_neighbours(shape: tuple[int, int], fastest: tuple[str, ...]) -> None:
    call = call_of((2, 384, 4, 64), (2, 256, 4, 64), bias=jnp.zeros((*shape, 384, 256)))
    spec, sizes = spec_of(call), {"entry": 2, "head": 4, "block": 3}
    places = [
        dict(zip(sizes, map(int, locate_sharers(spec, jnp.int32(tile), 3, 4, 2)), strict=True))
        for tile in range(24)
    ]
    assert sorted(tuple(place.values()) for place in places) == list(product(range(2), range(4), range(3)))
    stride = 1
    for name in fastest:
        values = [place[name] for place in places[: stride * sizes[name] : stride]]
        assert values == list(range(sizes[name]))
        stride *= sizes[name]


@pytest.mark.parametrize("pairs", [{}, {"mask": 1}, {"bias": 2}, {"bias": 4}, {"bias": 4, "mask": 1}])
@pytest.mark.parametrize("dims", head_dims())
def test_the_table_has_blocks_that_fit_beside_any_pairs(dims: tuple[int, int], pairs: dict[str, int]) -> None:
    kinds = [f"{name}_tiles" for name in pairs]
    for others in product(("pairs",) if pairs else ("",), ("", "cap"), ("", "ranges"), ("", "bounds")):
        work = [*kinds, *others]
        room = partial(fits, "forward", dims, 2, pairs)
        assert room(choose(*dims, work, 2048, room))
        for kernel in ("backward_query", "backward_key", "backward_bias"):
            room = partial(fits, kernel, dims, 2, pairs)
            assert room(choose_backward(kernel, *dims, work, room))


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", PAIRS)
def test_both_passes_are_right_with_tiles_of_pairs(name: str, dims: tuple[int, int]) -> None:
    if dims[0] > 64 and "three consumers" in name:
        pytest.skip("the slots of the rings do not fit")
    assert_right(tensors(*dims), PAIRS[name])


@needs_hopper
@pytest.mark.parametrize("queries", [1, 17])
@pytest.mark.parametrize("name", ["mask of batch rows and heads, causal", "bias of heads"])
def test_few_queries_are_right_with_tiles_of_pairs(name: str, queries: int) -> None:
    query, key, value = tensors(128)
    options = {
        name: x[:, :, :queries] if name in ("bias", "attention_mask") else x
        for name, x in PAIRS[name].items()
    }
    assert_right((query[:, :queries], key, value), options)


@needs_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 3.0}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_bias_hides_changes_nothing(dtype: str, options: dict[str, Any], dim: int) -> None:
    """S4: the fast kernels compare no bias; what is not finite behind one must be found all the same."""
    bias = normal(1, HEADS, Q, K, dtype=dtype).at[..., 290].set(-jnp.inf).at[:, :, 3].set(-jnp.inf)
    run = jax.jit(partial(both_passes, flash_attention_with_lse, options))
    want = run(tensors(dim), {"bias": bias})
    for name in ("keys", "queries"):
        got = run(poisoned(tensors(dim), name), {"bias": bias})
        jax.tree.map(np.testing.assert_array_equal, got, want)


@needs_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("keys", [1, 33])
def test_a_tile_past_the_keys_replaces_no_gradient(keys: int, dtype: str) -> None:
    """The second consumer's keys are past the end, and the whole gradient is one tile wide."""
    query, key, value = tensors(64)
    assert_right((query, key[:, :keys], value[:, :keys]), {"bias": normal(1, HEADS, Q, keys, dtype=dtype)})
