"""Speed of ring attention over the GPUs of one host, beside one of them alone and a peer, in the same run.

    python3 -m benchmarks.ring_speed --out FOLDER

The rows and targets are in `gpu_targets/ring.toml`. A share is the operations per second of each GPU, divided
by those of one GPU that has the tokens of one device as its whole sequence. The peer gathers all keys and
values and calls cuDNN with a mask.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import typer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.conformance.tuning.workload import Inputs, Workload, draw
from attest.kernels.attention import flash_attention
from attest.kernels.ring import ring_attention
from benchmarks import runner, targets
from benchmarks.record import Entry, Result, Row, Samples, Target
from benchmarks.report import MILLISECONDS, TFLOPS, Column, Layout
from benchmarks.runner import Benchmark, Out, Rows
from benchmarks.timing import Timing, measure, prepare
from benchmarks.workload import DIRECTIONS, in_direction

TARGETS = targets.FOLDER / "ring.toml"
AXIS, ALONE, PEER = "sequence", "one device alone", "all-gather and cuDNN"
_TEXT = (
    "Causal attention in bfloat16; medians of {samples} in turns. The share is that of the operations per "
    "second that one device alone does on as many tokens as each has. Workloads are batch x tokens of all "
    "devices, heads, head dim."
)


def main(out: Out, rows: Rows = "") -> None:
    """Time each strategy on all GPUs of this process, one device alone and the peer in turns."""
    runner.run(benchmark(targets.read(TARGETS), jax.local_device_count()), out, rows)


def benchmark(data: Mapping[str, Any], devices: int) -> Benchmark:
    """Return the benchmark of the data of ring.toml on so many devices."""
    rows: list[Row] = []
    for it, direction in product(data["rows"], DIRECTIONS):
        alone = Workload(data["batch"], it["tokens"], data["heads"], data["head_dim"], causal=True)
        whole = Workload(data["batch"], it["tokens"] * devices, data["heads"], data["head_dim"], causal=True)
        entries = {name: Entry(name, whole, devices) for name in (*data["strategies"], PEER)}
        least = {
            tuple(data["strategies"]) if name == "best" else (name,): bound
            for name, bound in it["least"].items()
        }
        found = tuple(Target(ALONE, "speed", bound, of) for of, bound in least.items())
        name = f"{it['tokens']} tokens a device"
        rows.append(Row(name, direction, {ALONE: Entry(ALONE, alone), **entries}, found))
    timing = Timing(**data["timing"])
    layout = Layout(
        "Ring attention over several GPUs",
        _TEXT.format(samples=timing.samples),
        (MILLISECONDS, TFLOPS, Column("share", _share)),
    )
    return Benchmark(
        "ring_speed",
        "ring_speed",
        rows,
        layout,
        partial(measure, timing=timing),
        # cuDNN captures a CUDA graph when it compiles, beside which no thread may compile.
        partial(prepare, program=program, draw_inputs=spread, alone=(ALONE, PEER, *data["strategies"])),
        devices=2,
    )


def _share(result: Result, label: str, _found: Samples) -> str:
    share = result.ratio(Target(ALONE, "speed", 0.0, (label,)))
    return "" if share is None or label == ALONE else f"{share:.2f}"


def _mesh(devices: int) -> jax.sharding.Mesh:
    used = jax.devices()[:devices]
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=used)


def spread(entry: Entry, workload: Workload) -> Inputs:
    """Return the inputs of a workload, the sequence spread over the devices of an entry."""
    if entry.devices == 1:
        return draw(workload)
    where = NamedSharding(_mesh(entry.devices), PartitionSpec(None, AXIS))
    return jax.jit(partial(draw, workload), out_shardings=where)()


def program(contender: str, workload: Workload, direction: str) -> Callable[[Inputs], Any]:
    """Return what a strategy, one device alone or the peer computes of the inputs that `spread` makes."""

    def attend(inputs: Inputs) -> jax.Array:
        arrays = (inputs["query"], inputs["key"], inputs["value"])
        if contender == ALONE:
            return flash_attention(*arrays, causal=workload.causal)
        local = partial(ring_attention, axis_name=AXIS, strategy=contender, causal=workload.causal)
        spec = PartitionSpec(None, AXIS)
        mesh = _mesh(jax.local_device_count())
        call = gathered_cudnn if contender == PEER else local
        return jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(*arrays)

    return in_direction(attend, direction)


def gathered_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Run cuDNN's attention on the rows of this device and the keys of all."""
    key, value = (jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (key, value))
    first = jax.lax.axis_index(AXIS) * query.shape[1]
    rows = first + jnp.arange(query.shape[1])[:, None]
    mask = (rows >= jnp.arange(key.shape[1]))[None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")


if __name__ == "__main__":
    typer.run(main)
