"""Hand-made records: one helper each for a measurement, a result and a run, and one pair of runs."""

import math
from dataclasses import replace
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.record import Element, Measurement, Result, RunRecord, Verdict

KERNEL = "our.kernel"
REPLAY = 'attest replay --subject our.kernel --check forward --case \'{"causal": true, "q_len": 3}\''


def explain(result: Result) -> str:
    """Stands in for attest.conformance.judging.failure.explain, whose words are another test's."""
    return f"{result.verdict} {result.subject} {result.check}: {result.message}\n{REPLAY}"


def measurement(
    output: str = "out",
    worst_ratio: float = 0.4,
    rms_ratio: float = 0.7,
    largest_z: float = 3.0,
    bias_t: float = -1.0,
    elements: int = 4096,
    **others: Any,
) -> Measurement:
    return Measurement(output, elements, worst_ratio, rms_ratio, largest_z, bias_t, **others)


def case(seed: int = 0, **fields: Any) -> Case:
    return Case(**{"dtype": "bfloat16", "q_len": 64, "kv_len": 1024, "head_dim": 64, "seed": seed, **fields})


def result(
    verdict: Verdict = Verdict.PASS,
    *measurements: Measurement,
    asked: Case | None = None,
    subject: str = KERNEL,
    check: str = "forward",
    **others: Any,
) -> Result:
    return Result(subject, check, ("S1",), asked or case(), verdict, measurements, **others)


def run(*results: Result, **others: Any) -> RunRecord:
    return RunRecord(**{"profile": "quick", "seed": 0, "results": results, **others})


GOOD = run(*(result(Verdict.PASS, measurement(), asked=case(seed)) for seed in range(10)))


# Too few elements for its statistics to be compared.
SMALL = measurement("dquery", elements=9, broken=("bound",))


def changed(**numbers: float) -> RunRecord:
    """GOOD with other numbers in every case."""
    return run(*(result(Verdict.PASS, measurement(**numbers), asked=case(seed)) for seed in range(10)))


def one(verdict: Verdict, **others: object) -> RunRecord:
    """GOOD with another verdict on its first case."""
    return run(replace(GOOD.results[0], verdict=verdict, **others), *GOOD.results[1:])


def example_base() -> RunRecord:
    """A run before a change: passes with numbers, a known failure, something refused."""
    return run(
        *(
            result(
                Verdict.PASS,
                measurement(worst_ratio=0.3 + 0.01 * seed, rms_ratio=0.6 + 0.01 * seed),
                asked=case(seed, causal=seed % 2 == 0),
            )
            for seed in range(10)
        ),
        *(
            result(
                Verdict.PASS, measurement("dquery"), measurement("dkey"), asked=case(seed), check="gradients"
            )
            for seed in range(10)
        ),
        result(
            Verdict.XFAIL,
            measurement(worst_ratio=812.0),
            asked=case(77, window=(2, 0)),
            message="the window is one token short",
            link="https://example.org/kernels/issues/1",
        ),
        result(Verdict.FAIL, measurement(worst_ratio=3.0), asked=case(78, sinks=1), message="wrong sinks"),
        result(Verdict.UNSUPPORTED, asked=case(79, dropout=0.1), message="does not declare dropout"),
        *(result(Verdict.PASS, asked=case(80, q_len=9), check=check) for check in ("forward", "lse")),
        environment={"commit": "a" * 12, "device": {"kind": "cpu", "count": 1}, "jax": "0.11.2"},
    )


def example_head() -> RunRecord:
    """The same after a change that breaks, loses, worsens and mends something."""
    worst = Element((0, 2, 0, 5), 0.5, 0.25, "0x3f00", "0x3e80")
    broken = measurement(worst_ratio=math.inf, broken=("bound",), worst=worst)
    return run(
        *(
            result(
                Verdict.PASS,
                measurement(worst_ratio=0.3 + 0.01 * seed, rms_ratio=0.6 + 0.01 * seed),
                asked=case(seed, causal=seed % 2 == 0),
            )
            for seed in range(2, 10)
        ),
        result(
            Verdict.FAIL,
            broken,
            asked=case(0, causal=True),
            message="outside the error model: out (bound) | `raw` <b>",
            minimal=True,
        ),
        result(Verdict.INCONCLUSIVE, measurement(), asked=case(1), message="cannot tell"),
        *(
            result(
                Verdict.PASS,
                measurement("dquery", rms_ratio=2.1, bias_t=4.0),
                measurement("dkey"),
                asked=case(seed),
                check="gradients",
            )
            for seed in range(10)
        ),
        result(Verdict.PASS, measurement(), asked=case(78, sinks=1)),
        result(
            Verdict.XFAIL,
            measurement(worst_ratio=900.0),
            asked=case(77, window=(2, 0)),
            message="the window is one token short",
            link="https://example.org/kernels/issues/1",
        ),
        result(Verdict.UNSUPPORTED, asked=case(79, dropout=0.1), message="does not declare dropout"),
        result(
            Verdict.TIMEOUT,
            asked=case(80, q_len=9),
            message="did not finish within 120 s, in the phase compiling; lse not judged on this case",
            phase="compiling",
        ),
        result(
            Verdict.ERROR, asked=case(5), subject="their.kernel", check="lse", message="bad \x1b[31m \x00 ]]>"
        ),
        environment={"commit": "b" * 12, "device": {"kind": "cpu", "count": 1}, "jax": "0.11.2"},
        problems=("expectation 3 of our.kernel matches nothing",),
    )
