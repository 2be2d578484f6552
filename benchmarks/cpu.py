"""Speed, compile times and memory of our kernels beside jax.nn on a CPU, against targets.toml.

    python3 -m benchmarks.cpu --out FOLDER

It has three parts, each with files of its own: cpu_large and cpu_small, compiled calls of the XLA kernel, and
cpu_eager, calls that are not under jax.jit, of which most is checks, the choice of the kernel and JAX's
dispatch. Run it on a quiet machine. The exit status is 1 if a target is missed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import typer

from attest import flash_attention
from attest.conformance.tuning.workload import Inputs, Workload, draw
from attest.kernels import operations
from benchmarks import runner, targets
from benchmarks.contenders import program
from benchmarks.record import OURS, SECONDS, Entry, Measured, Row, Target
from benchmarks.report import VALUE, Layout, difference_column
from benchmarks.runner import Benchmark, Out, Rows
from benchmarks.targets import TO_COMPILE
from benchmarks.timing import Call, Prepared, Timing, measure, measure_each, prepare
from benchmarks.workload import DIRECTIONS, FORWARD, FORWARD_BACKWARD

PEER = "jax.nn"
BYTES = "bytes"
COMPILATIONS = 3
LARGEST_DIFFERENCE = 1e-4  # ||a - b|| / ||b||
_TEXT = (
    "Medians of calls in float32, contenders in turns in one process; CPU time of the process but for "
    "cpu_large. Compilation: the least of a few, without tracing and lowering."
)


def main(out: Out, rows: Rows = "") -> None:
    """Time the rows of targets.toml, and end with status 1 if a target is missed."""
    every = benchmarks(targets.read(targets.CPU))
    chosen = [benchmark for benchmark in every if runner.matching(benchmark, rows)]
    reports = [runner.run(benchmark, out, rows) for benchmark in chosen or every]
    results = [result for report in reports for result in report.results]
    if any(result.outcome(it) == "missed" for result in results for it in result.row.targets):
        raise SystemExit(1)


def benchmarks(data: Mapping[str, Any]) -> list[Benchmark]:
    """Return the benchmarks of the data of targets.toml."""
    xla, eager = data["xla"], data["eager"]
    compiled = partial(prepare, program=program)
    return [
        _benchmark("cpu_large", large_rows(xla["flash_attention"]), xla["flash_attention"], compiled),
        _benchmark("cpu_small", small_rows(xla["small"]), xla["small"], compiled),
        _benchmark("cpu_eager", eager_rows(eager), eager, prepare_eager),
    ]


def _benchmark(
    file: str, rows: list[Row], data: Mapping[str, Any], prepare: Callable[..., Prepared]
) -> Benchmark:
    timing = Timing(**data["timing"])
    layout = Layout(
        f"The kernels beside jax.nn on a CPU: {file}", _TEXT, (VALUE, difference_column(LARGEST_DIFFERENCE))
    )
    return Benchmark("cpu", file, rows, layout, partial(_measure, timing), prepare, platform="cpu")


def large_rows(data: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one long sequence: times, and the temporary memory of a longer one."""
    workload = Workload(**data["workload"])
    name = f"{workload.length} tokens"
    longer = replace(workload, length=data["memory_length"])
    return [
        _beside_peer(name, FORWARD, workload, data["forward_ratio"]),
        _beside_peer(name, FORWARD_BACKWARD, workload, data["forward_backward_ratio"]),
        _beside_peer(f"{longer.length} tokens", FORWARD_BACKWARD, longer, data["memory_ratio"], BYTES),
    ]


def small_rows(data: Mapping[str, Any]) -> list[Row]:
    """Return the rows of small workloads: times, and the seconds to compile them."""
    rows: list[Row] = []
    for shape, causal, direction in product(data["shapes"], (True, False), DIRECTIONS):
        batch, queries, keys, heads, head_dim = shape
        workload = Workload(batch, queries, heads, head_dim, keys, causal=causal, dtype="float32")
        name = f"{shape}, {'causal' if causal else 'full'}"
        rows.append(_beside_peer(name, direction, workload, data["ratio"]))
        rows.append(_beside_peer(name, direction, workload, data["compile_ratio"], TO_COMPILE))
    return rows


def _beside_peer(name: str, direction: str, workload: Workload, most: float, unit: str = SECONDS) -> Row:
    # The peer aligns the first query with the first key; a single query sees every key in causal order.
    theirs = replace(workload, causal=workload.causal and workload.length == workload.keys)
    entries = {OURS: Entry("our_xla", workload), PEER: Entry("jax_nn_xla", theirs)}
    return Row(name, direction, entries, (Target(PEER, "cost", most),), unit=unit)


def eager_rows(data: Mapping[str, Any]) -> list[Row]:
    """Return the rows of calls that are not under jax.jit."""
    rows: list[Row] = []
    for call in data["calls"]:
        batch, length, heads, head_dim = call["shape"]
        workload = Workload(batch, length, heads, head_dim, causal=True, dtype="float32")
        of_operations = [
            Target("flash_attention", "cost", call["operation_ratio"], (name,))
            for name in ("executor", "operations.flash_attention")
        ]
        of_ours = Target(PEER, "cost", data["peer_ratio"], ("flash_attention",))
        entries = {name: Entry(name, workload) for name in EAGER}
        rows.append(Row(f"{call['shape']}, eager", FORWARD, entries, (*of_operations, of_ours)))
    return rows


EAGER: dict[str, Callable[[], Callable[..., Any]]] = {
    "executor": lambda: partial(
        operations.create_default_executor(), operations.FlashAttention(), causal=True
    ),
    "operations.flash_attention": lambda: partial(operations.flash_attention, causal=True),
    "flash_attention": lambda: partial(flash_attention, causal=True),
    PEER: lambda: partial(jax.nn.dot_product_attention, is_causal=True),
}


def prepare_eager(rows: Sequence[Row]) -> Prepared:
    """Return calls that are not compiled as a whole, each run once."""

    def eager(contender: str, _workload: Workload, _direction: str) -> Callable[[Inputs], Any]:
        call = EAGER[contender]()
        return lambda inputs: call(inputs["query"], inputs["key"], inputs["value"])

    def run_once(function: Callable[[Inputs], Any], inputs: Inputs) -> Call:
        jax.block_until_ready(function(inputs))
        return partial(function, inputs)

    return prepare(rows, eager, make_ready=run_once, alone=EAGER)


def _measure(timing: Timing, row: Row, prepared: Prepared) -> Measured:
    if row.unit == SECONDS:
        return measure(row, prepared, timing)
    return measure_each(row, temporary_bytes if row.unit == BYTES else compile_seconds)


def temporary_bytes(row: Row, entry: Entry) -> list[float]:
    """Return the temporary bytes as XLA plans them; nothing is run, as the peer's may not fit into memory."""
    memory: Any = _lowered(row, entry).compile().memory_analysis()
    return [float(memory.temp_size_in_bytes)]


def compile_seconds(row: Row, entry: Entry) -> list[float]:
    """Return the least CPU seconds that compiling takes, without tracing and lowering."""
    taken: list[float] = []
    for _ in range(COMPILATIONS):
        jax.clear_caches()
        lowered = _lowered(row, entry)
        start = time.process_time()
        lowered.compile()
        taken.append(time.process_time() - start)
    return [min(taken)]


def _lowered(row: Row, entry: Entry) -> jax.stages.Lowered:
    function = program(entry.contender, entry.call(), row.direction)
    return jax.jit(function).lower(jax.eval_shape(partial(draw, entry.call())))


if __name__ == "__main__":
    typer.run(main)
