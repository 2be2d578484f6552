"""The tables of the benchmark of clusters, in Markdown: what was measured, the model, and its errors."""

from collections.abc import Iterable, Sequence

from benchmarks.cluster_model import model_of, predicted
from benchmarks.cluster_record import PACED, Host

_MANY = 1000  # workers, of which the model says what they would do


def tables(host: Host) -> str:
    """Return the tables of a host."""
    found = [_measured(host)]
    if host.can_be_modelled:
        found += [_costs(host), _limits(host), _predictions(host)]
    return "\n\n".join(found)


def _measured(host: Host) -> str:
    rows = [
        (
            row.workers,
            f"{row.processes:.2f}",
            f"{row.cluster:.2f}",
            f"{row.ratio:.2f}",
            f"{row.counted.scheduler.spent.bytes / row.counted.results:,.0f}",
            f"{row.counted.scheduler.transitions / row.counted.results:.2f}",
        )
        for row in host.rows
    ]
    return _table(
        (
            "workers",
            "results/s of `-n`",
            "results/s of `--cluster`",
            "ratio",
            "bytes through the scheduler a result",
            "transitions of the scheduler a result",
        ),
        rows,
    )


def _costs(host: Host) -> str:
    model = model_of(host)
    return _table(
        ("cost", "of a batch", "of a result"),
        [
            (f"{what}, {unit}", f"{cost.batch * scale:,.{digits}f}", f"{cost.result * scale:,.{digits}f}")
            for what, unit, scale, digits, cost in (
                ("processor time of the scheduler", "ms", 1e3, 2, model.scheduler),
                ("processor time of the caller", "ms", 1e3, 2, model.caller),
                ("through the scheduler", "bytes", 1, 0, model.scheduler_bytes),
                ("at the caller", "bytes", 1, 0, model.caller_bytes),
            )
        ]
        + [("transitions of the scheduler", f"{model.transitions:.1f}", "0")],
    )


def _limits(host: Host) -> str:
    return _table(
        ("limit", "results/s", "workers"),
        [(limit.what, f"{limit.rate:,.0f}", f"{limit.workers:,.0f}") for limit in model_of(host).limits],
    )


def _predictions(host: Host) -> str:
    rows = [
        (
            f"{run.workers}{' that only wait' if run.kind == PACED else ''}",
            f"{run.rate:.2f}",
            f"{rate:.2f}",
        )
        for run, rate in predicted(host)
    ]
    rows.append((f"{_MANY:,}", "", f"{model_of(host).rate(_MANY):.2f}"))
    return _table(("workers", "results/s measured", "results/s predicted"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
