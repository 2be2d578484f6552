"""Launches by XLA on NVIDIA's GPUs: the PTX takes arrays alone, and the program names what it launches."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from attest.kernels.triton import compiled, flash_attention, ptx
from attest.kernels.triton import launch as module
from tests.kernels.interpreted import needs_compiler

pytestmark = needs_compiler

ENTRY = """.version 8.7
.visible .entry product(
	.param .u64 .ptr .global .align 1 product_param_0,
	.param .u32 product_param_1,
	.param .u64 .ptr .global .align 1 product_param_2,
	.param .u64 .ptr .global .align 1 product_param_3
)
.reqntid 128
{
	ld.param.b32 	%r1, [product_param_1];
	ld.param.b64 	%rd1, [product_param_0];
	ld.param.b64 	%rd2, [product_param_2];
}
"""


def test_ints_come_from_constant_memory_and_what_triton_adds_is_left_out() -> None:
    found = ptx.with_ints(ENTRY, {1: -7}, 3)
    assert ".visible .const .align 8 .s32 product_int_1 = -7;\n.visible .entry product(" in found
    assert "ld.const.b32 \t%r1, [product_int_1];" in found
    assert re.findall(r"\.param .* (\w+)", found) == ["product_param_0", "product_param_2"]
    assert found.count("ld.param") == 2
    assert ".reqntid 128" in found


def test_ints_of_64_bits_have_them() -> None:
    wide = ENTRY.replace(".param .u32 p", ".param .u64 p").replace("ld.param.b32", "ld.param.b64")
    found = ptx.with_ints(wide, {1: 2**40}, 3)
    assert f".s64 product_int_1 = {2**40};" in found
    assert "ld.const.b64 \t%r1, [product_int_1];" in found


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        (
            ENTRY.replace(
                "ld.param.b32 \t%r1, [product_param_1]", "ld.param.v2.b32 {%r1, %r2}, [product_param_1]"
            ),
            3,
            1,
        ),
        (ENTRY, 2, 2),  # one that is read, as memory of Triton's own would be
    ],
)
def test_what_is_read_in_an_unknown_way_is_refused(text: str, count: int, name: int) -> None:
    with pytest.raises(
        ValueError, match=rf"product_param_{name} of the compiled kernel is read in an unknown way"
    ):
        ptx.with_ints(text, {1: 7}, count)


def test_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="expected PTX with an entry"):
        ptx.with_ints("", {}, 1)


@pytest.fixture
def for_hopper(monkeypatch: pytest.MonkeyPatch):
    for name in ("attest.kernels.triton.passes.target_device", "attest.kernels.triton.launch.target_device"):
        monkeypatch.setattr(name, lambda: "sm_90")
    module._runner.cache_clear()
    yield
    module._runner.cache_clear()


def program(lengths: tuple[int, int]) -> str:
    query, key = (jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32) for length in lengths)
    attend = jax.jit(partial(flash_attention, causal=True))
    return attend.trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("for_hopper")
def test_a_program_has_the_kernel_and_its_lengths() -> None:
    """One compilation by Triton serves all lengths: only the PTX differs."""
    compiled.compiled_on.cache_clear()
    texts = [program(lengths) for lengths in ((37, 41), (53, 59))]
    for text, (queries, keys) in zip(texts, ((37, 41), (53, 59)), strict=True):
        assert text.count("__gpu$xla.gpu.ptx") == 1
        assert f" = {queries};" in text
        assert f" = {keys};" in text
        assert "shared_mem_bytes = " in text
    assert compiled.compiled_on.cache_info().misses == 1


@pytest.mark.usefixtures("for_hopper")
def test_what_does_not_compile_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiled, "compile_for", fails)
    compiled.compiled_on.cache_clear()
    with pytest.raises(RuntimeError, match="no such instruction"):
        program((37, 43))
