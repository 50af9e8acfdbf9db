"""Runs ONNX models with ONNX Runtime on a CPU or a CUDA device, directly on the memory of the given tensors.

State is bound as input and output. Weights are inputs as well, bound once without a second copy. On CUDA an engine runs
on a separate stream, between the earlier and the later work of torch's current stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mingc.errors import ArtifactError
from mingc.host.onnx_library import CUDA_PROVIDER, INSTALL, INSTALL_CUDA, has_cuda_provider, is_installed
from mingc.runtime.engines.base import Engine

_PREFIX = "model."  # names of weights in the model begin with it
_METADATA_KEY = "mingc"
_DTYPES: dict[torch.dtype, int] = {  # to numbers of ONNX's TensorProto.DataType
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 16,
}
_TYPES = {  # by ONNX Runtime's names
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
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
        weights: the last so many inputs are weights.
        outputs: the first so many outputs are results.
        state: for each further output the index of the input whose new value it is, and whether both may share memory.
    """

    weights: int
    outputs: int
    state: tuple[tuple[int, bool], ...]


# ONNX Runtime computes shapes on the host with these, which needs no data of the device.
_SHAPE_OPERATORS = frozenset(
    (
        "Add",
        "Cast",
        "Concat",
        "Constant",
        "Div",
        "Gather",
        "Mul",
        "Range",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "Sub",
        "Unsqueeze",
    )
)


