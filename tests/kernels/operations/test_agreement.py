"""Several processes tune one operation: one winner, and no hang, whatever one of them does."""

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from attest.kernels import xla
from attest.kernels.operations import FlashAttentionConfig
from attest.kernels.operations.agreement import Agreement

ROOT = Path(__file__).parents[3]
CONFIG = FlashAttentionConfig(config=xla.Config(xla.ChunkSizes(8, 8)))

# What each process does: its number, the role of the last one, and the address of the service.
_PROCESS = """
import sys
import jax
process, role, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, num_processes=2, process_id=process)
import numpy as np
from attest.kernels.operations import Tuner
from attest.kernels.operations.agreement import agreement_here
from attest.kernels.operations.executor import invocation
from tests.kernels.operations.toy import Judge, Toy, ToyConfig

agreement = agreement_here()
assert (agreement.process, agreement.processes) == (process, 2)
agreement.seconds = 5.0
last = process == 1
slow, fast = ToyConfig("slow", 3000), ToyConfig("fast")
if last and role == "fails":
    fast = ToyConfig("crashes")
if last and role == "vanishes":
    sys.stdout.flush()
    import os
    os._exit(0)
operation = Toy((slow, fast))
x = np.ones((8, 8), np.float32)
try:
    record = Tuner(1, 3, Judge()).tune(
        operation, invocation(operation, (), {"x": x}), {"x": x}, agreement=agreement
    )
    print("winner", record.winner().name)
except ValueError as error:
    print("error", error)
sys.stdout.flush()
import os
os._exit(0)
"""


def outputs(role: str) -> list[str]:
    """The last lines of two processes, of which the last one has a role."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(n), role, address],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=120)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_candidate_that_fails_in_one_process_is_chosen_in_none():
    assert outputs("fails") == ["winner slow", "winner slow"]


def test_a_process_that_is_lost_ends_in_an_error():
    first, _ = outputs("vanishes")
    assert first.startswith("error process 1: got no answer on times/")
    assert "expected every process of the program to make the same call" in first


class Shared:
    """A key-value service for threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def put(self, key: str, value: str) -> None:
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str, seconds: float) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, seconds):
                raise TimeoutError
            return self.values[key]


def together(work: Any, processes: int = 3) -> list[Any]:
    """What each of several threads returns that stand for processes."""
    shared = Shared()
    found: list[Any] = [None] * processes

    def run(process: int) -> None:
        found[process] = work(Agreement(process, processes, shared, 5.0))

    threads = [threading.Thread(target=run, args=(process,)) for process in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_each_candidate_has_its_time_on_the_slowest_process():
    times = (
        {"a": 1.0, "b": 3.0, "c": 1.0},
        {"a": 2.0, "b": 1.0, "d": 1.0},
        {"a": 1.5, "b": 2.0, "c": float("inf")},
    )
    found = together(lambda agreement: agreement.slowest("times", times[agreement.process]))
    assert found == [{"a": 2.0, "b": 3.0, "c": float("inf")}] * 3


def test_a_topic_may_come_up_again():
    found = together(lambda agreement: [agreement.slowest("t", {"a": float(n)}) for n in range(3)])
    assert found == [[{"a": 0.0}, {"a": 1.0}, {"a": 2.0}]] * 3


@pytest.mark.parametrize("config", [CONFIG, None])
def test_all_take_what_the_first_process_has_on_disk(config):
    def work(agreement: Agreement) -> Any:
        own = config if agreement.process == 0 else FlashAttentionConfig(platform="xla")
        return agreement.first(
            "config", own, write=FlashAttentionConfig.to_json, read=FlashAttentionConfig.from_json
        )

    assert together(work) == [config] * 3


def test_one_process_needs_no_service():
    assert Agreement().slowest("t", {"a": 1.0}) == {"a": 1.0}
    assert Agreement().first("t", CONFIG, write=str, read=str) == CONFIG
