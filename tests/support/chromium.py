"""Headless Chromium for tests of pages that are files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is not None and subprocess.run([BROWSER, "--version"], capture_output=True).returncode:
    BROWSER = None  # it does not start on this machine


def browse(path: Path, folder: Path, width: int = 1200) -> tuple[str, str]:
    """The document as headless Chromium has it after loading, and what it logged."""
    assert BROWSER is not None
    words = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        # A new profile would ask for updates and a default search engine first, which takes time and a network.
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-quic",
        "--disable-sync",
        f"--window-size={width},900",
        "--enable-logging=stderr",
    )
    done = subprocess.run(
        [BROWSER, *words, f"--user-data-dir={folder}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr
