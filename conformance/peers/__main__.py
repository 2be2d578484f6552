"""The peers that `nox -s gate-peers` judges: `python -m attest.conformance.peers` prints their names.

A line is the `module:NAME` of one that this process can run. With `--list` the others follow, and why not.
"""

import sys
from collections.abc import Mapping

from attest.conformance import peers
from attest.conformance.subject import Subject, listed_in


def judged_apart() -> Mapping[str, Subject]:
    """Return the subjects of the tuples APART, by the `module:NAME` that finds each."""
    return listed_in(peers, "APART")


def lines(subjects: Mapping[str, Subject], backend: str, others: bool) -> list[str]:
    """Return a line for each subject that runs on a backend, and for each of the others, with why not."""
    reasons = {name: subject.why_not_here(backend) for name, subject in subjects.items()}
    here = [name for name, reason in reasons.items() if reason is None]
    return here + [f"{name}: {reason}" for name, reason in reasons.items() if others and reason is not None]


if __name__ == "__main__":
    import jax

    print("\n".join(lines(judged_apart(), jax.default_backend(), "--list" in sys.argv[1:])))
