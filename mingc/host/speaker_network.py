"""Runs the ONNX speaker network of a checkpoint or an artifact, at export and in a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class SpeakerNetwork:
    """The network, loaded once; runs on one thread of the CPU, so that its values depend on its input alone.

    Raises: ImportError without onnxruntime, and its errors (which share no narrower class than Exception) for a file
    that is no model.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime  # only for voices

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def embed(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """(T, 80) filter banks → (D,) speaker vector."""
        given = {self._session.get_inputs()[0].name: features[None].astype(np.float32)}
        return np.asarray(self._session.run(None, given)[0], np.float32).reshape(-1)
