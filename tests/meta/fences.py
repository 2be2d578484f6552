"""The fenced blocks of a page.

A fence says in braces what its content needs: `title` is the file that it is saved as, `exit` the status that
its commands end with, and `norun` why it cannot run in a test.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*) *(?:\{(?P<attributes>[^\n}]*)\})?\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """One fenced block: its language, its text and what stands in braces."""

    language: str
    text: str
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def title(self) -> str | None:
        """The file that it is saved as."""
        return self.attributes.get("title")

    @property
    def runs(self) -> bool:
        """Whether a test can follow it."""
        return "norun" not in self.attributes


def snippets(page: Path, language: str | None = None) -> Iterator[Snippet]:
    """The blocks of a page in order, or those of one language."""
    for match in _FENCE.finditer(page.read_text()):
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', match["attributes"] or ""))
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        if language in (None, match["language"]):
            yield Snippet(match["language"], text, attributes)
