"""The cluster of a run or of a score: connected while it lasts."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from attest.conformance.cli.options import ClusterOptions

if TYPE_CHECKING:
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
    if cluster.address is None:
        yield workers
        return
    from attest.conformance.cluster.cluster import Cluster
    from attest.conformance.cluster.members import Requirements
    from attest.conformance.mutants.run import single_threaded
    from attest.conformance.running.environment import environment

    with single_threaded(), closing(Cluster(cluster.address, say)) as found:
        found.admit(Requirements(environment(), mixed=cluster.mixed))
        yield found
