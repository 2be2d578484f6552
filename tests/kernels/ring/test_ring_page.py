"""docs/how-to/ring-attention.md: its picture is the schedule's, its bytes are those of compiled programs."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attest.kernels.ring import ring_attention
from attest.kernels.ring.schedule import Meeting, Order, Schedule
from tests.meta.processes import ROOT
from tests.meta.test_snippets import follow

PAGE = ROOT / "docs" / "how-to" / "ring-attention.md"
DEVICES = 8
BATCH, LENGTH, HEADS, KEY_HEADS, DIM, VALUE_DIM = 1, 256, 16, 8, 16, 8
# How many devices share the sequence whose programs are compiled.
SHARING = 4
# The names of rows of the table of bytes, and their calls.
CALLS: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "ring, causal": {"strategy": "ring", "causal": True},
    "zigzag, causal": {"strategy": "zigzag", "causal": True},
    "all_gather": {"strategy": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
}

here = pytest.mark.process(devices=DEVICES)


def rows() -> dict[str, list[str]]:
    """The cells of the table of bytes: formulas of forward and backward, and their values in the example."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().partition("### What is sent")[2].splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == 4 and cells[0].startswith("`"):
            found[name] = cells
    return found


def sizes(length: int, heads: int, key_heads: int, dim: int, value_dim: int, itemsize: int) -> dict[str, int]:
    """The bytes of the shard of a length, by the letters of the page."""
    keys = key_heads * (dim + value_dim) * length
    rows = heads * length
    return {
        "K": keys * itemsize,
        "G": keys * 4,
        "Q": rows * dim * itemsize,
        "O": rows * value_dim * itemsize,
    }


def value(formula: str, devices: int, letters: dict[str, int]) -> float:
    return eval(formula.strip("`"), {"n": devices, **letters})


def test_the_table_has_every_strategy() -> None:
    assert list(rows()) == list(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_example_is_what_the_formulas_say(name: str) -> None:
    letters = sizes(65_536 // 8, 32, 8, 128, 128, 2)
    formulas, mebibytes = rows()[name][:2], rows()[name][2:]
    assert [f"{value(x, 8, letters) / 2**20:g} MiB" for x in formulas] == mebibytes


SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(r"= (.*?) (collective-permute|all-gather|all-to-all|reduce-scatter|all-reduce)\(")


def sent(compiled: Any) -> float:
    """The bytes that a device of a compiled program sends, the mean over the devices."""
    total = 0.0
    for line in compiled.as_text().splitlines():
        found = COLLECTIVE.search(line)
        if found is None:
            continue
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
        size = sum(SIZES[kind] * math.prod(int(x) for x in shape.split(",") if x) for kind, shape in arrays)
        moves = re.findall(
            r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2].partition("}}")[0] + "}"
        )
        share = {
            "collective-permute": sum(a != b for a, b in moves) / SHARING,
            "all-gather": (SHARING - 1) / SHARING,
            "all-to-all": (SHARING - 1) / SHARING,
            "reduce-scatter": SHARING - 1,
        }
        total += size * share[found[2]]
    return total


@here
@pytest.mark.parametrize("name", CALLS)
def test_a_program_sends_the_bytes_of_the_page(name: str) -> None:
    letters = sizes(LENGTH // SHARING, HEADS, KEY_HEADS, DIM, VALUE_DIM, 4)
    expected = [value(formula, SHARING, letters) for formula in rows()[name][:2]]
    assert sent_by(CALLS[name], KEY_HEADS) == expected


@here
def test_ulysses_sends_a_key_head_to_each_device() -> None:
    letters = sizes(LENGTH // SHARING, HEADS, SHARING, DIM, VALUE_DIM, 4)
    expected = [value(formula, SHARING, letters) for formula in rows()["ulysses"][:2]]
    assert sent_by(CALLS["ulysses"], SHARING // 2) == expected


def sent_by(options: dict[str, Any], key_heads: int) -> list[float]:
    """What a call sends, forward and backward.

    Each pass is compiled by itself: in one program XLA merges what both send.
    """
    mesh = jax.make_mesh((SHARING,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:SHARING])
    sharding = NamedSharding(mesh, P(None, "s"))

    def array(heads: int, dim: int) -> Any:
        return jax.ShapeDtypeStruct((BATCH, LENGTH, heads, dim), jnp.float32, sharding=sharding)

    def call(*arrays: Any) -> Any:
        return ring_attention(*arrays, **options, mesh=mesh, axis_name="s", platform="xla")

    arrays = array(HEADS, DIM), array(key_heads, DIM), array(key_heads, VALUE_DIM)
    traced = jax.jit(lambda *x: jax.vjp(call, *x)).trace(*arrays)
    forward: Any = traced.lower().compile()
    pull = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        traced.out_info[1],
        forward.output_shardings[1],
    )
    backward = jax.jit(lambda pull, x: pull(x)).lower(pull, array(HEADS, VALUE_DIM)).compile()
    return [sent(forward), sent(backward)]


def schedule_of(devices: int, pieces: int, window: int | None = None) -> Schedule:
    """Causal order with pieces of eight rows and keys."""
    length = 8 * pieces * devices
    order = Order(causal=True, window=(window, None), chunk=None, shift=0)
    return Schedule(devices, pieces, 8, 8, length, length, order)


def picture(pieces: int) -> list[str]:
    """In which step the rows of each piece meet the keys of each piece, of four devices."""
    devices = 4
    schedule = schedule_of(devices, pieces)
    grid = [["."] * (devices * pieces) for _ in range(devices * pieces)]
    for step, pairs in schedule.meetings.items():
        for (row, key), meetings in pairs.items():
            for device, meeting in enumerate(meetings):
                if meeting is not Meeting.HIDDEN:
                    source = (device - step) % devices
                    grid[schedule.place(device, row)][schedule.place(source, key)] = str(step)
    own = {schedule.place(device, piece): device for device in range(devices) for piece in range(pieces)}
    names = [f"device {own[n]} {n}" if pieces > 1 else f"device {n}" for n in range(devices * pieces)]
    return [" ".join((name, *line)) for name, line in zip(names, grid, strict=True)]


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_picture_is_that_of_the_schedule(pieces: int) -> None:
    section = PAGE.read_text().partition("### The communication schedule")[2]
    drawn = section.partition("```text")[2].partition("```")[0]
    columns = [line[:30].rstrip() if pieces == 1 else line[30:] for line in drawn.splitlines()]
    assert [line for line in columns if line.startswith("device")] == picture(pieces)


@given(window=st.integers(0, 60))
def test_keys_travel_as_far_as_a_window_reaches(window: int) -> None:
    chains = schedule_of(8, 1, window).chains
    assert sum(chains, ()) == tuple(range(1, min(7, math.ceil(window / 8)) + 1))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_last_device_but_one_sends_most(devices: int) -> None:
    schedule = schedule_of(devices, 1)
    (chain,) = schedule.chains
    moves = [source for step in range(len(chain)) for source, _ in schedule.sends(chain, step)]
    assert [moves.count(device) for device in range(devices)] == [*range(1, devices), 0]


@here
def test_the_page_runs_on_eight_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(PAGE)
