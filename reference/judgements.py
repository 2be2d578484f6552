"""Judgements: four statistics of an output's error, and their limits.

The limits are data, `thresholds.toml`; docs/log/error-model.md shows the measurements they come from.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.coherence import Parts
from attest.reference.error_model import Prediction
from attest.reference.numerics import WORST_EXCESS, Floats, format_of, half_ulp

_THRESHOLDS = Path(__file__).with_name("thresholds.toml")


@dataclass(frozen=True)
class Statistics:
    """The difference of one output from the truth.

    elements: those that have a standard deviation; the last three numbers are taken over them.
    worst_ratio: the largest |error| / bound, inf where anything is NaN or infinite that should not be, is
        not but should be, or differs where only the exact value will do. worst_index: where.
    rms_ratio: rms(error) / rms(std), where std allows for how the exact values round to the output's dtype.
    largest_z: the largest |error| / worst_std.
    bias_t: the sum of (got - truth rounded to the dtype) * sign(truth) / std over its own standard error,
        rows (the last of four axes) counting as one observation each, since their elements share errors.
        Positive: too far from zero. observations: how many; bias_t is at most their root.
    few: how far chance may take the square of rms_ratio past 1, where few independent errors make it up.
    repeated: how much of the summed variance may be one rounding, in all rows: 0 to 1.
    common_z: the sum of bias_t over its standard deviation where one rounding repeats in all rows; inf where
        none does.
    """

    elements: int
    worst_ratio: float
    worst_index: tuple[int, ...]
    rms_ratio: float
    largest_z: float
    bias_t: float
    observations: int = 0
    few: float = 0.0
    repeated: float = 0.0
    common_z: float = math.inf


@dataclass(frozen=True)
class Limits:
    """The largest values that Statistics of a correct kernel may have.

    A bias may be as large as bias_t, as bias_share of what it can be at all, or as common_z deviations of a
    rounding that repeats in all rows, whichever is most.
    """

    worst_ratio: float
    largest_z: float
    rms: float
    bias_t: float
    bias_share: float
    common_z: float


def measure(got: NDArray[Any], want: Floats, prediction: Prediction) -> Statistics:
    """Compare an output, in the dtype in which the kernel returned it, with the truth.

    Raises ValueError if the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(f"got: shape {got.shape}, expected {want.shape}, as the oracle's answer")
    if want.size == 0:
        return Statistics(0, 0.0, (), 0.0, 0.0, 0.0)
    given = got.astype(np.float64)
    form = format_of(got.dtype)
    with np.errstate(all="ignore"):
        ratio, comparable = _ratios(given, want, prediction, form.overflow)
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
        counted = comparable & (prediction.std > 0) & np.isfinite(prediction.std)
        if not counted.any():
            return Statistics(0, float(ratio[worst]), worst, 0.0, 0.0, 0.0)
        exact = np.where(counted, want, 0.0)
        error = np.where(counted, given - exact, 0.0)
        std = np.where(counted, prediction.std, 1.0)
        # Had only the output been rounded, it would be this: what remains is the kernel's own doing.
        rounded = exact.astype(got.dtype).astype(np.float64)
        # Scaled, so that squares of tiny errors do not underflow.
        unit = std[counted].max()
        allowed = np.square(std[counted] / unit)
        # Where many outputs lie beside the same number, their known rounding may be larger than usual.
        known = np.square((rounded - exact)[counted] / unit)
        usual = np.square(half_ulp(np.abs(exact[counted]), form.unit) / unit) / 3
        most = max(float(allowed.sum()), float((allowed + known - usual).sum()))
        rms_ratio = math.sqrt(np.square(error[counted] / unit).sum() / most)
        signed = np.where(counted, given - rounded, 0.0) * np.sign(rounded) / std
        observations = signed.sum(axis=-1) if signed.ndim == 4 else signed
        spread = math.sqrt(np.square(observations).sum())
        total, predicted = float(observations.sum()), float(np.square(std[counted]).sum())
        return Statistics(
            elements=int(counted.sum()),
            worst_ratio=float(ratio[worst]),
            worst_index=worst,
            rms_ratio=rms_ratio,
            few=_chance(prediction.parts, predicted),
            repeated=prediction.repeated / predicted,
            largest_z=float(np.abs(error / np.where(counted, prediction.worst_std, 1.0)).max()),
            bias_t=total / spread if spread > 0 else 0.0,
            observations=int(np.count_nonzero(counted.any(axis=-1) if signed.ndim == 4 else counted)),
            common_z=abs(total) / prediction.common if prediction.common > 0 else math.inf,
        )


