"""A C++ compiler that compiles nothing."""

from __future__ import annotations

from pathlib import Path


def fake_compiler(folder: Path, library: str) -> Path:
    """A compiler whose libraries hold the text `library`."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\nfor last; do :; done\necho "{library}" > "$last"\n')
    script.chmod(0o755)
    return script
