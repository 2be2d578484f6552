"""The fields of frozen dataclasses: checked by their annotations, and built from JSON.

An annotation is int (a positive integer of 32 bits), bool, a dataclass of such fields, a tuple of a fixed
length, or one of these or None.
"""

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from attest.kernels.call.options import check_flag, check_size, refuse, shown

# Kernels count in int32.
_LARGEST = (1 << 31) - 1


def check_fields(record: Any) -> None:
    """Check the fields of a record in its `__post_init__`; numbers of NumPy become those of Python.

    Raises: ValueError naming class and field.
    """
    for name, (kind, optional) in _kinds(type(record)).items():
        value = getattr(record, name)
        if value is not None or not optional:
            value = _checked(f"{type(record).__name__}.{name}", value, kind)
            object.__setattr__(record, name, value)


def read_fields(cls: Any, place: str, given: Any) -> Any:
    """Return a record of a class from what `json.loads` made of it; fields with a default may be absent.

    Raises: ValueError that begins with `place`, for a field that is unknown, absent or not as its annotation
    says, and for what the class itself refuses.
    """
    kinds = _kinds(cls)
    known = ", ".join(kinds)
    if not isinstance(given, dict):
        refuse(place, shown(given), f"an object with fields among {known}", "Write it as to_json does.")
    for name in given:
        if name not in kinds:
            refuse(
                place, f"the field {shown(name)}", f"fields among {known}", "Remove it, or correct its name."
            )
    absent = [x.name for x in fields(cls) if x.name not in given and x.default is MISSING]
    if absent:
        refuse(place, f"no field {absent[0]!r}", f"a value of every field of {', '.join(absent)}", "Add it.")
    values = {
        name: read_fields(kinds[name][0], f"{place}, {name}", value)
        if is_dataclass(kinds[name][0]) and not (value is None and kinds[name][1])
        else value
        for name, value in given.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


@cache
def _kinds(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of each field without None, and whether it may be None."""
    kinds: dict[str, tuple[Any, bool]] = {}
    for name, hint in get_type_hints(cls).items():
        optional = isinstance(hint, UnionType)
        kinds[name] = next(x for x in get_args(hint) if x is not NoneType) if optional else hint, optional
    return kinds


def _checked(name: str, value: Any, kind: Any) -> Any:
    if kind is bool:
        return check_flag(name, value)
    if kind is int:
        size = check_size(name, value)
        if size > _LARGEST:
            refuse(name, shown(size), f"at most {_LARGEST}", "Use a smaller number.")
        return size
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            refuse(name, shown(value), f"{len(kinds)} values", "Pass them as a tuple.")
        return tuple(
            _checked(f"{name}[{i}]", x, each) for i, (x, each) in enumerate(zip(value, kinds, strict=True))
        )
    if not isinstance(value, kind):
        refuse(name, f"a {type(value).__name__}", kind.__name__, f"Build it as {kind.__name__}.")
    return value
