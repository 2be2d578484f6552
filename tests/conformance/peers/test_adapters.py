"""The arguments that adapters of peers pass to their libraries, which fakes record here."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.peers import (
    flash_attn_jax,
    flax_nnx,
    jax_gpu_mha,
    jax_tpu_splash,
    keras,
    onnx,
    tokamax,
    torch_sdpa,
)

ARRAY = np.zeros((1, 4, 1, 8), np.float32)


class Noted:
    """Notes the arguments that it is called with."""

    def __call__(self, *arrays: Any, **options: Any) -> str:
        self.arrays, self.options = arrays, options
        return "out"


def library(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Put a module of some contents in the place of a library."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


WINDOWS = [(None, (-1, -1)), ((3, None), (3, -1)), ((None, 0), (-1, 0)), (2, (2, 2))]


@pytest.mark.parametrize(("window", "expected"), WINDOWS)
def test_flash_attn_jax_leaves_sides_open_by_minus_1(
    window: Any, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    library(monkeypatch, "flash_attn_jax", flash_mha=noted)
    flash_attn_jax.MHA.call(ARRAY, ARRAY, ARRAY, causal=True, softmax_scale=0.5, sliding_window=window)
    assert noted.options == {"softmax_scale": 0.5, "is_causal": True, "window_size": expected}


@pytest.mark.parametrize(
    ("window", "expected"), [((3, None), (3, 8)), ((None, 0), (8, 0)), (2, 2), (None, None)]
)
def test_tokamax_gets_a_side_past_the_ends_for_an_open_one(
    window: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted()
    library(monkeypatch, "tokamax", dot_product_attention=noted)
    tokamax.XLA.call(ARRAY, ARRAY, ARRAY, sliding_window=window, attention_mask="mask")
    assert noted.options["local_window_size"] == expected
    assert (noted.options["mask"], noted.options["implementation"]) == ("mask", "xla")


def test_keras_needs_its_jax_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert keras.JAX.why_not_here("cpu") == "needs a process with KERAS_BACKEND=jax, and it is torch"


def test_dropout_of_flax_has_a_mask_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    library(monkeypatch, "flax.nnx", dot_product_attention=noted)
    flax_nnx.DROPOUT.call(ARRAY, ARRAY, ARRAY, dropout_prob=0.5, dropout_seed=2**32 - 1)
    assert (noted.options["broadcast_dropout"], noted.options["dropout_rate"]) == (False, 0.5)
    assert noted.options["dropout_rng"] is not None


@given(st.integers(1, 16), st.integers(1, 16))
def test_mha_gets_as_many_blocks_of_queries_as_of_keys(queries: int, keys: int) -> None:
    noted = Noted()
    sizes: Any = SimpleNamespace
    with pytest.MonkeyPatch.context() as patch:
        fake = SimpleNamespace(mha=noted, BlockSizes=lambda *blocks, **others: sizes(**others))
        patch.setattr(jax_gpu_mha, "_library", lambda: fake)
        jax_gpu_mha.GPU.call(np.zeros((1, 128 * queries)), np.zeros((1, 128 * keys)), None, blocks=(128, 128))
    chosen = noted.options["block_sizes"]
    assert 128 * queries % chosen.block_q_dq == 128 * keys % chosen.block_kv_dkv == 0
    assert 128 * queries // chosen.block_q_dq == 128 * keys // chosen.block_kv_dkv


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 1), (None, 0), 3])
def test_the_mask_of_splash_attention_is_that_of_the_options(causal: bool, window: Any) -> None:
    from jax.experimental.pallas.ops.tpu import splash_attention

    mask = jax_tpu_splash._mask(splash_attention, (8, 12), causal, window)
    rows, keys = np.arange(8)[:, None], np.arange(12)
    left, right = (
        (None, None) if window is None else window if isinstance(window, tuple) else (window, window)
    )
    expected = np.ones((8, 12), bool)
    expected &= (rows >= keys) if causal else True
    expected &= (keys >= rows - left) if left is not None else True
    expected &= (keys <= rows + right) if right is not None else True
    np.testing.assert_array_equal(np.asarray(mask[:, :]), expected)


class Evaluator:
    """Notes its model and its inputs, and returns Q."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, _: None, given: dict[str, Any]) -> list[Any]:
        NODES.append((self.model, sorted(given), given["Q"].shape))
        return [given["Q"]]


NODES: list[Any] = []


def test_onnx_gets_heads_first_and_one_mask_or_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = SimpleNamespace(
        make_node=lambda kind, inputs, outputs, **attributes: attributes,
        make_tensor_value_info=lambda *_: None,
        make_graph=lambda nodes, *_: nodes[0],
        make_model=lambda graph, opset_imports: (graph, opset_imports),
        make_opsetid=lambda domain, version: version,
    )
    library(monkeypatch, "onnx", helper=helper, TensorProto=SimpleNamespace(FLOAT=1))
    library(monkeypatch, "onnx.reference", ReferenceEvaluator=Evaluator)
    NODES.clear()
    onnx._evaluator.cache_clear()
    query = jnp.zeros((1, 4, 2, 8))
    out = onnx.REFERENCE.call(query, query, query, bias=jnp.zeros((4, 4)), sliding_window=(None, 1))
    onnx._evaluator.cache_clear()
    assert out.shape == query.shape
    ((attributes, opsets), names, shape) = NODES[0]
    assert attributes == {"is_causal": 0, "left_window_size": -1, "right_window_size": 1}
    assert (opsets, names, shape) == ([25], ["K", "Q", "V", "attn_mask"], (1, 2, 4, 8))
    with pytest.raises(NotImplementedError, match="attention_mask and bias: got both"):
        onnx.REFERENCE.call(query, query, query, bias=query, attention_mask=query)


class Tensor:
    """A tensor of torch, as far as the conversion goes: views of bits and copies."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, array.dtype

    def view(self, dtype: Any) -> "Tensor":
        return Tensor(self.array.view(dtype))

    def detach(self) -> "Tensor":
        return self

    def contiguous(self) -> "Tensor":
        return Tensor(np.ascontiguousarray(self.array))

    def numpy(self) -> Any:
        if self.dtype == ml_dtypes.bfloat16:
            raise TypeError("torch hands no bfloat16 to NumPy")
        return self.array


def from_numpy(array: Any) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        raise TypeError("torch takes no bfloat16 of NumPy")
    return Tensor(array)


TORCH = SimpleNamespace(
    from_numpy=from_numpy, bfloat16=np.dtype(ml_dtypes.bfloat16), int16=np.dtype(np.int16)
)


@given(
    st.binary(min_size=24, max_size=24),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, np.bool_]),
)
def test_a_tensor_has_the_bits_of_its_array(bits: bytes, dtype: Any) -> None:
    if dtype == np.bool_:
        bits = bytes(byte & 1 for byte in bits)
    array = np.frombuffer(bits, dtype).reshape(2, -1)
    tensor = torch_sdpa.to_torch(TORCH, array)
    assert not np.shares_memory(tensor.array, array)
    back = torch_sdpa.to_numpy(TORCH, tensor)
    assert (back.dtype, back.tobytes()) == (array.dtype, bits)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "bias": ARRAY},
        {"causal": True, "attention_mask": ARRAY},
        {"attention_mask": ARRAY, "bias": ARRAY},
    ],
)
def test_torch_takes_a_mask_or_a_bias_or_causal_order(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="attention_mask, bias, causal: got several"):
        torch_sdpa.MATH.call(ARRAY, ARRAY, ARRAY, **options)
