"""TensorRT plans on a CUDA device, over the memory of torch's tensors.

State is an input and an output: the plan writes the new state to a new tensor, which is copied over the old one, so
that nothing depends on the order in which TensorRT reads and writes. A plan takes the states of a batch: this module
copies their rows out of the pools and back, because version 1.4 crashes at a state with a dynamic dim. Weights are
inputs as well, bound once: all engines of a stage share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mingc.artifacts.tensorrt_engine import EngineHeader, read_engine
from mingc.errors import ArtifactError, WorkerError
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import (
    DISTRIBUTIONS,
    INSTALL,
    TITLES,
    find_library,
    import_library,
    make_logger,
)
from mingc.runtime.engines.base import Engine

_PREFIX = "model."  # names of weights in the plan begin with it


class TensorRtEngine(Engine):
    """One serialized plan."""

    def __init__(self, path: Path, device: torch.device) -> None:
        file = read_engine(path)
        self._header, self._path, self._device = file.header, path, device
        self._trt = _import(file.header, path)
        _check_here(self._trt, file.header, path, device)
        self._logger, self._messages = make_logger(self._trt)
        self._runtime = self._trt.Runtime(self._logger)
        with torch.cuda.device(device):
            self._engine = self._runtime.deserialize_cuda_engine(file.plan)
        if self._engine is None:
            raise ArtifactError(
                f"{TITLES[file.header.library]} {self._trt.__version__} refuses the engine: "
                f"{'; '.join(self._messages) or 'no reason given'}",
                where=str(path),
                fix="run mingc verify --no-replay; if the files are whole, export again on this machine",
            )
        # The builder drops inputs that nothing reads.
        held = {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}
        shapes = {name: tuple(self._engine.get_tensor_shape(name)) for name in held}
        self._inputs = [
            (index, name, shapes[name]) for index, name in enumerate(file.header.inputs) if name in held
        ]
        self._outputs = [
            (name, shapes[name], _torch_dtype(self._trt, self._engine.get_tensor_dtype(name)))
            for name in file.header.outputs
        ]
        self._weights = [name for name in file.header.weights if f"{_PREFIX}{name}" in held]
        self._kept: dict[str, torch.Tensor] = {}
        self._context: Any = None

    def constants(self) -> Sequence[str]:
        return self._weights

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._kept = {f"{_PREFIX}{name}": weights[name].contiguous() for name in self._weights}
        self._context = None

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count = len(self._header.outputs) - len(self._header.state)
        if self._header.slots is None:
            values = self._execute(tensors)
            for index, value in zip(self._header.state, values[count:], strict=True):
                tensors[index].copy_(value)
            return values[:count]
        slots = tensors[self._header.slots]
        rows = torch.cat((slots.new_zeros(1), slots))
        own = list(tensors)
        own[self._header.slots] = torch.arange(1, len(rows), dtype=slots.dtype, device=slots.device)
        for index in self._header.state:
            own[index] = tensors[index].index_select(0, rows)
        values = self._execute(own)
        for index, value in zip(self._header.state, values[count:], strict=True):
            tensors[index].index_copy_(0, slots, value[1:])
            # Padding of `slots` is row 0 as well, with unchanged copies: the row itself is written last.
            tensors[index][0] = value[0]
        return values[:count]

    def _execute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns outputs, then updated states in new tensors."""
        context = self._context = self._context or self._open()
        given = [(name, tensors[index].contiguous()) for index, name, _ in self._inputs]
        for (name, tensor), (*_, shape) in zip(given, self._inputs, strict=True):
            if tensor.shape != shape:
                raise WorkerError(f"{self._path} takes {name} of {[*shape]}, not of {[*tensor.shape]}")
        values = [torch.empty(shape, dtype=dtype, device=self._device) for _, shape, dtype in self._outputs]
        made = zip((name for name, *_ in self._outputs), values, strict=True)
        for name, tensor in (*given, *made):
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream(self._device).cuda_stream):
            raise WorkerError(
                f"TensorRT could not run the engine: {'; '.join(self._messages[-3:])}", where=str(self._path)
            )
        return values

    def _open(self) -> Any:
        """An execution context in memory of torch's allocator, with the weights; it is made when it is needed."""
        context = self._engine.create_execution_context(
            self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        size = int(self._engine.device_memory_size_v2)
        self._memory = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)
        context.set_device_memory(self._memory.data_ptr(), size)
        for name, weight in self._kept.items():
            context.set_tensor_address(name, weight.data_ptr())
        return context


def _import(header: EngineHeader, path: Path) -> Any:
    """The library that built the engine. Raises: ArtifactError when it is not installed."""
    if header.library not in TITLES:
        raise ArtifactError(
            f"the engine was built by {header.library}, which this mingc does not know",
            where=str(path),
            fix="copy the artifact again, or export again",
        )
    try:
        return import_library(header.library)
    except (ImportError, OSError) as error:
        raise ArtifactError(
            f"the engine needs {TITLES[header.library]}, which cannot be imported: {error}",
            where=str(path),
            fix=f"pip install '{DISTRIBUTIONS[header.library]}=={header.version}'",
        ) from error


def _check_here(trt: Any, header: EngineHeader, path: Path, device: torch.device) -> None:
    """Raises: ArtifactError when the library has another version, or the GPU another capability."""
    if trt.__version__ != header.version:
        raise ArtifactError(
            f"the engine was built by {TITLES[header.library]} {header.version}, here is {trt.__version__}",
            where=str(path),
            fix=f"pip install '{DISTRIBUTIONS[header.library]}=={header.version}', or export again",
        )
    here = "{}.{}".format(*gpu(device).capability)
    if here not in header.capabilities:
        raise ArtifactError(
            f"the engine is for a GPU of compute capability {' or '.join(header.capabilities)}, here is {here}",
            where=str(path),
            fix="run it on such a GPU, or export again for this one",
        )


def _torch_dtype(trt: Any, dtype: Any) -> torch.dtype:
    return {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.BF16: torch.bfloat16,
        trt.DataType.INT64: torch.int64,
        trt.DataType.INT32: torch.int32,
        trt.DataType.INT8: torch.int8,
        trt.DataType.UINT8: torch.uint8,
        trt.DataType.BOOL: torch.bool,
    }[dtype]


def unavailable(device: str) -> tuple[str, str] | None:
    """Why no engine can be loaded here, and the fix; TensorRT itself is not imported."""
    if find_library() is None:  # an engine names the one of both that it needs
        return "TensorRT for RTX is not installed", INSTALL
    return None


def load(path: Path, device: torch.device) -> Engine:
    """The engine at `path`, without weights yet."""
    return TensorRtEngine(path, device)
