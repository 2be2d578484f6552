"""Whether a kernel's answer is as near the truth as the error model says: four numbers an output, and limits.

The limits are data, `thresholds.toml`; docs/error-model.md shows the measurements they come from.
"""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.error_model import Prediction
from reference.numerics import Floats, format_of

_THRESHOLDS = Path(__file__).with_name("thresholds.toml")


@dataclass(frozen=True)
class Statistics:
    """How one output differs from the truth.

    elements: those that have a standard deviation; the last three numbers are taken over them.
    worst_ratio: the largest |error| / bound, inf where anything is NaN or infinite that should not be, is
        not but should be, or differs where only the exact value will do. worst_index: where.
    rms_ratio: rms(error) / rms(std). largest_z: the largest |error| / std.
    bias_t: the sum of (got - truth rounded to the dtype) * sign(truth) / std over its own standard error,
        rows (the last of four axes) counting as one observation each, since their elements share errors.
        Positive: too far from zero. observations: how many; bias_t is at most their root.
    """

    elements: int
    worst_ratio: float
    worst_index: tuple[int, ...]
    rms_ratio: float
    largest_z: float
    bias_t: float
    observations: int = 0


@dataclass(frozen=True)
class Limits:
    """What Statistics may be: largest values, and rms_low a least one, 0 if not judged.

    A bias may be as large as bias_t, or as bias_share of what it can be at all, if that is more.
    """

    worst_ratio: float
    largest_z: float
    rms_high: float
    bias_t: float
    bias_share: float
    rms_low: float


def measure(got: NDArray[Any], want: Floats, prediction: Prediction) -> Statistics:
    """Compare an output, in the dtype in which the kernel returned it, with the truth.

    Raises ValueError if the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(f"got: shape {got.shape}, expected {want.shape}, as the oracle's answer")
    if want.size == 0:
        return Statistics(0, 0.0, (), 0.0, 0.0, 0.0)
    given = got.astype(np.float64)
    with np.errstate(all="ignore"):
        ratio, comparable = _ratios(given, want, prediction, format_of(got.dtype).overflow)
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
        counted = comparable & (prediction.std > 0) & np.isfinite(prediction.std)
        if not counted.any():
            return Statistics(0, float(ratio[worst]), worst, 0.0, 0.0, 0.0)
        error = np.where(counted, given - np.where(counted, want, 0.0), 0.0)
        std = np.where(counted, prediction.std, 1.0)
        # Scaled, so that squares of tiny errors do not underflow.
        unit = std[counted].max()
        rms_ratio = math.sqrt(np.square(error[counted] / unit).sum() / np.square(std[counted] / unit).sum())
        # Had only the output been rounded, it would be this: what remains is the kernel's own doing.
        rounded = np.where(counted, want, 0.0).astype(got.dtype).astype(np.float64)
        signed = np.where(counted, given - rounded, 0.0) * np.sign(rounded) / std
        observations = signed.sum(axis=-1) if signed.ndim == 4 else signed
        spread = math.sqrt(np.square(observations).sum())
        bias = float(observations.sum()) / spread if spread > 0 else 0.0
        return Statistics(
            elements=int(counted.sum()),
            worst_ratio=float(ratio[worst]),
            worst_index=worst,
            rms_ratio=rms_ratio,
            largest_z=float(np.abs(error / std).max()),
            bias_t=bias,
            observations=int(np.count_nonzero(counted.any(axis=-1) if signed.ndim == 4 else counted)),
        )


def limits(output: str, elements: int, keys: int, dtype: str, family: str = "normal") -> Limits:
    """The limits for an output of `elements` elements of a call of `keys` keys, from thresholds.toml.

    dtype: of the inputs. family: of the values; of those that repeat few numbers, or whose few largest
    errors are all that counts, only the bound is judged.
    """
    table = _thresholds()
    bound, z, rms, bias = (table[name] for name in ("bound", "z", "rms", "bias"))
    if family in table["bound_only_families"] or elements == 0:
        return Limits(bound["limit"], math.inf, math.inf, math.inf, 1.0, 0.0)
    few = elements < rms["elements_at_least"] or keys < rms["keys_at_least"]
    gaussian = math.sqrt(2 * math.log(2 * elements / z["false_alarm"]))
    return Limits(
        worst_ratio=bound["limit"],
        largest_z=z["margin"][dtype] * gaussian,
        rms_high=math.inf if few else rms["high"],
        bias_t=bias["t"] if not few and dtype in bias["dtypes"] and output in bias["outputs"] else math.inf,
        bias_share=bias["share"],
        rms_low=rms["low"][dtype] if not few and family in rms["two_sided_families"] else 0.0,
    )


def exceeded(statistics: Statistics, limit: Limits) -> tuple[str, ...]:
    """The judgements that fail, by the name of the statistic; empty for a correct kernel."""
    largest_bias = max(limit.bias_t, limit.bias_share * math.sqrt(statistics.observations))
    failed = {
        "worst_ratio": not statistics.worst_ratio <= limit.worst_ratio,
        "rms_ratio": not limit.rms_low <= statistics.rms_ratio <= limit.rms_high,
        "largest_z": not statistics.largest_z <= limit.largest_z,
        "bias_t": not abs(statistics.bias_t) <= largest_bias,
    }
    return tuple(name for name, fails in failed.items() if fails)


def _ratios(
    given: Floats, want: Floats, prediction: Prediction, overflow: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """|error| / bound, and which elements are finite on both sides."""
    comparable = np.isfinite(given) & np.isfinite(want)
    error = np.abs(given - want)
    ratio = np.where(error == 0, 0.0, error / prediction.bound)
    # A bound that is not a number allows nothing.
    ratio = np.where(comparable & ~np.isnan(ratio), ratio, np.inf)
    same = (np.isnan(given) & np.isnan(want)) | (given == want)
    may_overflow = np.isfinite(want) & (np.abs(want) + prediction.bound >= overflow)
    overflowed = np.isinf(given) & may_overflow & (np.sign(given) == np.sign(want))
    return np.where(same | overflowed, 0.0, ratio), comparable


@cache
def _thresholds() -> dict[str, Any]:
    return tomllib.loads(_THRESHOLDS.read_text(encoding="utf-8"))
