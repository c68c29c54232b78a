"""Draws the top of a run's report page, as README shows it: ``python tests/support/picture.py RUN FILE.png``."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image


def main(run: str, picture: str) -> None:
    """Draws the first screen and the table of drafts, with a palette of 256 colours."""
    page = Path(run, "report.html").resolve()
    browsers = [found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))]
    if not page.exists() or not browsers:
        raise SystemExit(f"{page} (make it with `make distill`, or name a run with RUN=) and Chromium are needed")
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "page.png")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        options += ["--window-size=1100,925", f"--screenshot={drawn}", page.as_uri()]
        subprocess.run([browsers[0], *options], check=True, capture_output=True, timeout=120)
        Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
