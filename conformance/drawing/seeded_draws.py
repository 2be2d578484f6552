"""Deterministic Hypothesis draws: the values depend only on the seed.

Hypothesis itself takes one number in twenty from the literals in the source of the local modules that happen
to be loaded, and varies earlier values. Then a literal changed anywhere, or one more import, gives the same
seed other cases, and the record of before cannot be compared with the record of after.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from random import Random
from typing import Any, NoReturn

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider
from hypothesis.strategies import SearchStrategy

# By name: the lowest Hypothesis that we allow takes no classes.
_BACKEND = "attest"
AVAILABLE_PROVIDERS[_BACKEND] = "attest.conformance.drawing.seeded_draws.SeededDraws"

# Hypothesis makes the provider and tells it no seed.
_SEED: ContextVar[int] = ContextVar("seed")


class SeededDraws(PrimitiveProvider):
    """Independent integers and booleans, which is all that cases are made of."""

    lifetime = "test_function"

    def __init__(self, conjecturedata: Any, /) -> None:
        super().__init__(conjecturedata)
        self._random = Random(_SEED.get())

    def draw_boolean(self, p: float = 0.5) -> bool:
        """Draw True with probability p."""
        return self._random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        """Draw uniformly between bounds, but for values that have a probability of their own in `weights`."""
        if min_value is None or max_value is None:
            raise NotImplementedError("no field of a case is an integer without bounds")
        left = self._random.random()
        for value, probability in (weights or {}).items():
            left -= probability
            if left < 0:
                return value
        return self._random.randint(min_value, max_value)

    def _not_drawn(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("no field of a case is drawn as a float, a string or bytes")

    draw_float = draw_string = draw_bytes = _not_drawn


def try_values[T](
    body: Callable[[T], None], strategy: SearchStrategy[T], count: int, seed: int, phases: Sequence[Phase]
) -> None:
    """Call `body` with values of a strategy until it has taken `count`; the same values for the same seed.

    It leaves one by `assume`. The simplest value may come before those drawn. With Phase.shrink, what `body`
    raises for one value is sought on simpler ones and then raised.
    """

    @seeded(seed)  # for the shrinker
    @settings(
        backend=_BACKEND,
        max_examples=count,
        database=None,
        phases=phases,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
    )
    @given(strategy)
    def call(value: T) -> None:
        body(value)

    before = _SEED.set(seed)
    try:
        call()
    finally:
        _SEED.reset(before)
