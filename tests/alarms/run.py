"""Counts false alarms: judges correct kernels by a profile over fresh seeds, on as many cores as there are.

    python -m tests.alarms.run --profile standard --seeds 2000:2100 --workers 64 --seconds 540 --out FILE

FILE holds JSON lines: every result that is not PASS, with its case and numbers, a count now and then, and a
summary at the end. It runs from the repository's folder, with nothing installed but what it imports.
"""

import argparse
import json
import multiprocessing
import os
import queue
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attest.conformance.mutants.run import SINGLE_THREADED
from tests.alarms.tally import Tally

# A process interprets Triton's kernels or compiles those of others.
INTERPRETED = "triton.interpret"
# The share of the processes that interpret Triton's kernels, which are slow.
INTERPRETING = 0.1
# Compiled programs stay in a process's memory: they are dropped every so many tasks.
TASKS_PER_CACHE = 10
# Seconds between two counts in the file, and those that a process has to finish its case at the end.
COUNT_SECONDS = 30.0
PATIENCE_SECONDS = 60.0


def main(arguments: list[str]) -> int:
    """Run, write the file and print the summary; 1 if anything was red."""
    options = _parse(arguments)
    os.environ.update(SINGLE_THREADED | {"XLA_FLAGS": _flags()})
    end = time.monotonic() + options.seconds
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    stop = context.Event()
    processes = _start(context, options, results, stop)
    total = Tally()
    with Path(options.out).open("w", encoding="utf-8") as file:
        for lines in _collect(processes, results, stop, end, total):
            for line in lines:
                file.write(json.dumps(line, sort_keys=True) + "\n")
            file.flush()
        summary = total.summary() | {"profile": options.profile, "seeds": options.seeds}
        file.write(json.dumps(summary, sort_keys=True) + "\n")
    if options.evidence:
        Path(options.evidence).write_text(
            json.dumps(summary, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
    print(json.dumps({name: summary[name] for name in ("results", "red", "by_subject")}, indent=1))
    return int(summary["red"] > 0)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--seeds", default="2000:2100", help="FIRST:END, or one seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--subjects", nargs="*", default=["all"], help="names, or the starts of names")
    parser.add_argument("--per-case", type=int, default=4, help="outsiders that each case is given to")
    parser.add_argument("--out", default="alarms.jsonl")
    parser.add_argument("--evidence", help="a JSON file of the summary alone, as docs/evidence/alarms.json")
    return parser.parse_args(arguments)


def _flags() -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {SINGLE_THREADED['XLA_FLAGS']}".strip()


def _start(context: Any, options: argparse.Namespace, results: Any, stop: Any) -> list[Any]:
    """Start the processes, those that interpret Triton's kernels with the environment that they need."""
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    whole = options.subjects == ["all"]
    interpreting = [name for name in options.subjects if name == INTERPRETED] or (
        [INTERPRETED] if whole else []
    )
    others = [name for name in options.subjects if name != INTERPRETED]
    interpreters = max(1, int(INTERPRETING * options.workers)) if interpreting and options.workers > 1 else 0
    if interpreting and not others:
        interpreters = options.workers
    processes: list[Any] = []
    for number in range(options.workers):
        interprets = number < interpreters
        os.environ["TRITON_INTERPRET"] = "1" if interprets else "0"
        names = interpreting if interprets else others
        among = interpreters if interprets else options.workers - interpreters
        place = number if interprets else number - interpreters
        setting = (names, options.profile, list(seeds[place::among]), options.per_case)
        process = context.Process(target=_work, args=(setting, results, stop), daemon=True)
        process.start()
        processes.append(process)
    return processes


def _collect(
    processes: list[Any], results: Any, stop: Any, end: float, total: Tally
) -> Iterator[list[dict[str, Any]]]:
    """The lines to write, as the processes report; all of them are over at the end."""
    next_count = time.monotonic() + COUNT_SECONDS
    while True:
        now = time.monotonic()
        if now > end:
            stop.set()
        if now > end + PATIENCE_SECONDS or (
            results.empty() and not any(process.is_alive() for process in processes)
        ):
            break
        try:
            report = results.get(timeout=1.0)
        except queue.Empty:
            continue
        total.join(report)
        lines = report.lines
        if now > next_count:
            next_count = now + COUNT_SECONDS
            lines = [*lines, {"kind": "count", **total.counts_json()}]
        yield lines
    for process in processes:
        process.terminate()


def _work(setting: tuple[list[str], str, list[int], int], results: Any, stop: Any) -> None:
    """What one process does: plan the tasks of its seeds, in an order of chance, and report each case."""
    from attest.conformance.running.plan import load_profile
    from tests.alarms.planned import drawn_tasks, drop_caches, judge_together
    from tests.alarms.subjects import choose

    names, profile, seeds, per_case = setting
    groups = choose(names)
    done = 0
    # Processes begin with different groups, since most end before they have been through one.
    for seed, group in ((number, group) for number in seeds for group in _from(groups, number)):
        planned = drawn_tasks(group[0], load_profile(profile), seed, stop)
        random.Random(seed).shuffle(planned)
        for task in planned:
            turn = [group[(done * per_case + k) % len(group)] for k in range(min(per_case, len(group)))]
            # The cases of a task share what is compiled.
            for case, checks in task.cases:
                if stop.is_set():
                    return
                tally = Tally()
                for subject, found in judge_together(turn, case, checks):
                    for result in found:
                        tally.add(subject.name, result, seed)
                results.put(tally)
            done += 1
            if done % TASKS_PER_CACHE == 0:
                drop_caches()


def _from(groups: list[Any], start: int) -> list[Any]:
    """The groups in turn, from one of them on."""
    return [groups[(start + k) % len(groups)] for k in range(len(groups))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
