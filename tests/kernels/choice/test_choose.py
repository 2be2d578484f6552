"""One way in: which implementation a call runs, on every device, and what is refused (S20)."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from attest import kernels
from attest.kernels import triton, xla
from attest.kernels.call.options import FLOAT_DTYPES
from attest.kernels.choice import choose
from attest.kernels.choice.choose import Device, Traits, implementation_for
from attest.kernels.configs.tables import read_table
from attest.kernels.implementations import IMPLEMENTATIONS, MOSAIC_GPU, PALLAS_TPU, TRITON, XLA
from tests.kernels.implementations import flash_kernels
from tests.kernels.interpreted import needs_compiler, needs_interpreter
from tests.kernels.kernel_cases import qkv

EVERYTHING = lambda _package: True  # noqa: E731
F32, BF16, F16 = "float32", "bfloat16", "float16"


CPU, TPU, METAL = Device("cpu"), Device("tpu"), Device("METAL")
HOPPER, AMPERE, MI300 = Device("gpu", "9.0"), Device("gpu", "8.0"), Device("gpu", "gfx942")


def traits(
    dtypes: str, head_dims: tuple[int, ...] = (64,), logits: str = "", dropout: bool = False
) -> Traits:
    """Dtypes by name, with spaces between."""
    return Traits(frozenset(dtypes.split()), frozenset(logits.split()), frozenset(head_dims), dropout)


@pytest.mark.parametrize(
    ("device", "call", "expected"),
    [
        (CPU, traits(F32), "xla"),
        (AMPERE, traits(F32), "triton"),
        (AMPERE, traits(F16, (256,)), "triton"),
        (AMPERE, traits(BF16, (64, 257)), "xla"),
        (MI300, traits(BF16), "triton"),
        (Device("gpu"), traits(BF16), "triton"),
        (HOPPER, traits(BF16), "mosaic_gpu"),
        (HOPPER, traits(F16, (256, 1)), "mosaic_gpu"),
        (HOPPER, traits(BF16, logits=f"{F32} {F16}"), "mosaic_gpu"),
        (HOPPER, traits(BF16, (64, 257)), "xla"),
        (HOPPER, traits(F32), "triton"),
        (HOPPER, traits(f"{BF16} {F32}"), "triton"),
        (HOPPER, traits(F32, logits=BF16), "triton"),
        (HOPPER, traits(BF16, dropout=True), "mosaic_gpu"),
        (HOPPER, traits(F16, (300,), dropout=True), "xla"),
        (TPU, traits(BF16), "pallas_tpu"),
        (TPU, traits(BF16, (256,), logits=F32), "pallas_tpu"),
        (TPU, traits(BF16, dropout=True), "pallas_tpu"),
        (TPU, traits(F16), "xla"),
        (TPU, traits(BF16, logits=F16), "xla"),
        (TPU, traits(F32, (64, 512)), "xla"),
        (METAL, traits(F32), "xla"),
    ],
)
def test_the_fastest_that_takes_the_call(device, call, expected):
    assert implementation_for(device, call, installed=EVERYTHING).name == expected


@pytest.mark.parametrize(
    ("device", "missing"), [(AMPERE, "triton"), (MI300, "triton"), (MI300, "jax_triton")]
)
def test_without_its_packages_it_is_not_chosen(device, missing):
    installed = lambda package: package != missing  # noqa: E731
    assert implementation_for(device, traits(F32), installed=installed).name == "xla"
    assert implementation_for(HOPPER, traits(BF16), installed=installed).name == "mosaic_gpu"
    with pytest.raises(NotImplementedError, match=f"platform: 'triton' needs the package {missing}.*'xla'"):
        implementation_for(device, traits(F32), "triton", installed)


def test_gpus_of_nvidia_need_no_jax_triton():
    installed = lambda package: package != "jax_triton"  # noqa: E731
    assert implementation_for(AMPERE, traits(F32), installed=installed).name == "triton"


@pytest.mark.parametrize(
    ("device", "version", "expected"),
    [
        (HOPPER, (0, 11, 2), "mosaic_gpu"),
        (HOPPER, (0, 11, 3), "triton"),
        (HOPPER, (0, 11, 1), "xla"),
        (HOPPER, (0, 12, 0), "xla"),
        (TPU, (0, 11, 2), "pallas_tpu"),
        (TPU, (0, 11, 3), "xla"),
        (TPU, (0, 10, 2), "xla"),
        (CPU, (0, 6, 1), "xla"),
        (CPU, (0, 12, 9), "xla"),
    ],
)
def test_one_that_was_not_judged_on_this_version_of_jax_is_not_chosen(device, version, expected):
    chosen = implementation_for(device, traits(BF16), installed=EVERYTHING, jax_version=version)
    assert chosen.name == expected


@pytest.mark.parametrize(
    ("device", "platform", "version", "words"),
    [
        (
            HOPPER,
            "triton",
            (0, 12, 0),
            r"'triton' needs jax >=0\.11\.2,<0\.12, and jax is 0\.12\.0\. Use 'xla'",
        ),
        (CPU, "triton", (0, 11, 1), r"'triton' needs jax >=0\.11\.2,<0\.12, and jax is 0\.11\.1\. Use 'xla'"),
        (
            HOPPER,
            "mosaic_gpu",
            (0, 11, 3),
            r"'mosaic_gpu' needs jax >=0\.11\.2,<0\.11\.3, and jax is 0\.11\.3\. Use 'triton' or 'xla'",
        ),
        (TPU, "pallas_tpu", (0, 10, 2), r"'pallas_tpu' needs jax >=0\.11\.2,<0\.11\.3, and jax is 0\.10\.2"),
        (
            CPU,
            "xla",
            (0, 11, 0),
            r"'xla' needs jax >=0\.6\.1,.*!=0\.11\.0,<0\.13, and jax is 0\.11\.0\. No other one can",
        ),
        (
            CPU,
            None,
            (0, 11, 0),
            r"'xla' needs jax >=0\.6\.1,.*!=0\.11\.0,<0\.13, and jax is 0\.11\.0\. Install such",
        ),
        (
            HOPPER,
            None,
            (0, 5, 3),
            r"'xla' needs jax >=0\.6\.1,.* and jax is 0\.5\.3\. Install such a version",
        ),
    ],
    ids=str,
)
def test_one_that_was_not_judged_on_this_version_of_jax_is_refused_by_name(device, platform, version, words):
    with pytest.raises(NotImplementedError, match=f"^platform: {words}"):
        implementation_for(device, traits(BF16), platform, EVERYTHING, version)


def test_the_versions_of_the_records_are_those_that_the_package_allows():
    """Pip then installs no version of JAX on which nothing runs."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for record, needed in ((XLA, project["dependencies"]), (TRITON, extras["triton"])):
        requirements = [Requirement(x) for x in needed]
        allowed = next(x.specifier for x in requirements if x.name == "jax")
        assert SpecifierSet(str(record.capabilities.jax_versions)) == allowed


