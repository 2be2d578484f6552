"""The functions that run in a worker of a cluster: each call gets a guarded process that can be killed.

The guarded process stays from one batch to the next, with what it has imported and compiled.
"""

import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attest.conformance.process.limits import limits
from attest.conformance.process.pool import Job, Outcome, Pool
from attest.conformance.process.settings import settle
from attest.conformance.running.gate import why_not_here
from attest.conformance.subject import find

_PATIENCE = 0.2  # seconds between two looks at the process
# Of each thread, so that a worker with several threads runs several calls at once.
_KEPT = threading.local()

# A function of a module that finds the facts of the environment in which it is called.
Facts = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Description:
    """The description of a worker.

    fault: why it cannot run anything, in one clause. environment: its facts, if there is no fault.
    reasons: why a subject cannot run there, by name; subjects without a reason can.
    """

    fault: str = ""
    environment: dict[str, Any] | None = None
    reasons: dict[str, str] | None = None


def describe(names: Sequence[str], facts: Facts) -> Description:
    """Describe this worker, and which subjects cannot run in it."""
    if multiprocessing.current_process().daemon:
        return Description(
            "is a daemon, which may start no process: start it with --no-nanny, or set"
            " distributed.worker.daemon to false"
        )
    (outcome,) = run_batch((Job("", described, (tuple(names), facts)),), limits()["start_seconds"])
    return outcome.value or Description(outcome.fault)


def run_batch(jobs: Sequence[Job], timeout: float) -> list[Outcome]:
    """Return the outcome of each call of some jobs. timeout: seconds for one call."""
    settle()
    pool: Pool | None = getattr(_KEPT, "pool", None)
    if pool is None:
        _KEPT.pool = pool = Pool(1, timeout)
    pool.timeout = timeout
    try:
        return _outcomes(pool, jobs)
    except BaseException:
        del _KEPT.pool
        pool.stop()
        raise


def _outcomes(pool: Pool, jobs: Sequence[Job]) -> list[Outcome]:
    waiting, found = deque(jobs), list[Outcome]()
    while waiting or pool.busy:
        if waiting and pool.idle:
            pool.give(waiting.popleft())
        found += pool.outcomes(_PATIENCE)
        waiting.extendleft(pool.left)
        pool.left.clear()
    return found


def described(_subject: None, asked: tuple[Sequence[str], Facts]) -> Description:
    """Describe the process in which this is called."""
    names, facts = asked
    here = facts()
    found = {name: _reason(name, here["backend"]) for name in names}
    return Description("", here, {name: reason for name, reason in found.items() if reason is not None})


def _reason(name: str, backend: str) -> str | None:
    try:
        return why_not_here(find(name), backend)
    except LookupError as error:
        return str(error.args[0])
