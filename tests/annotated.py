"""Hold the calls of the tests to the annotations of the public functions, by jaxtyping and beartype.

A call that returns is checked after it has: its arguments and its result must fit the annotations, and a name
of an axis must mean one size in all of them. A call that raises is not, so that tests of malformed arguments
see the function's own errors.

`install` must run before the modules are imported. It wraps their public functions, and the public methods of
their public classes, as soon as one of them is.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

MODULES = (
    "attest.kernels.attention",
    "attest.kernels.masks.mask_info",
    "attest.kernels.operations.attention",
    "attest.kernels.operations.easydel",
    "attest.kernels.operations.flash_attention",
    "attest.kernels.operations.functions",
    "attest.kernels.xla.attention",
    "attest.reference.oracle",
    "attest.reference.problem",
)
# Dataclasses of the arrays of one call.
_RECORDS = ("Answer", "AttentionOutput", "Cotangents", "Problem", "Sample")
# Its arrays need not fit each other before it is in a call.
_COLLECTIONS = ("MaskInfo",)
# It returns a MaskInfo of PartitionSpecs, in place of arrays.
_UNCHECKED = ("MaskInfo.shardings",)


class AnnotationError(AssertionError):
    """A call that an annotation says cannot be."""


def install(modules: Sequence[str] = MODULES) -> None:
    """Enforce the annotations of modules that are yet to be imported."""
    loaded = [name for name in modules if name in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is imported already, so its annotations would not be enforced.")
    sys.meta_path.insert(0, _Finder(modules))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = frozenset(modules)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        enforce(module)


def enforce(module: types.ModuleType) -> None:
    """Replace the public functions and methods of a module by some that check their calls."""
    for name, found in list(vars(module).items()):
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(found):
            setattr(module, name, enforced(found))
        elif inspect.isclass(found):
            for method, x in list(vars(found).items()):
                if method.startswith("_") or f"{name}.{method}" in _UNCHECKED:
                    continue
                if isinstance(x, classmethod):
                    setattr(found, method, classmethod(enforced(x.__func__)))
                elif inspect.isfunction(x):
                    setattr(found, method, enforced(x))


def enforced[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that checks its calls once they have returned."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        result = function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        parameters = signature.parameters
        values = {name: x for name, x in given.items() if x is not parameters[name].default}
        # jaxtyping cannot broadcast dimensions that are symbols.
        if any(map(_is_symbolic, values.values())):
            return result
        check_call(function, {**values, "return": result})
        return result

    return checked


def check_call(function: Callable[..., Any], values: dict[str, Any]) -> None:
    """Raise an AnnotationError for an argument, or a result by the name "return", that fits no annotation."""
    from jaxtyping import jaxtyped

    def check(name: str, value: Any, hint: Any) -> None:
        if not _fits(value, hint):
            beside = ", ".join(f"{other} {_described(x)}" for other, x in values.items() if x is not None)
            raise AnnotationError(
                f"{function.__qualname__}: {name} is {_described(value)} and not {hint}; the call: {beside}"
            )

    hints = hints_of(function)
    with jaxtyped("context"):
        for name, value in values.items():
            check(name, value, hints.get(name, Any))
            if type(value).__name__ in _RECORDS:
                for field, x, hint in _fields(value):
                    check(f"{name}.{field}", x, hint)
    for name, value in values.items():
        if type(value).__name__ in _COLLECTIONS:
            for field, x, hint in _fields(value):
                with jaxtyped("context"):
                    check(f"{name}.{field}", x, hint)


@functools.cache
def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a function or dataclass, by name; those that say nothing are left out."""
    hints = typing.get_type_hints(annotated, include_extras=True)
    return {name: as_jaxtyping(hint) for name, hint in hints.items() if hint is not Any}


def as_jaxtyping(hint: Any) -> Any:
    """Return an annotation in which `Annotated[ndarray, "Float B Sq"]` is `Float[ndarray, "B Sq"]`.

    The oracle imports no jaxtyping, and writes its annotations so.
    """
    import jaxtyping
    import numpy as np

    if isinstance(hint, typing.TypeAliasType):
        return as_jaxtyping(hint.__value__)
    if typing.get_origin(hint) is typing.Annotated:
        dtype, _, axes = hint.__metadata__[0].partition(" ")
        return getattr(jaxtyping, dtype)[np.ndarray, axes]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(as_jaxtyping, typing.get_args(hint)))
    return hint


def _fields(record: Any) -> Iterator[tuple[str, Any, Any]]:
    """The fields of a dataclass: names, values and annotations."""
    hints = hints_of(type(record))
    for field in fields(record):
        yield field.name, getattr(record, field.name), hints.get(field.name, Any)


def _fits(value: Any, hint: Any) -> bool:
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    # An int is a float to Python's type checkers.
    return hint is Any or is_bearable(value, hint, conf=BeartypeConf(is_pep484_tower=True))


def _is_symbolic(value: Any) -> bool:
    return not all(isinstance(size, int) for size in getattr(value, "shape", ()))


def _described(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value)[:80] if dtype is None else f"{dtype}{list(shape or ())}"