def test_the_page_has_the_versions_of_the_records():
    page = (Path(__file__).parents[3] / "docs/reference/kernels.md").read_text()
    rows = re.findall(r'^\| `"(\w+)"` \|.*\| `([^`]*)` \|$', page, flags=re.MULTILINE)
    assert dict(rows) == {x.name: str(x.capabilities.jax_versions) for x in IMPLEMENTATIONS}


@pytest.mark.parametrize("device", [CPU, AMPERE, HOPPER, TPU, METAL], ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("head_dim", [1, 4096])
@pytest.mark.parametrize("dropout", [False, True])
def test_there_is_always_one_and_it_can_be_named(device, dtype, head_dim, dropout):
    """Naming what would be chosen anyway changes nothing, and XLA takes everything."""
    call = traits(dtype, (head_dim,), dtype, dropout)
    chosen = implementation_for(device, call)
    assert implementation_for(device, call, chosen.name) is chosen
    assert implementation_for(device, call, "xla").name == "xla"


@pytest.mark.parametrize(
    ("device", "call", "platform", "words"),
    [
        (
            AMPERE,
            traits(F32),
            "pallas_tpu",
            r"runs on tpu and cpu, and JAX runs on gpu\. Use 'triton' or 'xla'",
        ),
        (
            TPU,
            traits(F32),
            "triton",
            r"runs on gpu and cpu, and JAX runs on tpu\. Use 'pallas_tpu' or 'xla'",
        ),
        (TPU, traits(F16), "pallas_tpu", r"and the call has float16\. Use 'xla'"),
        (
            TPU,
            traits(BF16, logits=F16),
            "pallas_tpu",
            r"takes a bias and logits of float32 and bfloat16, and the call has float16\. Use 'xla'",
        ),
        (
            CPU,
            traits(F16),
            "pallas_tpu",
            r"takes float32 and bfloat16, and the call has float16\. Use 'xla'",
        ),
        (
            AMPERE,
            traits(F32, (64, 300)),
            "triton",
            r"takes head dims up to 256, and the call has 300\. Use 'xla'",
        ),
        (TPU, traits(BF16), "mosaic_gpu", r"runs on gpu and cpu, and JAX runs on tpu\. Use 'pallas_tpu' or"),
        (CPU, traits(F32), "mosaic_gpu", r"takes bfloat16 and float16, and the call has float32\. Use 'xla'"),
        (
            AMPERE,
            traits(BF16),
            "mosaic_gpu",
            r"runs on GPUs of compute capability 9\.0, and JAX's is 8\.0\. Use 'triton' or 'xla'",
        ),
        (Device("gpu"), traits(BF16), "mosaic_gpu", r"9\.0, and JAX's is unknown\. Use 'triton' or 'xla'"),
        (
            HOPPER,
            traits(F32),
            "mosaic_gpu",
            r"takes bfloat16 and float16, and the call has float32\. Use 'triton' or 'xla'",
        ),
        (
            HOPPER,
            traits(BF16, (300,)),
            "mosaic_gpu",
            r"takes head dims up to 256, and the call has 300\. Use 'xla'",
        ),
    ],
)
def test_what_a_named_one_cannot_is_refused_by_name(device, call, platform, words):
    """S20: with the reason, and those that can."""
    with pytest.raises(NotImplementedError, match=f"^platform: '{platform}' .*{words}"):
        implementation_for(device, call, platform, EVERYTHING)


@pytest.mark.parametrize("platform", ["cuda", "", [], 3])
def test_an_unknown_platform_is_refused(platform):
    with pytest.raises(
        ValueError, match=r"^platform: got .* expected one of 'mosaic_gpu', 'triton', .*'xla'"
    ):
        kernels.flash_attention(*qkv(), platform=platform)


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, "int8", "float64"])
def test_dtypes_that_are_none_are_no_reason(dtype):
    """The checks of the one that is chosen refuse them."""
    for call in (traits(dtype), traits(F32, logits=dtype)):
        taken = implementation_for(TPU, call, installed=EVERYTHING).name
        assert taken == ("xla" if dtype == F16 else "pallas_tpu")


