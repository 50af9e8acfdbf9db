"""Names of what a process runs on: its processor, installed distributions. Needs the standard library only."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path


def processor_name() -> str:
    """Read the CPU model from /proc/cpuinfo; return the architecture where it is missing, as on many ARM machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
