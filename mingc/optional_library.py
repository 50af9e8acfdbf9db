"""Optional libraries: loaded when they are needed, with an error that says what for."""

from __future__ import annotations

import importlib
from typing import Any

from mingc.errors import ConfigError


def import_library(module: str, name: str, purpose: str) -> Any:
    """The module. `name` of the library and `purpose`, such as 'video input', are for the error.

    Raises: ConfigError when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {name}, which is not installed",
            where=purpose,
            fix="pip install 'mingc[serve]'",
        ) from error


def import_opencv(purpose: str) -> Any:
    """OpenCV's module `cv2`, on one thread. Raises: ConfigError when it is not installed."""
    cv2 = import_library("cv2", "OpenCV", purpose)
    # Requests are already prepared in parallel; threads inside one call would oversubscribe the CPU.
    cv2.setNumThreads(1)
    return cv2