@pytest.mark.parametrize(
    ("implementation", "blocks"),
    [(TRITON, "attest.kernels.triton.blocks"), (PALLAS_TPU, "attest.kernels.pallas.tpu.blocks")],
)
def test_there_are_block_sizes_for_the_largest_head_dim(implementation, blocks):
    rows = read_table(importlib.import_module(blocks)._TABLE)["sizes"]
    for kernel in {row["kernel"] for row in rows}:
        largest = max(row["head_dim"] for row in rows if row["kernel"] == kernel)
        assert largest == implementation.capabilities.largest_head_dim


def test_what_is_declared_of_the_hopper_kernels_is_theirs():
    blocks, target = (
        importlib.import_module(f"attest.kernels.pallas.mosaic_gpu.{name}") for name in ("blocks", "target")
    )
    assert MOSAIC_GPU.capabilities.largest_head_dim == max(blocks.head_dims())[0]
    assert MOSAIC_GPU.capabilities.compute_capability == target.CAPABILITY


def described(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *leading: Any) -> tuple[Any, ...]:
    """What the call tells `implementation_for`, or `fastest_for` where it names none."""
    asked: list[tuple[Any, ...]] = []

    def spy(*arguments: Any) -> Any:
        asked.append(arguments)
        raise LookupError

    for name in ("implementation_for", "fastest_for"):
        monkeypatch.setattr(choose, name, spy)
    with pytest.raises(LookupError):
        kernels.flash_attention(*leading, **call)
    return asked[0]


