"""The interpreter: right in every dtype, and it sees every access outside the arrays (clause S19)."""

from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from attest.conformance.record import Verdict
from attest.reference.semantics import STANDARD
from tests.kernels.interpreted import needs_interpreter

BF16 = np.dtype(ml_dtypes.bfloat16)
pytestmark = needs_interpreter
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BF16)


def run(kernel: Any, arguments: list[Any], *outputs: tuple[Any, Any], grid: Any = (1,), **constants: Any):
    from attest.kernels.triton.interpreter import interpret

    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    return interpret(kernel, arguments, structs, constants, grid)


def drained() -> list[str]:
    from attest.kernels.triton.memory import drain_violations

    return [str(violation) for violation in drain_violations()]


@triton.jit
def cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@pytest.mark.parametrize("dtype", FLOATS)
def test_casts_round_to_nearest_even(dtype: np.dtype[Any]) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1024, np.uint32)
    ties = (np.arange(1024, dtype=np.uint32) << 15) | 0x3F000000
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38, 65504.0, 65520.0], np.float32)
    wide = np.concatenate([bits.view(np.float32), ties.view(np.float32), np.resize(special, 2048)])
    (narrow,) = run(cast, [wide], (wide.shape, dtype), N=wide.size)
    with np.errstate(all="ignore"):
        wanted = wide.astype(dtype)
    np.testing.assert_array_equal(narrow.astype(np.float32), wanted.astype(np.float32))
    (again,) = run(cast, [narrow], (wide.shape, np.float32), N=wide.size)
    np.testing.assert_array_equal(again, wanted.astype(np.float32))


