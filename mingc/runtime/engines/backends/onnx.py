"""ONNX models run by ONNX Runtime on a CPU, directly on the memory of the given tensors.

State is bound as input and output. Weights are inputs as well, bound once without a second copy.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mingc.errors import ArtifactError
from mingc.runtime.engines.base import Engine

_PREFIX = "model."  # of the names of weights in the model
_METADATA_KEY = "mingc"
_INSTALL = "pip install 'mingc[onnx]'"
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
_TYPES = {  # of ONNX Runtime's names
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(int8)": torch.int8,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Metadata of a model.

    Attributes:
        weights: number of its last inputs, which are weights.
        outputs: number of its first outputs, which are results.
        state: of each further output, the index of the input whose new value it is, and whether both may be the same
            memory.
    """

    weights: int
    outputs: int
    state: tuple[tuple[int, bool], ...]


class OnnxEngine(Engine):
    """One `.onnx` model."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session = _open_session(path)
        self._layout = _layout(self._session, path)
        inputs = self._session.get_inputs()
        count = len(inputs) - self._layout.weights
        self._inputs, self._weights = (
            [each.name for each in part] for part in (inputs[:count], inputs[count:])
        )
        self._signatures = {each.name: (each.type, each.shape) for each in inputs[count:]}
        outputs = [each.name for each in self._session.get_outputs()]
        self._outputs, self._state = outputs[: self._layout.outputs], outputs[self._layout.outputs :]
        self._binding = self._session.io_binding()
        self._kept: list[torch.Tensor] = []

    def constants(self) -> Sequence[str]:
        return [name.removeprefix(_PREFIX) for name in self._weights]

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises: ArtifactError when a weight has another dtype or shape than the model's."""
        self._kept = [weights[name].contiguous() for name in self.constants()]
        for name, weight in zip(self._weights, self._kept, strict=True):
            self._check_weight(name, weight)
            self._bind_input(name, weight)

    def _check_weight(self, name: str, weight: torch.Tensor) -> None:
        type_name, shape = self._signatures[name]
        if _TYPES.get(type_name) != weight.dtype or list(shape) != [*weight.shape]:
            raise ArtifactError(
                f"the engine takes {name.removeprefix(_PREFIX)} as {type_name} {list(shape)}, the weights file has "
                f"{weight.dtype} {[*weight.shape]}",
                where=str(self._path),
                fix="engine and weights are of two exports: copy the artifact again, or export again",
            )

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = [tensor.contiguous() for tensor in tensors]
        for name, tensor in zip(self._inputs, given, strict=True):
            self._bind_input(name, tensor)
        for name in self._outputs:
            self._binding.bind_output(name, "cpu")
        copied = []
        for place, (name, (index, may_share)) in enumerate(zip(self._state, self._layout.state, strict=True)):
            if may_share and given[index] is tensors[index]:
                self._bind_output(name, given[index])
            else:
                self._binding.bind_output(name, "cpu")
                copied.append((len(self._outputs) + place, tensors[index]))
        self._session.run_with_iobinding(self._binding)
        values = self._binding.get_outputs()
        for place, state in copied:
            state.copy_(torch.from_numpy(values[place].numpy()))
        return [torch.from_numpy(each.numpy()) for each in values[: len(self._outputs)]]

    def _bind_input(self, name: str, tensor: torch.Tensor) -> None:
        dtype = _DTYPES[tensor.dtype]
        self._binding.bind_input(name, "cpu", 0, dtype, [*tensor.shape], tensor.data_ptr())

    def _bind_output(self, name: str, tensor: torch.Tensor) -> None:
        dtype = _DTYPES[tensor.dtype]
        self._binding.bind_output(name, "cpu", 0, dtype, [*tensor.shape], tensor.data_ptr())


def _open_session(path: Path) -> Any:
    """Raises: ArtifactError when ONNX Runtime is not installed or refuses the model."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ArtifactError(
            f"the engine needs ONNX Runtime, which cannot be imported: {error}",
            where=str(path),
            fix=_INSTALL,
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Threads of one engine must not keep the cores busy while another one runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the errors of ONNX Runtime have no base class of their own
        raise ArtifactError(
            f"ONNX Runtime {onnxruntime.__version__} refuses the engine: {error}",
            where=str(path),
            fix="run mingc verify --no-replay; if the files are whole, pip install --upgrade 'mingc[onnx]', or export "
            "again",
        ) from error


def _layout(session: Any, path: Path) -> _Layout:
    """Raises: ArtifactError when mingc did not export the model."""
    try:
        document = json.loads(session.get_modelmeta().custom_metadata_map[_METADATA_KEY])
        layout = _Layout(
            weights=int(document["weights"]),
            outputs=int(document["outputs"]),
            state=tuple((int(index), bool(may_share)) for index, may_share in document["state"]),
        )
        inputs = len(session.get_inputs()) - layout.weights
        if (
            not 0 <= inputs <= len(session.get_inputs())
            or not 0 <= layout.outputs == len(session.get_outputs()) - len(layout.state)
            or not all(0 <= index < inputs for index, _ in layout.state)
            or len({index for index, _ in layout.state}) < len(layout.state)
        ):
            raise ValueError(f"its metadata {document} do not describe its inputs and outputs")
        return layout
    except (KeyError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"the engine is an ONNX model that mingc did not export: {type(error).__name__}: {error}",
            where=str(path),
            fix="copy the artifact again, or export again",
        ) from error


def unavailable() -> tuple[str, str] | None:
    """Why no model can be loaded here, and the fix; ONNX Runtime itself is not imported."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "ONNX Runtime is not installed", _INSTALL
    return None


def load(path: Path, device: torch.device) -> Engine:
    """The model at `path`, without weights yet."""
    return OnnxEngine(path)
