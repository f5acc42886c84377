#!/usr/bin/env python3
"""Take the README's picture of a report: a real page in a real browser, with few colours so that the file stays small.

usage: scripts/report_picture.py reports/sandbox/latest docs/images/report.png
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # comes with matplotlib

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 128


def shoot(browser: str, page: Path, out: Path, width: int, height: int) -> None:
    """Draw the top of a page into a PNG. Raises CalledProcessError, TimeoutExpired."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", "--blink-settings=preferredColorScheme=1"]
        command += [f"--window-size={width},{height}", f"--screenshot={out}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> int:
    """Take one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="folder of a report")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=1800)
    options = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"report_picture: none of {', '.join(BROWSERS)} found; install one", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.png"
        shoot(browser, options.report / "report.html", whole, options.width, options.height)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(whole) as image:
            image.convert("RGB").quantize(COLOURS).save(options.out, optimize=True)
    print(f"{options.out}: {options.out.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
