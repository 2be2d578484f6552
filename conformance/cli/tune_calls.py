"""The calls that `attest tune` tunes: the one of the options, or those of a file of workloads."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax

from attest.conformance.cli.options import UsageError
from attest.conformance.tuning.workload import DTYPE, Workload, draw, options
from attest.conformance.tuning.workload_file import read_workloads
from attest.kernels.call.options import check_dtype


@dataclass(frozen=True)
class NamedCall:
    """A call of flash attention: its name, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]

    def on(self, platform: str | None) -> "NamedCall":
        """Return the call on a platform, or None: on what the choice takes."""
        return replace(self, arguments={**self.arguments, "platform": platform})


@dataclass(frozen=True)
class CallOptions:
    """The options of one call, as the command line has them, with their defaults."""

    q_len: int | None = None
    q_heads: int | None = None
    head_dim: int | None = None
    batch: int = 1
    kv_len: int | None = None
    kv_heads: int | None = None
    value_dim: int | None = None
    dtype: str = DTYPE
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0


def call_of_options(given: CallOptions) -> NamedCall:
    """Return the call of the options of a command line.

    Raises: UsageError for an option that is missing, ValueError for a malformed dtype.
    """
    q_len, q_heads, head_dim = given.q_len, given.q_heads, given.head_dim
    if q_len is None or q_heads is None or head_dim is None:
        raise UsageError("--q-len, --q-heads and --head-dim: give all three, or --workloads FILE")
    check_dtype("dtype", given.dtype)
    found: dict[str, Any] = {"causal": given.causal, "logits_soft_cap": given.soft_cap}
    if given.window is not None:
        found["sliding_window"] = (given.window, 0 if given.causal else given.window)
    if given.dropout:
        found |= {"dropout_prob": given.dropout, "dropout_seed": 0}
    kv_len, kv_heads, value_dim = (
        given.kv_len or q_len,
        given.kv_heads or q_heads,
        given.value_dim or head_dim,
    )
    arrays = {
        name: jax.ShapeDtypeStruct((given.batch, length, heads, dim), given.dtype)
        for name, length, heads, dim in (
            ("query", q_len, q_heads, head_dim),
            ("key", kv_len, kv_heads, head_dim),
            ("value", kv_len, kv_heads, value_dim),
        )
    }
    shape = Workload(
        given.batch, q_len, q_heads, head_dim, given.kv_len, given.kv_heads, given.value_dim
    ).shape
    on = [f"{name} {x}" for name in ("window", "soft_cap", "dropout") if (x := getattr(given, name))]
    name = ", ".join((shape, given.dtype, *(["causal"] if given.causal else []), *on))
    return NamedCall(name, {**arrays, **found})


def calls_of_file(path: Path, given: CallOptions) -> list[NamedCall]:
    """Return the calls of a file of workloads.

    Raises: UsageError for an option of one call beside it; ValueError for a malformed file.
    """
    for option in fields(CallOptions):
        if getattr(given, option.name) != option.default:
            name = f"--{option.name.replace('_', '-')}"
            raise UsageError(f"{name}: is of one call, and --workloads has the calls: leave one out")
    return [NamedCall(name, _arguments(workload)) for name, workload in read_workloads(path).items()]


def _arguments(workload: Workload) -> dict[str, Any]:
    """Return the arguments of a call: floats as shapes, except for slopes, which are constants."""
    check_dtype("dtype", workload.dtype)
    inputs: dict[str, Any] = jax.eval_shape(lambda: draw(workload))
    wanted = options(workload, inputs)
    exact = [name for name, x in inputs.items() if name == "slopes" or x.dtype.kind in "iub"]
    if exact:
        drawn = draw(workload)
        wanted = options(workload, {**inputs, **{name: drawn[name] for name in exact}})
    arrays = {name: inputs[name] for name in ("query", "key", "value")}
    return {**arrays, **wanted, **({"dropout_seed": 0} if workload.dropout else {})}
