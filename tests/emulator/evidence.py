"""Measures what docs/error-model.md says: run `python -m tests.emulator.evidence <part>` to reproduce a table.

Parts: bounds (drawn calls on the emulator), kernels (the same on the XLA kernels of this machine), calibration
(long calls on both), defects (what each judgement says of the twelve defects), functions (exp and tanh of XLA),
tables (Markdown from what the others wrote to docs/evidence/). Options: --seeds, --dtypes.
"""

import argparse
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.error_model import predict
from reference.judgements import Statistics, exceeded, limits, measure
from reference.numerics import Numerics
from reference.oracle import attention
from tests.emulator.cases import FAMILIES, Drawn, Shape, draw, draw_small, dtype_of
from tests.emulator.defects import DEFECTS
from tests.emulator.flash import Arithmetic, Emulator, correct

DTYPES = ("float32", "bfloat16", "float16")
FOLDER = Path(__file__).parents[2] / "docs" / "evidence"


@dataclass(frozen=True)
class Judged:
    """One output of one call."""

    kernel: str
    dtype: str
    output: str
    family: str
    features: tuple[str, ...]
    seed: int
    statistics: Statistics
    exceeded: tuple[str, ...]


def judged(
    got: Mapping[str, NDArray[Any]],
    drawn: Drawn,
    numerics: Numerics,
    *,
    kernel: str,
    dtype: str,
    family: str,
    features: tuple[str, ...],
    seed: int,
) -> Iterator[Judged]:
    """Measure and judge every output that a kernel returned."""
    want = attention(drawn.problem, drawn.semantics, drawn.cotangents).items()
    predictions = predict(drawn.problem, drawn.semantics, numerics, drawn.cotangents)
    for name, truth in want.items():
        if name not in got:
            continue
        statistics = measure(got[name], truth, predictions[name])
        limit = limits(name, statistics.elements, drawn.problem.kv_len, dtype, family)
        yield Judged(kernel, dtype, name, family, features, seed, statistics, exceeded(statistics, limit))


def emulated(drawn: Drawn, arithmetic: Arithmetic) -> dict[str, NDArray[Any]]:
    return Emulator(drawn.problem, drawn.semantics, arithmetic).run(drawn.cotangents)


def small_cases(dtype: str, seeds: range) -> Iterator[Judged]:
    """Drawn calls on the emulator, flash and materialised."""
    for seed in seeds:
        drawn, family, features, materialised = draw_small(dtype, seed)
        options: dict[str, Any] = {"materialised": materialised}
        if materialised and seed % 2 and dtype != "float32":
            options["d_weights"] = dtype
        arithmetic, numerics = correct(dtype, **options)
        got = emulated(drawn, arithmetic)
        where = {"kernel": "emulator", "dtype": dtype, "family": family, "features": features, "seed": seed}
        yield from judged(got, drawn, numerics, **where)  # type: ignore[arg-type]


# Fixed shapes and features, so that a compiled kernel serves many seeds.
SHAPES = (
    (Shape(1, 33, 50, 2, 1, 64, 64), ()),
    (Shape(1, 64, 64, 2, 1, 32, 32), ("causal",)),
    (Shape(2, 17, 40, 4, 2, 16, 16), ("causal", "lengths")),
    (Shape(1, 48, 48, 2, 2, 128, 64), ("window",)),
    (Shape(1, 40, 40, 3, 1, 96, 80), ("mask",)),
    (Shape(1, 40, 40, 2, 1, 24, 24), ("bias",)),
    (Shape(1, 40, 40, 2, 1, 64, 64), ("broadcast_bias", "causal")),
    (Shape(1, 64, 64, 2, 1, 64, 64), ("cap_15",)),
    (Shape(1, 64, 64, 2, 1, 64, 64), ("cap_0.8", "causal")),
    (Shape(1, 30, 70, 2, 1, 64, 64), ("sinks",)),
    (Shape(1, 30, 70, 2, 1, 64, 64), ("shared_sinks", "causal", "cap_50")),
    (Shape(1, 40, 80, 2, 1, 32, 32), ("dropout",)),
    (Shape(1, 40, 80, 2, 1, 32, 32), ("dropout", "bias", "sinks")),
    (Shape(2, 40, 40, 2, 1, 32, 32), ("segments",)),
    (Shape(1, 40, 40, 2, 1, 64, 64), ("unnormalised", "sinks")),
    (Shape(1, 1, 200, 4, 2, 64, 64), ()),
    (Shape(1, 100, 300, 1, 1, 3, 1), ("causal", "window")),
)


