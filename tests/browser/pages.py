"""The pages that `nox -s browser` looks at, in a headless Chromium, and pictures of them."""

import base64
import io
import os
import re
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI
from rich.text import Text

from attest.conformance.record import RunRecord
from attest.conformance.records.record_file import read_record
from attest.reports.compare import compare_records
from attest.reports.render import matrix_html
from attest.reports.render.comparison_html import render_html
from attest.reports.render.html import render_run
from attest.reports.render.terminal import print_run
from tests.reports import matrix_records

HERE = Path(__file__).parent
# The screenshots are those of the pages.
IMAGES = HERE.parents[1] / "docs" / "images"
SETTINGS: dict[str, Any] = tomllib.loads((HERE / "browser.toml").read_text())
WINDOWS: dict[str, tuple[int, int]] = {
    name: (width, height) for name, (width, height) in SETTINGS["windows"].items()
}
SCHEMES = ("light", "dark")

# The colours of a screenshot: text needs few.
_COLOURS = 256
_COLUMNS = 110
# The fonts that matplotlib brings, by family and weight: those of machines differ.
_FONTS = (
    ("text", "100 500", "DejaVuSans"),
    ("text", "600 900", "DejaVuSans-Bold"),
    ("code", "100 900", "DejaVuSansMono"),
)
_THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}


def example() -> RunRecord:
    """A run of tests.wrong_kernels.subjects:window_at_block_edge."""
    return read_record(HERE / "record.jsonl")


def written(folder: Path) -> dict[str, Path]:
    """The pages as files, by name: the example's report and comparison with the correct kernel; a matrix."""
    base = read_record(HERE / "base.jsonl")
    texts = {
        "report": render_run(example()),
        "comparison": render_html(compare_records(base, example())),
        "matrix": matrix_html.render_html(matrix_records.example()),
    }
    files = {name: folder / f"{name}.html" for name in texts}
    for name, file in files.items():
        file.write_text(texts[name], encoding="utf-8")
    return files


@contextmanager
def chromium() -> Generator[Browser]:
    """The Chromium that ATTEST_CHROMIUM names."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["ATTEST_CHROMIUM"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def shown(browser: Browser, file: Path, window: str = "wide", scheme: Any = "light") -> Generator[Page]:
    """A page in a window of WINDOWS and a scheme of SCHEMES, without a network."""
    width, height = WINDOWS[window]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True
    )
    try:
        page = context.new_page()
        page.goto(file.as_uri())
        page.add_style_tag(content=_fonts())
        page.evaluate("document.fonts.ready")
        yield page
    finally:
        context.close()


@cache
def _fonts() -> str:
    """A style by which every machine shows a page in the same fonts."""
    rules = ["body { font-family: text; } code, pre { font-family: code; }"]
    for family, weight, name in _FONTS:
        font = (Path(mpl.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf").read_bytes()
        source = f"url(data:font/ttf;base64,{base64.b64encode(font).decode()})"
        rules.append(f"@font-face {{ font-family: {family}; font-weight: {weight}; src: {source}; }}")
    return "\n".join(rules)


def screenshot(page: Page) -> Image.Image:
    """What a window shows, in few colours."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return image.quantize(_COLOURS, dither=Image.Dither.NONE)


def terminal(scheme: str) -> str:
    """What a terminal shows of the example, which wraps long lines, as SVG that loads no font."""
    printed = io.StringIO()
    print_run(example(), Console(file=printed, width=_COLUMNS, force_terminal=True, color_system="standard"))
    console = Console(record=True, file=io.StringIO(), width=_COLUMNS)
    console.print(Text.from_ansi(printed.getvalue()))
    svg = console.export_svg(title="attest check", theme=_THEMES[scheme], unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\}\n", "", svg, flags=re.S)
