"""Command and environment of a Python module that runs in a process of its own."""

from __future__ import annotations

import os
import sys


def module_command(name: str, *words: str) -> list[str]:
    """`python -m name words`, without modules of the working folder: files there may have any names."""
    return [sys.executable, "-P", "-m", name, *words]


def module_environment() -> dict[str, str]:
    """This process's environment, in which another one imports from where this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
