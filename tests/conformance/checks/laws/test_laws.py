"""The laws: a correct kernel breaks none, and each law finds a defect that is planted for it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.checks import all_checks
from attest.conformance.checks.laws import calls, run
from attest.conformance.checks.laws.table import LAWS
from attest.conformance.clauses import CLAUSES
from attest.conformance.judging.failure import explain
from attest.conformance.mutants.kernels.callback import DIFFERENTIATED, Passes, _attend
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import Restriction, load_profile, tasks
from attest.conformance.subject import Limits, Subject, Tiling
from attest.reference.oracle import Cotangents, attention
from attest.reference.problem import make_problem
from attest.reference.semantics import STANDARD, Semantics

Given = dict[str, Any]
# From the arguments to other arguments, and from the answer and the arguments to another answer.
Spoil = Callable[[Given], Given]
Answer = dict[str, Any]
SpoilAnswer = Callable[[Answer, Given], Answer]

PLAIN = Case(batch=2, q_len=9, kv_len=12, q_heads=4, kv_heads=2, head_dim=4, seed=3)
NAMES = [law.name for law in LAWS]


def _passes(spoil: Spoil, spoil_answer: SpoilAnswer) -> Passes:
    def answer(options: Any, arrays: Any, cotangents: Cotangents | None) -> Answer:
        given = {**dict(options), **arrays}
        exact = attention(make_problem(**spoil(given)), STANDARD, cotangents).items()
        return spoil_answer(exact, given)

    def forward(options: Any, arrays: Any) -> tuple[Any, Any]:
        got = answer(options, arrays, None)
        return got["out"].astype(arrays["query"].dtype), got["lse"].astype(np.float32)

    def gradients(options: Any, arrays: Any, d_out: Any, d_lse: Any) -> Any:
        got = answer(options, arrays, Cotangents(d_out, d_lse))
        return {name: got[f"d{name}"] for name in DIFFERENTIATED if f"d{name}" in got}

    return Passes(forward, gradients)


def _call(passes: Passes, query: Any, key: Any, value: Any, **options: Any) -> tuple[Any, Any]:
    given = {"query": query, "key": key, "value": value} | options
    arrays = {name: jnp.asarray(x) for name, x in given.items() if hasattr(x, "shape")}
    static = tuple(sorted((name, x) for name, x in given.items() if name not in arrays))
    varied = {name: arrays.pop(name) for name in DIFFERENTIATED if name in arrays}
    return _attend((passes, static), varied, arrays)


def kernel(
    spoil: Spoil = lambda given: given, answer: SpoilAnswer = lambda answer, _: answer, **declared: Any
) -> Subject:
    """The oracle as a kernel, its arguments or its answer spoilt."""
    options: dict[str, Any] = {"features": frozenset(ALL_FEATURES), "dtypes": DTYPES, "returns_lse": True}
    call = partial(_call, _passes(spoil, answer))
    return Subject(**{"name": "toy", "call": call, **options, **declared})


def arguments(**changes: Callable[[Any], Any]) -> Given:
    """A kernel that changes some of its arguments."""

    def spoil(given: Given) -> Given:
        return given | {name: change(given[name]) for name, change in changes.items() if name in given}

    return {"spoil": spoil}


def lacks(*names: str) -> Given:
    """A kernel that ignores some arguments."""
    return {"spoil": lambda given: {name: value for name, value in given.items() if name not in names}}


def outputs(**changes: Callable[[Any], Any]) -> Given:
    """A kernel that changes some of its outputs."""
    return {
        "answer": lambda answer, _: (
            answer | {name: change(answer[name]) for name, change in changes.items() if name in answer}
        )
    }


def _first_key_twice(value: Any) -> Any:
    value = value.copy()
    value[:, 0] = value[:, 0] + value[:, 0]
    return value


def _from_the_left(given: Given) -> Given:
    return given | {"q_offset": 0} if given.get("causal") else given


def _leaks(answer: Answer, given: Given) -> Answer:
    """Multiply what other places hold by 0 and add it."""
    return answer | {"out": answer["out"] + 0 * given["query"].astype(np.float64).sum()}


class _CountsItsCalls:
    """Is off at one of many calls, as a kernel with a race."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, answer: Answer, _given: Given) -> Answer:
        self.calls += 1
        # An odd number: a call of the kernel is one of the forward and one of the backward.
        return answer | {"out": answer["out"] + (self.calls % 31 == 0)}


