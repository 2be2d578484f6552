"""What a heat map counts: the cases of each feature whose output is wrong."""

import pytest

from attest.conformance.record import Verdict
from attest.reports.heat import EVERY_CASE, Cell, heat_maps
from tests.reports.records import KERNEL, case, measurement, result

WRONG = measurement(broken=("bound",))


def counted(*results) -> dict[str, tuple[tuple[int, int], ...]]:
    (found,) = heat_maps(results)
    return {name: tuple((cell.wrong, cell.cases) for cell in cells) for name, cells in found.rows}


def test_cases_are_counted_by_feature_and_output():
    results = [
        result(Verdict.FAIL, WRONG, measurement("lse"), asked=case(0, causal=True)),
        result(Verdict.PASS, measurement(), asked=case(1, causal=True)),
        result(Verdict.PASS, measurement(), asked=case(2)),
    ]
    assert counted(*results) == {EVERY_CASE: ((1, 3), (0, 1)), "causal": ((1, 2), (0, 1))}
    assert heat_maps(results) == heat_maps(results[::-1])


def test_a_case_of_two_checks_is_one_case():
    """The checks of accuracy judge one call, of which one may measure an output and another find it wrong."""
    assert counted(result(Verdict.PASS, measurement()), result(Verdict.FAIL, WRONG, check="gradients")) == {
        EVERY_CASE: ((1, 1),)
    }


def test_only_judged_cases_that_were_drawn_count():
    drawn, shrunk = case(0), case(1)
    assert counted(
        result(Verdict.FAIL, WRONG, asked=drawn, minimal=True, shrunk_from=drawn.id),
        result(Verdict.FAIL, WRONG, asked=shrunk, minimal=True, shrunk_from=drawn.id),
        result(Verdict.XFAIL, WRONG, asked=case(2)),
        result(Verdict.INCONCLUSIVE, measurement(), asked=case(3)),
        result(Verdict.FAIL, WRONG, asked=case(4), check="transforms.vmap"),
    ) == {EVERY_CASE: ((1, 1),)}
    assert heat_maps([result(Verdict.UNSUPPORTED)]) == ()


def test_subjects_with_wrong_cases_come_first():
    maps = heat_maps([result(Verdict.PASS, measurement(), subject="a"), result(Verdict.FAIL, WRONG)])
    assert [(found.subject, found.wrong) for found in maps] == [(KERNEL, True), ("a", False)]


def test_outputs_are_in_order_and_unknown_ones_come_last():
    names = ("strange", "dvalue", "lse", "out")
    (found,) = heat_maps([result(Verdict.PASS, *map(measurement, names), check="gradients")])
    assert found.outputs == ("out", "lse", "dvalue", "strange")


@pytest.mark.parametrize(
    ("wrong", "cases", "shade"),
    [(0, 0, 0), (0, 9, 0), (1, 100, 1), (1, 4, 1), (2, 4, 2), (3, 4, 3), (4, 4, 4)],
)
def test_a_shade_is_a_quarter(wrong, cases, shade):
    assert Cell(wrong, cases).shade == shade
