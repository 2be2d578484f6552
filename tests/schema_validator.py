"""A validator of JSON Schemas, with the keywords that ours use."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def same(x: Any, y: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    return x == y and isinstance(x, bool) == isinstance(y, bool)


_SIMPLE = {
    "minimum": lambda x, limit: x >= limit,
    "maximum": lambda x, limit: x <= limit,
    "exclusiveMinimum": lambda x, limit: x > limit,
    "exclusiveMaximum": lambda x, limit: x < limit,
    "minItems": lambda x, limit: len(x) >= limit,
    "maxItems": lambda x, limit: len(x) <= limit,
    "minLength": lambda x, limit: len(x) >= limit,
    "maxLength": lambda x, limit: len(x) <= limit,
    "minProperties": lambda x, limit: len(x) >= limit,
    "pattern": lambda x, pattern: re.search(pattern, x) is not None,
    "required": lambda x, names: set(names) <= set(x),
    "enum": lambda x, values: any(same(x, value) for value in values),
    "const": same,
}
_NOTES = {"$schema", "$defs", "title", "description", "default"}


def faults(value: Any, schema: Any, whole: Mapping[str, Any], place: str = "$") -> Iterator[str]:
    """Yield a line for each mistake; whole: the document that references point into."""
    if schema is False:
        yield f"{place}: nothing is allowed here"
        return
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{place}: got {value!r}, expected {kind}"
        return
    known = schema.get("properties", {})
    for keyword, given in schema.items():
        if keyword in _SIMPLE:
            if not _SIMPLE[keyword](value, given):
                yield f"{place}: got {value!r}, expected {keyword} {given}"
        elif keyword == "$ref":
            yield from faults(value, whole["$defs"][given.removeprefix("#/$defs/")], whole, place)
        elif keyword == "anyOf":
            if all(any(faults(value, choice, whole)) for choice in given):
                yield f"{place}: got {value!r}, expected one of {given}"
        elif keyword == "properties":
            for name in given.keys() & value.keys():
                yield from faults(value[name], given[name], whole, f"{place}.{name}")
        elif keyword == "additionalProperties":
            for name in value.keys() - known.keys():
                yield from faults(value[name], given, whole, f"{place}.{name}")
        elif keyword == "propertyNames":
            for name in value:
                yield from faults(name, given, whole, f"{place}.{name}")
        elif keyword == "prefixItems":
            for number, (item, each) in enumerate(zip(value, given, strict=False)):
                yield from faults(item, each, whole, f"{place}[{number}]")
        elif keyword == "items":
            for number, item in enumerate(value[len(schema.get("prefixItems", ())) :]):
                yield from faults(item, given, whole, f"{place}[{number}]")
        else:
            assert keyword == "type" or keyword in _NOTES, keyword
