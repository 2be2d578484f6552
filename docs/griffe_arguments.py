"""An extension of Griffe: a function of a record has the record's fields as parameters.

`attest.kernels.arguments.with_arguments` makes such functions. Griffe reads the source alone, so that it sees
but the one parameter of the function below the decorator.
"""

from typing import Any

import griffe


class Arguments(griffe.Extension):
    """Gives the functions below `with_arguments` the parameters that they have for a caller."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Change all functions of a package once it is read."""
        for module in _modules(pkg):
            for function in module.functions.values():
                record = _record_of(function)
                if record is not None:
                    function.parameters = _parameters(record)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    below = [x for x in module.modules.values() if not x.is_alias]
    return [module, *(each for x in below for each in _modules(x))]


def _record_of(function: griffe.Function) -> griffe.Class | None:
    """Return the dataclass of a function's decorator; None where it has none."""
    for decorator in [] if function.is_alias else function.decorators:
        if decorator.callable_path.endswith(".with_arguments"):
            name = str(decorator.value).partition("(")[2].rstrip(")")
            found = function.parent[name] if function.parent else None
            return found.final_target if found is not None and found.is_alias else found
    return None


def _parameters(record: griffe.Class) -> griffe.Parameters:
    """Return the fields of a dataclass, those of its bases first, as the parameters of its constructor."""
    found: dict[str, griffe.Parameter] = {}
    for each in (*reversed(record.mro()), record):
        kind = griffe.ParameterKind.positional_or_keyword
        for name, attribute in each.attributes.items():
            if name == "_":
                kind = griffe.ParameterKind.keyword_only
            else:
                kept = found[name].kind if name in found else kind
                found[name] = griffe.Parameter(
                    name, annotation=attribute.annotation, kind=kept, default=attribute.value
                )
    if not found:
        raise ValueError(f"{record.path}: found no fields; the parameters of its functions would be empty.")
    return griffe.Parameters(*found.values())
