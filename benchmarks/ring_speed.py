"""Speed of ring attention over the GPUs of one host, beside one of them alone and a peer, in the same run.

    python3 -m benchmarks.ring_speed --out FOLDER

It needs neither an installed project nor a network. The rows and targets are in `gpu_targets/ring.toml`; the
report is ring_speed.json, and ring_speed.md beside it. A share is the operations per second of each GPU,
divided by those of one GPU that has the tokens of one device as its whole sequence. The peer gathers all keys
and values and calls cuDNN with a mask.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.conformance.files import write_text
from attest.kernels.attention import flash_attention
from attest.kernels.ring import ring_attention
from benchmarks.gpu.contenders import DISTRIBUTIONS
from benchmarks.gpu.report import absent_cell, table
from benchmarks.gpu.state import State, watched
from benchmarks.gpu.timing import Absent, Timing, attempt, environment, in_turns, need_gpu
from benchmarks.gpu.workload import DIRECTIONS, FORWARD, Workload, operations

TARGETS = Path(__file__).parent / "gpu_targets" / "ring.toml"
AXIS, ALONE, PEER = "sequence", "one device alone", "all-gather and cuDNN"
TIMING = Timing(samples=7, sample_seconds=0.05)

type Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Measured:
    """What was measured of a row: medians in seconds, or why there is none, by contender."""

    tokens: int
    direction: str
    seconds: Mapping[str, float | Absent]
    shares: Mapping[str, float]
    outcomes: Mapping[str, str]
    state: State | None


def main(out: Annotated[Path, typer.Option(help="The folder that the report is written to.")]) -> None:
    """Time each strategy on all GPUs of this process, and report it."""
    need_gpu("benchmarks.ring_speed")
    if jax.local_device_count() == 1:
        raise SystemExit("benchmarks.ring_speed needs several GPUs, and JAX has one here.")
    data = tomllib.loads(TARGETS.read_text())
    rows: list[Measured] = []
    for row in data["rows"]:
        for direction in DIRECTIONS:
            rows.append(measure(data, row, direction))
            print(row["tokens"], direction, dict(rows[-1].shares), rows[-1].outcomes, flush=True)
    about = {**environment(DISTRIBUTIONS), "devices": str(jax.local_device_count())}
    report = {"schema": "attest.ring_speed/1", "about": about, "rows": [to_json(row) for row in rows]}
    write_text(out / "ring_speed.json", json.dumps(report, indent=1, sort_keys=True) + "\n")
    write_text(out / "ring_speed.md", as_markdown(about, data, rows))


def measure(data: Mapping[str, Any], row: Mapping[str, Any], direction: str) -> Measured:
    """Time all strategies, one device alone and the peer in turns."""
    devices, tokens = jax.local_device_count(), row["tokens"]
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    makes = {ALONE: partial(compiled, partial(flash_attention, causal=True), data, tokens, direction, None)}
    for name in data["strategies"]:
        attend = partial(ring_attention, axis_name=AXIS, strategy=name, causal=True)
        makes[name] = partial(compiled, attend, data, tokens * devices, direction, mesh)
    makes[PEER] = partial(compiled, gathered_cudnn, data, tokens * devices, direction, mesh)
    runs = {name: attempt(make) for name, make in makes.items()}
    with watched() as watch:
        taken = in_turns({name: run for name, run in runs.items() if not isinstance(run, Absent)}, TIMING)
    found = {name: run if isinstance(run, Absent) else taken[name] for name, run in runs.items()}
    seconds = {name: it if isinstance(it, Absent) else median(it) for name, it in found.items()}
    shares = shares_of(data, tokens, direction, devices, seconds)
    return Measured(tokens, direction, seconds, shares, outcomes(row["least"], shares), watch.state)


def compiled(
    attend: Attend, data: Mapping[str, Any], tokens: int, direction: str, mesh: Any
) -> Callable[[], Any]:
    """Compile attention over so many tokens, spread over a mesh or on one device; run it once."""
    shape = (data["batch"], tokens, data["heads"], data["head_dim"])
    spec = PartitionSpec(None, AXIS)
    where = jax.devices()[0] if mesh is None else NamedSharding(mesh, spec)

    @partial(jax.jit, static_argnums=0, out_shardings=where if mesh is not None else None)
    def draw(seed: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    query, key, value, d_out = (draw(seed) for seed in range(4))
    spread = attend if mesh is None else jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)

    def both(query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> Any:
        return jax.vjp(spread, query, key, value)[1](d_out)

    arrays = (query, key, value) if direction == FORWARD else (query, key, value, d_out)
    program = jax.jit(spread if direction == FORWARD else both).lower(*arrays).compile()
    jax.block_until_ready(program(*arrays))
    return partial(program, *arrays)


def gathered_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Run cuDNN's attention on the rows of this device and the keys of all."""
    key, value = (jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (key, value))
    first = jax.lax.axis_index(AXIS) * query.shape[1]
    rows = first + jnp.arange(query.shape[1])[:, None]
    mask = (rows >= jnp.arange(key.shape[1]))[None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")


def shares_of(
    data: Mapping[str, Any],
    tokens: int,
    direction: str,
    devices: int,
    seconds: Mapping[str, float | Absent],
) -> dict[str, float]:
    """Return the share of each contender that ran, but for the device alone."""
    alone = seconds[ALONE]
    if isinstance(alone, Absent):
        return {}

    def count(length: int) -> float:
        workload = Workload(data["batch"], length, data["heads"], data["head_dim"], causal=True)
        return operations(workload, direction)

    least = count(tokens) / alone
    return {
        name: count(tokens * devices) / devices / it / least
        for name, it in seconds.items()
        if name != ALONE and not isinstance(it, Absent)
    }


def outcomes(least: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, str]:
    """Return which targets are met; `best` is that of the best strategy."""
    ours = {name: share for name, share in shares.items() if name != PEER}
    if ours:
        ours["best"] = max(ours.values())
    found = {name: ours.get(name) for name in least}
    return {
        name: "absent" if share is None else "met" if share >= least[name] else "MISSED"
        for name, share in found.items()
    }


def to_json(row: Measured) -> dict[str, Any]:
    """Return a row as the file holds it."""
    return asdict(row) | {
        "seconds": {
            name: {"absent": it.reason} if isinstance(it, Absent) else it for name, it in row.seconds.items()
        }
    }


def as_markdown(about: Mapping[str, str], data: Mapping[str, Any], rows: list[Measured]) -> str:
    """Return the report: what it ran on, and a table of times and shares."""
    names = (ALONE, *data["strategies"], PEER)
    header = ("tokens a device", "direction", *names, "targets", "clock and power")
    lines = [
        (
            str(row.tokens),
            row.direction,
            *(_cell(row, name) for name in names),
            ", ".join(f"{name} {outcome}" for name, outcome in row.outcomes.items()),
            str(row.state or ""),
        )
        for row in rows
    ]
    shape = f"batch {data['batch']}, {data['heads']} heads, head dim {data['head_dim']}"
    parts = (
        "# Ring attention over several GPUs",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        f"Causal attention in bfloat16, {shape}. Milliseconds, medians of {TIMING.samples} in turns, and the "
        "share of the operations per second that one device alone does on as many tokens as each has.",
        table(header, lines),
    )
    return "\n\n".join(parts) + "\n"


def _cell(row: Measured, name: str) -> str:
    taken = row.seconds[name]
    if isinstance(taken, Absent):
        return absent_cell(taken)
    share = row.shares.get(name)
    return f"{1e3 * taken:.2f}" + ("" if share is None else f" ({share:.2f})")


if __name__ == "__main__":
    typer.run(main)
