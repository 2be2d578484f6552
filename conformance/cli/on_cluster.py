"""The cluster of a run, of a score or of other tasks: connected while they last."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from attest.conformance.cli.options import ClusterOptions

if TYPE_CHECKING:
    from attest.conformance.cluster.worker import Facts
    from attest.conformance.process.workers import Elsewhere
    from attest.conformance.running.runner import Request


@contextmanager
def connected(
    request: "Request", cluster: ClusterOptions, say: Callable[[str], None]
) -> Generator["Request"]:
    """Give a request with the workers of a cluster and their environment, if one is asked for.

    Raises WorkerError. say: reports a sentence to the user.
    """
    if cluster.address is None:
        yield request
        return
    from attest.conformance.cluster.cluster import Cluster
    from attest.conformance.cluster.members import Requirements

    needs_gpu = {name: subject.backend == "gpu" for name, subject in request.subjects.items()}
    with closing(Cluster(cluster.address, say)) as workers:
        workers.admit(Requirements(request.environment, needs_gpu, cluster.mixed))
        yield replace(request, workers=workers, environment=workers.environment)


@contextmanager
def scoring(
    workers: int, cluster: ClusterOptions, say: Callable[[str], None]
) -> Generator["int | Elsewhere"]:
    """Give the workers of a score: as many processes, or those of a cluster. Raises WorkerError."""
    from attest.conformance.mutants.run import single_threaded
    from attest.conformance.running.environment import environment

    with single_threaded(), working(workers, cluster, say, environment) as where:
        yield where


@contextmanager
def working(
    workers: int, cluster: ClusterOptions, say: Callable[[str], None], facts: "Facts"
) -> Generator["int | Elsewhere"]:
    """Give the workers of tasks without a subject: as many processes, or those of a cluster.

    facts: a function of a module, which finds what the workers must have in common with the caller. Raises
    WorkerError. say: reports a sentence to the user.
    """
    if cluster.address is None:
        yield workers
        return
    from attest.conformance.cluster.cluster import Cluster
    from attest.conformance.cluster.members import Requirements
    from attest.conformance.cluster.worker import described
    from attest.conformance.process.limits import limits
    from attest.conformance.process.settings import WorkerError
    from attest.conformance.process.workers import Job, perform

    with closing(Cluster(cluster.address, say)) as found:
        # In a process, as on a worker: here JAX may have begun with other settings.
        (here,) = perform([Job("", described, ((), facts))], {}, 1, limits()["start_seconds"])
        if here.fault:
            raise WorkerError(f"the caller of --cluster {cluster.address}: {here.fault}")
        found.admit(Requirements(here.value.environment, mixed=cluster.mixed, facts=facts))
        yield found
