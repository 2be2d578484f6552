"""The workers of a cluster: those that get calls, those that are refused, and the calls of each."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attest.conformance.cluster.worker import Description, Facts
from attest.conformance.process.limits import limits
from attest.conformance.running.environment import FACTS, differing
from attest.conformance.running.environment import environment as facts_of_run

# What a scheduler calls the accelerators of a worker: `dask worker --resources GPU=1`.
_GPU = "GPU"
# Facts in which a worker with a GPU differs from a caller without one.
_OF_DEVICE = ("backend", "device", "processor")
# A worker has one GPU of several, so that these differ between workers of one host.
_WHICH_GPU = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Requirements:
    """The requirements of a run on its workers.

    environment: the facts of the caller, which the workers share. subjects: by name, whether it needs a GPU.
    mixed: whether another processor is no reason to refuse a worker. facts: finds the facts of a worker.
    """

    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    subjects: Mapping[str, bool] = field(default_factory=dict[str, bool])
    mixed: bool = False
    facts: Facts = facts_of_run

    def of(self, gpu: bool) -> list[str]:
        """Return the subjects that need a GPU, or those that need none."""
        return [name for name, needs in self.subjects.items() if needs is gpu]

    @property
    def kinds(self) -> frozenset[bool]:
        """The kinds of work: True if some needs a GPU, False if some needs none."""
        # Without subjects, a run is of work that needs no GPU.
        return frozenset(self.subjects.values()) or frozenset({False})


@dataclass
class Member:
    """One worker.

    address: as the scheduler knows it. gpu: whether it declares one. takes: True if it takes subjects that
    need a GPU, False if it takes those that need none. running: the keys of what it was given. alone: whether
    that is a call that must have a worker for itself.
    """

    address: str
    threads: int
    gpu: bool
    takes: frozenset[bool]
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    running: set[Any] = field(default_factory=set[Any])
    alone: bool = False

    @property
    def free(self) -> bool:
        """Whether it can be given a batch."""
        return not self.alone and len(self.running) < self.threads


class Members:
    """The workers of a cluster, as they come and go.

    ask: requests the description of a worker. say: reports a sentence to the user. admitted: those that get
    calls. refused: the others, with the reason.
    """

    def __init__(
        self, requirements: Requirements, ask: Callable[[str, list[str]], None], say: Callable[[str], None]
    ) -> None:
        self.admitted: dict[str, Member] = {}
        self.refused: dict[str, str] = {}
        self.requirements = requirements
        self._ask, self._say = ask, say
        self._asked: dict[str, tuple[Member, float]] = {}  # each with the time

    @property
    def undecided(self) -> bool:
        """Whether a worker has not been described yet."""
        return bool(self._asked)

    @property
    def lacking(self) -> frozenset[bool]:
        """The kinds of work of the run that no worker takes."""
        return self.requirements.kinds.difference(*(member.takes for member in self.admitted.values()))

    @property
    def any_free(self) -> bool:
        """Whether one can be given a batch."""
        return any(member.free for member in self.admitted.values())

    def needs_gpu(self, subject: str) -> bool:
        """Return whether a subject of the run needs a GPU."""
        return self.requirements.subjects.get(subject, False)

    @property
    def environment(self) -> dict[str, Any]:
        """The environment for the record of a run."""
        here = dict(self.requirements.environment)
        apart = [member.environment for member in self.admitted.values() if False not in member.takes]
        if not apart:
            return here
        there = {name: apart[0][name] for name in _OF_DEVICE}
        return here | ({"gpu_workers": there} if self.requirements.of(gpu=False) else there)

    def forget_calls(self) -> None:
        """Take every worker for free."""
        for member in self.admitted.values():
            member.running.clear()
            member.alone = False

    def seen(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """Note which workers are there, as the scheduler knows them."""
        for known in (self.admitted, self.refused, self._asked):
            for address in [address for address in known if address not in workers]:
                del known[address]
        now, patience = time.monotonic(), limits()["start_seconds"]
        for address in [address for address, (_, asked) in self._asked.items() if now - asked > patience]:
            self.refuse(address, f"did not describe itself within {patience:g} s")
        new = workers.keys() - self.admitted.keys() - self.refused.keys() - self._asked.keys()
        # Work that needs no GPU runs on one all the same where the caller would run it on one.
        on_gpu = self.requirements.environment.get("backend") == "gpu"
        for address in sorted(new):
            gpu = _has_gpu(workers[address])
            able = ({True, False} if on_gpu else {True}) if gpu else {False}
            takes = self.requirements.kinds & able
            member = Member(address, workers[address].get("nthreads", 1), gpu, takes)
            if takes:
                self._asked[address] = member, now
                self._ask(address, [name for needs in takes for name in self.requirements.of(needs)])
            else:
                declares, needs = ("a GPU", "no") if gpu else ("no GPU", "each")
                self.refuse(address, f"declares {declares}, and {needs} subject of this run needs one")

    def described(self, address: str, description: Description) -> None:
        """Admit a worker, or refuse it."""
        if address not in self._asked:  # gone meanwhile
            return
        member, _ = self._asked.pop(address)
        member.environment = description.environment or {}
        reason = description.fault or "; ".join([*self._unlike(member), *self._unable(description)])
        if reason:
            self.refuse(address, reason)
        else:
            self.admitted[address] = member

    def refuse(self, address: str, reason: str) -> None:
        """Give a worker nothing more."""
        self.admitted.pop(address, None)
        self._asked.pop(address, None)
        self.refused[address] = reason
        self._say(f"worker {address} gets no cases: {reason}")

    def _unlike(self, member: Member) -> Iterable[str]:
        """Yield how a worker differs from the caller; in its device, from the other workers with a GPU."""
        mixed = {"processor"} if self.requirements.mixed else set[str]()
        # The device of the caller says nothing about a worker for subjects that run on GPUs alone.
        apart = set(_OF_DEVICE) if False not in member.takes else set[str]()
        here, there = _comparable(self.requirements.environment), _comparable(member.environment)
        yield from differing(there, here, [name for name in FACTS if name not in mixed | apart])
        others = [other for other in self.admitted.values() if other.gpu]
        if apart and others:
            yield from differing(there, _comparable(others[0].environment), sorted(apart - mixed))

    def _unable(self, description: Description) -> Iterable[str]:
        for name, reason in (description.reasons or {}).items():
            yield f"{name}: {reason}"


def _has_gpu(worker: Mapping[str, Any]) -> bool:
    return worker.get("resources", {}).get(_GPU, 0) > 0


def _comparable(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment without which of the GPUs of its host it has."""
    flags = {name: flag for name, flag in environment.get("flags", {}).items() if name not in _WHICH_GPU}
    return {**environment, "flags": flags}
