"""The tuner: judges the candidates of a call, times those that are right, and keeps a record."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from threading import TIMEOUT_MAX
from typing import Any, Protocol

import jax

from attest.kernels.call.options import check_size, refuse
from attest.kernels.operations.agreement import Agreement
from attest.kernels.operations.inputs import draw
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.judging import CandidateCall, Judge, Judgement, Program, installed_judge
from attest.kernels.operations.kernel import Kernel
from attest.kernels.operations.programs import compiled
from attest.kernels.operations.timing import OutOfTimeError, median_seconds, traced, within

# Seeds of judgements, other ones in each process and run.
_SEEDS = count(time.time_ns() % 2**31)
# The winner and the tables' choice are timed in turns, so often; it must be faster every time, and by this
# share in the median. Of two that are alike, one is ahead every time in one of 2 ** 7 runs.
_TURNS = 7
_NOISE = 0.02


@dataclass(frozen=True)
class Candidate[Config]:
    """One configuration in the record of a tuning run.

    seconds: the median of a call, infinite for one that was not timed. verdict: "right", "wrong" or
    "failed"; why: of the last two, in one sentence. statistics: how far each output was off, see `Judgement`.
    """

    config: Config
    seconds: float
    verdict: str
    why: str = ""
    statistics: Mapping[str, Mapping[str, float]] | None = None


@dataclass(frozen=True)
class TuningRecord[Config]:
    """The findings of a tuning run.

    candidates: the first is the choice of the tables. chosen: the index of the winner. gain: the time of the
    tables' choice over that of the winner, from timings in turns, which differ less than those of candidates
    one after another; 1 where they are the same, NaN where the tables' choice could not be timed.
    """

    op_id: str
    call: Mapping[str, Any]
    environment: Mapping[str, str]
    backward: bool
    candidates: tuple[Candidate[Config], ...]
    chosen: int
    gain: float

    def winner(self) -> Config:
        """Return the configuration that was chosen."""
        return self.candidates[self.chosen].config

    def summary(self) -> str:
        """Return one line for a log."""
        right = sum(x.verdict == "right" for x in self.candidates)
        fastest = f"{self.candidates[self.chosen].seconds * 1e3:.4g} ms"
        return f"{right} of {len(self.candidates)} candidates are right, the fastest takes {fastest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON; times that are not finite are None."""
        return {
            "op_id": self.op_id,
            "call": dict(self.call),
            "environment": dict(self.environment),
            "backward": self.backward,
            "chosen": self.chosen,
            "gain": self.gain if math.isfinite(self.gain) else None,
            "candidates": [
                {
                    "config": getattr(x.config, "to_json", lambda x=x: str(x.config))(),
                    "seconds": x.seconds if math.isfinite(x.seconds) else None,
                    "verdict": x.verdict,
                    "why": x.why,
                    "statistics": {name: dict(of) for name, of in (x.statistics or {}).items()},
                }
                for x in self.candidates
            ],
        }


class Progress(Protocol):
    """A display of the progress of a tuning run."""

    def __call__(self, done: int, total: int, candidate: Candidate[Any]) -> None:
        """Show that so many candidates of a total are done; the candidate is the last one."""
        ...


def _no_progress(done: int, total: int, candidate: Candidate[Any]) -> None:
    """Show nothing."""


