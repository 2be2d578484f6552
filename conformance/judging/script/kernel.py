"""The source that makes a subject's kernel available to a script: an import, or the function that adapts it.

A function that adapts the call for attest stands in a module that imports attest. Such a function is copied,
without its calls of attest, and what it uses is imported.
"""

import ast
import builtins
import dis
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax

from attest.conformance.judging.script.literals import ScriptError, literal

_OURS = "attest"
_JITTED = type(jax.jit(lambda: None))
_ADVICE = "give the Subject a `call` that is a function of a module"


@dataclass
class Kernel:
    """The source of a kernel: imports, definitions after them, and the expression that is called.

    keywords: what every call passes besides, as source by name. names: the objects of the script's globals
        that the kernel's source needs, by name.
    """

    expression: str = ""
    imports: set[str] = field(default_factory=set[str])
    definitions: list[str] = field(default_factory=list[str])
    keywords: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[str, Any] = field(default_factory=dict[str, Any])


def kernel_of(call: Callable[..., Any]) -> Kernel:
    """Return the source of the `call` of a subject. Raises ScriptError."""
    kernel = Kernel()
    while isinstance(call, partial):
        if call.args:
            raise ScriptError(f"call: it is a partial with positional arguments; {_ADVICE}")
        kernel.keywords = {
            name: _argument(name, value) for name, value in call.keywords.items()
        } | kernel.keywords
        call = call.func
    path = _importable(call)
    if path is not None and not _imports_ours(sys.modules[path[0]]):
        module, name = path
        first = name.partition(".")[0]
        kernel.imports.add(f"from {module} import {first}")
        kernel.names[first] = getattr(sys.modules[module], first)
        kernel.expression = name
        return kernel
    function = _function(call)
    if function is None or function.__name__ == "<lambda>":
        kind = "a lambda" if function is not None else f"an object of {type(call).__name__}"
        raise ScriptError(f"call: it is {kind}, which a script cannot import; {_ADVICE}")
    _copy(function, function.__name__, kernel)
    kernel.expression = function.__name__
    return kernel


def _argument(name: str, value: Any) -> str:
    try:
        return literal(value)
    except ScriptError as error:
        raise ScriptError(f"call: its argument {name}: {error}; {_ADVICE}") from None


