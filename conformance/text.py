"""Text from elsewhere, made safe to print: no control characters, of limited length."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from attest.conformance.sizes import sizes

# Terminals obey C0 and C1 controls, the bidirectional ones reorder what is read, and XML forbids surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_QUOTED_TRACEBACK = "Traceback (most recent call last):"


def printable(text: str) -> str:
    """Spell each control character as an escape; newlines and tabs stay."""
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def shortened(text: str, size: int) -> str:
    """Cut text to about `size` characters: the middle is left out, and a note stands in its place."""
    clean = printable(text)
    if len(clean) <= size:
        return clean
    return f"{clean[: size // 2]}\n[... {len(clean) - size} characters left out ...]\n{clean[-size // 2 :]}"


def sentence(text: str) -> str:
    """Put text in one line of limited length."""
    return " ".join(shortened(text, sizes().sentence_characters).split())


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a count with its noun: "1 key", "2 keys"."""
    return f"{count} {noun}" if count == 1 else f"{count} {nouns or noun + 's'}"


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the names that a mistyped one may stand for, as a question; `otherwise` if none is near."""
    names = list(known)
    near = get_close_matches(name, names, n=3) or [other for other in names if name and name in other][:3]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def exception_text(error: BaseException) -> str:
    """Return an exception's type and message, up to a limit.

    XLA quotes the traceback of a callback, whose own error comes last: that line is then the first.
    """
    said = message_of(error)
    lines = said.splitlines()
    if lines and lines[0].endswith(_QUOTED_TRACEBACK):
        said = f"{lines[-1]}\n{said}"
    elif said:
        said = f"{type(error).__name__}: {said}"
    else:
        said = type(error).__name__
    return shortened(said, sizes().exception_characters)


def describe(error: BaseException) -> str:
    """Return an exception in one line: its type and the first line of its message."""
    return exception_text(error).splitlines()[0]


def message_of(error: BaseException) -> str:
    """Return an exception's own message, or why it cannot be read."""
    try:
        return str(error).strip()
    except Exception as unreadable:  # the exception is a subject's, and so is its text
        return f"(its text cannot be read: {type(unreadable).__name__})"