def test_every_dtype_and_head_dim_of_a_call_counts(monkeypatch):
    query, key, value = (x.astype(BF16) for x in qkv(value_dim=24))
    bias = np.zeros((1, 1, query.shape[1], key.shape[1]), np.float32)
    call = {"query": query, "key": key, "value": value, "bias": bias, "logits_dtype": jnp.float16}
    device, told, platform = described(call | {"platform": "xla"}, monkeypatch)
    assert device == Device("cpu", kind="cpu")
    assert told == traits(BF16, (query.shape[3], 24), f"{F32} {F16}")
    assert platform == "xla"


@pytest.mark.parametrize("probability", [0.1, 1 - 2**-20, 2**-200, np.float32(0.5), np.array(0.5)], ids=repr)
def test_dropout_counts_by_position_or_by_name(probability, monkeypatch):
    arrays = qkv()
    told = [
        described({"dropout_prob": probability, "dropout_seed": 3}, monkeypatch, *arrays)[1],
        described({"dropout_seed": 3}, monkeypatch, *arrays, None, None, None, probability)[1],
    ]
    assert all(call.dropout for call in told)


@pytest.mark.parametrize(
    "probability",
    [0, 0.0, -0.1, 1.0, 1.5, float("nan"), float("inf"), True, "0.1", None, [0.1], 0.1j],
    ids=repr,
)
def test_no_dropout_and_what_is_no_probability_are_no_reason(probability, monkeypatch):
    """The checks of the one that is chosen refuse what is malformed."""
    assert not described({"dropout_prob": probability}, monkeypatch, *qkv())[1].dropout


def test_a_traced_probability_is_no_reason(monkeypatch):
    told: list[Any] = []
    jax.jit(lambda p: told.append(described({"dropout_prob": p}, monkeypatch, *qkv())[1]))(0.1)
    assert not told[0].dropout


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
    with pytest.raises(
        NotImplementedError, match=r"kernels\.triton: JAX runs on cpu.*Use attest\.kernels\.xla"
    ):
        kernels.flash_attention(*qkv(), platform="triton")
    with pytest.raises(
        NotImplementedError, match=r"kernels\.pallas\.tpu: compiled for cpu.*Use attest\.kernels\.xla"
    ):
        kernels.flash_attention(*qkv(), platform="pallas_tpu")
    with pytest.raises(NotImplementedError, match=r"kernels\.pallas\.mosaic_gpu: compiled for cpu"):
        kernels.flash_attention(*qkv(dtype=BF16), platform="mosaic_gpu")


@pytest.mark.parametrize(("name", "primitive"), [("mosaic_gpu", "mpmd_map"), ("pallas_tpu", "pallas_call")])
def test_a_named_one_is_traced_for_a_device_that_is_not_here(name, primitive):
    """To be compiled for it, or exported; unless it is named, nothing of it is in the program."""

    def program(**options: Any) -> str:
        call = lambda *arrays: kernels.flash_attention(*arrays, **options)  # noqa: E731
        return str(jax.make_jaxpr(call)(*qkv(dtype=BF16)))

    assert primitive in program(platform=name)
    assert primitive not in program()


@needs_compiler
def test_importing_kernels_imports_none_of_the_accelerators():
    code = (
        "import sys; from attest import kernels; kernels.flash_attention; from jax._src import xla_bridge; "
        "sys.exit(any(x in sys.modules for x in ('triton', 'jax_triton', 'jax.experimental.pallas')) "
        "or xla_bridge.backends_are_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
