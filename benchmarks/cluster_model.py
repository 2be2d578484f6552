"""A model of a run on many workers: how many results a second its scheduler and its caller can handle.

A process spends so much on each batch, and so much on each result of it. Both are fitted to runs whose
batches differ in size. The most results a second are those that take a whole second of its processor time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from distributed.scheduler import heartbeat_interval
from scipy.optimize import nnls

from attest.conformance.cluster.batches import BATCH_SECONDS, MOST_JOBS
from benchmarks.cluster_record import PACED, Host, Run

# What a network card of 1 Gbit/s carries at most.
LINK_BYTES_PER_SECOND = 125e6
# Dask lets workers send their heartbeats the more seldom the more they are: never more than so many a second.
MOST_HEARTBEATS = 200.0


@dataclass(frozen=True)
class Cost:
    """A cost: of each batch, and of each result."""

    batch: float
    result: float

    def of_result(self, results_of_a_batch: float) -> float:
        """Return what a result costs, with its share of its batch."""
        return self.batch / results_of_a_batch + self.result


@dataclass(frozen=True)
class Limit:
    """The most results a second that one thing allows, and the workers that give as many."""

    what: str
    rate: float
    workers: float


@dataclass(frozen=True)
class Model:
    """The costs of a run on a host.

    scheduler, caller: seconds of processor time. heartbeat: of a worker, in seconds of the scheduler.
    scheduler_bytes, caller_bytes: received and sent. transitions: of the scheduler, a batch.
    results_of_a_batch: where there is more than enough to do. rate_of_a_worker: results a second.
    """

    scheduler: Cost
    caller: Cost
    heartbeat: float
    scheduler_bytes: Cost
    caller_bytes: Cost
    transitions: float
    results_of_a_batch: float
    rate_of_a_worker: float

    @property
    def limits(self) -> list[Limit]:
        """The limits of a cluster of many such workers, the lowest first."""
        free = 1 - self.heartbeat * MOST_HEARTBEATS
        costs = {
            "processor of the caller": self.caller.of_result(self.results_of_a_batch),
            "processor of the scheduler": self.scheduler.of_result(self.results_of_a_batch) / free,
            "1 Gbit/s at the caller": self.caller_bytes.of_result(self.results_of_a_batch)
            / LINK_BYTES_PER_SECOND,
            "1 Gbit/s at the scheduler": self.scheduler_bytes.of_result(self.results_of_a_batch)
            / LINK_BYTES_PER_SECOND,
        }
        found = [Limit(what, 1 / cost, 1 / cost / self.rate_of_a_worker) for what, cost in costs.items()]
        return sorted(found, key=lambda limit: limit.rate)

    def rate(self, workers: float) -> float:
        """Return the results a second of so many workers."""
        return min(workers * self.rate_of_a_worker, self.limits[0].rate)


def model_of(host: Host) -> Model:
    """Return the model that fits the runs of a host on idle workers. Raises ValueError without such runs."""
    if not host.can_be_modelled:
        raise ValueError(f"{host.name}: expected a row, and runs on idle workers: give --workers and --idle")
    rate = host.rate_of_a_worker
    jobs = min(rate / host.results_of_a_job * BATCH_SECONDS, MOST_JOBS)
    return Model(
        scheduler=_fitted(host.idle, lambda run: run.scheduler_seconds),
        caller=_fitted(host.idle, lambda run: run.caller.seconds),
        heartbeat=_heartbeat(host.idle),
        scheduler_bytes=_fitted(host.idle, lambda run: run.scheduler_bytes),
        caller_bytes=_fitted(host.idle, lambda run: run.caller.bytes),
        transitions=sum(run.scheduler.transitions for run in host.idle)
        / sum(run.scheduler.batches for run in host.idle),
        results_of_a_batch=max(jobs, 1.0) * host.results_of_a_job,
        rate_of_a_worker=rate,
    )


def _fitted(runs: Sequence[Run], value: Callable[[Run], float]) -> Cost:
    """Return the costs, none below 0, that fit some runs best, each weighed by what it spent."""
    spent = np.array([value(run) for run in runs], float)
    counts = np.array([(run.scheduler.batches, run.results) for run in runs], float)
    (batch, result), _ = nnls(counts / spent[:, None], np.ones(len(runs)))
    return Cost(float(batch), float(result))


def _heartbeat(runs: Sequence[Run]) -> float:
    """Return the seconds of a heartbeat, by the run with most workers."""
    most = max((run for run in runs if run.resting), key=lambda run: run.workers)
    assert most.resting is not None
    return most.resting.seconds * heartbeat_interval(most.workers) / most.workers


def predicted(host: Host) -> list[tuple[Run, float]]:
    """Return the runs of a host at the pace of real workers, each with the rate that the model predicts."""
    model = model_of(host)
    paced = [run for run in host.idle if run.kind == PACED]
    runs = [*(row.counted for row in host.rows), *paced]
    return [(run, model.rate(run.workers)) for run in runs]
