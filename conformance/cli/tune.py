"""The command `attest tune`: find the fastest right configuration of a call, and save it for later calls."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attest.conformance.cli.options import Outputs, UsageError
from attest.conformance.files import same_file, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from attest.conformance.cli.tune_calls import NamedCall
    from attest.kernels.operations.tuner import Candidate, TuningRecord

Batch = Annotated[int, typer.Option(min=1, help="Batch entries.")]
QLen = Annotated[int | None, typer.Option("--q-len", min=1, help="Query rows.")]
KvLen = Annotated[int | None, typer.Option("--kv-len", min=1, show_default="--q-len", help="Keys.")]
QHeads = Annotated[int | None, typer.Option("--q-heads", min=1, help="Query heads.")]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", min=1, show_default="--q-heads", help="Key heads.")
]
HeadDim = Annotated[int | None, typer.Option("--head-dim", min=1, help="Channels of query and key.")]
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
Candidates = Annotated[
    int | None,
    typer.Option(min=1, show_default="12", help="Largest number of sizes to try for each kernel."),
]
Workloads = Annotated[
    Path | None, typer.Option(help="A TOML file of calls to tune, in place of the options of one call.")
]
TablePath = Annotated[
    Path | None, typer.Option("--table", help="Write rows of a table of block sizes here, for ATTEST_BLOCKS.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the record of the run here.")]


def tune(
    q_len: QLen = None,
    q_heads: QHeads = None,
    head_dim: HeadDim = None,
    batch: Batch = 1,
    kv_len: KvLen = None,
    kv_heads: KvHeads = None,
    value_dim: ValueDim = None,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    window: Left = None,
    soft_cap: Cap = None,
    dropout: Dropout = 0.0,
    workloads: Workloads = None,
    table: TablePath = None,
    forward_only: ForwardOnly = False,
    platform: Platform = None,
    candidates: Candidates = None,
    iters: Iters = 100,
    time_limit: TimeLimit = 120.0,
    json: Json = None,
) -> int:
    """Find the fastest right configuration of flash attention for a call, and save it for later calls.

    Every candidate is compared with the oracle before it is timed. The result is saved in the folder
    ATTEST_CACHE_DIR, and with --table as rows of a table of block sizes.
    """
    outputs = Outputs(json)
    from attest.conformance.cli.console import complain, print_text, show
    from attest.conformance.cli.tune_calls import CallOptions, call_of_options, calls_of_file
    from attest.conformance.cli.tune_table import open_table

    if table is not None and json is not None and same_file(table, json):
        raise UsageError(f"--table {table} and --json {json} are the same file: name two")
    options = CallOptions(
        q_len=q_len,
        q_heads=q_heads,
        head_dim=head_dim,
        batch=batch,
        kv_len=kv_len,
        kv_heads=kv_heads,
        value_dim=value_dim,
        dtype=dtype,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        dropout=dropout,
    )
    try:
        calls = [call_of_options(options)] if workloads is None else calls_of_file(workloads, options)
        rows = None if table is None else open_table(table, platform, calls, forward_only)
        run = _Run(forward_only, candidates, iters, time_limit)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    records: list[dict[str, Any]] = []
    failed = 0
    for call in calls:
        try:
            named = call.on(platform if rows is None else rows.implementation)
            if rows is not None and rows.has(named):
                print_text(f"{call.name}: an earlier call gave its rows")
                continue
            record = run.record(named)
        except (TypeError, ValueError, NotImplementedError) as error:
            if workloads is None:
                raise UsageError(str(error)) from None
            complain(f"{call.name}: {error}")
            failed += 1
            continue
        if workloads is not None:
            print_text(call.name)
        show(lambda console, record=record: _show(console, record))
        if rows is not None:
            print_text(f"{rows.add(named, record)} rows of {rows.implementation} written: {table}")
        records.append({**record.as_dict(), **({} if workloads is None else {"name": call.name})})
        if outputs.json is not None:
            written = records[0] if workloads is None else records
            write_text(outputs.json, json_format.dumps(written, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0


class _Run:
    """The tuning runs of one command."""

    def __init__(
        self,
        forward_only: bool,
        candidates: int | None,
        iters: int,
        time_limit: float,
    ) -> None:
        from attest.conformance.tuning.judge import judge
        from attest.kernels.operations import FlashAttention, Tuner, create_default_executor

        self._backward = not forward_only
        self._operation = FlashAttention(most_candidates=candidates)
        self._executor = create_default_executor(timing_iterations=iters)
        self._tuner = Tuner(iters=iters, judge=judge, time_limit=time_limit)

    def record(self, call: "NamedCall") -> "TuningRecord[Any]":
        """Tune a call.

        Raises: TypeError, ValueError or NotImplementedError for a call that cannot be tuned.
        """
        from attest.kernels.operations import policy_override

        chooser = self._executor.chooser
        with _Bar() as bar, policy_override(chooser, validate_backward=self._backward):
            self._tuner.progress = bar.advance
            chooser.tuner = self._tuner
            return self._executor.tune(self._operation, **call.arguments)


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
