"""What a dialect may say, and what is refused."""

from dataclasses import fields
from typing import Any

import pytest

from attest.reference.oracle import effective
from attest.reference.problem import Problem
from attest.reference.semantics import OPTIONS, STANDARD, Semantics
from tests.reference.test_problem import arrays

REFUSED = [
    ({"hidden": "sentinel"}, "sentinel: got -inf"),
    ({"hidden": "sentinel", "sentinel": float("nan")}, "sentinel: got nan"),
    ({"hidden": "sentinel", "sentinel": 0.0}, "sentinel: got 0.0"),
    ({"gradients": frozenset({"query", "mask"})}, r"gradients: got \['mask'\], expected a subset of"),
    ({"ignored_arguments": frozenset({"query"})}, r"ignored_arguments: got \['query'\]"),
    (
        {"ignored_arguments": frozenset({"cum_seqlens_q"})},
        "ignored_arguments: got 'cum_seqlens_q' alone, expected 'cum_seqlens_k' with it",
    ),
    ({"ignored_arguments": frozenset({"cum_seqlens_k"})}, "got 'cum_seqlens_k' alone"),
    ({"ignored_arguments": frozenset({"q_segment_ids"})}, "got 'q_segment_ids' alone"),
    ({"ignored_arguments": frozenset({"kv_segment_ids"})}, "got 'kv_segment_ids' alone"),
    ({"ignored_arguments": frozenset({"dropout_seed"})}, "got 'dropout_seed' alone"),
    ({"dropout_chunk": 0}, "dropout_chunk: got 0"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED)
def test_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Semantics(**choices)


def test_the_standard_is_the_default() -> None:
    assert Semantics() == STANDARD
    assert hash(Semantics(hidden="sentinel", sentinel=-1e9)) != hash(STANDARD)


def test_options_are_those_of_a_problem() -> None:
    """The kept weights are known only from a kernel: no call gets them."""
    no_options = {"query", "key", "value", "dropout_keep"}
    assert set(OPTIONS) == {field.name for field in fields(Problem)} - no_options


def test_ignored_arguments_take_their_defaults() -> None:
    """S20: what a kernel drops is as if it had never been given; the rest stays."""
    problem = Problem(*arrays(), causal=True, dropout_prob=0.5, dropout_seed=3, normalize_output=False)
    dropped = effective(problem, Semantics(ignored_arguments=frozenset({"causal", "dropout_prob"})))
    assert (dropped.causal, dropped.dropout_prob) == (False, 0.0)
    assert (dropped.dropout_seed, dropped.normalize_output) == (3, False)
    assert dropped.query is problem.query