class Tuner:
    """A search for the fastest right configuration of a call.

    warmup: calls before the first that is timed. iters: calls that are timed, at most; the median counts, and
    a candidate that is clearly slower than the best so far is timed less often. judge: what says whether a
    candidate is right; by default the one that is installed. time_limit: seconds to judge or to time one
    candidate, compilation included. progress: called after each candidate.
    """

    def __init__(
        self,
        warmup: int = 5,
        iters: int = 100,
        judge: Judge | None = None,
        time_limit: float = 120.0,
        progress: Progress = _no_progress,
    ) -> None:
        """Check the numbers.

        Raises: ValueError naming the argument.
        """
        self.warmup, self.iters = check_size("warmup", warmup), check_size("iters", iters)
        if not 0 < time_limit <= TIMEOUT_MAX:
            refuse("time_limit", time_limit, "a positive number of seconds", "Leave it out for the default.")
        self.time_limit = float(time_limit)
        self.progress = progress
        self._judge = judge

    @property
    def judge(self) -> Judge | None:
        """The judge that was given, or the one that is installed; None where there is none."""
        return installed_judge() if self._judge is None else self._judge

    def tune[Config](
        self,
        kernel: Kernel[Config, Any],
        inv: Invocation[Config, Any],
        arguments: Mapping[str, Any],
        *,
        backward: bool = False,
        agreement: Agreement | None = None,
    ) -> TuningRecord[Config]:
        """Judge and time the candidates of a call, and return the record with the winner.

        arguments: of the call, by name; floats may be jax.ShapeDtypeStruct, as they are drawn anew. backward:
        whether gradients are judged and timed, too. The fastest right candidate is judged once more after it
        was timed, on other inputs, and the next one is taken if it fails. The first candidate is kept unless
        the fastest one is faster by more than noise.

        Raises: ValueError without a judge or candidates, inside of a trace, where no candidate is right, and
        where a process is lost.
        """
        judge = self.judge
        if judge is None:
            refuse("judge", "none", "a judge of candidates", "Install attest-attention[suite].")
        if traced():
            got, advice = "a call while JAX traces", "Call it ahead of time, with the shapes of the call."
            refuse("tune", got, "one outside of jax.jit and other transformations", advice)
        configs = list(kernel.candidate_cfgs(inv))
        if not configs:
            advice = "It needs no tuning: call it."
            refuse("op", f"{inv.op_id}, which has one configuration here", "several candidates", advice)
        run = _Run(self, kernel, inv, arguments, backward, judge)
        if not backward:
            configs = _first_of_each(configs, kernel.forward_part)
        found = [run.candidate(config, len(configs) + 1) for config in configs]
        right = ((x.config, x.seconds) for x in found if math.isfinite(x.seconds))
        joined = kernel.combined_cfg(right)
        if joined is not None and joined not in configs:
            found.append(run.candidate(joined, len(configs) + 1))
        times = _agreed(found, inv, agreement or Agreement())
        found = [replace(x, seconds=time) for x, time in zip(found, times, strict=True)]
        chosen = None
        for index in _fastest_first(times):
            judgement = run.judged(found[index].config)
            if _agreed_on(judgement.right, inv, agreement or Agreement()):
                chosen = index
                break
            why = judgement.reason or "it is wrong in another process"
            found[index] = replace(found[index], seconds=math.inf, verdict="wrong", why=why)
        gain = math.nan if found[0].verdict != "right" else 1.0
        if chosen and found[0].verdict == "right":
            gains = run.gains(found[chosen].config, over=found[0].config)
            gain = statistics.median(gains)
            # Noise must not win: the first candidate is what runs without tuning.
            clearly = min(gains) > 1 and gain > 1 + _NOISE
            if not _agreed_on(clearly, inv, agreement or Agreement()):
                chosen, gain = 0, 1.0
        if chosen is None:
            reasons = "; ".join(dict.fromkeys(x.why for x in found))
            got = f"none of {len(found)} that is right ({reasons})" if found else "none"
            advice = "Leave cfg out for the tables' choice, and report the failure."
            refuse("candidates", got, "at least one that is right", advice)
        return TuningRecord(inv.op_id, inv.call, inv.environment, backward, tuple(found), chosen, gain)


