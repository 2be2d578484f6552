"""Counts false alarms: judges correct kernels by a profile over fresh seeds, on as many cores as there are.

    python -m tests.alarms.run --profile standard --seeds 2000:2100 --workers 64 --seconds 540 --out FILE
    python -m tests.alarms.run --cluster tcp://a:8786 --out FILE

FILE holds JSON lines: every result that is not PASS, with its case and numbers, a count now and then, and a
summary at the end. It runs from the repository's folder, with nothing installed but what it imports; the
workers of a cluster need that folder in their PYTHONPATH, and the variables that this sets.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attest.conformance.cli.console import note
from attest.conformance.cli.options import ClusterOptions, UsageError
from attest.conformance.mutants.run import SINGLE_THREADED
from attest.conformance.process.limits import limits
from attest.conformance.process.pool import Job
from attest.conformance.process.settings import WorkerError
from attest.conformance.process.workers import Workers, perform
from tests.alarms.tally import Tally

# Seconds between two counts in the file, and those that calls have to finish at the end.
COUNT_SECONDS = 30.0
PATIENCE_SECONDS = 60.0
# So many jobs are drawn before they are needed: drawing all of them would take a core from the kernels.
AHEAD = 1000


class _OverError(Exception):
    """The time is over, and calls still run."""


@dataclass
class _Pace:
    """The progress of a run. end: when no call may begin any more, by `time.monotonic`; done: calls."""

    end: float
    drawn: int = 0
    done: int = 0

    def over(self, _job: object = None) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.end

    def watch(self, _job: Job, _seconds: float) -> None:
        """Raise _OverError if calls run too long after the end."""
        if time.monotonic() > self.end + PATIENCE_SECONDS:
            raise _OverError

    def ahead(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield jobs until the time is over, not many more than are needed."""
        for job in jobs:
            while self.drawn - self.done > AHEAD and not self.over():
                time.sleep(0.1)
            if self.over():
                return
            self.drawn += len(job.calls)
            yield job


def main(arguments: list[str]) -> int:
    """Run, write the file and print the summary; 1 if anything was red, or if the workers were lost."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.workers is not None and options.cluster is not None:
        parser.error("--cluster and --workers: a cluster has workers of its own: give one of both")
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers: got {options.workers}, expected at least 1")
    os.environ.update(_variables(options.subjects))
    from attest.conformance.cli.on_cluster import working
    from tests.alarms.calls import facts

    try:
        cluster = ClusterOptions(options.cluster, options.mixed)
        with working(options.workers or os.cpu_count() or 1, cluster, note, facts) as workers:
            return _run(options, workers)
    except UsageError as error:
        parser.error(str(error))
    except WorkerError as error:
        note(str(error))
        return 1


def _run(options: argparse.Namespace, workers: Workers) -> int:
    total, lost = Tally(), False
    with Path(options.out).open("w", encoding="utf-8") as file:
        try:
            for line in _lines(options, workers, total):
                file.write(json.dumps(line, sort_keys=True) + "\n")
                file.flush()
        except WorkerError as error:
            note(str(error))
            lost = True
        summary = total.summary() | {"profile": options.profile, "seeds": options.seeds}
        file.write(json.dumps(summary, sort_keys=True) + "\n")
    if options.evidence:
        Path(options.evidence).write_text(
            json.dumps(summary, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
    print(json.dumps({name: summary[name] for name in ("results", "red", "by_subject")}, indent=1))
    return int(lost or summary["red"] > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--seeds", default="2000:2100", help="FIRST:END, or one seed")
    parser.add_argument("--workers", type=int, help="processes; the number of cores if not given")
    parser.add_argument("--cluster", help="the address of a Dask scheduler, or local:N")
    parser.add_argument("--mixed", action="store_true", help="use workers with another processor, too")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--subjects", nargs="*", default=["all"], help="names, or the starts of names")
    parser.add_argument("--per-case", type=int, default=4, help="outsiders that each case is given to")
    parser.add_argument("--out", default="alarms.jsonl")
    parser.add_argument("--evidence", help="a JSON file of the summary alone, as docs/evidence/alarms.json")
    return parser


def _variables(subjects: list[str]) -> dict[str, str]:
    """The variables of all processes: one thread each, and Triton's interpreter if it is wanted."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {SINGLE_THREADED['XLA_FLAGS']}".strip()
    interprets = subjects == ["all"] or "triton.interpret".startswith(tuple(subjects))
    return {**SINGLE_THREADED, "XLA_FLAGS": flags} | ({"TRITON_INTERPRET": "1"} if interprets else {})


def _lines(options: argparse.Namespace, workers: Workers, total: Tally) -> Iterator[dict[str, Any]]:
    """The lines to write, as calls end; `total` has the counts of all that have ended."""
    from attest.conformance.running.plan import load_profile
    from tests.alarms.calls import jobs_of, tally_of
    from tests.alarms.subjects import choose

    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    pace = _Pace(time.monotonic() + options.seconds)
    groups, profile = choose(options.subjects), load_profile(options.profile)
    jobs = pace.ahead(jobs_of(groups, profile, seeds, options.per_case))
    seconds = limits()["task_seconds"] * options.per_case
    next_count = time.monotonic() + COUNT_SECONDS
    with closing(perform(jobs, {}, workers, seconds, lambda _job: not pace.over(), pace.watch)) as outcomes:
        try:
            for outcome in outcomes:
                pace.done += 1
                tally = tally_of(outcome)
                total.join(tally)
                yield from tally.lines
                if time.monotonic() > next_count:
                    next_count = time.monotonic() + COUNT_SECONDS
                    yield {"kind": "count", **total.counts_json()}
        except _OverError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
