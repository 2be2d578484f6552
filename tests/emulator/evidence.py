"""Measures the tables of docs/log/error-model.md: `python -m tests.emulator.evidence <part>` reproduces one.

Parts: bounds (drawn calls on the emulator), kernels (the same on the kernels of this machine), calibration
(long calls on both), defects (what each judgement says of the twelve defects), functions (exp and tanh of
XLA). Each writes docs/evidence/<part>.json; `tables` turns those into Markdown. Options: --seeds, --dtypes.
"""

import argparse
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.error_model import predict
from attest.reference.judgements import Statistics, exceeded, limits, measure
from attest.reference.numerics import Numerics
from attest.reference.oracle import attention
from tests.emulator.cases import FAMILIES, Drawn, Shape, draw, draw_small
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
    call = (drawn.problem, drawn.semantics, numerics, drawn.cotangents)

    def judge(repeats: bool) -> list[Judged]:
        predictions = predict(*call, repeats=repeats)
        found: list[Judged] = []
        for name in want:
            if name in got:
                statistics = measure(got[name], want[name], predictions[name])
                limit = limits(name, statistics.elements, drawn.problem.kv_len, dtype, family)
                broken = exceeded(statistics, limit)
                found.append(Judged(kernel, dtype, name, family, features, seed, statistics, broken))
        return found

    found = judge(repeats=False)
    yield from judge(repeats=True) if any(case.exceeded for case in found) else found


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
    from attest.conformance.subject import find

    names = ("xla.flash_attention", "xla.attention", "jax.nn.dot_product_attention")
    return [find(name) for name in names]


def runs_on(subject: Any, shape: Shape, features: tuple[str, ...]) -> bool:
    """Whether a kernel takes what a call's shape and features switch on."""
    if shape.value_dim != shape.head_dim and "value_dim" not in subject.features:
        return False
    needs = {
        "sinks": "sinks",
        "shared_sinks": "sinks",
        "cap_15": "soft_cap",
        "cap_50": "soft_cap",
        "cap_0.8": "soft_cap",
        "dropout": "dropout",
        "segments": "segments",
        "lengths": "padded",
        "unnormalised": "unnormalized",
    }
    return all(needs[f] in subject.features for f in features if f in needs)


def on_kernel(subject: Any, drawn: Drawn, dtype: str, tiling: int = -1) -> tuple[Any, Numerics]:
    """What a subject of the suite returns, and what it declares; nothing where JAX has no such product."""
    from attest.conformance.cases.build import Built
    from attest.conformance.judging.execute import SubjectError, execute

    tiling %= len(subject.tilings)
    try:
        got = execute(subject, Built(drawn.problem, drawn.cotangents), tiling)
    except SubjectError as error:
        if "not supported by dot_general" not in str(error):
            raise
        got = {}
    return got, subject.numerics(dtype, subject.tilings[tiling])


def kernel_cases(dtype: str, seeds: range) -> Iterator[Judged]:
    """Every shape with its share of the seeds on every kernel that takes its features."""
    for subject in kernels():
        plans = [plan for plan in SHAPES if runs_on(subject, *plan)]
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
    (Shape(1, 512, 1024, 2, 1, 64, 64), ()),
    (Shape(1, 256, 1280, 1, 1, 128, 128), ("causal",)),
    (Shape(1, 256, 1024, 1, 1, 96, 96), ("bias", "cap_50", "dropout", "sinks")),
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
                    arithmetic, numerics = correct(dtype)
                    got = emulated(drawn, arithmetic)
                    yield from judged(got, drawn, numerics, kernel="emulator", **where)  # type: ignore[arg-type]
                    continue
                for subject in kernels():
                    if runs_on(subject, shape, features):
                        mine = for_subject(drawn, subject)
                        got, numerics = on_kernel(subject, mine, dtype)
                        yield from judged(got, mine, numerics, kernel=subject.name, **where)  # type: ignore[arg-type]


def calls(cases: Iterable[Judged]) -> dict[str, Any]:
    """By kernel, dtype and output: how many calls, the worst of each statistic and where, what failed."""
    table: dict[str, Any] = {}
    for case in cases:
        at = f"{case.kernel} {case.dtype} {case.output}"
        row = table.setdefault(at, {"calls": 0, "elements": 0, "worst": {}, "rms_ratio": {}, "failed": []})
        statistics = case.statistics
        row["calls"] += 1
        row["elements"] += statistics.elements
        where = {"family": case.family, "features": list(case.features), "seed": case.seed}
        for name in ("worst_ratio", "largest_z", "bias_t"):
            number = abs(getattr(statistics, name))
            if number >= row["worst"].get(name, {"value": -1.0})["value"]:
                row["worst"][name] = {"value": number, **where}
        if statistics.elements:
            low, high, bias, z = row["rms_ratio"].get(case.family, (np.inf, 0.0, 0.0, 0.0))
            ratio = statistics.rms_ratio
            row["rms_ratio"][case.family] = (
                min(low, ratio),
                max(high, ratio),
                max(bias, abs(statistics.bias_t)),
                max(z, statistics.largest_z),
            )
        if case.exceeded:
            row["failed"].append({"judgements": list(case.exceeded), **where})
    return table