def _importable(thing: Any) -> tuple[str, str] | None:
    """Return the module and the name by which an object can be imported, the shortest public ones."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    parts = module.split(".")
    parents = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next(((parent, name) for parent in parents if _holds(parent, name, thing)), None)


def _holds(module: str, name: str, thing: Any) -> bool:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is thing


def _imports_ours(module: ModuleType) -> bool:
    """Return whether a module is of attest, or holds something of it."""
    return _is_ours(module) or any(_is_ours(thing) for thing in list(vars(module).values()))


def _is_ours(thing: Any) -> bool:
    if isinstance(thing, ModuleType):
        name = thing.__name__
    else:
        name = getattr(thing, "__module__", None) or type(thing).__module__
    return isinstance(name, str) and name.partition(".")[0] == _OURS


def _copy(function: FunctionType, name: str, kernel: Kernel) -> None:
    """Add a function to the definitions of a kernel, with what it uses. Raises ScriptError."""
    kernel.names[name] = getattr(sys.modules.get(function.__module__), name, function)
    tree = _without_ours(function)
    source = ast.unparse(tree)
    known = _names(function)
    for used in sorted(set(_globals(compile(source, "<script>", "exec"))) - {name}):
        if used in known:
            _provide(used, known[used], function, kernel)
        elif not hasattr(builtins, used):
            raise ScriptError(f"call: {name} uses {used!r}, which is not defined")
    kernel.definitions.append(source)


def _provide(name: str, thing: Any, user: FunctionType, kernel: Kernel) -> None:
    """Make a name that a copied function uses available. Raises ScriptError."""
    if name in kernel.names:
        if kernel.names[name] is not thing:
            raise ScriptError(f"call: its functions use two objects of the name {name!r}; {_ADVICE}")
        return
    path = _importable(thing)
    if isinstance(thing, ModuleType):
        if _is_ours(thing) or not _found_again(thing):
            raise ScriptError(f"call: it needs {thing.__name__}, which a script cannot import; {_ADVICE}")
        kernel.names[name] = thing
        kernel.imports.add(f"import {thing.__name__}" + (f" as {name}" if name != thing.__name__ else ""))
    elif path is not None and "." not in path[1] and not _imports_ours(sys.modules[path[0]]):
        module, qualified = path
        kernel.names[name] = thing
        renamed = f" as {name}" if name != qualified else ""
        kernel.imports.add(f"from {module} import {qualified}{renamed}")
    elif (own := _function(thing)) is not None and own.__name__ == name and _in_one_package(own, user):
        _copy(own, name, kernel)
    elif _is_ours(thing) or callable(thing):
        raise ScriptError(f"call: it needs {name!r}, which a script cannot import without attest; {_ADVICE}")
    else:
        kernel.names[name] = thing
        kernel.definitions.append(f"{name} = {_argument(name, thing)}")


def _in_one_package(function: FunctionType, other: FunctionType) -> bool:
    """Return whether two functions are of one module, or of modules side by side in a package."""
    modules = (function.__module__, other.__module__)
    packages = {module.rpartition(".")[0] for module in modules}
    return modules[0] == modules[1] or (len(packages) == 1 and "" not in packages)


def _found_again(module: ModuleType) -> bool:
    try:
        return importlib.import_module(module.__name__) is module
    except Exception:  # the module is the user's
        return False


def _without_ours(function: FunctionType) -> ast.Module:
    """Return the source of a function, without annotations and calls of attest whose result is dropped."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        raise ScriptError(f"call: the source of {function.__name__} cannot be read; {_ADVICE}") from None
    known = _names(function)
    for node in ast.walk(_NoAnnotations().visit(tree)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or "."] if isinstance(node, ast.ImportFrom) else [x.name for x in node.names]
            if any(name.partition(".")[0] == _OURS for name in names) or getattr(node, "level", 0):
                raise ScriptError(f"call: it imports {', '.join(names)} itself; {_ADVICE}")
        if isinstance(node, ast.FunctionDef):
            kept = [each for each in node.body if not _is_for_effect(each, known)]
            node.body = kept or [ast.Pass()]
    return tree


class _NoAnnotations(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """Return the assignment, or nothing of a variable that is only declared."""
        if node.value is None:
            return ast.Pass()
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Return the argument."""
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Return the function, and what is in it."""
        node.returns = None
        self.generic_visit(node)
        return node


def _names(function: FunctionType) -> dict[str, Any]:
    """Return the globals of a function, and the variables of the functions around it."""
    found = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that is not bound yet
            found[name] = cell.cell_contents
    return found


def _function(thing: Any) -> FunctionType | None:
    """Return a function as it was defined: its source holds its decorators. None for what has no such source.

    What was added to an object later, such as the passes of a `jax.custom_vjp`, is in no source of it.
    """
    inner = thing
    while isinstance(thing, (FunctionType, _JITTED)) and inner is not None:
        thing, inner = inner, getattr(inner, "__wrapped__", None)
    return thing if isinstance(thing, FunctionType) else None


def _is_for_effect(node: ast.stmt, known: dict[str, Any]) -> bool:
    """Return whether a statement is a docstring, or calls something of attest and drops the result."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    callee = node.value.func if isinstance(node.value, ast.Call) else None
    while isinstance(callee, ast.Attribute):
        callee = callee.value
    return isinstance(callee, ast.Name) and _is_ours(known.get(callee.id))


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the global names that a compiled text reads, in its functions too, and does not define."""
    defined = {each.argval for each in dis.get_instructions(code) if each.opname.startswith("STORE_NAME")}
    stack = [code]
    while stack:
        here = stack.pop()
        stack += [constant for constant in here.co_consts if isinstance(constant, CodeType)]
        for each in dis.get_instructions(here):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval not in defined:
                yield each.argval
