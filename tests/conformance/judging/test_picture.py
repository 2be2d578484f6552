"""The picture shows which keys a kernel sees, beside those that the clauses make visible."""

from dataclasses import replace

import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.judging import picture as module
from attest.conformance.judging.picture import picture
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import find
from tests import toys
from tests.wrong_kernels import subjects


def test_a_diagonal_that_is_not_seen():
    case = Case(q_len=3, kv_len=5, head_dim=2, causal=True)
    assert picture(Trial(subjects.causal_edge, case)).splitlines() == [
        "batch entry 0, head 0: rows down, keys across; 3 of 15 differ",
        "  key 0",
        "0 ##?..",
        "1 ###?.",
        "2 ####?",
        "# visible, . hidden, ! visible but should be hidden, ? hidden but should be visible",
    ]


def test_a_diagonal_in_the_other_corner():
    """`toys.top_left` declares nothing of the kind."""
    shown = picture(Trial(toys.top_left, Case(q_len=2, kv_len=4, head_dim=2, causal=True))).splitlines()
    assert shown[2:4] == ["0 #??.", "1 ##??"]


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2, q_len=5, kv_len=7, q_heads=4, kv_heads=2, head_dim=3, window=(1, 2), segments=2),
        Case(
            q_len=5, kv_len=7, head_dim=3, dropout=0.9, dropout_seed=1, mask="11", bias="111", bias_hides=True
        ),
        Case(batch=2, q_len=6, kv_len=6, head_dim=3, lengths=((3, 4), (6, 2)), soft_cap=1.0, sinks=1),
    ],
    ids=["window, segments", "dropout, mask, bias that hides", "lengths, cap, sinks"],
)
def test_a_right_kernel_differs_nowhere(case):
    assert "; 0 of " in picture(Trial(find("xla.flash_attention"), case))


def test_a_large_case_is_shown_where_it_differs(monkeypatch):
    seen = module._seen

    def wrong(trial, problem):
        got = seen(trial, problem)
        got[0, 1, 150, 170] ^= True
        return got

    monkeypatch.setattr(module, "_seen", wrong)
    case = Case(q_len=200, kv_len=180, q_heads=2, kv_heads=2, head_dim=64)
    title, keys, *rows, _ = picture(Trial(replace(toys.right), case)).splitlines()
    assert title == "batch entry 0, head 1: rows down, keys across; 1 of 36000 differ"
    assert len(rows) == 40
    (line,) = [row for row in rows if "?" in row]
    assert line.startswith("150 ")
    assert int(keys.split()[-1]) + line.removeprefix("150 ").index("?") == 170
    assert {len(row) for row in rows} == {len("150 ") + 72}
    assert np.array_equal(sorted(set("".join(row[4:] for row in rows))), ["#", "?"])
