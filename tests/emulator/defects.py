"""Which twelve quiet losses of precision the judgements must see, each planted in the emulator."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.emulator.cases import Shape
from tests.emulator.flash import Arithmetic, second_degree_exp

Plant = Callable[[Arithmetic], Arithmetic]


_LONG = Shape(q_len=1024, kv_len=1024, q_heads=1)


@dataclass(frozen=True)
class Defect:
    """A planted defect: where it is planted, and the call that shows it; lengths are the table's."""

    name: str
    plant: Plant
    dtype: str = "bfloat16"
    family: str = "normal"
    features: tuple[str, ...] = ()
    shape: Shape = _LONG


def _with(**changes: object) -> Plant:
    return lambda arithmetic: replace(arithmetic, **changes)  # type: ignore[arg-type]


DEFECTS = (
    Defect("bfloat16 accumulator for O", _with(out_accumulator="bfloat16")),
    Defect("bfloat16 accumulator for dQ", _with(query_accumulator="bfloat16")),
    Defect("bfloat16 accumulator for dK", _with(key_accumulator="bfloat16")),
    Defect("bfloat16 accumulator for l", _with(sum_accumulator="bfloat16")),
    Defect("P truncated, not rounded", _with(weights="bfloat16_chopped")),
    Defect("Delta in bfloat16", _with(delta="bfloat16"), family="positive"),
    Defect("cap 15 not differentiated", _with(slope=False), features=("cap_15",)),
    Defect("cap 50 not differentiated", _with(slope=False), features=("cap_50",)),
    Defect("exp by a polynomial of degree 2", _with(exp=second_degree_exp)),
    Defect(
        "q scaled, then cast to bfloat16, D = 32",
        _with(prescaled="bfloat16"),
        shape=Shape(q_len=1024, kv_len=1024, q_heads=1, head_dim=32),
    ),
    Defect(
        "q scaled, then cast to bfloat16, D = 96",
        _with(prescaled="bfloat16"),
        shape=Shape(q_len=1024, kv_len=1024, q_heads=1, head_dim=96),
    ),
    Defect(
        "q scaled, then cast to bfloat16, D = 128",
        _with(prescaled="bfloat16"),
        shape=Shape(q_len=1024, kv_len=1024, q_heads=1, head_dim=128),
    ),
    Defect("TF32 where float32 is declared", _with(operands="tf32"), dtype="float32"),
    Defect(
        "dsinks rounded to bfloat16 before the sum",
        _with(sink_terms="bfloat16"),
        dtype="float32",
        features=("sinks",),
    ),
)
