"""The libraries of the extra `serve` that decode media: loaded at the first medium, checked when a server starts."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from mingc.errors import ConfigError

# Module: the package that pip installs.
LIBRARIES = {"av": "av", "cv2": "opencv-python-headless", "soundfile": "soundfile"}
# What finds speech. Decoder processes, which load all of the above, do not run it.
_FOR_SPEECH = {"onnxruntime": "onnxruntime", "soxr": "soxr"}


def load_library(module: str) -> Any:
    """Import one of these libraries. Raises: ConfigError with the `pip install`."""
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            return importlib.import_module(module)
    except (ImportError, OSError) as error:  # soundfile raises OSError without libsndfile
        package = (LIBRARIES | _FOR_SPEECH)[module]
        raise ConfigError(
            f"{package} cannot be imported: {error}",
            where="media input",
            fix=f"pip install 'mingc[serve]'; if that changes nothing: pip install --force-reinstall {package}",
        ) from error
