"""Configurations of every implementation: to JSON and back, and what is refused in broken JSON."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest import flash_attention
from attest.kernels import triton, xla
from attest.kernels.config import from_json, implementation_of, to_json
from attest.kernels.contract import Capabilities, Implementation, Passes
from attest.kernels.implementations import IMPLEMENTATIONS
from attest.kernels.pallas import mosaic_gpu, tpu
from tests.kernels.kernel_cases import qkv

TILE = {"k": 64, "stages": 2, "consumers": 2, "registers": [240, 24], "partial_sums": True}
STEP = {"step": 64, "stages": 2, "consumers": 2, "registers": [240, 24]}

powers = st.integers(4, 10).map(lambda n: 1 << n)
sizes = st.integers(1, (1 << 31) - 1)
eights = st.integers(1, 1 << 27).map(lambda n: 8 * n)
triton_blocks = st.builds(
    triton.BlockSizes, q=powers, k=powers, num_warps=st.sampled_from([1, 2, 4, 8, 16, 32]), num_stages=sizes
)
tpu_blocks = st.builds(tpu.BlockSizes, eights, eights)
scheduled: dict[str, Any] = {
    "stages": sizes,
    "consumers": st.integers(1, 2),
    "registers": st.tuples(*[st.integers(3, 20).map(lambda n: 8 * n)] * 2),
}
step = st.builds(
    mosaic_gpu.BackwardBlocks, step=st.sampled_from([64, 128, 192, 256]), **scheduled,
    ping_pong=st.booleans(), separate=st.booleans(),
)  # fmt: skip
tile = st.builds(
    mosaic_gpu.Blocks, k=st.sampled_from([64, 128, 192, 256]),
    **scheduled | {"stages": st.integers(2, (1 << 31) - 1)},
    partial_sums=st.booleans(), programs=st.none() | sizes,
)  # fmt: skip
chunks = st.builds(xla.ChunkSizes, sizes, sizes)


def _configs(config: Any, forward: Any, backward: Any) -> st.SearchStrategy[Any]:
    return st.builds(config, st.none() | forward, st.none() | backward)


def _of_each(sizes: Any, one: Any) -> st.SearchStrategy[Any]:
    """Block sizes of the three backward kernels, each of which may be absent."""
    return st.builds(sizes, *[st.none() | one] * 3)


CONFIGS = {
    "mosaic_gpu": _configs(mosaic_gpu.Config, tile, _of_each(mosaic_gpu.BackwardSizes, step)),
    "triton": _configs(triton.Config, triton_blocks, _of_each(triton.BackwardSizes, triton_blocks)),
    "pallas_tpu": _configs(tpu.Config, tpu_blocks, _of_each(tpu.BackwardSizes, tpu_blocks)),
    "xla": _configs(xla.Config, chunks, chunks),
}
every_implementation = pytest.mark.parametrize("name", CONFIGS)


def test_every_implementation_has_a_config():
    assert [x.name for x in IMPLEMENTATIONS] == list(CONFIGS)


@every_implementation
@given(data=st.data())
def test_a_config_goes_to_json_and_back(name, data):
    config = data.draw(CONFIGS[name])
    text = to_json(config)
    again = from_json(text)
    assert again == config
    assert type(again) is type(config)
    assert hash(again) == hash(config)
    assert to_json(again) == text
    assert json.loads(text)["implementation"] == name == implementation_of(config).name


@every_implementation
def test_a_config_is_frozen(name):
    config = from_json(json.dumps({"implementation": name}))
    assert (config.forward, config.backward) == (None, None)
    with pytest.raises(FrozenInstanceError):
        config.forward = None


def test_reading_a_configuration_imports_no_kernel():
    """So that any machine can read what another one measured."""
    code = (
        "import sys; from attest.kernels.config import from_json; "
        f"[from_json('{{\"implementation\": \"' + name + '\"}}') for name in {list(CONFIGS)}]; "
        "sys.exit(any(x in sys.modules for x in ('triton', 'jax_triton', 'jax.experimental.pallas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_does_not_depend_on_the_order_or_the_type_of_numbers():
    written = to_json(triton.Config(triton.BlockSizes(num_warps=8, q=32)))
    assert written == to_json(triton.Config(triton.BlockSizes(np.int64(32), np.int32(64), num_warps=8)))
    assert "\n" not in written
    assert from_json(written).forward == triton.BlockSizes(32, 64, 8, 2)
    blocks = mosaic_gpu.Blocks(**TILE)
    assert blocks == mosaic_gpu.Blocks(**TILE | {"registers": (240, np.int64(24)), "partial_sums": np.True_})


# What no field takes.
STRANGE = st.one_of(
    st.booleans().map(lambda x: [x]),
    st.floats(),
    st.text(max_size=5),
    st.integers(max_value=0),
    st.lists(st.integers(), min_size=3, max_size=3),
    st.dictionaries(st.just("unheard of"), st.none(), min_size=1),
)


def _places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the values of nested objects are."""
    if not isinstance(value, dict):
        return [path]
    return [path, *(place for name, x in value.items() for place in _places(x, (*path, name)))]


