"""The client of the bridge: starts servers in other environments, and exchanges messages with them.

Each process has its own servers. A server that has died, or whose call was interrupted, is replaced with the
next call. Nothing that a server sends is unpickled: it sends JSON and the bytes of arrays.
"""

import atexit
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from numpy.typing import NDArray

from attest.conformance.bridge import server
from attest.conformance.text import sentence

Array = NDArray[Any]

# They name the folders of this environment, whose packages the other interpreter may not be able to import.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
# Seconds that a server has to end after its connection is closed, before it is killed.
_FAREWELL = 2.0
# Exceptions of a function keep their type if it is one of these or derived from one: S20 asks for the type.
_TYPES: Mapping[str, type[Exception]] = {
    each.__name__: each for each in (TypeError, ValueError, NotImplementedError, RuntimeError)
}


class BridgeError(RuntimeError):
    """A function of another environment cannot be called, or its server died; the message is one sentence."""


@dataclass(frozen=True)
class Origin:
    """A function of another environment.

    name: of the kernel, in errors. python: the interpreter. function: `module:function` or
    `file.py:function`. framework: "numpy", "jax" or "torch". variables: for its environment, as pairs.
    """

    name: str
    python: str
    function: str
    framework: str
    variables: tuple[tuple[str, str], ...] = ()


def call_function(
    origin: Origin, message: Mapping[str, Any], arrays: Mapping[str, Array], expected: Mapping[str, Any]
) -> dict[str, Array]:
    """Return the arrays that a server answers with; `expected` has the shape and dtype of each by name.

    Raises BridgeError, or what the function raised as TypeError, ValueError, NotImplementedError or
    RuntimeError.
    """
    found = _server_of(origin).call(message, {name: server.raw_of(array) for name, array in arrays.items()})
    gradient = "the gradient of " if message["gradients"] else ""
    for name, want in expected.items():
        dtype, shape, _ = found[name]
        for what, got, wanted in (("shape", shape, want.shape), ("dtype", dtype, want.dtype.name)):
            if got != wanted:
                raise BridgeError(
                    f"{origin.name}: {origin.function} returned {gradient}{name} of {what} {got}, "
                    f"expected {wanted}: make it that {what} there"
                )
    return {name: server.numpy_of(found[name]) for name in expected}


class _Server:
    """A process that serves one function, and the connection to it."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._lock = threading.Lock()  # XLA may run two callbacks at once
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def call(self, message: Mapping[str, Any], arrays: Mapping[str, server.Raw]) -> dict[str, server.Raw]:
        """Send a call and return the arrays of its answer, after starting the process if there is none."""
        with self._lock:
            try:
                if self._connection is None:
                    self._start()
                reply, found = self._exchange(message, arrays)
            except BaseException:  # an answer that nobody has read would be taken for that of the next call
                self.stop()
                raise
        self._raise_error(reply)
        return found

    def stop(self) -> None:
        """End the process, by force if it is at work."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            try:
                self._process.wait(_FAREWELL)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Drop the process without ending it, in a forked process, whose parent goes on using it."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # it cannot be waited for here

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = ours
            arguments = (theirs.fileno(), os.getpid(), self._origin.framework, self._origin.function)
            try:
                self._process = subprocess.Popen(
                    [self._origin.python, server.__file__, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    env={**variables_there(), **dict(self._origin.variables)},
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                advice = "name the interpreter of its environment, such as /path/venv/bin/python"
                self._fail(f"cannot start {self._origin.python!r} ({error.strerror}): {advice}")
        try:
            hello, _ = server.receive(ours)
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            self._fail(
                f"{self._origin.python!r} {self._end()} before it answered: name a Python of 3.9 or newer"
            )
        if hello.get("protocol") != server.PROTOCOL:
            got = hello.get("protocol")
            self._fail(f"its server has protocol {got!r}, expected {server.PROTOCOL}: install attest again")
        if "error" in hello or "raised" in hello:
            self.stop()
            self._raise_error(hello, "importing it ")

    def _exchange(
        self, message: Mapping[str, Any], arrays: Mapping[str, server.Raw]
    ) -> tuple[dict[str, Any], dict[str, server.Raw]]:
        assert self._connection is not None
        try:
            server.send(self._connection, message, arrays)
            return server.receive(self._connection)
        except (EOFError, OSError):
            self._fail(f"its process {self._end()} during a call; the next call starts a new one")
        except (ValueError, KeyError, TypeError) as error:
            self._fail(f"its server sent no answer that can be read ({type(error).__name__}: {error})")

    def _end(self) -> str:
        """Return how the process ended, as a clause."""
        assert self._process is not None
        try:
            status = self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"died of {_signal_name(-status)}" if status < 0 else f"ended with exit status {status}"

    def _fail(self, what: str) -> NoReturn:
        raise BridgeError(sentence(f"{self._origin.name}: {what}")) from None

    def _raise_error(self, reply: Mapping[str, Any], doing: str = "") -> None:
        if "error" in reply:
            self._fail(str(reply["error"]))
        if "raised" in reply:
            said = reply["raised"]
            known = next((_TYPES[each] for each in said["types"] if each in _TYPES), RuntimeError)
            text = sentence(said["text"])
            raise known(f"{self._origin.name}: {doing}raised {said['types'][0]}: {text} (at {said['place']})")


def variables_there() -> dict[str, str]:
    """Return the variables of this process that hold in another environment, too."""
    return {name: value for name, value in os.environ.items() if name not in _OURS}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_servers: dict[Origin, _Server] = {}


def _server_of(origin: Origin) -> _Server:
    return _servers.setdefault(origin, _Server(origin))


def stop_servers() -> None:
    """End the servers of this process; the next call starts a new one."""
    while _servers:
        _servers.popitem()[1].stop()


def _forget_servers() -> None:
    while _servers:
        _servers.popitem()[1].forget()


atexit.register(stop_servers)
os.register_at_fork(after_in_child=_forget_servers)
