"""Hold the calls of the tests to the annotations of the public functions, by jaxtyping and beartype.

A call that returns is checked after it has: its arguments and its result must fit the annotations, and a name
of an axis must mean one size in all of them. A call that raises is not, so that tests of malformed arguments
see the function's own errors.

`install` must run before the modules of PUBLIC are imported. It wraps their functions when they are.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

# Where the public functions and the classes with public methods are.
PUBLIC = {
    "attest.kernels.attention": ("flash_attention", "flash_attention_with_lse"),
    "attest.kernels.masks.mask_info": ("MaskInfo",),
    "attest.kernels.operations.attention": ("Attention",),
    "attest.kernels.operations.easydel": ("FlashAttn", "VanillaAttn"),
    "attest.kernels.operations.flash_attention": ("FlashAttention",),
    "attest.kernels.operations.functions": ("attention", "flash_attention"),
    "attest.kernels.operations.ring_attention": ("RingAttention",),
    "attest.kernels.ring.attention": ("ring_attention", "ring_attention_with_lse"),
    "attest.kernels.xla.attention": ("attention",),
    "attest.reference.oracle": ("attention",),
    "attest.reference.problem": ("make_problem",),
}
# Dataclasses of the arrays of one call.
_RECORDS = ("Answer", "AttentionOutput", "Cotangents", "Problem", "Sample")
# Its arrays need not fit each other before it is in a call. One that is given holds whatever JAX maps over.
_COLLECTIONS = ("MaskInfo",)
# It returns a MaskInfo of PartitionSpecs in place of arrays.
_UNCHECKED = ("MaskInfo.shardings",)


class AnnotationError(AssertionError):
    """A call that an annotation says cannot be."""


def install(public: Mapping[str, Sequence[str]] = PUBLIC) -> None:
    """Enforce the annotations of names in modules that are yet to be imported."""
    loaded = [module for module in public if module in sys.modules]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is imported already, so its annotations would not be enforced.")
    sys.meta_path.insert(0, _Finder(public))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, public: Mapping[str, Sequence[str]]) -> None:
        self._public = public

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._public:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._public[name])
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, module: str, path: str, public: Sequence[str]) -> None:
        super().__init__(module, path)
        self._public = public

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        for name in self._public:
            found = getattr(module, name)
            if inspect.isclass(found):
                _enforce_methods(found)
            else:
                setattr(module, name, enforced(found))


def _enforce_methods(cls: type) -> None:
    for name, x in list(vars(cls).items()):
        if name.startswith("_") or f"{cls.__name__}.{name}" in _UNCHECKED:
            continue
        if isinstance(x, classmethod):
            setattr(cls, name, classmethod(enforced(x.__func__)))
        elif inspect.isfunction(x):
            setattr(cls, name, enforced(x))


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
    if type(values.get("return")).__name__ in _COLLECTIONS:
        for field, x, hint in _fields(values["return"]):
            with jaxtyped("context"):
                check(f"return.{field}", x, hint)


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
    """The fields of a dataclass that are not their defaults: names, values and annotations."""
    hints = hints_of(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not field.default:
            yield field.name, value, hints.get(field.name, Any)


def _fits(value: Any, hint: Any) -> bool:
    return hint is Any or _checker()(value, hint)


@functools.cache
def _checker() -> Callable[[Any, Any], bool]:
    from beartype import BeartypeConf
    from beartype.door import is_bearable

    # An int is a float to Python's type checkers.
    return functools.partial(is_bearable, conf=BeartypeConf(is_pep484_tower=True))


def _is_symbolic(value: Any) -> bool:
    return not all(isinstance(size, int) for size in getattr(value, "shape", ()))


def _described(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value)[:80] if dtype is None else f"{dtype}{list(shape or ())}"