class OnnxEngine(Engine):
    """One `.onnx` model."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.is_capturable = self._stream is None  # a call on CUDA waits for the device
        self._session = _open_session(path, device, self._stream)
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
        if self._stream is not None:
            self._results = [
                _fixed_size(each, path) for each in self._session.get_outputs()[: self._layout.outputs]
            ]

    def constants(self) -> Sequence[str]:
        return [name.removeprefix(_PREFIX) for name in self._weights]

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises: ArtifactError when the model takes a weight with another dtype or shape."""
        self._kept = [weights[name].contiguous() for name in self.constants()]
        for name, weight in zip(self._weights, self._kept, strict=True):
            self._check_weight(name, weight)
            self._bind_input(name, weight)

    def _check_weight(self, name: str, weight: torch.Tensor) -> None:
        type_name, shape = self._signatures[name]
        if _TYPES.get(type_name) != weight.dtype or list(shape) != [*weight.shape]:
            raise ArtifactError(
                f"the engine takes {name.removeprefix(_PREFIX)} as {type_name} {list(shape)}, the weights files have "
                f"{weight.dtype} {[*weight.shape]}",
                where=str(self._path),
                fix="engine and weights are of two exports: copy the artifact again, or export again",
            )

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = [tensor.contiguous() for tensor in tensors]
        for name, tensor in zip(self._inputs, given, strict=True):
            self._bind_input(name, tensor)
        if self._stream is not None:
            return self._run_on_cuda(tensors, given, self._stream)
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

    def _run_on_cuda(
        self, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Run the model after the work on torch's current stream, and before the work that follows there.

        ONNX Runtime waits for its stream at the end. It can leave that out, but version 1.31.1 then ends the process:
        it frees host memory in a callback of the stream, where CUDA allows no calls.
        """
        current = torch.cuda.current_stream(self._device)
        results = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in self._results]
        for name, result in zip(self._outputs, results, strict=True):
            self._bind_output(name, result)
        copied = []
        for name, (index, may_share) in zip(self._state, self._layout.state, strict=True):
            is_shared = may_share and given[index] is tensors[index]
            after = given[index] if is_shared else torch.empty_like(given[index])
            self._bind_output(name, after)
            if not is_shared:
                copied.append((tensors[index], after))
        stream.wait_stream(current)
        self._session.run_with_iobinding(self._binding)
        current.wait_stream(stream)
        for state, after in copied:
            state.copy_(after)
        return results

    def _bind_input(self, name: str, tensor: torch.Tensor) -> None:
        self._binding.bind_input(name, *self._place(tensor))

    def _bind_output(self, name: str, tensor: torch.Tensor) -> None:
        self._binding.bind_output(name, *self._place(tensor))

    def _place(self, tensor: torch.Tensor) -> tuple[str, int, int, list[int], int]:
        """Arguments that name the memory of `tensor` to ONNX Runtime."""
        return (
            self._device.type,
            self._device.index or 0,
            _DTYPES[tensor.dtype],
            [*tensor.shape],
            tensor.data_ptr(),
        )


def _fixed_size(output: Any, path: Path) -> tuple[torch.dtype, list[int]]:
    """Dtype and shape of a result. Raises: ArtifactError when the shape is not fixed."""
    if not all(isinstance(size, int) for size in output.shape) or output.type not in _TYPES:
        raise ArtifactError(
            f"the engine gives {output.name} as {output.type} {list(output.shape)}; on CUDA sizes must be fixed",
            where=str(path),
            fix="export again with --target cuda",
        )
    return _TYPES[output.type], list(output.shape)


def _open_session(path: Path, device: torch.device, stream: torch.cuda.Stream | None) -> Any:
    """Load the model. Raises: ArtifactError when ONNX Runtime is not installed, lacks the device, or refuses it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ArtifactError(
            f"the engine needs ONNX Runtime, which cannot be imported: {error}",
            where=str(path),
            fix=INSTALL if stream is None else INSTALL_CUDA,
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Threads of one engine must not keep the cores busy while another one runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if stream is not None:
        own = {
            "device_id": str(device.index or 0),
            "user_compute_stream": str(stream.cuda_stream),
            "use_tf32": "0",
        }
        providers.insert(0, (CUDA_PROVIDER, own))
        onnxruntime.set_default_logger_severity(4)  # it warns of every scatter, which may write rows twice
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = onnxruntime.InferenceSession(path, options, providers=providers)
    except Exception as error:  # the errors of ONNX Runtime have no common base class
        raise ArtifactError(
            f"ONNX Runtime {onnxruntime.__version__} refuses the engine: {error}",
            where=str(path),
            fix="run mingc verify --no-replay; if the files are whole, pip install --upgrade 'mingc[onnx]', or export "
            "again",
        ) from error
    if stream is not None:
        _check_device(session, onnxruntime.__version__, path)
    return session


def _check_device(session: Any, version: str, path: Path) -> None:
    """Raises: ArtifactError when ONNX Runtime runs the model, or some of its operators, on the CPU instead.

    ONNX Runtime only warns when it cannot load the library of a device, and runs operators that the device lacks on the
    CPU.
    """
    if CUDA_PROVIDER not in session.get_providers():
        raise ArtifactError(
            f"ONNX Runtime {version} cannot run models on CUDA devices here",
            where=str(path),
            fix=f"{INSTALL_CUDA}; if that is there, it needs the CUDA release that torch has",
        )
    on_host = {
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != CUDA_PROVIDER
        for node in part.get_nodes()
    }
    if slow := sorted(on_host - _SHAPE_OPERATORS):
        raise ArtifactError(
            f"ONNX Runtime {version} would run {', '.join(slow)} on the CPU, as it has no such operator for CUDA "
            "in the dtype of the engine",
            where=str(path),
            fix="export this stage again with another backend, such as --backend aoti:STAGE, or with --dtype float32",
        )


def _layout(session: Any, path: Path) -> _Layout:
    """The metadata of the model. Raises: ArtifactError when mingc did not export it."""
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


def unavailable(device: str) -> tuple[str, str] | None:
    """Why no model can be loaded for `device` here, and the fix; ONNX Runtime itself is not imported."""
    if not is_installed():
        return "ONNX Runtime is not installed", INSTALL if device == "cpu" else INSTALL_CUDA
    if device == "cuda" and not has_cuda_provider():
        return "this ONNX Runtime has no CUDA provider", INSTALL_CUDA
    return None


def load(path: Path, device: torch.device) -> Engine:
    """Load the model at `path`, without weights yet."""
    return OnnxEngine(path, device)
