"""The fingerprints of planted defects are those of the table, of which none is wrong."""

import json
from typing import Any

import pytest

from attest.conformance.mutants.catalogue import load
from tests.conformance.mutants.fingerprints import KINDS, TABLE, kind_of, outcome, page, rows, true_kinds

ROWS: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
SEEDS = sorted({row["seed"] for row in ROWS})
# Defects of which each is judged in less than a second: with each kind of fingerprint, and with none.
QUICK = (
    "bias_gradient_scaled",
    "cap_not_differentiated",
    "channels_after_192_ignored",
    "empty_row_is_nan",
    "float32_inputs_in_eleven_bits",
    "lse_in_base_2",
    "lse_in_bfloat16",
    "maximum_begins_with_0",
    "tanh_of_eleven_bits",
    "value_wider_than_the_head",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_defect_has_the_fingerprints_of_the_table(name):
    assert rows([name], SEEDS) == [row for row in ROWS if row["defect"] == name]


def test_no_fingerprint_is_wrong():
    assert [row for row in ROWS if row["outcome"] == "wrong"] == []
    assert {row["outcome"] for row in ROWS} == {"right", "not finite", "none"}


def test_the_page_is_that_of_the_table():
    assert TABLE.with_suffix(".md").read_text(encoding="utf-8") == page(ROWS)


def test_the_kinds_that_are_right_are_those_of_defects():
    defects = load("clean_kernel")
    for name, kinds in true_kinds().items():
        assert name in defects
        assert kinds
        assert set(kinds) <= set(KINDS), name


def test_a_kind_that_a_defect_does_not_have_is_wrong():
    factor = "every wrong value is the right one times 2"
    assert outcome("tanh_of_eleven_bits", {"out": [factor], "lse": []}) == "wrong"
    assert outcome("lse_in_base_2", {"out": [factor], "lse": ["every wrong value is NaN"]}) == "right"
    assert outcome("lse_in_base_2", {"out": ["every wrong value is 0"], "lse": [factor]}) == "wrong"
    assert outcome("lse_in_base_2", {"out": []}) == "none"
    assert outcome("lse_in_base_2", {"out": ["every wrong value is NaN"]}) == "not finite"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("every wrong value is inf", "not finite"),
        ("2 of 3 wrong values are NaN or infinite", "not finite"),
        ("2 of 3 wrong values are -inf", "not finite"),
        ("every wrong value is 0", "0"),
        ("every value is a number of bfloat16", "bfloat16"),
        ("every wrong value is the right one times the scale, 0.3", "factor"),
        ("every wrong value is the right one of the key before it", "shift"),
        ("values are truncated, not rounded", "truncated"),
    ],
)
def test_a_text_has_a_kind(text, kind):
    assert kind_of(text) == kind
