"""Chunk sizes of the XLA kernels by the data table blocks.toml, and the rows that a tuner writes for it."""

from dataclasses import asdict, replace
from pathlib import Path

from attest.kernels.call.call import Call
from attest.kernels.call.symbolic import is_symbolic
from attest.kernels.configs.fields import read_fields
from attest.kernels.configs.rows import Row, device_kind, half
from attest.kernels.configs.tables import all_rows, select
from attest.kernels.contract import Settings
from attest.kernels.visibility.intervals import windowed
from attest.kernels.xla import whole
from attest.kernels.xla.blocks import ChunkSizes, Config

_TABLE = Path(__file__).with_name("blocks.toml")


def choose(kernel: str, call: Call) -> ChunkSizes | None:
    """Return the table's choice for "forward" or "backward"; None where no row fits.

    Without any row, as by default, a call does not wait for JAX to look for its devices.
    """
    if is_symbolic(call) or not all_rows(_TABLE):
        return None
    try:
        row = select(_TABLE, kernel, _dim(call), work_of(call), call.query.dtype.itemsize, device_kind())
    except LookupError:
        return None
    return read_fields(ChunkSizes, f"block sizes of {kernel}", row)


def with_choice(settings: Settings, call: Call) -> Settings:
    """Return the settings with the table's choice for what the caller does not give."""
    forward, backward = (
        choose(kernel, call) if given is None else given
        for kernel, given in (("forward", settings.forward), ("backward", settings.backward))
    )
    return replace(settings, forward=forward, backward=backward)


def work_of(call: Call) -> frozenset[str]:
    """Return the kinds of work that the table tells apart.

    "small": the call is one piece by default. "causal": causal order. "window": a window or a chunk. "ids":
    segment ids, lengths or ranges. "pairs": a mask or a bias. "dropout": pairs are dropped.
    """
    kinds = {
        "small": whole.takes(call),
        "causal": call.causal,
        "window": windowed(call),
        "ids": any(
            x is not None for x in (call.q_segment_ids, call.cum_seqlens_q, call.kv_start, call.kv_end)
        ),
        "pairs": call.attention_mask is not None or call.bias is not None,
        "dropout": call.dropout_seed is not None,
    }
    return frozenset(name for name, found in kinds.items() if found)


def rows(call: Call, config: Config) -> tuple[Row, ...]:
    """Return a row for each pass whose sizes are given, for calls of the same head dim, device and work."""
    dim = _dim(call)
    selecting = {"bytes": call.query.dtype.itemsize, "over": half(dim), "head_dim": dim}
    where = {"devices": [device_kind()], "only": sorted(work_of(call))}
    return tuple(
        {"kernel": kernel, **selecting, **asdict(sizes), **where}
        for kernel, sizes in (("forward", config.forward), ("backward", config.backward))
        if sizes is not None
    )


def _dim(call: Call) -> int:
    return max(call.query.shape[3], call.value.shape[3])
