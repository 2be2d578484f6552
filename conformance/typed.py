"""JSON and TOML as typed data: a mistake is one sentence, never a traceback."""

import tomllib
from collections.abc import Mapping
from types import NoneType
from typing import Any

import msgspec

from attest.conformance.sizes import sizes
from attest.conformance.text import sentence

_SCALARS = (str, int, float, NoneType)


def decode[T](data: bytes, kind: type[T], where: str) -> T:
    """Read JSON as a type. Raises ValueError that begins with `where`."""
    try:
        return _shallow(msgspec.json.decode(data, type=kind), where)
    except msgspec.ValidationError as error:
        raise ValueError(_located(where, str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(sentence(f"{where}: not valid JSON: {error}")) from error
    except RecursionError as error:
        raise ValueError(_too_deep(where)) from error


def convert[T](data: object, kind: type[T], where: str) -> T:
    """Read parsed data as a type. Raises ValueError that begins with `where`."""
    try:
        return _shallow(msgspec.convert(data, kind), where)
    except msgspec.ValidationError as error:
        raise ValueError(_located(where, str(error))) from error
    except RecursionError as error:
        raise ValueError(_too_deep(where)) from error


def decode_toml(data: bytes, where: str) -> dict[str, Any]:
    """Read TOML. Raises ValueError that begins with `where`."""
    try:
        return _shallow(tomllib.loads(data.decode()), where)
    except RecursionError as error:
        raise ValueError(_too_deep(where)) from error
    except ValueError as error:  # UTF-8, TOML, and numbers of too many digits
        raise ValueError(sentence(f"{where}: not readable as TOML: {error}")) from error


def _located(where: str, message: str) -> str:
    """Move the place from the end of a message of msgspec, as ` - at `$.results[3].check``, to its front."""
    what, _, place = message.partition(" - at `$")
    place = place.strip("`").removeprefix(".")
    return sentence(f"{where}{f', {place}' if place else ''}: {what[:1].lower()}{what[1:]}")


def _too_deep(where: str) -> str:
    return f"{where}: nested more than {sizes().depth} levels deep"


def _shallow[T](data: T, where: str) -> T:
    """Return the data, if its plain lists and objects are not nested too deeply."""
    level: list[object] = [data]
    for _ in range(sizes().depth):
        level = [item for outer in level for item in _items(outer) if not isinstance(item, _SCALARS)]
        if not level:
            return data
    raise ValueError(_too_deep(where))


def _items(value: object) -> list[object]:
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, Mapping):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple)) else []
