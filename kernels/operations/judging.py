"""The interface of a candidate test: its input, its result, and how it is found.

`kernels` contains no test; the suite registers one as an entry point of the group `attest.judges`, so that
tuning is possible where the suite is installed. Without a test nothing is tuned.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

GROUP = "attest.judges"


# From the arguments of a call by name, and the cotangent of out where gradients are judged, to a function
# that returns "out" and the gradients of all float arrays, such as "dquery". Non-array arguments are fixed at
# compile time.
type Program = Callable[..., Callable[[], Mapping[str, Any]]]


@dataclass(frozen=True)
class CandidateCall:
    """One candidate on one call.

    run: the compiled program, see `Program`; a judge may call it often. arguments: the call, float arrays as
    jax.ShapeDtypeStruct, for the judge to draw; integer and bool arrays as they are. implementation: its
    name, such as "triton". backward: whether gradients are judged, too. seed: what the judge draws from;
    another one each time.
    """

    run: Program
    arguments: Mapping[str, Any]
    implementation: str
    backward: bool
    seed: int


@dataclass(frozen=True)
class Judgement:
    """The verdict on a candidate: right, or why not, in one sentence.

    failed: whether it could not be judged, so that nothing is known about it. statistics: of each output,
    such as "out", numbers by name: how far it is off, as shares of what the error model allows.
    """

    right: bool
    reason: str = ""
    statistics: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    failed: bool = False


type Judge = Callable[[CandidateCall], Judgement]


@cache
def installed_judge() -> Judge | None:
    """Return the judge that is installed; None where there is none.

    Raises: ValueError where there are several.
    """
    found = {point.value: point for point in entry_points(group=GROUP)}
    if len(found) > 1:
        raise ValueError(
            f"{GROUP}: got the entry points {', '.join(sorted(found))}; expected one. "
            "Uninstall the others, or pass Tuner(judge=...)."
        )
    return next((point.load() for point in found.values()), None)
