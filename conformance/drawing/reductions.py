"""Single steps that make a failing Case simpler: fewer features, smaller sizes, plain values.

They come before the random search of `strategies`: a failure that needs a whole block of keys is not among
the smallest cases, and these steps keep its lengths until the last.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.drawing.strategies import without


def reduced(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the case after every step on which `fails` holds, in a fixed order."""
    for step in (_features, _sizes, _values, _lengths):
        for change in step(case):
            with suppress(ValueError):  # the case would lack what its features need
                smaller = change(case)
                if smaller != case and fails(smaller):
                    case = smaller
    return case


Change = Callable[[Case], Case]


def _features(case: Case) -> Iterator[Change]:
    """Yield the steps that leave one feature, then those that leave out one."""
    names = sorted(case.features)
    for name in names:
        yield lambda now, name=name: _without(now, now.features - {name})
    for name in names:
        yield lambda now, name=name: _without(now, {name})


def _without(case: Case, names: Any) -> Case:
    left = without(case, names)
    return replace(left, q_heads=left.kv_heads) if "gqa" in names else left


def _sizes(case: Case) -> Iterator[Change]:
    """Yield the steps to one batch entry, one KV head, and few channels."""
    if case.lengths is None:
        yield lambda now: replace(now, batch=1)
    yield lambda now: replace(now, kv_heads=1, q_heads=now.q_heads // now.kv_heads)
    yield lambda now: replace(now, head_dim=min(now.head_dim, 2), value_dim=now.value_dim and 1)


def _values(_case: Case) -> Iterator[Change]:
    """Yield the steps to plain values."""
    plain = Case()
    yield lambda now: replace(now, family=plain.family, seed=plain.seed, poison=plain.poison)
    yield lambda now: replace(
        now,
        mask_pattern=plain.mask_pattern,
        bias_pattern=plain.bias_pattern,
        segment_pattern=plain.segment_pattern,
        sink_pattern=plain.sink_pattern,
    )
    yield lambda now: replace(now, tiling=plain.tiling)


def _lengths(case: Case) -> Iterator[Change]:
    """Yield the steps to one query, to one key, and to parts of each."""
    if case.lengths is not None:
        return
    yield lambda now: replace(now, q_len=1)
    yield lambda now: replace(now, kv_len=1)
    for numerator, denominator in ((1, 2), (1, 2), (3, 4), (7, 8)):
        yield lambda now, n=numerator, d=denominator: replace(now, q_len=max(1, now.q_len * n // d))
        yield lambda now, n=numerator, d=denominator: replace(now, kv_len=max(1, now.kv_len * n // d))
