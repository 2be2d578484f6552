"""A toy operation: x times a factor, with candidates that may be slow, wrong, or not end."""

import json
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from attest.kernels.operations import Executor, Kernel, Tuner, create_default_executor
from attest.kernels.operations.judging import CandidateCall, Judgement


@dataclass(frozen=True)
class ToyConfig:
    """name: what kind of candidate it is. cost: matrix products that it does beside."""

    name: str = "right"
    cost: int = 0

    def to_json(self) -> str:
        return f'{{"cost": {self.cost}, "name": "{self.name}"}}'

    @classmethod
    def from_json(cls, text: str) -> "ToyConfig":
        return cls(**json.loads(text))


class Toy(Kernel[ToyConfig, Any]):
    """3 * x, by the candidates that it is built with."""

    op_id = "toy"
    config_type = ToyConfig

    def __init__(self, candidates: tuple[ToyConfig, ...] = (ToyConfig(),)) -> None:
        super().__init__()
        self.candidates = candidates
        self.ran: list[ToyConfig] = []

    def prepare(self, *args, **kwargs):
        return (), {"x": args[0], **kwargs} if args else kwargs

    def run(self, *args, cfg, **kwargs):
        (_, kwargs) = self.prepare(*args, **kwargs)
        self.ran.append(cfg)
        x = kwargs["x"]
        if cfg.name == "crashes":
            raise RuntimeError("no room\nin registers")
        if cfg.name == "hangs":
            return x * 3 + jax.pure_callback(_slow_zero, jax.ShapeDtypeStruct((), x.dtype))
        x = jax.lax.fori_loop(0, cfg.cost, lambda _, x: x + 0 * (x @ x.T @ x), x)
        return x * (3.03 if cfg.name == "wrong" else 3)

    def heuristic_cfg(self, inv):
        return self.candidates[0]

    def candidate_cfgs(self, inv):
        return self.candidates


def _slow_zero() -> np.ndarray:
    time.sleep(30)
    return np.float32(0)


class Judge:
    """Compares with 3 * x, on x drawn anew; keeps the seeds that it was given."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def __call__(self, call: CandidateCall) -> Judgement:
        self.seeds.append(call.seed)
        shape = call.arguments["x"].shape
        x = np.random.default_rng(call.seed).standard_normal(shape).astype(np.float32)
        out = np.asarray(call.run({"x": x})()["out"])
        worst = float(abs(out - 3 * x).max())
        right = worst < 1e-3
        return Judgement(right, "" if right else f"out is off by {worst:.3g}", {"out": {"worst": worst}})


def first_refused() -> tuple[Executor[Any, Any], list[CandidateCall]]:
    """An executor whose judge refuses the first candidate alone, and the calls that were judged."""
    judged: list[CandidateCall] = []

    def judge(call: CandidateCall) -> Judgement:
        judged.append(call)
        return Judgement(len(judged) > 1)

    executor = create_default_executor()
    executor.chooser.tuner = Tuner(1, 1, judge)
    return executor, judged
