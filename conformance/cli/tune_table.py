"""The table of block sizes that `attest tune --table` writes: a row for each kernel and kind of call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attest.conformance.cli.options import UsageError
from attest.conformance.cli.tune_calls import NamedCall
from attest.conformance.files import read_bytes, refusal, write_text
from attest.conformance.running.environment import environment
from attest.conformance.sizes import sizes
from attest.kernels.configs.own_tables import checked_table
from attest.kernels.configs.rows import Row, conditions, new_table, with_rows
from attest.kernels.operations import FlashAttention
from attest.kernels.operations.executor import invocation
from attest.kernels.operations.invocation import Invocation

if TYPE_CHECKING:
    from attest.kernels.operations.tuner import TuningRecord

# The parts of the environment of a tuning run that are versions of packages.
_PACKAGES = ("jax", "jaxlib", "triton", "jax_triton", "libtpu")


@dataclass
class BlockTable:
    """A table that is being written. done: the conditions of all rows that the calls so far could give."""

    path: Path
    implementation: str
    text: str
    forward_only: bool
    done: set[Any] = field(default_factory=set[Any])

    def has(self, call: NamedCall) -> bool:
        """Return whether earlier calls of this run decided every row that this one could give.

        Raises: ValueError or NotImplementedError for a call that the implementation does not take.
        """
        return self._conditions(call) <= self.done

    def add(self, call: NamedCall, record: "TuningRecord[Any]") -> int:
        """Write the rows of a winner into the file, and return how many there are.

        Raises: FileError where it cannot be written.
        """
        op, inv = _invocation(call)
        rows: list[Row] = [
            {**row, "measured": _measured(call, record)}
            for row in op.table_rows(record.winner(), inv)
            if not self._skips(row) and conditions(row) not in self.done
        ]
        self.done |= self._conditions(call)
        self.text = with_rows(self.text, rows)
        write_text(self.path, self.text)
        return len(rows)

    def _conditions(self, call: NamedCall) -> set[Any]:
        """Return the conditions of the rows of all candidates of a call."""
        op, inv = _invocation(call)
        rows = (row for config in op.candidate_cfgs(inv) for row in op.table_rows(config, inv))
        return {conditions(row) for row in rows if not self._skips(row)}

    def _skips(self, row: Row) -> bool:
        return self.forward_only and row["kernel"] != "forward"


def open_table(path: Path, platform: str | None, calls: list[NamedCall], forward_only: bool) -> BlockTable:
    """Return the table of a file, or a new one: of a platform, or of what runs the first call.

    Raises: UsageError for a file that cannot be written, is no table, or is that of another implementation.
    """
    reason = refusal(path)
    if reason is not None:
        raise UsageError(f"--table {path}: {reason}")
    text = ""
    if path.exists():
        text = read_bytes(path, sizes().expectations_bytes, "table").decode()
    op, first = _invocation(calls[0].on(platform))
    runner = op.runner(first, gradients=not forward_only)
    if not text.strip():
        return BlockTable(path, runner, new_table(runner), forward_only)
    implementation, _ = checked_table(f"--table {path}", text)
    if platform is not None and runner != implementation:
        raise UsageError(f"--platform: got {platform}, expected {implementation}, whose table {path} is")
    try:
        with_rows(text, [])
    except ValueError as error:
        raise UsageError(f"--table {path}: {error}") from None
    return BlockTable(path, implementation, text, forward_only)


def _invocation(call: NamedCall) -> tuple[FlashAttention, Invocation[Any, Any]]:
    op = FlashAttention()
    args, arguments = op.prepare(**call.arguments)
    return op, invocation(op, args, arguments)


def _measured(call: NamedCall, record: "TuningRecord[Any]") -> Mapping[str, Any]:
    """Return where a row comes from: the call, what it gains over the tables' choice, and the run."""
    here = environment()
    versions = [f"{name} {record.environment[name]}" for name in _PACKAGES if name in record.environment]
    gain = {"gain": round(record.gain, 3)} if record.gain == record.gain else {}
    return {
        "call": call.name,
        **gain,
        "device": here["processor"] if here["backend"] == "cpu" else here["device"],
        "versions": ", ".join(versions),
        "commit": here["commit"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
