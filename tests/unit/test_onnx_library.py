"""ONNX Runtime as it is installed, the session that is opened with it, and what an engine of it can do."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engines import FunctionEngine

from mingc.artifacts.spec import GraphSpec
from mingc.export.compile.backends import onnx as onnx_backend
from mingc.host import onnx_library
from mingc.probe import engine_trial
from mingc.runtime.engines.backends import onnx as loader
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)
FIX_CPU = "pip install 'mingc[onnx]'"
FIX_CUDA = "pip uninstall onnxruntime; pip install 'mingc[onnx-gpu]'"


def install(monkeypatch: pytest.MonkeyPatch, *absent: str, library: Path | None = None) -> None:
    """As if the packages `absent` were missing, and ONNX Runtime lay beside `library`."""

    def find_spec(name: str) -> Any:
        if name in absent:
            return None
        return SimpleNamespace(origin=None if library is None else str(library.parent.parent / "__init__.py"))

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(
    ("name", "has_cuda"),
    [
        ("capi/libonnxruntime_providers_cuda.so", True),
        ("capi/onnxruntime_providers_cuda.dll", True),
        ("capi/libonnxruntime_providers_shared.so", False),
        ("other/libonnxruntime_providers_cuda.so", False),
    ],
)
def test_the_library_of_cuda_devices_says_which_distribution_it_is(
    name: str, has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / name
    library.parent.mkdir()
    library.touch()
    install(monkeypatch, library=library)
    assert onnx_library.is_installed() and onnx_library.has_cuda_provider() is has_cuda
    assert loader.unavailable("cpu") is None
    assert loader.unavailable("cuda") == (
        None if has_cuda else ("this ONNX Runtime has no CUDA provider", FIX_CUDA)
    )
    reason = None if has_cuda else f"needs onnxruntime-gpu, not installed: {FIX_CUDA}"
    supports = onnx_backend.BACKEND.unsupported_reason
    assert (supports("cuda", "float32"), supports("cpu", "float32")) == (reason, None)
    use = "use --dtype float32"
    assert supports("cuda", "bfloat16") == f"its engines were not run in bfloat16; {use}"
    assert supports("cpu", "bfloat16") == f"ONNX Runtime's CPU kernels lack bfloat16; {use}"


def test_no_onnx_runtime_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "onnxruntime", "onnxscript")
    assert not onnx_library.is_installed() and not onnx_library.has_cuda_provider()
    assert loader.unavailable("cpu") == ("ONNX Runtime is not installed", FIX_CPU)
    assert loader.unavailable("cuda") == ("ONNX Runtime is not installed", FIX_CUDA)
    reason = onnx_backend.BACKEND.unsupported_reason
    assert reason("cpu", "float32") == f"needs onnxscript, onnxruntime, not installed: {FIX_CPU}"
    assert reason("cuda", "float32") == f"needs onnxscript, onnxruntime-gpu, not installed: {FIX_CUDA}"


def test_a_package_without_a_file_has_no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert onnx_library.is_installed() and not onnx_library.has_cuda_provider()


@dataclass
class Options:
    """ONNX Runtime's options of a session, as they were set."""

    entries: dict[str, str] = field(default_factory=dict)

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, Any], list[Any]]]:
    """Sessions that were opened: their files, options and providers."""
    opened: list[tuple[Path, dict[str, Any], list[Any]]] = []

    def open_session(path: Path, options: Options, *, providers: list[Any]) -> Any:
        opened.append((path, vars(options), providers))
        return SimpleNamespace(
            get_providers=lambda: ["CUDAExecutionProvider"], get_provider_graph_assignment_info=lambda: []
        )

    module = ModuleType("onnxruntime")
    levels: list[int] = []
    vars(module).update(
        __version__="1.31.1",
        SessionOptions=Options,
        InferenceSession=open_session,
        set_default_logger_severity=levels.append,
        levels=levels,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    return opened


def test_options_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = fake_runtime(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    path, stream = Path("x.onnx"), SimpleNamespace(cuda_stream=1234)
    loader._open_session(path, CPU, None)
    assert sys.modules["onnxruntime"].levels == [], (
        "on a CPU, warnings of other sessions are left as they are"
    )
    for device in (SECOND, torch.device("cuda")):
        loader._open_session(path, device, stream)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "log_severity_level": 4,
        "intra_op_num_threads": 5,
        "inter_op_num_threads": 1,
        "entries": {"session.intra_op.allow_spinning": "0"},
    }
    entries = {**options["entries"], "session.record_ep_graph_assignment_info": "1"}
    on_cuda = {**options, "entries": entries}

    def provider(index: str) -> tuple[str, dict[str, str]]:
        own = {"device_id": index, "user_compute_stream": "1234", "use_tf32": "0"}
        return "CUDAExecutionProvider", own

    assert opened == [
        (path, options, ["CPUExecutionProvider"]),
        (path, on_cuda, [provider("1"), "CPUExecutionProvider"]),
        (path, on_cuda, [provider("0"), "CPUExecutionProvider"]),
    ]
    assert sys.modules["onnxruntime"].levels == [4, 4]


def test_the_missing_runtime_of_a_gpu_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(loader.ArtifactError, match="needs ONNX Runtime, which cannot be imported") as refused:
        loader._open_session(Path("x.onnx"), SECOND, SimpleNamespace(cuda_stream=1))  # type: ignore[arg-type]
    assert (refused.value.where, refused.value.fix) == ("x.onnx", FIX_CUDA)


@pytest.mark.parametrize(
    ("device", "place"), [(SECOND, ("cuda", 1)), (torch.device("cuda"), ("cuda", 0)), (CPU, ("cpu", 0))]
)
def test_where_a_tensor_lies(device: torch.device, place: tuple[str, int]) -> None:
    engine = object.__new__(loader.OnnxEngine)
    engine._device = device
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert engine._place(tensor) == (*place, 16, [2, 3], tensor.data_ptr())


def test_dtypes_have_the_numbers_of_onnx() -> None:
    proto = pytest.importorskip("onnx").TensorProto
    names = {torch.float32: "FLOAT", torch.bool: "BOOL"}
    for dtype, number in loader._DTYPES.items():
        name = names.get(dtype, str(dtype).removeprefix("torch.").upper())
        assert number == getattr(proto, name)
    spelled = {torch.float32: "float"}
    for text, dtype in loader._TYPES.items():
        assert text == f"tensor({spelled.get(dtype, str(dtype).removeprefix('torch.'))})"


def test_one_engine_that_cannot_be_captured_is_enough() -> None:
    def engine(is_capturable: bool) -> FunctionEngine:
        made = FunctionEngine((), tuple)
        made.is_capturable = is_capturable
        return made

    def graph(*engines: bool) -> Graph:
        return Graph(SPEC, {(size,): engine(each) for size, each in enumerate(engines)})

    assert graph(True, True).is_capturable and not graph(True, False).is_capturable
    assert LoadedStage("x", {"a": graph(True), "b": graph(True)}).is_capturable
    assert not LoadedStage("x", {"a": graph(True), "b": graph(True, False)}).is_capturable


def test_a_trial_captures_what_can_be_captured() -> None:
    captured: list[str] = []

    def capture(run: Any, name: str) -> Any:
        captured.append(name)
        return SimpleNamespace(replay=lambda: "replayed"), None

    pool: Any = SimpleNamespace(capture=capture)
    engine = FunctionEngine(("x",), lambda x: (x + 1,))
    arguments = [torch.ones(1)]
    assert engine_trial._runner(engine, arguments, pool)() == "replayed" and captured == ["trial"]
    engine.is_capturable = False
    assert engine_trial._runner(engine, arguments, pool)() == (2,) and captured == ["trial"]
    engine.is_capturable = True
    assert engine_trial._runner(engine, arguments, None)() == (2,) and captured == ["trial"]


SPEC = GraphSpec(name="x", dims=(), inputs=(), outputs=(), state=(), weights=())