class _Remembers:
    """Adds what the call before left."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, answer: Answer, given: Given) -> Answer:
        last, self.last = self.last, float(given["value"].astype(np.float64).flat[0])
        return answer | {"out": answer["out"] + last}


def _half(array: Any) -> Any:
    return array / 2


def _short(array: Any) -> Any:
    return np.clip(array, -0.1, 0.1)


def _grouped_mean(answer: Answer, given: Given) -> Answer:
    """Average the gradients of keys over the group, where they are sums."""
    group = given["query"].shape[2] // given["key"].shape[2]
    return answer | ({"dkey": answer["dkey"] / group} if "dkey" in answer else {})


def _unpacked(given: Given) -> Given:
    """Ignore lengths in a batch of one."""
    packed = len(given["query"]) == 1
    return {name: value for name, value in given.items() if not (packed and name.startswith("cum_"))}


# For each law a defect that it finds, and the fields in which its case differs from PLAIN.
DEFECTS: dict[str, tuple[Given, Given]] = {
    "gqa": ({"answer": _grouped_mean}, {}),
    "window_past_ends": (arguments(sliding_window=lambda _sides: (2, 2)), {}),
    "far_cap": (arguments(logits_soft_cap=lambda cap: min(cap, 0.5)), {}),
    "sink_as_key": (arguments(softmax_aux=lambda sinks: sinks + 1), {"sinks": 2}),
    "permuted_keys": (arguments(value=_first_key_twice), {"bias": "bhq"}),
    "permuted_keys_at_positions": (lacks("kv_positions"), {}),
    "shifted_positions": (arguments(kv_positions=lambda numbers: np.minimum(numbers, 1000)), {}),
    "chunk_as_segments": (arguments(chunk_size=lambda size: size + 1), {}),
    "alibi_as_bias": (arguments(alibi_slopes=lambda slopes: slopes + slopes), {}),
    "padded_head_dim": (lacks("softmax_scale"), {}),
    "doubled_query": (lacks("softmax_scale"), {}),
    "constant_rows": (arguments(bias=lambda bias: np.minimum(bias, 1)), {}),
    "values_add": (outputs(out=_short), {}),
    "cotangents_add": (outputs(dquery=_short), {}),
    "negated_values": (outputs(out=np.abs), {}),
    "value_adjoint": (outputs(dvalue=_half), {}),
    "query_key_adjoint": (outputs(dkey=_half), {}),
    "constant_value": (outputs(out=_half), {}),
    "packed_as_loop": (lacks("cum_seqlens_q", "cum_seqlens_k"), {"causal": True}),
    "packed_as_padded": ({"spoil": _unpacked}, {"causal": True}),
    "packed_as_segments": (lacks("cum_seqlens_q", "cum_seqlens_k"), {}),
    "last_row": ({"spoil": _from_the_left}, {"causal": True}),
    "merged_halves": (outputs(lse=lambda lse: lse / np.log(2)), {}),
    "batch_entries": ({"answer": _leaks}, {}),
    "heads": ({"answer": _leaks}, {}),
    "rows": ({"answer": _leaks}, {}),
    "repeats": ({"answer": _CountsItsCalls()}, {}),
    "other_call": ({"answer": _Remembers()}, {}),
}


def verdict(subject: Subject, name: str, case: Case) -> Any:
    (result,) = judge(subject, case, (f"law.{name}",))
    return result


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_law_finds_its_defect_and_passes_without(name: str) -> None:
    defect, fields = DEFECTS[name]
    case = replace(PLAIN, **fields)
    result = verdict(kernel(**defect), name, case)
    assert result.verdict is Verdict.FAIL, result.message
    law = next(law for law in LAWS if law.name == name)
    assert result.message.startswith(law.equal)
    text = explain(result)
    assert all(f"{clause}: {CLAUSES[clause]}" in text for clause in law.clauses)
    assert f'"check":"law.{name}"' in text
    assert verdict(kernel(), name, case).verdict is Verdict.PASS


def _fast(query: Any, key: Any, value: Any, fast: bool = False, **options: Any) -> Any:
    out, lse = kernel().call(query, key, value, **options)
    return (out + out if fast else out), lse


def test_other_block_sizes_are_compared() -> None:
    tilings = (Tiling({"fast": False}), Tiling({"fast": True}))
    assert verdict(kernel(tilings=tilings, call=_fast), "tilings", PLAIN).verdict is Verdict.FAIL
    same = (Tiling({"fast": False}), Tiling())
    assert verdict(kernel(tilings=same, call=_fast), "tilings", PLAIN).verdict is Verdict.PASS
    assert verdict(kernel(), "tilings", PLAIN).verdict is Verdict.UNSUPPORTED


def test_repeats_of_a_slow_kernel_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _CountsItsCalls()
    monkeypatch.setattr(run, "repeat_seconds", lambda: 0.0)
    assert verdict(kernel(answer=counted), "repeats", PLAIN).verdict is Verdict.PASS
    assert counted.calls == 2 * 2


def test_nan_in_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(1)
    full = calls.jnp.full

    def fill(shape: Any, number: Any, dtype: Any) -> Any:
        memory[:] = number
        return full(shape, number, dtype)

    monkeypatch.setattr(calls.jnp, "full", fill)

    def reads(answer: Answer, _given: Given) -> Answer:
        return answer | {"out": answer["out"] + memory}

    assert verdict(kernel(answer=reads), "nan_in_memory", PLAIN).verdict is Verdict.FAIL
    assert verdict(kernel(), "nan_in_memory", PLAIN).verdict is Verdict.PASS


def test_every_law_has_a_defect_that_it_finds() -> None:
    elsewhere = {"tilings", "nan_in_memory", "directional_differences", "vmap"}
    assert {*DEFECTS, *elsewhere} == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def _drawn(subject: Subject, name: str, seed: int, profile: str = "quick") -> Iterator[Case]:
    for task in tasks(subject, load_profile(profile), seed, Restriction(checks=(f"law.{name}",))):
        assert task.checks == (f"law.{name}",)
        yield from (case for case, _ in task.cases)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_correct_kernel_breaks_no_law(name: str, seed: int) -> None:
    subject = kernel(tilings=(Tiling(), Tiling({})))
    verdicts = [verdict(subject, name, case) for case in _drawn(subject, name, seed)]
    assert not [result.message for result in verdicts if result.verdict is Verdict.FAIL]
    assert not [result.message for result in verdicts if result.verdict is Verdict.ERROR]
    assert any(result.verdict is Verdict.PASS for result in verdicts)


def test_the_quick_profile_runs_only_laws_that_are_named() -> None:
    quick, standard = load_profile("quick"), load_profile("standard")
    laws = {f"law.{name}" for name in NAMES} - {"law.tilings"}
    assert laws <= all_checks().keys()

    def planned(profile: Any) -> set[str]:
        return {check for task in tasks(kernel(), profile, 0) for check in task.checks}

    assert not laws & planned(quick)
    assert laws <= planned(standard)
    assert len(list(_drawn(kernel(), "gqa", 0))) == quick.kinds["laws"]["named"]


def test_a_law_applies_only_to_what_a_subject_declares() -> None:
    checks = all_checks()
    assert checks["law.gqa"].applies(kernel(features=frozenset())) == "does not declare gqa"
    top_left = Semantics(causal="top_left")
    assert checks["law.last_row"].applies(kernel(semantics=top_left)) == "declares a dialect: causal"
    assert checks["law.heads"].applies(kernel(semantics=top_left)) is None
    loose = kernel(semantics=Semantics(deterministic=False))
    assert checks["law.repeats"].applies(loose) == "declares that it is not deterministic"
    assert checks["law.merged_halves"].applies(kernel(returns_lse=False)) == "does not return lse"


def test_calls_that_the_subject_does_not_take_are_not_judged() -> None:
    limits = Limits(length_multiple=3, longest=12)
    result = verdict(kernel(limits=limits), "sink_as_key", replace(PLAIN, sinks=1))
    assert (result.verdict, "takes at most 12 tokens" in result.message) == (Verdict.INCONCLUSIVE, True)
    limits = Limits(excludes=(frozenset({"sinks", "bias"}),))
    result = verdict(kernel(limits=limits), "sink_as_key", replace(PLAIN, sinks=1))
    assert (result.verdict, "does not combine" in result.message) == (Verdict.INCONCLUSIVE, True)
    result = verdict(kernel(head_dims=(1, 5)), "padded_head_dim", PLAIN)
    assert (result.verdict, "head dims 1 to 5" in result.message) == (Verdict.INCONCLUSIVE, True)
    result = verdict(kernel(limits=Limits(head_dim_multiple=PLAIN.head_dim)), "padded_head_dim", PLAIN)
    assert (result.verdict, "are multiples of" in result.message) == (Verdict.INCONCLUSIVE, True)


def test_the_page_has_a_row_for_each_law() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "laws.md").read_text()
    for law in LAWS:
        needs = ", ".join(sorted(law.features)) or "none"
        dialects = "any" if law.any_dialect else "standard"
        row = f"| `law.{law.name}` | {', '.join(law.clauses)} | {law.equal} | {needs} | {dialects} |"
        assert row in page
