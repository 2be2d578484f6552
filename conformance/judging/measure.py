"""Measurements: how far an output is from the oracle, and which judgements it breaks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.case import Case
from attest.conformance.judging.fingerprints import fingerprints
from attest.conformance.judging.places import places
from attest.conformance.record import Element, Measurement
from attest.reference import judgements
from attest.reference.error_model import Prediction

# The names that judgements have in a record.
_BROKEN = {"worst_ratio": "bound", "rms_ratio": "rms", "largest_z": "z", "bias_t": "bias"}


def measure(
    output: str, got: NDArray[Any], want: NDArray[np.float64], prediction: Prediction, case: Case
) -> Measurement:
    """Judge one output: got as the kernel returned it, want and prediction of the same shape."""
    statistics = judgements.measure(got, want, prediction)
    limits = judgements.limits(output, statistics.elements, case.kv_len, case.dtype, case.family)
    broken = tuple(_BROKEN[name] for name in judgements.exceeded(statistics, limits))
    wrong = judgements.outside(got, want, prediction) if "bound" in broken else np.zeros(got.shape, bool)
    return Measurement(
        output=output,
        elements=statistics.elements,
        worst_ratio=statistics.worst_ratio,
        rms_ratio=statistics.rms_ratio,
        largest_z=statistics.largest_z,
        bias_t=statistics.bias_t,
        broken=broken,
        worst=_element(statistics.worst_index, got, want) if got.size else None,
        wrong=int(wrong.sum()),
        size=int(got.size),
        where=places(output, wrong),
        fingerprints=fingerprints(output, got, want, wrong, prediction.bound, case) if broken else (),
    )


def beyond_precision(got: NDArray[Any], want: NDArray[np.float64], coarse: Prediction) -> bool:
    """Return whether an output is further off than a kernel that loses precision everywhere would be.

    coarse: the prediction for such a kernel. NaN and infinities in the wrong places count as further off.
    """
    statistics = judgements.measure(got.astype(np.float64), want, coarse)
    return not (statistics.worst_ratio <= 1 and statistics.largest_z <= judgements.coarse_limit())


def _element(index: tuple[int, ...], got: NDArray[Any], want: NDArray[np.float64]) -> Element:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = want[index].astype(got.dtype)
    return Element(
        index=index,
        got=float(got[index]),
        expected=float(want[index]),
        got_hex=_hex(got[index]),
        expected_hex=_hex(rounded),
    )


def _hex(number: Any) -> str:
    """Return the bits of a number as stored, most significant first."""
    return "0x" + number.tobytes()[::-1].hex()
