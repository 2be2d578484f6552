"""Subjects: what they declare is validated, and they are found by name, by path and by entry point."""

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attest.conformance import subject as subject_module
from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.checks import all_checks
from attest.conformance.cli import catalogue
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Verdict
from attest.conformance.running.choice import first_try
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import Limits, Subject, find
from attest.reference.semantics import STANDARD
from tests.toys import toy, toy_attention


@pytest.mark.parametrize(
    ("named", "declared"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "two words"}),
        ("call", {"call": 3}),
        ("features", {"features": frozenset({"telepathy"})}),
        ("dtypes", {"dtypes": ()}),
        ("dtypes", {"dtypes": ("float64",)}),
        ("backend", {"backend": "abacus"}),
        ("head_dims", {"head_dims": (8, 4)}),
        ("head_dims", {"head_dims": (9, 15), "limits": Limits(head_dim_multiple=8)}),
        ("tilings", {"tilings": ()}),
        ("unjudged", {"unjudged": frozenset({"telepathy"})}),
        ("unjudged", {"features": frozenset({"causal"}), "unjudged": frozenset({"causal"})}),
        ("gradient_dtype", {"gradient_dtype": "float64"}),
        ("distribution", {"distribution": "jax 0.11.2"}),
        ("limits", {"limits": {"seed_bits": 32}}),
        ("sharding", {"sharding": ("explicit",)}),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(named: str, declared: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=named):
        Subject(**({"name": "toy", "call": print} | declared))


@pytest.mark.parametrize(
    "declared",
    [
        {"longest": 0},
        {"excludes": (frozenset({"mask"}),)},
        {"excludes": (frozenset({"mask", "telepathy"}),)},
        {"window_sides": "right"},
        {"length_multiple": 0},
        {"head_dim_multiple": 0},
        {"seed_bits": 65},
        {"seed_bits": 0},
        {"origin_multiple": 0},
        {"sinks": "per_batch"},
    ],
)
def test_a_wrong_limit_is_refused_by_name(declared: dict[str, Any]) -> None:
    (name,) = declared
    with pytest.raises(ValueError, match=f"limits, {name}: got .*, expected"):
        Limits(**declared)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(sinks=1), "sinks"),
        (Case(dtype="float16"), "float16"),
        (Case(head_dim=512), "head dims"),
        (Case(value_dim=512, head_dim=4), "value_dim"),
        (Case(tiling=3), "tilings"),
        (Case(kv_len=4096), "2048 tokens"),
        (Case(causal=True), None),
    ],
)
def test_why_a_case_is_not_taken(case: Case, words: str | None) -> None:
    reason = toy().why_not(case)
    assert reason is None if words is None else words in str(reason)


NARROW = Subject(
    "narrow",
    call=print,
    features=frozenset(ALL_FEATURES),
    limits=Limits(
        excludes=(frozenset({"mask", "bias"}), frozenset({"padded", "segments"})),
        window_sides="left",
        origin_multiple=8,
        length_multiple=4,
    ),
)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(q_len=4, kv_len=4, mask="11"), None),
        (Case(q_len=4, kv_len=4, mask="11", bias="111"), "combine bias and mask"),
        (Case(q_len=4, kv_len=4, mask="11", bias="111", causal=True), "combine bias and mask"),
        (Case(batch=2, q_len=4, kv_len=4, lengths=((1, 1), (2, 2)), segments=1), "padded and segments"),
        (Case(q_len=4, kv_len=4, lengths=((1, 1), (2, 2)), segments=1), None),
        (Case(q_len=6, kv_len=4), "multiples of 4"),
        (Case(q_len=4, kv_len=5), "multiples of 4"),
        (Case(q_len=0, kv_len=8), None),
        (Case(q_len=4, kv_len=4, window=(2, 0)), None),
        (Case(q_len=4, kv_len=4, window=(2, None), causal=True), None),
        (Case(q_len=4, kv_len=4, window=(2, None)), "left of the diagonal"),
        (Case(q_len=4, kv_len=4, window=(2, 1), causal=True), "left of the diagonal"),
        (Case(q_len=4, kv_len=4, window=(None, 0)), "left of the diagonal"),
        (Case(q_len=4, kv_len=4, dropout=0.5, origin=(1, 2, 3, 8)), None),
        (Case(q_len=4, kv_len=4, dropout=0.5, origin=(1, 2, 3, 4)), "key is a multiple of 8"),
    ],
)
def test_what_a_narrow_subject_does_not_take(case: Case, words: str | None) -> None:
    reason = NARROW.why_not(case)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize("dims", [{"head_dim": 3}, {"head_dim": 2, "value_dim": 3}])
def test_every_head_dim_is_a_multiple(dims: dict[str, int]) -> None:
    assert "head dims that are multiples of 2" in str(Limits(head_dim_multiple=2).why_not(Case(**dims)))


@pytest.mark.parametrize("sinks", ["any", "shared", "per_head"])
def test_sinks_are_taken_as_declared(sinks: Any) -> None:
    subject = Subject("narrow", call=print, features=frozenset({"sinks"}), limits=Limits(sinks=sinks))
    taken = {
        name
        for name, per_head in (("shared", False), ("per_head", True))
        if subject.why_not(Case(sinks=1, sinks_per_head=per_head)) is None
    }
    assert taken == ({"shared", "per_head"} if sinks == "any" else {sinks})
    assert subject.why_not(Case()) is None


