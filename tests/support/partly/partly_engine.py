"""The runtime side of `partly_backend`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import eager_engine
import torch

from mingc.runtime.engines.backends import aoti
from mingc.runtime.engines.base import Engine


def load(path: Path, device: torch.device) -> Engine:
    """A package of AOTInductor is a ZIP file."""
    return aoti.load(path, device) if zipfile.is_zipfile(path) else eager_engine.load(path, device)
