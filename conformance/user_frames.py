"""The frames of an exception that belong to the code under test, in words.

Frames of the suite, of JAX and NumPy, and of Python's own library are left out: a reader looks for the line
of the kernel.
"""

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from attest.conformance.text import exception_text

# As `_described` writes a frame.
_FRAME = re.compile(r"at (?P<file>.+?):(?P<line>[1-9][0-9]{0,8}) in .+")
# The innermost frames are enough to find a line.
_SHOWN = 3

_SUITE = Path(__file__).resolve().parent
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()
_PACKAGES = tuple({Path(sysconfig.get_paths()[kind]).resolve() for kind in ("purelib", "platlib")})
_LIBRARIES = ("attest", "jax", "jaxlib", "jaxtyping", "numpy", "python")


def raised(error: BaseException, advice: str = "") -> str:
    """Return what the code under test raised, with `advice` behind it, and in which lines of its files."""
    return "\n".join([f"raised {exception_text(error)}{advice}", *user_frames(error)])


@dataclass(frozen=True)
class Frame:
    """A frame that a message names: its line of the message, its file, and the number of its line there."""

    text: str
    file: str
    line: int


def frames_of(message: str) -> list[Frame]:
    """Return the frames in a message of `raised`, the innermost last."""
    found = (_FRAME.fullmatch(text) for text in message.splitlines())
    return [Frame(match[0], match["file"], int(match["line"])) for match in found if match]


def user_frames(error: BaseException) -> list[str]:
    """Return the last frames of the code under test, one line each, the innermost last.

    Those of installed packages are shown only if there are no others, as for a kernel that is installed.
    """
    frames = [frame for frame in _frames(error.__traceback__) if _package(frame[0]) not in _LIBRARIES]
    own = [frame for frame in frames if not _package(frame[0])]
    return [_described(frame, line) for frame, line in (own or frames)[-_SHOWN:]]


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package(frame: FrameType) -> str:
    """Return the installed package that a frame belongs to, "python" for Python itself; else ""."""
    name = frame.f_code.co_filename
    file = Path(name).resolve()
    if name.startswith("<"):
        return "python"
    if file.is_relative_to(_SUITE):
        return "attest"
    for folder in _PACKAGES:
        if file.is_relative_to(folder):
            return file.relative_to(folder).parts[0]
    return "python" if file.is_relative_to(_PYTHON) else ""


def _described(frame: FrameType, line: int) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return f"at {_short(code.co_filename)}:{line} in {code.co_name}" + (f": {source}" if source else "")


def _short(file: str) -> str:
    """Return a file relative to the folder, among this one and those of imports, that holds it."""
    folders = [folder for folder in (os.getcwd(), *sys.path) if folder and Path(file).is_relative_to(folder)]
    return str(Path(file).relative_to(max(folders, key=len))) if folders else file