def test_a_leak_that_is_declared_is_not_planned() -> None:
    case = Case(q_len=2, kv_len=3, causal=True, poison=True)
    leaks = replace(STANDARD, hidden_nonfinite="leaks")
    assert toy().why_not(case) is None
    assert "leaks" in str(toy(semantics=leaks).why_not(case))
    assert toy(semantics=leaks).why_not(replace(case, poison=False)) is None
    assert all_checks()["poison"].applies(toy(semantics=leaks)) is not None


def test_seeds_fit_the_declared_bits() -> None:
    case = Case(q_len=3, kv_len=3, dropout=0.5, seed=7)
    whole = Trial(toy(), case).built.problem.dropout_seed
    narrow = Trial(toy(limits=Limits(seed_bits=16)), case).built.problem.dropout_seed
    assert whole is not None
    assert whole >= 2**16
    assert narrow == whole % 2**16


def test_a_run_plans_nothing_that_a_narrow_subject_does_not_take() -> None:
    limits = replace(NARROW.limits, sinks="per_head")
    subject = replace(NARROW, limits=limits, semantics=replace(STANDARD, hidden_nonfinite="leaks"))
    drawn = [first_try(task.draw) for task in tasks(subject, load_profile("quick"), seed=0)]
    planned = [case for case in drawn if case is not None]
    assert len(planned) == len(drawn)
    assert {subject.why_not(case) for case in planned} == {None}
    assert frozenset().union(*(case.features for case in planned)) == subject.features


def with_float32_gradients(query: Any, key: Any, value: Any) -> Any:
    """The toy, whose backward pass returns what it accumulated."""
    attend = jax.custom_vjp(toy_attention)

    def backward(arrays: tuple[Any, ...], d_out: Any) -> tuple[Any, ...]:
        wide = tuple(array.astype(jnp.float32) for array in arrays)
        return jax.vjp(toy_attention, *wide)[1](d_out.astype(jnp.float32))

    attend.defvjp(lambda *arrays: (toy_attention(*arrays), arrays), backward)
    return attend(query, key, value)


@pytest.mark.parametrize(
    ("declared", "call", "verdict"),
    [
        ("input", toy_attention, Verdict.PASS),
        ("float32", with_float32_gradients, Verdict.PASS),
        ("input", with_float32_gradients, Verdict.FAIL),
        ("float32", toy_attention, Verdict.FAIL),
    ],
)
def test_gradients_have_the_declared_dtype(declared: Any, call: Any, verdict: Verdict) -> None:
    subject = toy(call, features=frozenset(), dtypes=("bfloat16",), gradient_dtype=declared)
    case = Case(dtype="bfloat16", q_len=4, kv_len=6, head_dim=4, seed=2)
    (result,) = judge(subject, case, ("gradients",))
    assert result.verdict is verdict, result.message
    assert verdict is Verdict.PASS or "dtype" in result.message


def test_the_catalogue_names_every_limit(monkeypatch) -> None:
    limits = replace(NARROW.limits, seed_bits=32, sinks="shared", validates=False)
    origin = {"distribution": "toys", "interpreter": "Triton"}
    subject = replace(NARROW, limits=limits, gradient_dtype="float32", **origin)
    monkeypatch.setattr(catalogue, "discover", lambda: {"narrow": lambda: subject})
    monkeypatch.setattr(catalogue, "find", lambda _name: subject)
    text = " ".join(catalogue.catalogue().split())
    for words in (
        "not bias and mask in one call",
        "windows to the left only",
        "multiples of 4",
        "seeds of 32 bits",
        "sinks shared by all heads",
        "gradients in float32",
        "does not validate its arguments",
        "part of toys",
        "run by an interpreter of Triton",
    ):
        assert words in text


def test_the_kernels_that_ship_are_found() -> None:
    for name in ("xla.flash_attention", "xla.attention", "jax.nn.dot_product_attention"):
        assert find(name).name == name


def test_a_subject_is_found_by_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "somebodys_kernel.py").write_text(
        "from attest.conformance.subject import Subject\nmine = Subject('mine', call=print)\nnot_one = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find("somebodys_kernel:mine").name == "mine"
    with pytest.raises(LookupError, match="is a int"):
        find("somebodys_kernel:not_one")
    with pytest.raises(LookupError, match="no attribute 'missing'"):
        find("somebodys_kernel:missing")
    sys.modules.pop("somebodys_kernel")


@pytest.mark.parametrize("name", ["nothing", "no.such.module:subject", "json:dumps"])
def test_what_cannot_be_found_is_one_sentence(name: str) -> None:
    with pytest.raises(LookupError) as error:
        find(name)
    assert "\n" not in str(error.value)


def test_a_broken_entry_point_spoils_nothing_else(monkeypatch) -> None:
    class Broken:
        name, value = "broken", "broken:subject"

        def load(self) -> None:
            raise ImportError("libnothing.so: cannot open")

    monkeypatch.setattr(subject_module, "entry_points", lambda group: [Broken()])
    assert find("xla.attention").name == "xla.attention"
    with pytest.raises(LookupError, match=r"broken.*libnothing"):
        find("broken")
