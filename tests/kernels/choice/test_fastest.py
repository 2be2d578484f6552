"""Which implementations compute a call the fastest, with gradients and without: the table, and the choice."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.arguments import AttentionArguments
from attest.kernels.attention import flash_attention
from attest.kernels.choice import choose, fastest
from attest.kernels.choice.choose import Device, Traits, fastest_for
from attest.kernels.choice.fastest import Sizes, Winners, sizes_of, winners
from attest.kernels.choice.two_implementations import apart
from attest.kernels.contract import Implementation, Passes
from attest.kernels.implementations import IMPLEMENTATIONS, TRITON, XLA
from attest.kernels.operations import Executor, FlashAttention, FlashAttentionConfig, Invocation
from attest.kernels.xla.blocks import ChunkSizes
from tests.kernels.kernel_cases import qkv

ABLE = ("mosaic_gpu", "triton", "xla")
SIZES = Sizes(2, 64, 1024, 512, 128, 4.0, ("bias", "causal"))
TABLE = """
margin = 0.1
octaves = { heads = 1.0, queries = 1.0, keys = 1.0, width = 0.5, group = 1.0 }
"""
ROW = """
[[calls]]
device = "GPU of tests"
milliseconds = { triton = [1.0, 4.0], mosaic_gpu = [2.0, 4.0] }
[calls.sizes]
bytes = 2
heads = 64
queries = 1024
keys = 512
width = 128
group = 4
features = ["bias", "causal"]
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Let a table of these rows be the one that is read."""

    def put(*rows: str) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(TABLE + "".join(rows))
        monkeypatch.setattr(fastest, "TABLE", path)
        fastest._looked_up.cache_clear()

    yield put
    fastest._looked_up.cache_clear()


def found(sizes: Sizes = SIZES, kind: str = "GPU of tests", able: tuple[str, ...] = ABLE) -> Winners:
    return winners(kind, sizes, able)


def test_calls_with_and_without_gradients_have_what_was_faster(table):
    table(ROW)
    assert found() == ("triton", "mosaic_gpu")
    assert found(able=("mosaic_gpu", "xla")) == ("mosaic_gpu", "mosaic_gpu")


def test_a_small_difference_is_no_reason(table):
    table(ROW.replace("[1.0, 4.0]", "[1.81, 3.61]"))
    assert found() == ("mosaic_gpu", "mosaic_gpu")
    table(ROW.replace("[1.0, 4.0]", "[1.79, 3.59]"))
    assert found() == ("triton", "triton")


@pytest.mark.parametrize("axis", ["heads", "queries", "keys", "width", "group"])
def test_a_row_counts_for_calls_near_it_on_every_axis(axis, table):
    table(ROW)
    octaves = 0.5 if axis == "width" else 1.0
    for direction in (-1, 1):
        for distance, expected in ((0.99, "triton"), (1.01, "mosaic_gpu")):
            size = getattr(SIZES, axis) * 2 ** (direction * distance * octaves)
            assert found(SIZES._replace(**{axis: size})).alone == expected, (direction, distance)


@pytest.mark.parametrize("other", [{"bytes": 4}, {"features": ("bias",)}, {"features": ()}])
def test_other_features_and_dtypes_are_other_calls(other, table):
    table(ROW)
    assert found(SIZES._replace(**other)).alone == "mosaic_gpu"


def test_the_nearest_row_decides(table):
    near = ROW.replace("heads = 64", "heads = 32").replace("[1.0, 4.0]", "[9.0, 3.1]")
    table(ROW, near)
    assert found() == ("triton", "mosaic_gpu")
    assert found(SIZES._replace(heads=40)) == ("mosaic_gpu", "triton")


def test_other_devices_have_the_default_order(table):
    table(ROW)
    assert found(kind="another GPU") == ("mosaic_gpu", "mosaic_gpu")


def test_the_choice_reads_the_table(table):
    table(ROW)
    call = Traits(frozenset({"bfloat16"}))
    able = partial(fastest_for, call=call, installed=lambda _package: True)
    hopper = Device("gpu", "9.0", "GPU of tests")
    assert [x.name for x in able(hopper, sizes=SIZES)] == ["mosaic_gpu", "triton"]
    assert [x.name for x in able(hopper, sizes=None)] == ["mosaic_gpu", "mosaic_gpu"]
    assert [x.name for x in able(Device("gpu", "9.0"), sizes=SIZES)] == ["mosaic_gpu", "mosaic_gpu"]
    # Triton alone runs float32 there.
    wide = able(hopper, sizes=SIZES, call=Traits(frozenset({"float32"})))
    assert [x.name for x in wide] == ["triton", "triton"]


def given(**options: Any) -> AttentionArguments:
    query, key, value = qkv(batch=2, q_length=12, k_length=20, q_heads=6, k_heads=2, head_dim=8, value_dim=4)
    return AttentionArguments(**{"query": query, "key": key, "value": value, **options})


def test_sizes_of_a_call():
    expected = Sizes(4, heads=12, queries=12, keys=20, width=12, group=3.0, features=())
    assert sizes_of(given(), dropout=False) == expected
    assert sizes_of(given(causal=True), dropout=True).features == ("causal", "dropout")
    assert sizes_of(given(query=given().query.astype(jnp.bfloat16)), dropout=False).bytes == 2


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"sliding_window": 3}, 7),
        ({"sliding_window": (2, 4)}, 7),
        ({"sliding_window": (2, None)}, 20),
        ({"sliding_window": (100, 100)}, 20),
        ({"chunk_size": 5}, 5),
        ({"sliding_window": (2, 4), "chunk_size": 6}, 6),
    ],
)
def test_windows_and_chunks_bound_the_keys(options, keys):
    assert sizes_of(given(**options), dropout=False).keys == keys


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("attention_mask", "mask"),
        ("bias", "bias"),
        ("softmax_aux", "sinks"),
        ("logits_soft_cap", "soft_cap"),
        ("q_segment_ids", "segments"),
        ("kv_segment_ids", "segments"),
        ("cum_seqlens_q", "lengths"),
        ("cum_seqlens_k", "lengths"),
        ("q_offset", "positions"),
        ("q_positions", "positions"),
        ("kv_positions", "positions"),
        ("kv_start", "ranges"),
        ("kv_end", "ranges"),
        ("sliding_window", "window"),
        ("chunk_size", "chunk"),
        ("alibi_slopes", "alibi"),
        ("dropout_shared", "dropout_shared"),
    ],
)
def test_every_argument_of_a_feature_counts(name, feature):
    value = {"sliding_window": 3, "chunk_size": 4}.get(name, np.zeros(1))
    assert sizes_of(given(**{name: value}), dropout=False).features == (feature,)


@pytest.mark.parametrize(
    "options",
    [
        {"query": None},
        {"key": np.zeros((2, 20, 8), np.float32)},
        {"value": np.zeros((2, 0, 2, 4), np.float32)},
        {"sliding_window": (1, 2, 3)},
        {"sliding_window": -1},
        {"sliding_window": 1.5},
        {"chunk_size": 0},
        {"chunk_size": "4"},
        {"precision": "highest"},
        {"logits_dtype": "bfloat16"},
        {"normalize_output": False},
    ],
    ids=repr,
)
def test_of_malformed_calls_and_other_arithmetic_nothing_was_measured(options):
    assert sizes_of(given(**options), dropout=False) is None


def test_symbolic_sizes_are_no_sizes():
    (batch,) = jax.export.symbolic_shape("b")
    seen: list[Any] = []

    def look(query: Any) -> Any:
        seen.append(sizes_of(given(query=query), dropout=False))
        return query

    jax.export.export(jax.jit(look))(jax.ShapeDtypeStruct((batch, 12, 6, 8), jnp.float32))
    assert seen == [None]


def test_the_table_is_whole():
    table = fastest.read(fastest.TABLE)
    assert 0 < table["margin"] < 0.2
    assert set(table["octaves"]) == {"heads", "queries", "keys", "width", "group"}
    names = {x.name for x in IMPLEMENTATIONS}
    calls = [(row["device"], row["sizes"]) for row in table["calls"]]
    assert len(calls) == len(set(calls)) > 50
    for row in table["calls"]:
        assert set(row["milliseconds"]) <= names
        assert len(row["milliseconds"]) > 1
        assert all(0 < forward < both < math.inf for forward, both in row["milliseconds"].values())


def test_calls_without_gradients_run_in_the_other_implementation():
    xla = XLA.load()

    def sevens(settings: Any, call: Any) -> Any:
        found = xla.forward(settings, call)
        return found._replace(out=jnp.full_like(found.out, 7))

    def split(alone: Passes, followed: Passes) -> Implementation:
        return Implementation("two", XLA.capabilities, lambda: apart(alone, followed))

    arrays, other = qkv(), replace(xla, forward=sevens)
    out, pull = jax.vjp(partial(flash_attention, platform=split(other, xla)), *arrays)
    want, pull_of_one = jax.vjp(partial(flash_attention, platform="xla"), *arrays)
    for a, b in zip([out, *pull(want)], [want, *pull_of_one(want)], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(flash_attention(*arrays, platform=split(other, xla)), jnp.full_like(out, 7))
    alone = flash_attention(*arrays, platform=split(xla, other))
    np.testing.assert_array_equal(alone, flash_attention(*arrays, platform="xla"))


def test_equal_pairs_are_compiled_once():
    assert apart(XLA.load(), XLA.load()) is apart(XLA.load(), XLA.load())


def test_each_reads_its_own_precision():
    passes = apart(XLA.load(), Passes(forward=XLA.load().forward, backward=XLA.load().backward))
    assert passes.check_precision(None) == (XLA.load().check_precision(None), None)
    with pytest.raises(ValueError, match="precision: got 'low'"):
        passes.check_precision("low")


@pytest.fixture
def in_two(table, monkeypatch):
    """Let this device be one on which two implementations share a call."""
    kind = jax.devices()[0].device_kind
    sizes = sizes_of(given(), dropout=False)
    shape = ", ".join(
        f"{name} = {list(x) if isinstance(x, tuple) else x}" for name, x in sizes._asdict().items()
    )
    table(
        f"""
        [[calls]]
        device = "{kind}"
        sizes = {{ {shape} }}
        milliseconds = {{ xla = [2.0, 3.0], triton = [1.0, 3.0] }}
        """
    )
    other = Implementation("triton", XLA.capabilities, XLA.load, tunable=TRITON.tunable)
    monkeypatch.setattr(choose, "IMPLEMENTATIONS", (XLA, other))


def test_a_call_that_names_nothing_is_computed_by_two(in_two):
    arrays = {name: getattr(given(), name) for name in ("query", "key", "value")}
    program = str(jax.make_jaxpr(lambda x: flash_attention(**x))(arrays))
    assert "xla, triton without gradients, on" in program
    np.testing.assert_allclose(
        flash_attention(**arrays), flash_attention(**arrays, platform="xla"), atol=2e-6
    )
    with_sizes = partial(flash_attention, platform="xla")
    assert "triton" not in str(jax.make_jaxpr(lambda x: with_sizes(**x))(arrays))


def test_operations_say_that_two_compute_a_call(in_two):
    arrays = {name: getattr(given(), name) for name in ("query", "key", "value")}
    explanation = Executor().explain(FlashAttention(), **arrays)
    assert explanation.implementation == "xla, triton without gradients"
    assert explanation.complete.platform == "auto"
    assert "runs by xla, triton without gradients: " in str(explanation)
    op = FlashAttention()
    _, arguments = op.prepare(**arrays)
    np.testing.assert_allclose(
        op.run(**arguments, cfg=FlashAttentionConfig()), flash_attention(**arrays), atol=2e-6
    )


def test_a_tuner_tries_the_candidates_of_both(in_two, monkeypatch):
    monkeypatch.setattr("attest.kernels.triton.candidates.target_device", lambda: "sm_90")
    arrays = {name: getattr(given(), name) for name in ("query", "key", "value")}
    op = FlashAttention()
    _, arguments = op.prepare(**arrays)
    found = op.candidate_cfgs(Invocation(op.op_id, kwargs=arguments))
    platforms = [x.platform for x in found]
    assert platforms == sorted(platforms, key=["xla", "triton"].index)
    assert set(platforms) == {"xla", "triton"}


def test_the_best_choices_are_joined_within_the_fastest_implementation():
    """Which of two implementations share a call, a tuner may find another one to be the faster."""

    def of(name: str, forward: Any = None, backward: Any = None) -> FlashAttentionConfig:
        config = {x.name: x for x in IMPLEMENTATIONS}[name].config()
        return FlashAttentionConfig(platform=name, config=config(forward, backward))

    chunks = ChunkSizes(128, 128)
    timed = [(of("triton"), 3.0), (of("xla"), 2.0), (of("xla", chunks), 1.0), (of("xla", None, chunks), 1.5)]
    assert FlashAttention().combined_cfg(timed) == of("xla", chunks, chunks)
