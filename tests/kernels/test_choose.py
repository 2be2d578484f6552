"""One way in: which implementation a call runs, on every backend, and what is refused (S20)."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import flash_kernels
from kernel_cases import qkv

import kernels
from kernels import choose, triton, xla
from kernels.arguments import FLOAT_DTYPES
from kernels.choose import IMPLEMENTATIONS, implementation_for
from tests.kernels.interpreted import needs_compiler, needs_interpreter, run_interpreted

EVERYTHING = lambda _package: True  # noqa: E731
F32, BF16, F16 = "float32", "bfloat16", "float16"


@needs_compiler
def test_triton_in_a_process_of_its_own():
    run_interpreted(__file__)


@pytest.mark.parametrize(
    ("backend", "dtypes", "head_dims", "expected"),
    [
        ("cpu", {F32}, {64}, "xla"),
        ("gpu", {F32}, {64}, "triton"),
        ("gpu", {F16}, {256}, "triton"),
        ("gpu", {BF16}, {64, 257}, "xla"),
        ("tpu", {BF16}, {64}, "pallas_tpu"),
        ("tpu", {BF16, F32}, {256}, "pallas_tpu"),
        ("tpu", {F16}, {64}, "xla"),
        ("tpu", {BF16, F16}, {64}, "xla"),
        ("tpu", {F32}, {64, 512}, "xla"),
        ("metal", {F32}, {64}, "xla"),
    ],
)
def test_the_fastest_that_takes_the_call(backend, dtypes, head_dims, expected):
    assert implementation_for(backend, dtypes, head_dims, installed=EVERYTHING).name == expected


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_without_its_packages_it_is_not_chosen(missing):
    installed = lambda package: package != missing  # noqa: E731
    assert implementation_for("gpu", {F32}, {64}, installed=installed).name == "xla"
    with pytest.raises(NotImplementedError, match=f"platform: 'triton' needs the package {missing}.*'xla'"):
        implementation_for("gpu", {F32}, {64}, "triton", installed)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu", "metal"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("head_dim", [1, 4096])
def test_there_is_always_one_and_it_can_be_named(backend, dtype, head_dim):
    """Naming what would be chosen anyway changes nothing, and XLA takes everything."""
    chosen = implementation_for(backend, {dtype}, {head_dim})
    assert implementation_for(backend, {dtype}, {head_dim}, chosen.name) is chosen
    assert implementation_for(backend, {dtype}, {head_dim}, "xla").name == "xla"


@pytest.mark.parametrize(
    ("backend", "dtypes", "head_dims", "platform", "words"),
    [
        (
            "gpu",
            {F32},
            {64},
            "pallas_tpu",
            r"runs on tpu and cpu, and JAX runs on gpu\. Use 'triton' or 'xla'",
        ),
        (
            "tpu",
            {F32},
            {64},
            "triton",
            r"runs on gpu and cpu, and JAX runs on tpu\. Use 'pallas_tpu' or 'xla'",
        ),
        ("tpu", {BF16, F16}, {64}, "pallas_tpu", r"and the call has float16\. Use 'xla'"),
        (
            "cpu",
            {F16},
            {64},
            "pallas_tpu",
            r"takes float32 and bfloat16, and the call has float16\. Use 'xla'",
        ),
        ("gpu", {F32}, {64, 300}, "triton", r"takes head dims up to 256, and the call has 300\. Use 'xla'"),
    ],
)
def test_what_a_named_one_cannot_is_refused_by_name(backend, dtypes, head_dims, platform, words):
    """S20: with the reason, and those that can."""
    with pytest.raises(NotImplementedError, match=f"^platform: '{platform}' .*{words}"):
        implementation_for(backend, dtypes, head_dims, platform, EVERYTHING)


@pytest.mark.parametrize("platform", ["cuda", "", [], 3])
def test_an_unknown_platform_is_refused(platform):
    with pytest.raises(ValueError, match=r"^platform: got .* expected one of 'triton', 'pallas_tpu', 'xla'"):
        kernels.flash_attention(*qkv(), platform=platform)


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, "int8", "float64"])
def test_dtypes_that_are_none_are_no_reason(dtype):
    """The checks of the one that is chosen refuse them."""
    taken = implementation_for("tpu", {dtype}, {64}, installed=EVERYTHING).name
    assert taken == ("xla" if dtype == F16 else "pallas_tpu")


@pytest.mark.parametrize("name", ["triton", "pallas_tpu"])
def test_the_largest_head_dim_is_that_of_the_kernels(name):
    (declared,) = (x for x in IMPLEMENTATIONS if x.name == name)
    module = importlib.import_module(f"{declared.module}.flash_attention")
    assert declared.largest_head_dim == module.MAX_HEAD_DIM


def described(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What the call tells `implementation_for`."""
    asked: list[tuple[Any, ...]] = []

    def spy(*arguments: Any) -> Any:
        asked.append(arguments)
        raise LookupError

    monkeypatch.setattr(choose, "implementation_for", spy)
    with pytest.raises(LookupError):
        kernels.flash_attention(**call)
    return asked[0]


def test_every_dtype_and_head_dim_of_a_call_counts(monkeypatch):
    query, key, value = (x.astype(BF16) for x in qkv(value_dim=24))
    bias = np.zeros((1, 1, query.shape[1], key.shape[1]), np.float32)
    call = {"query": query, "key": key, "value": value, "bias": bias, "logits_dtype": jnp.float16}
    backend, dtypes, head_dims, platform = described(call | {"platform": "xla"}, monkeypatch)
    assert backend == jax.default_backend()
    assert dtypes == {BF16, F32, F16}
    assert head_dims == {query.shape[3], 24}
    assert platform == "xla"


