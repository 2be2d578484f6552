"""The server of the bridge: one function of this interpreter's environment, called with arrays from a socket.

The client starts this file with the interpreter of the other environment. It needs Python 3.9 and NumPy, and
nothing of attest. A message is the length of a JSON object, the object, and the bytes of the arrays that the
object lists under "arrays" with name, dtype and shape.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PROTOCOL = 1
OLDEST = (3, 9)

# The bytes of one element, by the name of its dtype. An array of another dtype is refused.
ITEM_SIZES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}

# dtype, shape and bytes: an array without a framework.
Raw = tuple[str, tuple[int, ...], Any]

_LENGTH = struct.Struct("<Q")
# A longer object is none of ours: those of calls have some hundred characters.
_LONGEST_OBJECT = 1 << 24
# Before the name of a result: its cotangent. No argument has a space in its name.
COTANGENT = "cotangent "

# Their frames are not where an exception of a kernel comes from.
_FRAMEWORK_PACKAGES = ("numpy", "jax", "jaxlib", "torch", "jaxtyping", "beartype")

# Seconds between two looks at whether the parent still runs.
_LOOK = 0.5


class RefusedError(Exception):
    """The call cannot be made, or its result cannot be sent; the message is one sentence."""


def send(connection: socket.socket, message: Mapping[str, Any], arrays: Mapping[str, Raw]) -> None:
    """Send a message with its arrays."""
    listed = [{"name": name, "dtype": raw[0], "shape": list(raw[1])} for name, raw in arrays.items()]
    text = json.dumps({**message, "arrays": listed}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for _, _, data in arrays.values():
        connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], dict[str, Raw]]:
    """Read a message and its arrays. Raises EOFError if the other side has ended."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _LONGEST_OBJECT:
        raise EOFError(f"the other side sent an object of {length} bytes")
    message = json.loads(_read(connection, length))
    arrays: dict[str, Raw] = {}
    for listed in message.pop("arrays"):
        shape = tuple(int(size) for size in listed["shape"])
        size = functools.reduce(lambda total, size: total * size, shape, ITEM_SIZES[listed["dtype"]])
        arrays[listed["name"]] = (listed["dtype"], shape, _read(connection, size))
    return message, arrays


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if got == 0:
            raise EOFError("the other side has ended")
        view = view[got:]
    return data


def encoded(option: Any) -> Any:
    """Return an option in JSON's types; a tuple stays one. Raises TypeError for a value of another type."""
    if option is None or isinstance(option, (bool, int, float, str)):
        return option
    if isinstance(option, tuple):
        return {"tuple": [encoded(each) for each in option]}
    if isinstance(option, list):
        return {"list": [encoded(each) for each in option]}
    if isinstance(option, dict) and all(isinstance(name, str) for name in option):
        return {"dict": {name: encoded(each) for name, each in option.items()}}
    raise TypeError(type(option).__name__)


def decoded(option: Any) -> Any:
    """Return the option that `encoded` made this of."""
    if not isinstance(option, dict):
        return option
    ((kind, value),) = option.items()
    if kind == "dict":
        return {name: decoded(each) for name, each in value.items()}
    return {"tuple": tuple, "list": list}[kind](decoded(each) for each in value)


def numpy_of(raw: Raw) -> Any:
    """Return the NumPy array of a raw one."""
    import numpy as np

    dtype, shape, data = raw
    if dtype != "bfloat16":
        return np.frombuffer(data, dtype).reshape(shape)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise RefusedError("NumPy has no bfloat16 without the package ml_dtypes: install it there") from error
    return np.frombuffer(data, bfloat16).reshape(shape)


def raw_of(array: Any) -> Raw:
    """Return the raw array of one that NumPy can read."""
    import numpy as np

    array = np.asarray(array)
    if array.dtype.name not in ITEM_SIZES:
        raise RefusedError(f"got an array of dtype {array.dtype}, expected one of {', '.join(ITEM_SIZES)}")
    flat = np.ascontiguousarray(array).reshape(-1)
    return array.dtype.name, array.shape, memoryview(flat.view(np.uint8))


def _jax_of(raw: Raw) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(numpy_of(raw))


def _torch_of(raw: Raw) -> Any:
    torch: Any = importlib.import_module("torch")

    dtype, shape, data = raw
    if not hasattr(torch, dtype):
        raise RefusedError(f"PyTorch {torch.__version__} has no dtype {dtype}")
    if not data:  # `frombuffer` takes no empty one
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)


def _raw_of_torch(tensor: Any) -> Raw:
    torch: Any = importlib.import_module("torch")

    if not isinstance(tensor, torch.Tensor):
        raise RefusedError(f"got a {type(tensor).__name__}, expected a torch.Tensor")
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype != torch.bfloat16:
        return raw_of(tensor.numpy())
    _, shape, data = raw_of(tensor.view(torch.int16).numpy())
    return "bfloat16", shape, data


Function = Callable[..., Any]
Arrays = Mapping[str, Any]


def _vjp_by_jax(forward: Function, varied: Arrays) -> tuple[Any, Function]:
    """Return the outputs, and from their cotangents to the gradients, by `jax.vjp`."""
    import jax

    outputs, pull = jax.vjp(forward, dict(varied))
    return outputs, lambda cotangents: pull(tuple(cotangents))[0]