class _Run[Config]:
    """One tuning run."""

    def __init__(
        self,
        tuner: Tuner,
        kernel: Kernel[Config, Any],
        inv: Invocation[Config, Any],
        arguments: Mapping[str, Any],
        backward: bool,
        judge: Judge,
    ) -> None:
        self._tuner, self._kernel, self._inv = tuner, kernel, inv
        self._arguments, self._backward, self._judge = dict(arguments), backward, judge
        self._plain = kernel.plain(self._arguments)
        self._best = math.inf
        self._done = 0
        self._programs: dict[Config, Program | Judgement] = {}

    def program(self, config: Config) -> Program | Judgement:
        """Return the compiled program of a candidate, or why there is none.

        One is compiled at a time: Triton's compiler is not safe in several threads.
        """
        if config not in self._programs:
            self._programs[config] = self._compiled(config)
        return self._programs[config]

    def _compiled(self, config: Config) -> Program | Judgement:
        def run(**arguments: Any) -> Any:
            return self._kernel.run(cfg=config, **arguments)

        try:
            return within(self._tuner.time_limit, lambda: compiled(run, self._plain, self._backward))
        except OutOfTimeError:
            return Judgement(False, f"it was not compiled in {self._tuner.time_limit:g} s", failed=True)
        except Exception as error:  # whatever a kernel or a compiler raises, the next one has its turn
            return Judgement(False, _sentence(error), failed=True)

    def candidate(self, config: Config, total: int) -> Candidate[Config]:
        """Judge one configuration, and time it if it is right."""
        judgement = self.judged(config)
        if judgement.right:
            found = self._timed(config, judgement)
        else:
            verdict = "failed" if judgement.failed else "wrong"
            found = Candidate(config, math.inf, verdict, judgement.reason, judgement.statistics)
        self._done += 1
        self._tuner.progress(self._done, total, found)
        return found

    def judged(self, config: Config) -> Judgement:
        """Judge one configuration on inputs that no judgement saw before."""
        program = self.program(config)
        if isinstance(program, Judgement):
            return program
        call = CandidateCall(
            run=program,
            arguments=self._plain,
            implementation=self._kernel.implementation_of(config, self._inv),
            backward=self._backward,
            seed=next(_SEEDS),
        )
        try:
            return within(self._tuner.time_limit, lambda: self._judge(call))
        except OutOfTimeError:
            return Judgement(False, f"it was not judged in {self._tuner.time_limit:g} s", failed=True)
        except Exception as error:
            return Judgement(False, _sentence(error), failed=True)

    def gains(self, config: Config, over: Config) -> list[float]:
        """Return how many times as fast as another one a candidate is in each turn; 0 if one fails."""
        programs = [self.program(x) for x in (config, over)]

        def times() -> list[list[float]]:
            arguments = draw(self._plain, next(_SEEDS))
            calls = [_repeated(x(arguments)) for x in programs if not isinstance(x, Judgement)]
            few = max(1, self._tuner.iters // _TURNS)
            return [[median_seconds(call, 1, few, math.inf) for call in calls] for _ in range(_TURNS)]

        try:
            found = within(self._tuner.time_limit, times)
        except Exception:  # also OutOfTimeError: the other one is kept
            return [0.0]
        return [second / first for first, second in found]

    def _timed(self, config: Config, judgement: Judgement) -> Candidate[Config]:
        def seconds() -> float:
            program = self.program(config)
            assert not isinstance(program, Judgement)
            call = _repeated(program(draw(self._plain, next(_SEEDS))))
            return median_seconds(call, self._tuner.warmup, self._tuner.iters, self._best)

        try:
            found = within(self._tuner.time_limit, seconds)
        except OutOfTimeError:
            why = f"it was not timed in {self._tuner.time_limit:g} s"
            return Candidate(config, math.inf, "failed", why, judgement.statistics)
        except Exception as error:
            return Candidate(config, math.inf, "failed", _sentence(error), judgement.statistics)
        self._best = min(self._best, found)
        return Candidate(config, found, "right", "", judgement.statistics)


def _repeated(call: Callable[[], Any]) -> Callable[[int], None]:
    """Return a function that makes so many calls and waits for the last."""

    def calls(times: int) -> None:
        for _ in range(times - 1):
            call()
        jax.block_until_ready(call())

    return calls


def _first_of_each[Config](configs: list[Config], part: Callable[[Config], Any]) -> list[Config]:
    """Return the configurations whose part no earlier one has."""
    first: dict[Any, Config] = {}
    for config in configs:
        first.setdefault(part(config), config)
    return list(first.values())


def _agreed(found: Iterable[Candidate[Any]], inv: Invocation[Any, Any], agreement: Agreement) -> list[float]:
    times = {_name(x): x.seconds for x in found}
    slowest = agreement.slowest(f"times/{inv.call_key}", times)
    return [slowest.get(name, math.inf) for name in times]


def _agreed_on(right: bool, inv: Invocation[Any, Any], agreement: Agreement) -> bool:
    answer = agreement.slowest(f"right/{inv.call_key}", {"right": 0.0 if right else math.inf})
    return math.isfinite(answer["right"])


def _name(candidate: Candidate[Any]) -> str:
    return getattr(candidate.config, "to_json", lambda: str(candidate.config))()


def _fastest_first(times: list[float]) -> Iterator[int]:
    """Return the indices of finite times; of equal times the first."""
    return (i for i in sorted(range(len(times)), key=lambda i: (times[i], i)) if math.isfinite(times[i]))


def _sentence(error: Exception) -> str:
    """Return an exception as one line: the first of its text."""
    text = str(error).strip().splitlines()
    return f"it raised {type(error).__name__}: {text[0][:300] if text else ''}"
