"""Reading and writing of files: reads are bounded, and a write is whole or not there.

A device or a pipe is written into, never replaced. A symbolic link is refused: replacing it and replacing
what it names may both surprise.
"""

import errno
import os
import stat
import zlib
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path

from attest.conformance.text import sentence

_IRREGULAR = "it is no regular file"


class FileError(Exception):
    """A file cannot be written; the message is one sentence that names it."""


def read_bytes(path: Path, limit: int, what: str, *, named: bool = True) -> bytes:
    """Read a file of at most `limit` bytes. Raises ValueError with one sentence.

    named: whether the user named it, so that it may be a pipe; what was found in a folder may not.
    """
    try:
        with path.open("rb") if named else os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise ValueError(sentence(f"{path}: not a readable {what}: {reason_of(error)}")) from error
    if len(data) > limit:
        raise ValueError(sentence(f"{path}: not a readable {what}: it has more than {limit} bytes"))
    return data


def read_line(file: BufferedIOBase, limit: int, where: str) -> bytes:
    """Read a line of at most `limit` bytes, the newline among them; nothing at the end of the file.

    Raises ValueError that begins with `where`, also if the file is compressed and damaged.
    """
    try:
        line = file.readline(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(sentence(f"{where}: {reason_of(error)}")) from error
    if len(line) > limit:
        raise ValueError(f"{where}: it has more than {limit} bytes")
    return line


def open_regular(path: Path, flags: int, mode: int = 0o666) -> int:
    """Return the descriptor of a regular file, without waiting for the other end of a pipe.

    Raises: OSError, also for a file of another kind.
    """
    # What is checked is what was opened, so that it cannot be replaced in between.
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe without another end
            raise OSError(error.errno, _IRREGULAR) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, _IRREGULAR)


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there. Raises FileError."""
    write_parts(path, [text.encode()])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file of parts, of which one at a time is in memory: whole, or what was there is left.

    A device gets the parts as they come. Raises FileError, and what the parts raise, which is no OSError.
    """
    try:
        if is_special(path):
            with path.open("wb") as file:
                file.writelines(parts)
        else:
            _replace(path, parts)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {reason_of(error)}") from error


def refusal(path: Path) -> str | None:
    """Return why a file cannot be written, in one clause; None if it can. Tries it, and changes nothing."""
    if os.path.isdir(path):  # pathlib raises for names that are too long
        return "is a folder, expected a file to write"
    if is_special(path):
        return None if os.access(path, os.W_OK) else "may not be written"
    if os.path.islink(path):
        return f"is a symbolic link to {os.path.realpath(path)}: name the file itself"
    if not os.path.isdir(path.parent):
        return f"the folder {path.parent} does not exist"
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return "may not be written"
    scratch = _scratch(path)
    try:
        os.close(_create(scratch))
        scratch.unlink()
    except (OSError, ValueError) as error:
        return f"may not be written: {reason_of(error)}"
    return None


def is_special(path: Path) -> bool:
    """Return whether a path names a device, a pipe or a socket."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def same_file(first: Path, second: Path) -> bool:
    """Return whether two paths name one file, which need not exist yet."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return False


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    scratch = _scratch(path)
    try:
        with os.fdopen(_create(scratch), "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def _scratch(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def _create(scratch: Path) -> int:
    with suppress(FileNotFoundError):
        scratch.unlink()
    return os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def reason_of(error: Exception) -> str:
    """Return why a file cannot be read or written, in one clause."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
