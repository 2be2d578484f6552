"""Ablation: the cases and sizes made for a defect are left out of all plans, and nothing else is."""

import pytest

from attest.conformance.drawing import tables
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.drawing.recipes import model
from attest.conformance.drawing.tables import drawing


@pytest.fixture
def leave_out(monkeypatch):
    monkeypatch.setattr(tables, "_LEFT_OUT", set())
    caches = (load_corpus, model)
    for cache in caches:
        cache.cache_clear()
    yield tables.leave_out
    for cache in caches:
        cache.cache_clear()


def test_a_listed_case_is_left_out_and_the_others_keep_their_numbers(leave_out):
    before = drawing()["edges"]
    leave_out(["window_right_at_most_255"])
    after = drawing()["edges"]
    assert after == {number: table for number, table in before.items() if table["seed"] != 75}
    assert len(after) == len(before) - 1


def test_a_class_of_sizes_is_left_out_with_the_rows_that_name_it(leave_out):
    assert ["tall", "large"] in drawing()["together"]
    leave_out(["key_gradient_of_rows_below_192"])
    assert "tall" not in drawing()["lengths"]
    assert "tall" not in model().choices["lengths"]
    assert ["tall", "large"] not in drawing()["together"]
    assert {"few", "edge", "many", "wide"} <= drawing()["lengths"].keys()


def test_a_known_bug_is_left_out(leave_out):
    names = {entry.name for entry in load_corpus()}
    leave_out(["bias_in_bfloat16"])
    load_corpus.cache_clear()
    assert {entry.name for entry in load_corpus()} == names - {"06_float32_bias"}


def test_what_is_used_by_rows_of_no_class_is_never_left_out():
    usual = drawing()["usual"].values()
    tables_read = tables.tomllib.loads((tables.Path(tables.__file__).with_name("drawing.toml")).read_text())
    assert not set(usual) & tables_read["because"].keys()
