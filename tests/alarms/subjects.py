"""The clean kernels of this folder as subjects, on the default numerics of a third party."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.mutants.kernels.arguments import Options
from attest.conformance.mutants.kernels.callback import Arrays, Passes, call_back
from attest.conformance.mutants.kernels.jax_flash import flash_attention
from attest.conformance.mutants.kernels.variants import VARIANTS, Variant
from attest.conformance.subject import Subject, Tiling, default_numerics, find
from attest.reference.numerics import Numerics
from tests.alarms import emulated, numpy_flash


def jax_subject(variant: Variant) -> Subject:
    """The kernel in pure JAX, computed one way."""
    return _subject("jax", partial(flash_attention, variant), variant)


def numpy_subject(variant: Variant) -> Subject:
    """The kernel in NumPy, computed one way."""

    def forward(options: Options, arrays: Arrays) -> tuple[Any, Any]:
        out, lse, _, _ = numpy_flash.forward(numpy_flash.prepare(variant, options, dict(arrays)))
        return out.transpose(0, 2, 1, 3), lse

    def gradients(options: Options, arrays: Arrays, d_out: Any, d_lse: Any) -> Arrays:
        call = numpy_flash.prepare(variant, options, dict(arrays))
        found = numpy_flash.backward(call, numpy_flash.forward(call), d_out, d_lse)
        return found | {name: found[name].transpose(0, 2, 1, 3) for name in ("query", "key", "value")}

    return _subject("numpy", partial(call_back, Passes(forward, gradients)), variant)


def _subject(kind: str, call: Callable[..., Any], variant: Variant) -> Subject:
    return Subject(
        name=f"outsider.{kind}.{variant.name}",
        call=call,
        features=frozenset(FEATURES),
        dtypes=DTYPES,
        numerics=partial(_numerics, variant),
        tilings=(Tiling({}, variant.query_block, variant.key_block),),
        returns_lse=True,
    )


def _numerics(variant: Variant, dtype: str, tiling: Tiling) -> Numerics:
    numerics = variant.declared(default_numerics(dtype, tiling))
    return replace(numerics, delta_from_weights=variant.delta == "weights")


OUTSIDERS = (
    *(numpy_subject(variant) for variant in VARIANTS),
    *(jax_subject(variant) for variant in VARIANTS if variant.tanh != "double"),
)
OURS = ("xla.flash_attention", "xla.attention", "triton.interpret")


@cache
def everyone() -> dict[str, Subject]:
    """All subjects by name, whether or not they can run in this process."""
    subjects = (*OUTSIDERS, *emulated.SUBJECTS, *(find(name) for name in OURS))
    return {subject.name: subject for subject in subjects}


def kind_of(subject: Subject) -> str:
    """The name of the group that a subject belongs to."""
    return subject.name if subject.name in OURS else subject.name.rpartition(".")[0]


def choose(names: Iterable[str]) -> list[tuple[Subject, ...]]:
    """The subjects that can run in this process and whose names begin so, or all; in groups.

    Those of a group declare the same features and dtypes, so that one drawing of cases serves them.
    """
    wanted = tuple(names)
    chosen = [
        subject
        for subject in everyone().values()
        if subject.why_not_here("cpu") is None and (wanted == ("all",) or subject.name.startswith(wanted))
    ]
    groups: dict[str, list[Subject]] = {}
    for subject in chosen:
        groups.setdefault(kind_of(subject), []).append(subject)
    return [tuple(group) for group in groups.values()]
