"""Files that may be compressed by gzip, which is recognised by their first bytes."""

import gzip
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader, BytesIO
from pathlib import Path

from attest.conformance.files import reason_of
from attest.conformance.text import sentence

_MAGIC = b"\x1f\x8b"
_PIECE = 1 << 16  # bytes that are handed on at once
_READ_AHEAD = 1 << 20


def compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of a file as those of a compressed one, without a time or a name in its header."""
    sink = BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=sink, mtime=0, compresslevel=6) as file:
        for part in parts:
            file.write(part)
            if sink.tell() >= _PIECE:
                yield sink.getvalue()
                sink.seek(0)
                sink.truncate()
    yield sink.getvalue()


def decompressed(data: bytes, limit: int, where: str) -> bytes:
    """Return the bytes of a file, decompressed if need be. Raises ValueError that begins with `where`.

    limit: of the bytes that it may have decompressed.
    """
    if not data.startswith(_MAGIC):
        return data
    try:
        found = gzip.GzipFile(fileobj=BytesIO(data)).read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(sentence(f"{where}: {reason_of(error)}")) from error
    if len(found) > limit:
        raise ValueError(f"{where}: it has more than {limit} bytes when it is decompressed")
    return found


@contextmanager
def opened(path: Path) -> Generator[BufferedIOBase]:
    """Open a file to read it, decompressed if need be. Raises OSError."""
    with path.open("rb") as file:
        packed = file.peek(len(_MAGIC)).startswith(_MAGIC)
        # The reader in between finds lines faster than GzipFile does.
        yield BufferedReader(gzip.GzipFile(fileobj=file), _READ_AHEAD) if packed else file
