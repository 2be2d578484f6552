"""The worked example of the page of semantics is what the oracle computes."""

import re
from typing import Any

import numpy as np
import pytest

from attest.conformance.clauses import CLAUSES
from attest.reference.oracle import Answer, Cotangents, attention
from attest.reference.problem import make_problem
from tests.meta.processes import ROOT

PAGE = (ROOT / "docs" / "reference" / "semantics.md").read_text()
EXAMPLE = PAGE.partition("### An example with three keys")[2].partition("\n## ")[0]


def tables() -> list[list[dict[str, str]]]:
    """The tables of the example: a dictionary for each row, by the words at the head of its columns."""
    found: list[list[dict[str, str]]] = []
    for table in re.findall(r"(?:^\|.*\n)+", EXAMPLE, flags=re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()
        ]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


KEYS, CALLS = tables()


def test_a_failure_has_words_for_each_clause() -> None:
    assert sorted(CLAUSES) == sorted(re.findall(r"^\| (S\d+) \|", PAGE, flags=re.MULTILINE))


def vector(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+", text)]


def answer(**options: Any) -> Answer:
    """The oracle's answer to the example, with further options in place of its mask or beside it."""
    (query,) = re.findall(r"query q = (\([^)]*\))", EXAMPLE)
    key = np.array([vector(row["vector"]) for row in KEYS], np.float32)
    value = np.array([[float(row["value"])] for row in KEYS], np.float32)
    mask = np.array([row["seen"] == "yes" for row in KEYS])
    problem = make_problem(
        np.array(vector(query), np.float32)[None, None, None],
        key[None, :, None],
        value[None, :, None],
        **{"attention_mask": mask[None, None, None], **options},
    )
    return attention(problem, cotangents=Cotangents(np.ones((1, 1, 1, 1))))


def test_the_row_of_each_key() -> None:
    """The logit of a key is the lse of a call in which the query sees that key alone."""
    gradient = answer().dvalue
    assert gradient is not None
    for number, row in enumerate(KEYS):
        alone = np.arange(len(KEYS)) == number
        logit = answer(attention_mask=alone[None, None, None]).lse.item()
        assert float(row["logit"]) == pytest.approx(logit, abs=1e-12)
        assert float(row["q . k"]) == pytest.approx(logit * len(vector(row["vector"])) ** 0.5, abs=1e-12)
        expected = f"{np.exp(logit):.4f}" if row["seen"] == "yes" else "absent"
        assert row["exp(logit)"] == expected
        # With a cotangent of 1, the gradient of a value is its weight.
        assert row["weight"] == row["dvalue"] == f"{gradient[0, number, 0, 0]:.4f}"


def test_the_results_of_each_call() -> None:
    calls: list[dict[str, Any]] = [
        {},
        {"softmax_aux": np.zeros(1, np.float32)},
        {"attention_mask": np.zeros((1, 1, 1, 3), bool)},
    ]
    for row, options in zip(CALLS, calls, strict=True):
        got = answer(**options)
        assert row["lse"] == f"{got.lse.item():.4f}"
        assert row["out"] == f"{got.out.item():.4f}"
        assert row["sum of exponentials"] == f"{np.exp(got.lse.item()):.4f}"


def test_the_sentence_below_the_tables_has_their_numbers() -> None:
    first, second = (row for row in KEYS if row["seen"] == "yes")
    terms = " + ".join(f"{row['weight']} * {row['value']}" for row in (first, second))
    assert f"out = {terms} and lse = log {CALLS[0]['sum of exponentials']}" in EXAMPLE


@pytest.mark.parametrize("number", range(1, 30))
def test_every_clause_has_its_row(number: int) -> None:
    assert re.search(rf"^\| S{number} \|", PAGE, flags=re.MULTILINE)