def _vjp_by_torch(forward: Function, varied: Arrays) -> tuple[Any, Function]:
    """Return the same by autograd; an output that does not depend on the inputs has no gradient."""
    torch: Any = importlib.import_module("torch")

    leaves = {name: tensor.requires_grad_() for name, tensor in varied.items()}
    outputs = forward(leaves)

    def pull(cotangents: Sequence[Any]) -> Arrays:
        used = [index for index, output in enumerate(outputs) if output.requires_grad]
        if not used:
            raise RefusedError("autograd has no gradient of the result: keep the graph of the inputs there")
        found = torch.autograd.grad(
            [outputs[index] for index in used],
            list(leaves.values()),
            [cotangents[index].to(outputs[index].device) for index in used],
            allow_unused=True,
        )
        return {
            name: torch.zeros_like(leaf) if found[index] is None else found[index]
            for index, (name, leaf) in enumerate(leaves.items())
        }

    return outputs, pull


# By name: from raw arrays, to raw arrays, and differentiation, which plain NumPy has not.
FRAMEWORKS: Mapping[str, tuple[Function, Function, Any]] = {
    "numpy": (numpy_of, raw_of, None),
    "jax": (_jax_of, raw_of, _vjp_by_jax),
    "torch": (_torch_of, _raw_of_torch, _vjp_by_torch),
}


def load(origin: str) -> Function:
    """Return the function of a `module:function` or of a `file.py:function`. Raises RefusedError."""
    module_name, _, names = origin.rpartition(":")
    if module_name.endswith(".py"):
        module = _from_file(module_name)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise RefusedError(
                f"no module {error.name!r} in the environment of {sys.executable}: install it there, "
                "or name a file, such as /path/kernel.py:function"
            ) from error
    try:
        return functools.reduce(getattr, names.split("."), module)
    except AttributeError as error:
        raise RefusedError(
            f"{module_name} has no function {names!r}: check the name after the colon"
        ) from error


def _from_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise RefusedError(f"no file {os.path.abspath(path)}: check the path before the colon")
    # Behind all packages: a file beside it may have the name of one.
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    name = os.path.splitext(os.path.basename(path))[0]
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def answer(
    function: Function, framework: str, message: Mapping[str, Any], raw: Mapping[str, Raw]
) -> dict[str, Raw]:
    """Return the results of a call by name, or the gradients of those arrays that are varied.

    A function may have another way to its results where it is differentiated, so it is then called that way.
    """
    to_array, to_raw, vjp = FRAMEWORKS[framework]
    names, varied = message["results"], message["varied"]
    options = {name: decoded(option) for name, option in message["options"].items()}
    arrays = {name: to_array(each) for name, each in raw.items()}
    cotangents = [arrays.pop(COTANGENT + name) for name in names if COTANGENT + name in arrays]

    def forward(varied: Arrays) -> tuple[Any, ...]:
        given = {**arrays, **varied, **options}
        query, key, value = (given.pop(name) for name in ("query", "key", "value"))
        return _listed(function(query, key, value, **given), names)

    if varied:
        outputs, pull = vjp(forward, {name: arrays[name] for name in varied})
        if message["gradients"]:
            gradients = pull(cotangents)
            return {name: to_raw(gradients[name]) for name in varied}
    else:
        outputs = forward({})
    return {name: to_raw(outputs[index]) for index, name in enumerate(names)}


def _listed(result: Any, names: Sequence[str]) -> tuple[Any, ...]:
    outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(outputs) != len(names):
        raise RefusedError(f"returned {len(outputs)} results, expected {len(names)}: {', '.join(names)}")
    return outputs


def _described(error: BaseException) -> dict[str, Any]:
    """Return an exception as types, text and place: the innermost line outside of the frameworks."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_framework(frame.filename)]
    place = (own or frames)[-1]
    types = [each.__name__ for each in type(error).__mro__]
    return {"types": types, "text": str(error), "place": f"{place.filename}:{place.lineno} in {place.name}"}


def _is_framework(file: str) -> bool:
    if file == __file__ or file.startswith("<"):
        return True
    folders = file.replace(os.sep, "/").split("/")
    return "site-packages" in folders and any(name in folders for name in _FRAMEWORK_PACKAGES)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even during a call."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


def _greet(framework: str, origin: str) -> tuple[dict[str, Any], Any]:
    """Return the first message, and the function; None if there is an error in the message."""
    hello: dict[str, Any] = {"protocol": PROTOCOL, "python": platform.python_version()}
    if sys.version_info < OLDEST:
        wanted = ".".join(str(number) for number in OLDEST)
        return {**hello, "error": f"needs Python {wanted} or newer there, got {hello['python']}"}, None
    for package in ("numpy", framework):
        try:
            importlib.import_module(package)
        except ImportError as error:
            sentence = (
                f"cannot import {package} in the environment of {sys.executable} ({error}): install it there"
            )
            return {**hello, "error": sentence}, None
    try:
        return hello, load(origin)
    except RefusedError as refusal:
        return {**hello, "error": str(refusal)}, None
    except BaseException as error:  # a module may raise SystemExit
        return {**hello, "raised": _described(error)}, None


def main(descriptor: int, parent: int, framework: str, origin: str) -> None:
    """Run calls of one function until the client ends."""
    os.dup2(2, 1)  # prints of the function must not reach what the client prints
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.getcwd(), *(folder for folder in sys.path if os.path.abspath(folder) != here)]
    connection = socket.socket(fileno=descriptor)
    hello, function = _greet(framework, origin)
    send(connection, hello, {})
    while function is not None:
        try:
            message, raw = receive(connection)
        except (EOFError, OSError):
            return
        try:
            reply, results = {}, answer(function, framework, message, raw)
        except RefusedError as refusal:
            reply, results = {"error": str(refusal)}, {}
        except BaseException as error:  # a function may raise SystemExit
            reply, results = {"raised": _described(error)}, {}
        send(connection, reply, results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