def defects() -> list[dict[str, Any]]:
    """For each defect: the statistics of the worst output, with and without it, and the usual rules."""
    rows: list[dict[str, Any]] = []
    for defect in DEFECTS:
        drawn = draw(defect.family, defect.features, defect.shape, defect.dtype, 11)
        arithmetic, numerics = correct(defect.dtype)
        where = {
            "kernel": "emulator",
            "dtype": defect.dtype,
            "family": defect.family,
            "features": defect.features,
            "seed": 11,
        }
        want = attention(drawn.problem, drawn.semantics, drawn.cotangents).items()
        low = "bfloat16" if defect.dtype == "float32" else defect.dtype
        baseline = emulated(drawn, baseline_arithmetic(arithmetic, low))
        row: dict[str, Any] = {"defect": defect.name, "dtype": defect.dtype, "family": defect.family}
        for label, planted in (("correct", arithmetic), ("defective", defect.plant(arithmetic))):
            got = emulated(drawn, planted)
            outputs = list(judged(got, drawn, numerics, **where))  # type: ignore[arg-type]
            row[label] = {
                case.output: {
                    "bound": case.statistics.worst_ratio,
                    "rms": case.statistics.rms_ratio,
                    "z": case.statistics.largest_z,
                    "bias": case.statistics.bias_t,
                    "caught_by": list(case.exceeded),
                    "allclose": bool(np.allclose(_wide(got, case), want[case.output], 1e-2, 1e-2)),
                    "twice_baseline": _largest(got, want, case) <= 2 * _largest(baseline, want, case),
                }
                for case in outputs
            }
        rows.append(row)
    return rows


def baseline_arithmetic(arithmetic: Arithmetic, dtype: str) -> Arithmetic:
    """The naive implementation of the usual rule: everything is stored in the low precision."""
    return replace(
        arithmetic,
        materialised=True,
        weights=dtype,
        d_weights=dtype,
        operands=dtype,
        out_accumulator=dtype,
    )


def _wide(got: Mapping[str, NDArray[Any]], case: Judged) -> NDArray[np.float64]:
    return got[case.output].astype(np.float64)


def _largest(got: Mapping[str, NDArray[Any]], want: Mapping[str, NDArray[Any]], case: Judged) -> float:
    return float(np.abs(_wide(got, case) - want[case.output]).max())


def functions() -> dict[str, Any]:
    """The largest and the rms relative error of XLA's float32 exp and tanh, against float64."""
    import jax
    import jax.numpy as jnp

    table: dict[str, Any] = {}
    for name, function, exact, low, high in (
        ("exp", jnp.exp, np.exp, -80.0, 0.0),
        ("exp, small", jnp.exp, np.exp, -1.0, 0.0),
        ("tanh", jnp.tanh, np.tanh, -12.0, 12.0),
        ("tanh, small", jnp.tanh, np.tanh, -0.5, 0.5),
        ("log", jnp.log, np.log, 1.0, 1e6),
    ):
        x = np.random.default_rng(0).uniform(low, high, 4_000_000).astype(np.float32)
        want = exact(x.astype(np.float64))
        error = (np.asarray(jax.jit(function)(x)).astype(np.float64) - want) / want
        table[name] = {
            "largest": float(np.abs(error).max()),
            "rms": float(np.sqrt(np.mean(error**2))),
            "mean": float(error.mean()),
        }
    return table


def environment() -> dict[str, str]:
    packages = ("jax", "jaxlib", "numpy", "ml_dtypes")
    return {"machine": platform.machine(), "python": platform.python_version()} | {
        name: version(name) for name in packages
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part", choices=("bounds", "kernels", "calibration", "defects", "functions", "tables")
    )
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    arguments = parser.parse_args()
    dtypes, seeds = arguments.dtypes.split(","), range(arguments.seeds)
    if arguments.part == "tables":
        from tests.emulator.tables import tables

        print(tables(FOLDER))
        return
    result: Any
    if arguments.part == "bounds":
        result = calls(case for dtype in dtypes for case in small_cases(dtype, seeds))
    elif arguments.part == "kernels":
        result = calls(case for dtype in dtypes for case in kernel_cases(dtype, seeds))
    elif arguments.part == "calibration":
        result = calls(
            case for dtype in dtypes for on in ("emulator", "xla") for case in long_cases(dtype, seeds, on)
        )
    else:
        result = {"defects": defects, "functions": functions}[arguments.part]()
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), "seeds": arguments.seeds, "result": result}
    path = FOLDER / f"{arguments.part}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
