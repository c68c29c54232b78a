"""Draws the top of a run's report page, as README shows it: ``python tests/support/picture.py RUN FILE.png``."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(run: str, picture: str) -> None:
    """Draws the first screen and the table of drafts, with a palette of 128 colours."""
    page = Path(run, "report.html").resolve()
    if not page.exists():
        raise SystemExit(f"{page} is missing: make it with `make distill`, or name another run with RUN=runs/NAME")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(
            f"a browser is needed to draw the page, and none of {', '.join(BROWSERS)} was found: install one"
        )
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "page.png")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        options += ["--window-size=1100,925", f"--screenshot={drawn}", page.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=120)
        Image.open(drawn).convert("RGB").quantize(128).save(picture, optimize=True)
    print(f"{picture} shows {page}")


if __name__ == "__main__":
    main(*sys.argv[1:])
