"""The picture shows which keys a kernel sees, beside those that the clauses make visible."""

import re
from dataclasses import replace

import numpy as np
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.judging import picture as module
from attest.conformance.judging.picture import TooLateError, draw, picture
from attest.conformance.judging.trial import Trial
from attest.conformance.subject import Tiling, find
from tests import toys
from tests.wrong_kernels import subjects


def test_a_diagonal_that_is_not_seen():
    case = Case(q_len=3, kv_len=5, head_dim=2, causal=True)
    shown = picture(Trial(subjects.causal_edge, case)).splitlines()
    # Which power of ten it is depends on how XLA optimizes.
    shown[8:11] = [line[0] + re.sub(r"\d", "5", line[1:]) for line in shown[8:11]]
    assert shown == [
        "batch entry 0, head 0: rows down, keys across; 3 of 15 differ",
        "  key 0",
        "0 ##?..",
        "1 ###?.",
        "2 ####?",
        "# visible, . hidden, ! visible but should be hidden, ? hidden but should be visible",
        "errors of the weights",
        "  key 0",
        "0 555..",
        "1 5555.",
        "2 55555",
        ". within the bound, 0 to 9 the power of ten of err/bound, x not finite",
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


def test_a_wrong_scale_shows_every_key_and_wrong_weights():
    def call(query, key, value, **options):
        return toys.right.call(2 * query, key, value, **options)

    shown = draw(Trial(replace(toys.right, call=call), Case(q_len=3, kv_len=4, head_dim=4)))
    assert (shown.differ, set("".join(shown.seen))) == (0, {"#"})
    assert shown.wrong_weights
    assert not draw(Trial(toys.right, Case(q_len=3, kv_len=4, head_dim=4))).wrong_weights


def test_a_weight_that_is_not_finite():
    def call(query, key, value, **options):
        return toys.right.call(query, key, value, **options).at[0, 1].set(np.nan)

    shown = draw(Trial(replace(toys.right, call=call), Case(q_len=3, kv_len=4, head_dim=4)))
    assert shown.errors == ("....", "xxxx", "....")


def test_blocks_are_set_apart():
    tilings = (Tiling(query_block=2, key_block=3),)
    subject = replace(subjects.causal_edge, tilings=tilings)
    shown = picture(Trial(subject, Case(q_len=3, kv_len=5, head_dim=2, causal=True))).splitlines()
    assert shown[2:6] == ["0 ##?|..", "1 ###|?.", "  ------", "2 ###|#?"]


def test_a_picture_that_is_not_wanted_any_more_ends():
    wanted = iter([True, False])
    with pytest.raises(TooLateError):
        draw(Trial(toys.right, Case(kv_len=3, head_dim=1)), lambda: next(wanted))


def test_a_large_case_is_shown_where_it_differs(monkeypatch):
    weights = module._weights

    def wrong(trial, problem, wanted):
        got = np.concatenate(list(weights(trial, problem, wanted)), axis=-1)
        got[0, 1, 150, 170] = 0
        return [got]

    monkeypatch.setattr(module, "_weights", wrong)
    case = Case(q_len=200, kv_len=180, q_heads=2, kv_heads=2, head_dim=64)
    title, keys, *rows = picture(Trial(replace(toys.right), case)).splitlines()[:42]
    assert title == "batch entry 0, head 1: rows down, keys across; 1 of 36000 differ"
    assert len(rows) == 40
    (line,) = [row for row in rows if "?" in row]
    assert line.startswith("150 ")
    assert int(keys.split()[-1]) + line.removeprefix("150 ").index("?") == 170
    assert {len(row) for row in rows} == {len("150 ") + 72}
    assert np.array_equal(sorted(set("".join(row[4:] for row in rows))), ["#", "?"])


def test_of_too_many_weights_only_the_visible_keys_are_drawn(monkeypatch):
    monkeypatch.setattr(module, "_MOST_WEIGHTS", 8)
    case = Case(q_len=2, kv_len=4, head_dim=2, causal=True)
    assert draw(Trial(toys.top_left, case)).wrong_weights
    longer = draw(Trial(toys.top_left, replace(case, kv_len=5)))
    assert longer.differ
    assert not longer.wrong_weights


def test_no_key_at_all():
    case = Case(q_len=2, kv_len=0, head_dim=2)
    assert draw(Trial(find("xla.flash_attention"), case)).seen == ("", "")
