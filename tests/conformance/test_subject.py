"""Subjects: what they declare is validated, and they are found by name, by path and by entry point."""

import sys
from typing import Any

import pytest

from conformance import subject as subject_module
from conformance.case import Case
from conformance.subject import Subject, find
from tests.conformance.toy import toy


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
        ("tilings", {"tilings": ()}),
        ("longest", {"longest": 0}),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(named: str, declared: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=named):
        Subject(**({"name": "toy", "call": print} | declared))


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


def test_the_kernels_that_ship_are_found() -> None:
    for name in ("xla.flash_attention", "xla.attention", "jax.nn.dot_product_attention"):
        assert find(name).name == name


def test_a_subject_is_found_by_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "somebodys_kernel.py").write_text(
        "from conformance.subject import Subject\nmine = Subject('mine', call=print)\nnot_one = 3\n"
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
