"""Writes the screenshots of docs/images anew: `uvx nox -s browser -- --refresh`."""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.browser.pages import IMAGES, SCHEMES, WINDOWS, chromium, screenshot, shown, terminal, written


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, chromium() as browser:
        for name, file in written(Path(folder)).items():
            for window, scheme in product(WINDOWS, SCHEMES):
                with shown(browser, file, window, scheme) as page:
                    screenshot(page).save(IMAGES / f"{name}-{window}-{scheme}.png", optimize=True)
    for scheme in SCHEMES:
        (IMAGES / f"terminal-{scheme}.svg").write_text(terminal(scheme), encoding="utf-8")


if __name__ == "__main__":
    main()
