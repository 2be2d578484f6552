"""Templates: strict about missing names, and escaped for the language that they write."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from attest.conformance.text import plural, printable, shortened
from attest.reports.words import family, number, one_line, recipe

# A page stays below this number of bytes, so that every browser and mail server takes it.
SIZE_LIMIT = 2_000_000

_FOLDER = Path(__file__).parent / "templates"
_MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]<|~#@])")
_EXPLANATION_SIZE = 3000


def fill(name: str, **values: Any) -> str:
    """Fill a template of reports/render/templates; one that ends in .html.j2 is escaped as HTML."""
    return _template(name).render(**values)


def sections(name: str, **values: Any) -> Any:
    """Return the filled sections of a template, its macros, each to be called."""
    return _template(name).make_module(values)


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests.update(_TESTS)
    environment.filters.update(_FILTERS)
    return environment.get_template(name)


def escape(text: object, width: int = 200) -> str:
    """Return text as one line of Markdown that means only itself, also in a table and to GitHub."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", one_line(str(text), width))


def is_link(text: str) -> bool:
    """Return whether text is an address that may be made clickable."""
    return re.fullmatch(r"https?://[^\s<>|\"'\\]{1,300}", text) is not None


def link(text: str) -> str:
    """Return an address as a link of Markdown; anything else as plain text."""
    return f"<{text}>" if is_link(text) else escape(text)


def code(text: object, width: int = 300) -> str:
    """Return text as inline code of Markdown, also in a table."""
    flat = one_line(str(text), width).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`" if flat else ""


def fenced(text: str) -> str:
    """Return text as a block of Markdown code, whose fence is longer than any within.

    The middle of long text is left out, since the line that replays a failure is at an end.
    """
    short = shortened(text, _EXPLANATION_SIZE)
    longest = max((len(run) for run in re.findall("`+", short)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{short}\n{fence}"


_TESTS: dict[str, Any] = {"link": is_link}
_FILTERS: dict[str, Any] = {
    "number": number,
    "line": one_line,
    "printable": printable,
    "recipe": recipe,
    "plural": plural,
    "family": family,
    "md": escape,
    "code": code,
    "fenced": fenced,
    "link": link,
}