MALFORMED = [
    ("query", {"query": 3}),
    ("query", {"query": None}),
    ("query", {"query": [[1.0]]}),
    ("query", {"query": np.zeros((2, 40), F32)}),
    ("query", {"query": np.zeros((2, 40, 4, 16), "float64")}),
    ("value", {"value": "float16"}),
    ("key", {"key": np.zeros((2, 40, 4, 300), F32)}),
    ("bias", {"bias": 1.0}),
    ("logits_dtype", {"logits_dtype": [1, 2]}),
    ("logits_dtype", {"logits_dtype": "float64"}),
]


@needs_compiler
@pytest.mark.parametrize(("name", "spoilt"), MALFORMED, ids=str)
def test_a_malformed_call_is_refused_in_the_words_of_the_one_that_is_chosen(name, spoilt):
    """S20: never by the choice."""
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | spoilt
    words = []
    for function in (kernels.flash_attention, xla.flash_attention):
        with pytest.raises(ValueError, match=f"^{name}: got") as refusal:
            function(**arguments)
        words.append(str(refusal.value))
    assert words[0] == words[1]


@pytest.mark.parametrize("wrong", [{"scale": 1.0}, {"query": None}])
def test_arguments_that_do_not_exist_are_a_type_error(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        kernels.flash_attention(*qkv(), **wrong)


@pytest.mark.parametrize("name", ["fwd_params", "bwd_params"])
def test_block_sizes_need_a_platform(name):
    sizes = {name: xla.ChunkSizes(16, 16)}
    with pytest.raises(ValueError, match=rf'^{name}: got a ChunkSizes.*name it, such as platform="triton"'):
        kernels.flash_attention(*qkv(), **sizes)
    named = kernels.flash_attention(*qkv(), **sizes, platform="xla")
    np.testing.assert_array_equal(named, xla.flash_attention(*qkv(), **sizes))


def test_options_are_those_of_the_implementations_and_platform():
    for name in ("flash_attention", "flash_attention_with_lse"):
        shown = inspect.signature(getattr(kernels, name)).parameters
        common = inspect.signature(getattr(xla, name)).parameters
        assert list(shown) == [*common, "platform"]
        assert all(shown[option] == common[option] for option in common)
        assert shown["platform"].kind is inspect.Parameter.KEYWORD_ONLY
        assert getattr(kernels, name).__doc__


def test_on_a_cpu_it_is_xla_unless_it_is_named():
    """By position or by keyword, also in Triton's interpreter, under jit and derived."""
    arrays = qkv()
    options = {"causal": True, "sliding_window": (9, None), "softmax_scale": 0.2}
    mask = np.arange(40 * 50).reshape(1, 1, 40, 50) % 3 > 0
    want = xla.flash_attention_with_lse(*arrays, mask, **options)
    for call in (
        kernels.flash_attention_with_lse,
        jax.jit(kernels.flash_attention_with_lse, static_argnames=options),
    ):
        for got, expected in zip(call(*arrays, mask, **options), want, strict=True):
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(kernels.flash_attention(*arrays, mask, **options), want[0])
    pairs = [
        jax.grad(lambda q, call=call: call(q, *arrays[1:]).sum())(arrays[0])
        for call in (kernels.flash_attention, xla.flash_attention)
    ]
    np.testing.assert_array_equal(*pairs)


@flash_kernels
def test_a_named_one_runs(kernel):
    """Triton in its interpreter, XLA without: bit for bit what its own function returns."""
    name = "triton" if kernel.call is triton.flash_attention_with_lse else "xla"
    got = kernels.flash_attention_with_lse(*qkv(), causal=True, **kernel.blocks, platform=name)
    for one, other in zip(got, kernel.call(*qkv(), causal=True, **kernel.blocks), strict=True):
        np.testing.assert_array_equal(one, other)


@needs_interpreter
def test_the_interpreter_is_run_where_it_is_named_alone():
    def primitives(**options: Any) -> str:
        return str(jax.make_jaxpr(lambda *arrays: kernels.flash_attention(*arrays, **options))(*qkv()))

    assert "pure_callback" in primitives(platform="triton")
    assert "pure_callback" not in primitives()


@needs_compiler
def test_a_named_one_that_finds_no_device_says_who_can():
    """Whether an interpreter or another machine's compiler is at work, the kernels know themselves."""
    with pytest.raises(NotImplementedError, match=r"kernels\.triton: JAX runs on cpu.*Use kernels\.xla"):
        kernels.flash_attention(*qkv(), platform="triton")
    with pytest.raises(
        NotImplementedError, match=r"kernels\.pallas\.tpu: compiled for cpu.*Use kernels\.xla"
    ):
        kernels.flash_attention(*qkv(), platform="pallas_tpu")


@needs_compiler
def test_importing_kernels_imports_none_of_the_accelerators():
    code = (
        "import kernels, sys; kernels.flash_attention; from jax._src import xla_bridge; "
        "sys.exit(any(x in sys.modules for x in ('triton', 'jax_triton', 'jax.experimental.pallas')) "
        "or xla_bridge.backends_are_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
