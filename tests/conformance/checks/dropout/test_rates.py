"""Statistics of kept weights: independent ones are probable, and each dependence is found."""

import numpy as np
import pytest

from attest.conformance.checks.dropout.rates import AXES, Count, improbable

SHAPE = (3, 2, 4, 24, 20)  # seed, batch, head, row, key


def masks(seed: int, rate: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).random(SHAPE) >= rate


def found(kept: np.ndarray, rate: float = 0.3, seen: np.ndarray | None = None) -> list[str]:
    seen = np.ones(SHAPE, bool) if seen is None else seen
    return [count.what for count in improbable(kept, seen, rate, 1e-6)]


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_independent_weights_are_probable(rate: float) -> None:
    assert not any(found(masks(seed, rate), rate) for seed in range(10))


@pytest.mark.parametrize(
    ("axis", "steps"), [(axis, steps) for axis in range(len(AXES)) for steps in (1, 2) if SHAPE[axis] > steps]
)
def test_equal_places_are_found(axis: int, steps: int) -> None:
    kept = masks(1)
    kept = np.take(kept, np.arange(SHAPE[axis]) % steps, axis)
    assert any(f"{steps} apart drop alike" in what for what in found(kept))


@pytest.mark.parametrize("steps", [1, -1])
def test_a_mask_that_moves_from_seed_to_seed_is_found(steps: int) -> None:
    first = masks(1)[0]
    kept = np.stack([np.roll(first, steps * seed, axis=1) for seed in range(SHAPE[0])])
    assert f"a seed and the next one, {steps:+d} head, drop alike in" in found(kept)


@pytest.mark.parametrize("axis", range(len(AXES)))
def test_a_place_with_another_rate_is_found(axis: int) -> None:
    kept = masks(1)
    place = (slice(None),) * axis + (1,)
    kept[place] = masks(2, 0.6)[place]
    assert f"in {AXES[axis]} 1 dropout keeps" in found(kept)


def test_pairs_that_are_not_seen_do_not_count() -> None:
    kept, seen = masks(1), np.ones(SHAPE, bool)
    kept[..., 10:], seen[..., 10:] = True, False
    assert found(kept)
    assert not found(kept, seen=seen)
    assert not found(kept, seen=np.zeros(SHAPE, bool))


def test_a_count_in_words() -> None:
    count = Count("dropout keeps", 70, 100, 0.5)
    assert str(count) == "dropout keeps 70 of 100, expected 0.5 of them"
    # The exact tail is 3.9e-5; the bound is 2.7e-4.
    assert np.exp(-count.exponent) == pytest.approx(2.7e-4, rel=0.02)
    assert Count("", 0, 8, 0.5).exponent == pytest.approx(8 * np.log(2))