@triton.jit
def arithmetic(x, y, out, chosen, top, total, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a * b + a - b)
    tl.store(chosen + at, tl.where(a > b, tl.minimum(a, b), a + b))
    tl.store(top, tl.max(a, 0))
    tl.store(total, tl.sum(a.to(tl.float32), 0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_rounds_in_the_dtype(dtype: np.dtype[Any]) -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(64).astype(dtype) for _ in range(2))
    out, chosen, top, total = run(
        arithmetic, [a, b], ((64,), dtype), ((64,), dtype), ((), dtype), ((), np.float32), N=64
    )
    np.testing.assert_array_equal(out, a * b + a - b)
    np.testing.assert_array_equal(chosen, np.where(a > b, b, a + b))
    assert top == a.max()
    np.testing.assert_allclose(total, a.astype(np.float32).sum(), rtol=1e-6)


@triton.jit
def dot(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.trans(tl.load(y + at)), input_precision="ieee"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_dot_sums_in_float32(dtype: np.dtype[Any]) -> None:
    # 2048 + 31 * 1 is 2048 in either 16-bit format, were it summed in it.
    x = np.ones((32, 32), dtype)
    x[:, 0] = 2048
    (out,) = run(dot, [x, np.ones_like(x)], (x.shape, np.float32), N=32)
    np.testing.assert_array_equal(out, 2079)


@triton.jit
def dot_of_a_copy(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    copy = tl.trans(tl.load(y + at)) + 0.0
    tl.store(out + at, tl.dot(tl.load(x + at), copy, input_precision="ieee"))


def test_a_dot_has_the_same_bits_wherever_its_operands_lie() -> None:
    """A transposed tile and a copy of it are the same numbers, in another order in memory."""
    dice = np.random.default_rng(0)
    x, y = (dice.standard_normal((32, 32), np.float32) for _ in range(2))
    transposed, copied = (run(kernel, [x, y], (x.shape, np.float32), N=32) for kernel in (dot, dot_of_a_copy))
    np.testing.assert_array_equal(transposed[0], copied[0])


@triton.jit
def join(x, out, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    pairs = tl.permute(tl.join(a, -a), (1, 0))
    tl.store(out + tl.arange(0, 2 * N), tl.reshape(pairs, (2 * N,)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_shapes_change_in_every_dtype(dtype: np.dtype[Any]) -> None:
    x = np.arange(16).astype(dtype)
    (out,) = run(join, [x], ((32,), dtype), N=16)
    np.testing.assert_array_equal(out, np.concatenate([x, -x]))


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b * d


@triton.jit
def reduce(x, top, least, sums, products, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tile = tl.load(x + at)
    rows = tl.arange(0, N)
    tl.store(top + rows, tl.max(tile, 1))
    tl.store(least, tl.min(tl.min(tile, 1), 0))
    s, p = tl.reduce((tile, tile), 1, add_pairs)
    tl.store(sums + rows, s)
    tl.store(products + rows, p)


def test_reductions_of_one_function_and_another() -> None:
    x = np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
    x[0] = np.nan
    x[1, 3] = np.nan
    top, least, sums, products = run(
        reduce, [x], ((8,), np.float32), ((), np.float32), ((8,), np.float32), ((8,), np.float32), N=8
    )
    np.testing.assert_array_equal(top, np.fmax.reduce(x, 1))
    assert least == np.nanmin(x)
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-5)
    np.testing.assert_allclose(products, x.prod(1), rtol=1e-5)


@triton.jit
def integers(flags, words, n, out, high, N: tl.constexpr):
    at = tl.arange(0, N)
    kept = tl.load(flags + at)
    w = tl.load(words + at)
    tl.store(out + at, kept & (at < n))
    tl.store(high + at, tl.umulhi(w, tl.full([], 0xD2511F53, tl.uint32)) ^ (w * 5))


def test_booleans_and_words() -> None:
    random = np.random.default_rng(3)
    flags, words = random.integers(0, 2, 32).astype(bool), random.integers(0, 2**32, 32, np.uint32)
    out, high = run(integers, [flags, words, 20], ((32,), bool), ((32,), np.uint32), N=32)
    np.testing.assert_array_equal(out, flags & (np.arange(32) < 20))
    wide = words.astype(np.uint64)
    wanted = (wide * 0xD2511F53 >> np.uint64(32)).astype(np.uint32) ^ (wide * 5).astype(np.uint32)
    np.testing.assert_array_equal(high, wanted)


@triton.jit
def shifted(x, n, shift_read, shift_write, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + shift_read + at, mask=at < n, other=0.0)
    tl.store(y + shift_write + at, value, mask=at < n)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shifts", "sentences"),
    [
        ((0, 0), []),
        ((3, 0), ["shifted read 'x' 3 elements past its end (program 1)"]),
        ((-1, 0), ["shifted read 'x' 1 element before its start (program 0)"]),
        ((0, 2), ["shifted wrote 'y' 2 elements past its end (program 1)"]),
        ((0, -5), ["shifted wrote 'y' 5 elements before its start (program 0)"]),
        ((2**30, 0), ["shifted read 'x' 1073741788 elements past its end (program 0)"]),
    ],
)
def test_an_access_outside_its_array_is_seen(
    dtype: np.dtype[Any], shifts: tuple[int, int], sentences: list[str]
) -> None:
    x = np.arange(100).astype(dtype)
    (y,) = run(shifted, [x, 100, *shifts], ((100,), dtype), grid=(2,), N=64)
    assert drained() == sentences
    assert drained() == []
    np.testing.assert_array_equal(x, np.arange(100).astype(dtype))
    read, write = shifts
    source = np.arange(100) + read
    value = np.where((source >= 0) & (source < 100), source, np.nan)
    wanted = np.full(100, np.nan)
    target = np.arange(100) + write
    inside = (target >= 0) & (target < 100)
    wanted[target[inside]] = value[inside]
    np.testing.assert_array_equal(y.astype(np.float64), wanted)


@triton.jit
def unmasked(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at))


def test_a_planted_unmasked_access_is_named() -> None:
    (y,) = run(unmasked, [np.zeros(13, np.int32)], ((16,), np.int32), N=16)
    assert drained() == ["unmasked read 'x' 3 elements past its end (program 0)"]
    np.testing.assert_array_equal(y, [0] * 13 + [-1] * 3)
    run(unmasked, [np.zeros(16, np.int32)], ((13,), np.int32), N=16)
    assert drained() == ["unmasked wrote 'y' 3 elements past its end (program 0)"]


@triton.jit
def copies(x, n, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tl.load(x + at), mask=at < n)


def test_a_read_past_the_end_fails_a_subject_whose_answer_is_right() -> None:
    from attest.conformance.cases.case import Case
    from attest.conformance.running.judge import judge
    from attest.kernels.triton.launch import launch
    from attest.kernels.triton.memory import drain_violations
    from attest.kernels.triton.target import Launch
    from tests.toys import toy, toy_attention

    def careless(query: Any, key: Any, value: Any, **options: Any) -> Any:
        out = toy_attention(query, key, value, **options)
        like = jax.ShapeDtypeStruct(out.shape, out.dtype)
        what = Launch(copies, (out, out.size), (like,), {"N": 64}, (-(-out.size // 64),), 4, 2)
        return launch(what)[0]

    subject = toy(careless, semantics=replace(STANDARD, gradients=frozenset()), violations=drain_violations)
    case = Case(q_len=5, kv_len=7, head_dim=4, causal=True, seed=3)
    results = judge(subject, case, ("forward", "purity", "transforms.vmap", "transforms.eager"))
    assert {(result.verdict, result.clauses) for result in results} == {(Verdict.FAIL, ("S19",))}
    assert {result.message for result in results} == {"copies read 'x' 44 elements past its end (program 0)"}


@triton.jit
def writes_its_input(x, y, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 7)


def test_an_input_is_never_written() -> None:
    x = np.zeros(16, np.int32)
    (y,) = run(writes_its_input, [x], ((16,), np.int32), N=16)
    assert drained() == ["writes_its_input wrote into its input 'x' (program 0)"]
    assert not x.any()
    np.testing.assert_array_equal(y, -1)


@triton.jit
def reads_nothing(x, y):
    tl.store(y, tl.load(tl.full([], 64, tl.int64).to(tl.pointer_type(tl.float32))))


def test_an_address_of_nothing_is_seen() -> None:
    run(reads_nothing, [np.zeros(16, np.float32)], ((), np.float32))
    assert drained() == ["reads_nothing read an address that belongs to no argument (program 0)"]


@triton.jit
def hides_half(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at, mask=at < N // 2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_a_mask_hides_is_undefined(dtype: np.dtype[Any]) -> None:
    (y,) = run(hides_half, [np.zeros(16, dtype)], ((16,), dtype), N=16)
    np.testing.assert_array_equal(np.isnan(y), np.arange(16) >= 8)
    assert drained() == []


@triton.jit
def where_am_i(y):
    x, z = tl.program_id(0), tl.program_id(2)
    at = (x * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + z
    tl.store(y + at, at)


def test_every_program_of_a_grid_runs() -> None:
    (y,) = run(where_am_i, [], ((24,), np.int32), grid=(2, 3, 4))
    np.testing.assert_array_equal(y, np.arange(24))
    (untouched,) = run(where_am_i, [], ((4,), np.int32), grid=(0,))
    np.testing.assert_array_equal(untouched, -1)


@triton.jit
def splits(x):
    return tl.reshape(x, (3,))


@triton.jit
def fails_late(y):
    if tl.program_id(0) == 2:
        tl.store(y + tl.arange(0, 4), splits(tl.arange(0, 4)))


@triton.jit
def adds_atomically(y):
    tl.atomic_add(y, 1.0)


def test_an_error_names_kernel_and_program() -> None:
    from attest.kernels.triton.interpreter import KernelError

    with pytest.raises(KernelError, match=r"^kernel fails_late, program 2: ValueError: .*power of 2$"):
        run(fails_late, [], ((4,), np.int32), grid=(4,))
    with pytest.raises(KernelError, match="atomic operations are not supported"):
        run(adds_atomically, [], ((), np.float32))
