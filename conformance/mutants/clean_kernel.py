"""Plants a defect in a copy of the kernel's source and makes a subject of it.

The copy runs step by step in NumPy, which compiles nothing, or in JAX as it stands.
"""

import sys
import tomllib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from attest.conformance.cases.build import Built
from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.judging.execute import call_of
from attest.conformance.subject import Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics
from attest.conformance.mutants.kernels.variants import VARIANTS, Variant

KERNEL = Path(__file__).parents[1] / "alarms"
# The modules of the kernel, each before those that import it.
MODULES = ("arguments", "pairs", "jax_tiles", "jax_forward", "jax_backward", "jax_flash", "callback")
# Those that NumPy can run in place of JAX.
COMPUTING = ("jax_tiles", "jax_forward", "jax_backward")
_NUMBERS = count()
# What every mutant is called, so that the same cases are drawn for all of them.
SUBJECT = "mutant"


@dataclass(frozen=True)
class Edit:
    """One place of the source: in which module, the text as it is, which occurs once, and with the defect."""

    module: str
    correct: str
    planted: str


@dataclass(frozen=True)
class Mutant:
    """One table of in_clean_kernel.toml or nulls.toml; the fields are explained there."""

    name: str
    breaks: str
    edits: tuple[Edit, ...]
    clause: str = ""
    near: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    variant: str = "plain"
    jax: bool = False
    quick: bool = False


@cache
def load(file: str) -> Mapping[str, Mutant]:
    """The mutants of a file of this folder, by name."""
    tables = tomllib.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {name: _mutant(name, table) for name, table in tables.items()}


def _mutant(name: str, table: dict[str, Any]) -> Mutant:
    edits = tuple(Edit(**edit) for edit in table.pop("edits"))
    lists = {field: tuple(table.pop(field)) for field in ("near", "lacks") if field in table}
    return Mutant(name=name, edits=edits, **lists, **table)


def source(module: str, edits: tuple[Edit, ...] = ()) -> str:
    """The source of a module of the kernel with edits made. Raises ValueError if one does not fit."""
    text = (KERNEL / f"{module}.py").read_text(encoding="utf-8")
    for edit in edits:
        if edit.module == module:
            if text.count(edit.correct) != 1:
                raise ValueError(
                    f"{module}: {edit.correct!r} occurs {text.count(edit.correct)} times, not once"
                )
            text = text.replace(edit.correct, edit.planted)
    return text


@contextmanager
def planted(edits: tuple[Edit, ...], jax: bool = False) -> Generator[Mapping[str, ModuleType]]:
    """The kernel's modules by name, with the edits made, for as long as the block runs."""
    package = f"planted_{next(_NUMBERS)}"
    modules: dict[str, ModuleType] = {}
    try:
        for name in MODULES:
            text = source(name, edits)
            for other in MODULES:
                text = text.replace(f"tests.alarms.{other} ", f"{package}.{other} ")
            if name in COMPUTING and not jax:
                text = text.replace(
                    "import jax.numpy as jnp", "from attest.conformance.mutants.kernels import eager_numpy as jnp"
                )
                text = text.replace(
                    "from jax import lax", "from attest.conformance.mutants.kernels import eager_lax as lax"
                )
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
    """The kernel with a defect, or as it is if the mutant has no edits, for as long as the block runs."""
    variant = next(variant for variant in VARIANTS if variant.name == mutant.variant)
    compiled = jax or mutant.jax
    with planted(mutant.edits, compiled) as modules:
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
    return replace(default_numerics(dtype, tiling), splits=variant.splits)


def _passes(modules: Mapping[str, ModuleType], variant: Variant) -> Any:
    """Both passes of the kernel over NumPy arrays."""
    prepare = modules["jax_tiles"].prepare
    run, differentiate = modules["jax_forward"].forward, modules["jax_backward"].backward
    results, gradients_of = modules["jax_flash"].results, modules["jax_flash"].gradients_of

    def forward(options: Any, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        return results(run(prepare(variant, options, arrays)), arrays)

    def gradients(options: Any, arrays: Mapping[str, Any], d_out: Any, d_lse: Any) -> Mapping[str, Any]:
        call = prepare(variant, options, arrays)
        return gradients_of(differentiate(call, run(call), d_out, d_lse), arrays)

    return modules["callback"].Passes(forward, gradients)