def outside(got: NDArray[Any], want: Floats, prediction: Prediction) -> NDArray[np.bool_]:
    """Return which elements lie outside their bound; the arguments are those of `measure`."""
    with np.errstate(all="ignore"):
        ratio, _ = _ratios(got.astype(np.float64), want, prediction, format_of(got.dtype).overflow)
    return ratio > 1


def limits(output: str, elements: int, keys: int, dtype: str, family: str = "normal") -> Limits:
    """Return the limits for an output of `elements` elements of a call of `keys` keys, from thresholds.toml.

    dtype: of the inputs. family: of the values; of those that repeat few numbers, or whose few largest
    errors are all that counts, only the bound is judged.
    """
    table = _thresholds()
    bound, z, rms, bias = (table[name] for name in ("bound", "z", "rms", "bias"))
    if family in table["bound_only_families"] or elements == 0:
        return Limits(bound["limit"], math.inf, math.inf, math.inf, 1.0, math.inf)
    few = elements < rms["elements_at_least"] or keys < rms["keys_at_least"]
    gaussian = math.sqrt(2 * math.log(2 * elements / z["false_alarm"]))
    judged = not few and dtype in bias["dtypes"] and output in bias["outputs"]
    return Limits(
        worst_ratio=bound["limit"],
        largest_z=z["margin"][dtype] * gaussian,
        rms=math.inf if few else rms["lse" if output == "lse" else dtype],
        bias_t=bias["t"] if judged else math.inf,
        bias_share=bias["share"],
        common_z=bias["common_z"],
    )


def coarse_limit() -> float:
    """Return the largest z, by a kernel that loses precision everywhere, that lost precision explains."""
    return float(_thresholds()["coarse"]["z"])


def exceeded(statistics: Statistics, limit: Limits) -> tuple[str, ...]:
    """Return the judgements that fail, by the name of the statistic; empty for a correct kernel."""
    largest_bias = max(limit.bias_t, limit.bias_share * math.sqrt(statistics.observations))
    biased = not abs(statistics.bias_t) <= largest_bias and not statistics.common_z <= limit.common_z
    most = statistics.few + WORST_EXCESS * statistics.repeated
    failed = {
        "worst_ratio": not statistics.worst_ratio <= limit.worst_ratio,
        "rms_ratio": not statistics.rms_ratio <= limit.rms * math.sqrt(1 + most),
        "largest_z": not statistics.largest_z <= limit.largest_z,
        "bias_t": biased,
    }
    return tuple(name for name, fails in failed.items() if fails)


def _ratios(
    given: Floats, want: Floats, prediction: Prediction, overflow: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return |error| / bound, and which elements are finite on both sides."""
    comparable = np.isfinite(given) & np.isfinite(want)
    error = np.abs(given - want)
    ratio = np.where(error == 0, 0.0, error / prediction.bound)
    # A bound that is not a number allows nothing.
    ratio = np.where(comparable & ~np.isnan(ratio), ratio, np.inf)
    same = (np.isnan(given) & np.isnan(want)) | (given == want)
    may_overflow = np.isfinite(want) & (np.abs(want) + prediction.bound >= overflow)
    overflowed = np.isinf(given) & may_overflow & (np.sign(given) == np.sign(want))
    return np.where(same | overflowed, 0.0, ratio), comparable


def _chance(parts: Parts, total: float) -> float:
    """Return how far a weighted sum of squares of normal errors exceeds its mean at odds of false_alarm.

    Laurent and Massart, Annals of Statistics 28(5), 2000, lemma 1.
    """
    exponent = -math.log(_thresholds()["rms"]["false_alarm"])
    return (2 * math.sqrt(parts.squares * exponent) + 2 * parts.largest * exponent) / total


@cache
def _thresholds() -> dict[str, Any]:
    return tomllib.loads(_THRESHOLDS.read_text(encoding="utf-8"))
