"""The cluster of a run: connected while it lasts."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from attest.conformance.cli.options import ClusterOptions

if TYPE_CHECKING:
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
    from attest.conformance.cluster.members import Wanted

    needs_gpu = {name: subject.backend == "gpu" for name, subject in request.subjects.items()}
    with closing(Cluster(cluster.address, say)) as workers:
        workers.admit(Wanted(request.environment, needs_gpu, cluster.mixed))
        yield replace(request, workers=workers, environment=workers.environment)