def kernels() -> list[Any]:
    from conformance.subject import find

    names = ("xla.flash_attention", "xla.attention", "jax.nn.dot_product_attention")
    return [find(name) for name in names]


def runs_on(subject: Any, features: tuple[str, ...]) -> bool:
    """Whether a kernel takes what a call's features switch on."""
    needs = {
        "sinks": "sinks",
        "shared_sinks": "sinks",
        "cap_15": "softcap",
        "cap_50": "softcap",
        "cap_0.8": "softcap",
        "dropout": "dropout",
        "segments": "segments",
        "lengths": "padded",
        "unnormalised": "unnormalized",
    }
    return all(needs[f] in subject.features for f in features if f in needs)


def on_kernel(subject: Any, drawn: Drawn, dtype: str, tiling: int = -1) -> tuple[Any, Numerics]:
    """What a subject of the suite returns, and what it declares."""
    from conformance.build import Built
    from conformance.execute import execute

    tiling %= len(subject.tilings)
    got = execute(subject, Built(drawn.problem, drawn.cotangents), tiling)
    return got, subject.numerics(dtype, subject.tilings[tiling])


def kernel_cases(dtype: str, seeds: range) -> Iterator[Judged]:
    """Every shape with its share of the seeds on every kernel that takes its features."""
    for subject in kernels():
        plans = [plan for plan in SHAPES if runs_on(subject, plan[1])]
        for seed in seeds:
            shape, features = plans[seed % len(plans)]
            family = FAMILIES[(seed // len(plans)) % len(FAMILIES)]
            if dtype == "float16" and family == "large_logits":
                continue
            drawn = for_subject(draw(family, features, shape, dtype, seed), subject)
            got, numerics = on_kernel(subject, drawn, dtype, seed % len(plans))
            where = {"kernel": subject.name, "dtype": dtype, "family": family}
            yield from judged(got, drawn, numerics, features=features, seed=seed, **where)


def for_subject(drawn: Drawn, subject: Any) -> Drawn:
    """The same call in a kernel's dialect, with no cotangent for an lse that it does not return."""
    cotangents = drawn.cotangents
    if not subject.returns_lse and cotangents.lse is not None:
        cotangents = replace(cotangents, lse=np.zeros_like(cotangents.lse))
    return replace(drawn, semantics=subject.semantics, cotangents=cotangents)


LONG = (
    (Shape(1, 1024, 1024, 2, 1, 64, 64), ()),
    (Shape(1, 512, 1536, 1, 1, 128, 128), ("causal",)),
    (Shape(1, 1024, 1024, 1, 1, 96, 96), ("cap_50", "sinks", "dropout")),
    (Shape(1, 1024, 1024, 1, 1, 32, 32), ("bias", "window")),
)


def long_cases(dtype: str, seeds: range, on: str) -> Iterator[Judged]:
    """Calls of at least 1024 keys, every family, on the emulator or on the kernels of the machine."""
    for seed in seeds:
        for family in FAMILIES:
            if dtype == "float16" and family == "large_logits":
                continue
            for shape, features in LONG:
                drawn = draw(family, features, shape, dtype, seed)
                where = {"dtype": dtype, "family": family, "features": features, "seed": seed}
                if on == "emulator":
                    for block in (64, 256):
                        arithmetic, numerics = correct(dtype, key_block=block)
                        got = emulated(drawn, arithmetic)
                        yield from judged(got, drawn, numerics, kernel=f"emulator/{block}", **where)  # type: ignore[arg-type]
                    continue
                for subject in kernels():
                    if runs_on(subject, features):
                        mine = for_subject(drawn, subject)
                        got, numerics = on_kernel(subject, mine, dtype)
                        yield from judged(got, mine, numerics, kernel=subject.name, **where)  # type: ignore[arg-type]
