"""The command `attest tune`: find the fastest right configuration of a call, and save it for later calls."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attest.conformance.cli.options import Outputs, UsageError
from attest.conformance.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from attest.kernels.operations.tuner import Candidate, TuningRecord

Batch = Annotated[int, typer.Option(min=1, help="Batch entries.")]
QLen = Annotated[int, typer.Option("--q-len", min=1, help="Query rows.")]
KvLen = Annotated[int | None, typer.Option("--kv-len", min=1, show_default="--q-len", help="Keys.")]
QHeads = Annotated[int, typer.Option("--q-heads", min=1, help="Query heads.")]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", min=1, show_default="--q-heads", help="Key heads.")
]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="Channels of query and key.")]
ValueDim = Annotated[
    int | None, typer.Option("--value-dim", min=1, show_default="--head-dim", help="Channels of value.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Causal = Annotated[bool, typer.Option("--causal", help="Causal order.")]
Left = Annotated[
    int | None, typer.Option("--window", min=0, help="Number of keys that a row sees to its left.")
]
Cap = Annotated[float | None, typer.Option("--soft-cap", help="The cap of the logits.")]
Dropout = Annotated[float, typer.Option("--dropout", help="The share of weights that is dropped.")]
ForwardOnly = Annotated[bool, typer.Option("--forward-only", help="Neither test nor time gradients.")]
Platform = Annotated[str | None, typer.Option(help="auto, triton, pallas, xla, or an implementation.")]
Iters = Annotated[int, typer.Option(min=1, help="Largest number of timed calls.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds to compile, to test or to time one candidate.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the record of the run here.")]


def tune(
    q_len: QLen,
    q_heads: QHeads,
    head_dim: HeadDim,
    batch: Batch = 1,
    kv_len: KvLen = None,
    kv_heads: KvHeads = None,
    value_dim: ValueDim = None,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    window: Left = None,
    soft_cap: Cap = None,
    dropout: Dropout = 0.0,
    forward_only: ForwardOnly = False,
    platform: Platform = None,
    iters: Iters = 100,
    time_limit: TimeLimit = 120.0,
    json: Json = None,
) -> int:
    """Find the fastest right configuration of flash attention for a call, and save it for later calls.

    Every candidate is compared with the oracle before it is timed. The result is saved in the folder
    ATTEST_CACHE_DIR.
    """
    import jax

    outputs = Outputs(json)
    from attest.conformance.cli.console import show
    from attest.conformance.tuning.judge import judge
    from attest.kernels.call.options import check_dtype
    from attest.kernels.operations import FlashAttention, Tuner, create_default_executor, policy_override

    options: dict[str, Any] = {"causal": causal, "platform": platform, "logits_soft_cap": soft_cap}
    if window is not None:
        options["sliding_window"] = (window, 0 if causal else window)
    if dropout:
        options |= {"dropout_prob": dropout, "dropout_seed": 0}
    kv_len, kv_heads = kv_len or q_len, kv_heads or q_heads
    try:
        check_dtype("dtype", dtype)
        arrays = {
            name: jax.ShapeDtypeStruct((batch, length, heads, dim), dtype)
            for name, length, heads, dim in (
                ("query", q_len, q_heads, head_dim),
                ("key", kv_len, kv_heads, head_dim),
                ("value", kv_len, kv_heads, value_dim or head_dim),
            )
        }
        executor = create_default_executor(timing_iterations=iters)
        with _Bar() as bar, policy_override(executor.chooser, validate_backward=not forward_only):
            executor.chooser.tuner = Tuner(
                iters=iters, judge=judge, time_limit=time_limit, progress=bar.advance
            )
            record = executor.tune(FlashAttention(), **arrays, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    show(lambda console: _show(console, record))
    if outputs.json is not None:
        write_text(outputs.json, json_format.dumps(record.as_dict(), indent=1, sort_keys=True) + "\n")
    return 0


class _Bar:
    """A progress bar over the candidates of a run, on a terminal alone."""

    def __init__(self) -> None:
        from rich.progress import Progress

        from attest.conformance.cli.console import console_of

        console = console_of(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("compiling", total=None)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, done: int, total: int, candidate: "Candidate[Any]") -> None:
        """Show the verdict of the last candidate."""
        self._progress.update(self._task, description=candidate.verdict, completed=done, total=total)


def _show(console: "Console", record: "TuningRecord[Any]") -> None:
    """Print the candidates, the fastest first, and the gain of the winner over the tables' choice."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "ms", "verdict", "configuration"):
        table.add_column(name, justify="right" if name == "ms" else "left", overflow="fold")
    order = sorted(range(len(record.candidates)), key=lambda i: record.candidates[i].seconds)
    for i in order:
        candidate = record.candidates[i]
        mark = "winner" if i == record.chosen else "tables" if i == 0 else ""
        time = f"{candidate.seconds * 1e3:.4g}" if candidate.seconds < float("inf") else ""
        verdict = candidate.verdict if not candidate.why else f"{candidate.verdict}: {candidate.why}"
        table.add_row(mark, time, verdict, _sizes(candidate.config))
    console.print(table)
    passes = "both passes" if record.backward else "forward"
    console.print(f"{record.summary()}, {passes}; {record.gain:.3f} times as fast as the tables' choice")


def _sizes(config: Any) -> str:
    """Return the configuration as JSON, without what all candidates have in common."""
    return json_format.dumps(
        {
            name: x
            for name, x in json_format.loads(config.to_json())["config"].items()
            if name != "implementation"
        }
    )
