"""Mutants of the clean kernel, as Subjects.

A defect is planted in a copy of the kernel's source. The copy runs step by step in NumPy, which compiles
nothing, or in JAX as it stands.
"""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np

from attest.conformance.cases.build import Built
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.judging.execute import call_of
from attest.conformance.mutants.catalogue import Mutant, source_of
from attest.conformance.mutants.kernels.variants import VARIANTS, Variant
from attest.conformance.subject import Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics

_KERNELS = "attest.conformance.mutants.kernels"
# The modules of the kernel, each before those that import it.
MODULES = ("arguments", "pairs", "jax_tiles", "jax_forward", "jax_backward", "jax_flash", "callback")
# Those that NumPy can run in place of JAX.
COMPUTING = ("jax_tiles", "jax_forward", "jax_backward")
_NUMBERS = count()
# What every mutant is called, so that the same cases are drawn for all of them.
SUBJECT = "mutant"


@contextmanager
def planted_modules(mutant: Mutant, jax: bool = False) -> Generator[Mapping[str, ModuleType]]:
    """Load the kernel's modules, by name, with the mutant's edits made, for as long as the block runs."""
    package = f"planted_{next(_NUMBERS)}"
    modules: dict[str, ModuleType] = {}
    try:
        for name in MODULES:
            text = source_of(mutant, f"{name}.py")
            for other in MODULES:
                text = text.replace(f"{_KERNELS}.{other} ", f"{package}.{other} ")
            if name in COMPUTING and not jax:
                text = text.replace("import jax.numpy as jnp", f"from {_KERNELS} import eager_numpy as jnp")
                text = text.replace("from jax import lax", f"from {_KERNELS} import eager_lax as lax")
            module = ModuleType(f"{package}.{name}")
            sys.modules[module.__name__] = module
            exec(compile(text, f"{package}/{name}.py", "exec"), module.__dict__)
            modules[name] = module
        yield modules
    finally:
        for name in modules:
            sys.modules.pop(f"{package}.{name}", None)


@dataclass(frozen=True)
class Planted:
    """A kernel with a defect: as a subject, and as a function of a case's arrays.

    answer: out, lse and the gradients by name, computed in NumPy at once; None for one that runs in JAX.
    """

    subject: Subject
    answer: Callable[[Built], Mapping[str, Any]] | None


@contextmanager
def planted_kernel(mutant: Mutant, jax: bool = False) -> Generator[Planted]:
    """Make the kernel with a defect, or as it is without edits, for as long as the block runs."""
    variant = next(variant for variant in VARIANTS if variant.name == mutant.variant)
    compiled = jax or mutant.compiled
    with planted_modules(mutant, compiled) as modules:
        passes = _passes(modules, variant)
        if compiled:
            call: Any = partial(modules["jax_flash"].flash_attention, variant)
        else:
            call = partial(modules["callback"].call_back, passes)
        subject = Subject(
            name=SUBJECT,
            call=call,
            features=frozenset(FEATURES) - set(mutant.lacks),
            dtypes=DTYPES,
            numerics=partial(_numerics, variant),
            tilings=(Tiling({}, variant.query_block, variant.key_block),),
            returns_lse=True,
        )
        yield Planted(subject, None if compiled else partial(_answer, modules, passes))


def _answer(modules: Mapping[str, ModuleType], passes: Any, built: Built) -> Mapping[str, Any]:
    with np.errstate(all="ignore"):
        options, arrays = modules["arguments"].arguments(**call_of(built).keywords())
        out, lse = passes.forward(options, arrays)
        found = passes.gradients(options, arrays, built.cotangents.out, built.cotangents.lse)
    return {"out": out, "lse": lse} | {f"d{name}": gradient for name, gradient in found.items()}


def _numerics(variant: Variant, dtype: str, tiling: Tiling) -> Numerics:
    return variant.declared(default_numerics(dtype, tiling))


def _passes(modules: Mapping[str, ModuleType], variant: Variant) -> Any:
    """Return the forward and the backward pass of the kernel over NumPy arrays."""
    prepare = modules["jax_tiles"].prepare
    run, differentiate = modules["jax_forward"].forward, modules["jax_backward"].backward
    results, gradients_of = modules["jax_flash"].results, modules["jax_flash"].gradients_of

    def forward(options: Any, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        return results(run(prepare(variant, options, arrays)), arrays)

    def gradients(options: Any, arrays: Mapping[str, Any], d_out: Any, d_lse: Any) -> Mapping[str, Any]:
        call = prepare(variant, options, arrays)
        return gradients_of(differentiate(call, run(call), d_out, d_lse), arrays)

    return modules["callback"].Passes(forward, gradients)