@every_implementation
@given(data=st.data())
def test_broken_json_is_refused_by_name(name, data):
    """One value is replaced, or one field is added: always a ValueError, which names the implementation."""
    config = data.draw(CONFIGS[name])
    broken: dict[str, Any] = {"implementation": name, **json.loads(json.dumps(asdict(config)))}
    *path, last = data.draw(st.sampled_from([x for x in _places(broken) if x and x != ("implementation",)]))
    inner: Any = broken
    for each in path:
        inner = inner[each]
    if data.draw(st.booleans()):
        inner[last] = data.draw(STRANGE)
    else:
        inner["unheard of"] = 1
    with pytest.raises(ValueError, match=rf"^config of '{name}'.*: got .*; expected .*\.") as refusal:
        from_json(json.dumps(broken))
    assert len(str(refusal.value)) < 600


@given(text=st.text() | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["implementation", "forward"]), inner),
).map(json.dumps))  # fmt: skip
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"(?s)^config.*: got .*; expected "):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"config: got None; expected JSON .*must be str"),
        (b"\xff", r"config: got b'\\xff'; expected JSON .*can't decode"),
        ("[" * 100_000, r"config: got .*expected JSON"),
        ("1" * 5000, r"config: got .*expected JSON"),
        ("[]", r"config: got \[\]; expected an object with the field 'implementation'"),
        ("{}", r"config, implementation: got None; expected one of 'mosaic_gpu', 'triton', "),
        ('{"implementation": ["xla"]}', r"config, implementation: got \['xla'\]; expected one of"),
        ('{"implementation": "xla", "implementation": "xla"}', r"config: got .*a field is there twice"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(text, words):
    with pytest.raises(ValueError, match=rf"(?s)^{words}"):
        from_json(text)


@pytest.mark.parametrize(
    ("name", "passes", "words"),
    [
        ("triton", {"forward": {"q": 48}}, r"forward: BlockSizes\.q: got 48; expected a power of two"),
        ("triton", {"forward": {"q": True}}, r"forward: BlockSizes\.q: got True; expected an integer"),
        ("triton", {"forward": {"q": 64.0}}, r"forward: BlockSizes\.q: got 64\.0; expected an integer"),
        ("triton", {"forward": {"p": 64}}, r"forward: got the field 'p'; expected fields among q, k, num_w"),
        ("triton", {"forward": 64}, r"forward: got 64; expected an object with fields among q, k, num_warps"),
        (
            "triton",
            {"forward": {"q": 2048, "k": 1024}},
            r".*BlockSizes\.k: got q \* k = 2097152; expected at",
        ),
        ("triton", {"forward": {"num_warps": 64}}, r".*num_warps: got 64; expected a power of two up to 32"),
        ("triton", {"backward": {"query": {"k": 8}}}, r"backward, query: BlockSizes\.k: got 8; expected"),
        (
            "triton",
            {"backward": {"q": 64, "k": 64}},
            r"backward: got the field 'q'; expected fields among que",
        ),
        ("pallas_tpu", {"forward": {"q": 12}}, r"forward: BlockSizes\.q: got 12; expected a multiple of 8"),
        ("xla", {"backward": {"k": 0}}, r"backward: ChunkSizes\.k: got 0; expected a positive integer"),
        ("xla", {"forward": {"q": 1 << 31}}, r"forward: ChunkSizes\.q: got 2147483648; expected at most"),
        ("xla", {"sideways": None}, r"got the field 'sideways'; expected fields among forward, backward"),
        ("mosaic_gpu", {"forward": {"k": 64}}, r"forward: got no field 'stages'; expected a value of every"),
        (
            "mosaic_gpu",
            {"forward": TILE | {"k": 96}},
            r".*Blocks\.k: got 96; expected a multiple of 64 up to",
        ),
        ("mosaic_gpu", {"forward": TILE | {"k": 320}}, r".*Blocks\.k: got 320; expected .*64 up to 256"),
        (
            "mosaic_gpu",
            {"forward": TILE | {"partial_sums": 1}},
            r".*partial_sums: got 1; expected True or Fal",
        ),
        ("mosaic_gpu", {"forward": TILE | {"consumers": 8}}, r".*consumers: got 8; expected at most 7"),
        (
            "mosaic_gpu",
            {"forward": TILE | {"consumers": 3}},
            r".*got \(240, 24\) with 3 consumers, 744 in all",
        ),
        # A launch of 3 warpgroups has 504 registers to share out: another 8 are waited for without end.
        (
            "mosaic_gpu",
            {"forward": TILE | {"registers": [240, 32]}},
            r".*got \(240, 32\) with 2 consumers, 512 in all; expected at most 504",
        ),
        (
            "mosaic_gpu",
            {"forward": TILE | {"registers": [9, 24]}},
            r".*registers: got \(9, 24\); expected mult",
        ),
        ("mosaic_gpu", {"forward": TILE | {"registers": [240, 16]}}, r".*got \(240, 16\); .*from 24 to 256"),
        (
            "mosaic_gpu",
            {"forward": TILE | {"registers": 24}},
            r".*Blocks\.registers: got 24; expected 2 values",
        ),
        (
            "mosaic_gpu",
            {"forward": TILE | {"registers": [24, 2.5]}},
            r".*Blocks\.registers\[1\]: got 2\.5; expected an integer",
        ),
        (
            "mosaic_gpu",
            {"backward": {"backward_key": STEP | {"step": 32}}},
            r"backward, backward_key: BackwardBlocks\.step: got 32; expected a multiple of 64",
        ),
    ],
    ids=str,
)
def test_a_field_that_the_kernels_refuse_is_named(name, passes, words):
    with pytest.raises(ValueError, match=rf"^config of '{name}'(, |: ){words}"):
        from_json(json.dumps({"implementation": name, **passes}))


@pytest.mark.parametrize(
    ("config", "forward", "words"),
    [
        (triton.Config, tpu.BlockSizes(), r"Config\.forward: got a BlockSizes; expected BlockSizes"),
        (xla.Config, (16, 16), r"Config\.forward: got a tuple; expected ChunkSizes"),
        (mosaic_gpu.Config, 3, r"Config\.forward: got a int; expected Blocks"),
    ],
)
def test_a_config_takes_the_block_sizes_of_its_implementation(config, forward, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        config(forward)


def test_numbers_that_python_cannot_print_are_refused():
    with pytest.raises(
        ValueError, match=r"^ChunkSizes\.q: got a int that cannot be printed; expected at most"
    ):
        xla.ChunkSizes(10**5000)


def test_a_config_that_belongs_to_nothing_is_refused():
    for config in (triton.BlockSizes(), None, 3):
        with pytest.raises(
            ValueError, match=r"^config: got a .*; expected the Config of mosaic_gpu or triton"
        ):
            to_json(config)


CONFIG = xla.Config(xla.ChunkSizes(16, 12), xla.ChunkSizes(12, 17))


def test_a_call_with_a_config_is_one_with_its_block_sizes():
    """It names the implementation, also after a journey through JSON."""
    want = xla.flash_attention(*qkv(), fwd_params=CONFIG.forward, bwd_params=CONFIG.backward)
    for options in ({}, {"platform": "xla"}, {"platform": IMPLEMENTATIONS[-1]}):
        got = flash_attention(*qkv(), config=from_json(to_json(CONFIG)), **options)
        np.testing.assert_array_equal(got, want)


def test_both_passes_of_a_call_read_their_part_of_a_config():
    received: list[Any] = []

    def check(sizes: Any) -> Any:
        received.append(sizes)
        raise LookupError

    passes = Passes(lambda *_: None, lambda *_: None, check_forward=received.append, check_backward=check)
    toy = Implementation("toy", Capabilities(), lambda: passes, lambda: xla.Config)
    with pytest.raises(LookupError):
        flash_attention(*qkv(), platform=toy, config=CONFIG)
    assert received == [CONFIG.forward, CONFIG.backward]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": CONFIG, "platform": "triton"}, r"config: got a configuration of 'xla'; .*triton"),
        ({"config": CONFIG, "platform": "cuda"}, r"config: got a configuration of 'xla'; .*cuda"),
        ({"config": CONFIG, "platform": np.zeros(3)}, r"config: got a configuration of 'xla'"),
        ({"config": {"forward": None}}, r"config: got a dict; expected the Config of mosaic_gpu or triton"),
        ({"config": CONFIG, "fwd_params": CONFIG.forward}, r"fwd_params: got a ChunkSizes and a config"),
        ({"config": CONFIG, "bwd_params": 3, "platform": "xla"}, r"bwd_params: got a int and a config"),
        (
            {"config": triton.Config(), "platform": IMPLEMENTATIONS[-1]},
            r"config: got a Config; expected the Config of xla",
        ),
        (
            {"config": CONFIG, "platform": Implementation("toy", Capabilities(), lambda: None)},
            r"config: got a Config; expected the Config of no implementation",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "call",
)  # fmt: skip
def test_a_config_that_contradicts_the_call_is_refused(options, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        flash_attention(*qkv(), **options)


def test_an_implementation_of_ones_own_has_json_too():
    toy = Implementation("toy", Capabilities(), lambda: None, lambda: xla.Config)
    text = to_json(CONFIG, (toy,))
    assert json.loads(text)["implementation"] == "toy"
    assert from_json(text, (toy,)) == CONFIG
    with pytest.raises(ValueError, match=r"^config, implementation: got 'toy'; expected one of 'mosaic_gpu'"):
        from_json(text)
