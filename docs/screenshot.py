"""Takes the picture of the page that the README shows: ``python -m docs.screenshot``. Needs Chromium.

The page shows two simulated programs, so that it looks alike whoever takes it. ``python -m docs`` leaves it alone.
"""

import argparse
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from ds_lgamp.cli.main import main
from testing import ROOT
from testing.browser import browser, executable

PICTURE = ROOT / "docs" / "plots" / "page.png"
COMMAND = "schedule --gather 1 --reduce 2 --hop 0.2 --update 0.25 --html"
"""The words behind ``ds_lgamp`` that write the page, but for its file."""
SIZE = 1200, 730
"""Pixels: width and height."""


def take(path: Path) -> None:
    """Writes the picture. Raises RuntimeError if no Chromium is installed."""
    found = executable()
    if found is None:
        raise RuntimeError("no Chromium is installed; CONTRIBUTING.md says how to get one")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        with redirect_stdout(StringIO()):
            main([*COMMAND.split(), str(page)])
        with browser(found) as window:
            window.open(page, *SIZE)
            # Computes and waits alone, so that the picture stays small.
            window.evaluate("document.getElementById('lanes').click()")
            window.frame()
            window.screenshot(path, SIZE[1])


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m docs.screenshot", description=__doc__).parse_args()
    take(PICTURE)
