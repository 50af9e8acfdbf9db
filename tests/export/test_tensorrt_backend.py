"""TensorRT engines: targets, files, the loader over a stand-in for the library, and real builds for RTX cards.

No GPU is here. torch-tensorrt and TensorRT for RTX build without one for cards that it lists; such tests are skipped
where they are not installed. The stand-in runs the ONNX model that is given to it as a plan, at the addresses that the
loader sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from engine_checks import CPU, needs_torch_tensorrt
from mingc_command import DATA
from safetensors.torch import load_file
from sliding_window import Sliding
from stage_checks import graph_of
from torch import Tensor, nn

from mingc.artifacts.artifact import check_fingerprint
from mingc.artifacts.manifest import Fingerprint
from mingc.artifacts.spec import GraphSpec, TensorSpec
from mingc.artifacts.target import Host
from mingc.artifacts.tensorrt_engine import EngineFile, EngineHeader, read_engine, write_engine
from mingc.errors import ArtifactError, CompileError, ConfigError, IncompatibleError, WorkerError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile import tensorrt_program
from mingc.export.compile.backends import tensorrt as tensorrt_backend
from mingc.export.compile.backends.tensorrt import BACKEND
from mingc.export.compile.onnx_program import to_onnx
from mingc.export.compile.tensorrt_program import without_weights
from mingc.export.compile.trace import trace_graph
from mingc.export.recipe import ExportRecipe, stage_options
from mingc.export.source import open_source
from mingc.export.stage import GraphDef, Shard, StageOptions
from mingc.export.stages import find
from mingc.export.tasks.check_graph import check_graph
from mingc.export.tasks.compile_engine import build_engine
from mingc.export.tasks.early_refusals import early_refusals
from mingc.export.tasks.graph_task import GraphTask
from mingc.export.weights.loading import float32_module, load_module, write_weights
from mingc.host import tensorrt_library
from mingc.numerics.relative_error import relative_error
from mingc.runtime.engines.backends import tensorrt as loader


def recipe(folder: Path, **options: Any) -> ExportRecipe:
    return ExportRecipe(checkpoint=folder, output=folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cpu"}, "for NVIDIA GPUs; use --target cuda or, for RTX cards, --target rtx:sm89"),
        ({"target": "rtx:sm86,sm90"}, "--target rtx:sm86,sm90: sm90 is not one of sm75, sm80, .*, sm121"),
        ({"target": "rtx:sm86,sm86"}, "names a card twice"),
        ({"target": "rtx:"}, "an empty name is not one of"),
        ({"target": "rtx:sm89", "backend": ("aoti",)}, "aoti cannot build engines for RTX cards"),
        ({"target": "rtx:sm89", "backend": ("onnx",)}, "--backend onnx: .*rtx:sm89"),
        ({"target": "rtx:sm89,sm121"}, "TensorRT for RTX 1.2.3 cannot build for sm121"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_read(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tensorrt_backend, "compiler_problem", lambda *words: None)
    monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: StandIn)
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, **{"backend": ("tensorrt",), **options})


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class Foreign(nn.Module):
    """Calls an operator that only the test's library has."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mingc_test.twice(x)


class Paged(nn.Module):
    def forward(self, x: Tensor, pages: Tensor) -> Tensor:
        return pages[0] + x


def early(module: nn.Module, inputs: tuple[Tensor, ...], dims: tuple[dict[int, Any], ...]) -> str | None:
    """Why the backend refuses a graph before anything is built; None: it does not."""
    names = ("x", "pages", "mask")[: len(inputs)]
    specs = tuple(
        TensorSpec(name=name, dtype=str(each.dtype)[6:], shape=tuple(each.shape))
        for name, each in zip(names, inputs, strict=True)
    )
    plan: Any = SimpleNamespace(spec=GraphSpec(name="g", inputs=specs, outputs=()))
    moved = tuple(each.to("meta") for each in inputs)

    def trace() -> torch.export.ExportedProgram:
        return torch.export.export(module.to("meta"), moved, dynamic_shapes=dims, strict=False)

    try:
        BACKEND.check_graph(plan, module, trace, where="s.g")
    except CompileError as error:
        assert (error.where, error.fix) == (
            "s.g",
            "compile this stage with AOTInductor: --backend aoti:STAGE; for RTX cards, for which nothing else builds, "
            "leave it out with --stages",
        )
        return error.message
    return None


def test_what_the_traced_graph_shows_is_refused_before_anything_is_built() -> None:
    library = torch.library.Library("mingc_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", torch.empty_like, "Meta")
    x, rows = torch.zeros(2, 4, 8), torch.export.Dim("rows", min=1, max=1 << 33)
    assert "torch-tensorrt does not convert the operator mingc_test::twice" in str(
        early(Foreign(), (x,), ({},))
    )
    refused = early(Paged(), (x[0], torch.zeros(3, 4, 8)), ({}, {0: rows}))
    assert str(refused).startswith("pages (s") and "grows with a pool" in str(refused)


class Stored(nn.Module):
    """A weight in FP8 with its scale, as quantized stages have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.float()


def test_quantized_weights_are_refused_before_anything_is_built() -> None:
    plan: Any = SimpleNamespace(spec=GraphSpec(name="g", inputs=(), outputs=()))
    module, x = Stored().to("meta"), torch.zeros(2, 4, device="meta")
    with pytest.raises(
        CompileError, match="float8_e4m3fn, which only engines of AOTInductor read"
    ) as refused:
        BACKEND.check_graph(
            plan, module, lambda: torch.export.export(module, (x,), strict=False), where="s.g"
        )
    assert str(refused.value.fix).startswith("leave out --quantize, or compile this stage with AOTInductor")


class Attending(nn.Module):
    """An attention whose scores are 4 × heads × length² bytes."""

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k, mask)


def test_an_attention_with_a_mask_is_refused_when_no_gpu_holds_its_scores() -> None:
    long, mask = (
        (torch.zeros(1, 8, 32_768, 4, device="meta"),) * 2,
        torch.zeros(1, 1, 32_768, 32_768, device="meta"),
    )
    says = "an attention has up to 32 GiB of scores, which TensorRT holds in memory (limit 16 GiB)"
    assert early(Attending(), (*long, mask), ({}, {}, {})) == says
    assert early(Attending(), long, ({}, {})) is None, "kernels without a mask do not store scores"
    half = torch.zeros(1, 8, 16_384, 4, device="meta")
    assert early(Attending(), (half, long[1], mask[:, :, :16_384]), ({}, {}, {})) is None, "16 GiB"


HOPPER = "9.0"
RTX_211 = "pip install 'mingc[tensorrt]' 'torch-tensorrt-rtx==2.11.*' 'tensorrt-rtx==1.4.*'"
CLASSIC_213 = "pip install 'mingc[tensorrt-classic]' 'torch-tensorrt==2.13.*'"


@pytest.mark.parametrize(
    ("library", "compiler", "own", "torch_release", "unlisted", "problem"),
    [
        ("tensorrt_rtx", None, None, "2.11.0", HOPPER, f"needs torch-tensorrt-rtx, not installed: {RTX_211}"),
        ("tensorrt_rtx", "2.11.0", None, "2.11.0", None, f"needs tensorrt-rtx, not installed: {RTX_211}"),
        ("tensorrt_rtx", "2.11.0", "1.4.0.76", "2.11.0", HOPPER, None),
        ("tensorrt_rtx", "2.13.0", "1.5.0.114", "2.13.0", None, None),
        ("tensorrt_rtx", "2.1.0", "1.4", "2.11.0", None, f"-rtx 2.1.0 does not fit torch 2.11.0: {RTX_211}"),
        ("tensorrt_rtx", "2.11.0", "1.7.1", "2.11.0", None, f"-rtx 1.7.1 does not fit torch 2.11.0: {RTX_211}"),
        (
            "tensorrt_rtx", "2.13.0", "1.5.0.114", "2.13.0", HOPPER,
            "on a GPU of compute capability 9.0 only TensorRT for RTX 1.4 runs, which needs torch 2.11 or 2.12, here "
            "is 2.13.0: pip install 'torch==2.11.*' 'mingc[tensorrt]' 'tensorrt-rtx==1.4.*'",
        ),
        ("tensorrt", "2.13.0", "10.15", "2.13.0", HOPPER, None),
        ("tensorrt", "2.12.1", "10.15", "2.13.0", HOPPER, f"2.12.1 does not fit torch 2.13.0: {CLASSIC_213}"),
    ],
)  # fmt: skip
def test_versions_that_do_not_fit_are_refused_with_the_installation_that_does(
    library: str, compiler: str | None, own: str | None, torch_release: str, unlisted: str | None,
    problem: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The pairs: torch-tensorrt 2.11 cannot be imported with 1.5 or later, 2.12 takes 1.4, 2.13 requires 1.5."""
    names = {"tensorrt_rtx": ("torch-tensorrt-rtx", "tensorrt-rtx-cu13-bindings")}
    installed = dict(zip(names.get(library, ("torch-tensorrt", "tensorrt")), (compiler, own), strict=True))
    monkeypatch.setattr(tensorrt_library, "installed_version", installed.get)
    found = tensorrt_library.compiler_problem(library, torch_release, unlisted)
    assert found is None if problem is None else str(found).endswith(problem)


def test_both_dtypes_are_taken_and_the_library_of_the_target_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = torch.__version__[:4]
    installed = {"torch-tensorrt": release + ".0", "tensorrt": "10.15"}
    monkeypatch.setattr(tensorrt_library, "installed_version", installed.get)
    words: dict[str, Any] = {"target": "cuda", "stages": ("talker", "cfm", "audio_vae")}
    for dtype in ("float32", "bfloat16"):
        mixed = recipe(tmp_path, dtype=dtype, backend=("aoti", "tensorrt:talker,cfm"), **words)
        assert mixed.backends_of("cfm") == ("tensorrt",) and mixed.backends_of("audio_vae") == ("aoti",)
        assert "tensorrt" in recipe(tmp_path, dtype=dtype, backend=("auto",), **words).backends_of("cfm")
    # Classic TensorRT builds for no other machine.
    with pytest.raises(
        ConfigError, match=r"needs torch-tensorrt-rtx, not installed: pip install 'mingc\[tensorrt\]'"
    ):
        recipe(tmp_path, target="rtx:sm89", backend=("tensorrt",))
    installed.clear()
    with pytest.raises(ConfigError, match="needs torch-tensorrt-rtx, not installed"):
        recipe(tmp_path, backend=("tensorrt",), **words)


def test_float32_is_refused_only_on_a_gpu_that_the_library_does_not_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200 it had ten times the error that float32 may have."""
    release = torch.__version__[:4]
    rtx = {"torch-tensorrt-rtx": f"{release}.0", "tensorrt-rtx": "1.4.0"}
    classic = {"torch-tensorrt": f"{release}.0", "tensorrt": "10.15"}
    monkeypatch.setattr(tensorrt_library, "_RTX_OF_TORCH", {release: "1.4"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, installed, refused in (
        ((9, 0), rtx, True),
        ((8, 9), rtx, False),
        ((9, 0), classic, False),
    ):
        monkeypatch.setattr(tensorrt_backend, "gpu", lambda: SimpleNamespace(capability=capability))  # noqa: B023
        monkeypatch.setattr(tensorrt_library, "installed_version", installed.get)
        found = BACKEND.unsupported_reason("cuda", "float32")
        assert ("capability 9.0" in str(found) and "bfloat16" in str(found)) is refused
        assert (found is not None) is refused and BACKEND.unsupported_reason("cuda", "bfloat16") is None


def refusals(
    stage_name: str, backend: str, *, target: str = "cuda", checkpoint: Path = DATA / "tiny-ming"
) -> dict[str, dict[str, str]]:
    """The reasons why backends refuse bfloat16 before an export builds anything, by graph and backend."""
    found = ExportRecipe(
        checkpoint=checkpoint, output=checkpoint, target=target, dtype="bfloat16", backend=(backend,),
        synthetic=checkpoint != DATA / "tiny-ming",
    )  # fmt: skip
    stage = find(stage_name)
    config = stage.config(open_source(found))
    plans = stage.graphs(config, Shard(), stage_options(found))
    return early_refusals(found, stage, config, plans)


@pytest.mark.parametrize(
    "stage",
    [
        "audio_encoder",
        "talker",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("cfm", "audio_vae")),
    ],
)
def test_graphs_of_speech_and_encoders_are_not_refused_for_a_gpu(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_backend, "compiler_problem", lambda *words: None)
    found = refusals(stage, "tensorrt")
    assert found and not any(found.values())


def test_the_vision_encoder_is_refused_for_a_gpu_and_left_to_aoti_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The builder asked for as much memory on an H100: four heads, 65,536 patches, four bytes."""
    monkeypatch.setattr(tensorrt_backend, "compiler_problem", lambda *words: None)
    assert 4 * 65_536**2 * 4 == 68_719_476_736 == 64 << 30
    with pytest.raises(
        CompileError, match="up to 64 GiB of scores, which TensorRT holds in memory"
    ) as refused:
        refusals("vision_encoder", "tensorrt")
    assert refused.value.where == "vision_encoder.encode"
    of_auto = refusals("vision_encoder", "auto")["vision_encoder.encode"]
    assert "GiB of scores" in of_auto["tensorrt"] and "aoti" not in of_auto


def test_the_vision_encoder_is_not_refused_for_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their images are those of a CPU: 16,384 patches, 16 GiB of scores at the released dims."""
    released = DATA.parents[1] / "benchmarks" / "released"
    monkeypatch.setattr(tensorrt_backend, "compiler_problem", lambda *words: None)
    monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: StandIn)
    found = refusals("vision_encoder", "tensorrt", target="rtx:sm89", checkpoint=released)
    assert found == {"vision_encoder.encode": {}}


def test_the_thinker_is_refused_for_a_gpu_and_auto_leaves_its_pages_to_aoti(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensorrt_backend, "compiler_problem", lambda *words: None)
    with pytest.raises(CompileError, match="grows with a pool") as refused:
        refusals("thinker", "tensorrt")
    assert "--backend aoti:STAGE" in (refused.value.fix or "")
    of_auto = refusals("thinker", "auto")
    for graph in ("thinker.prefill_attention", "thinker.decode_attention"):
        assert "grows with a pool" in of_auto[graph]["tensorrt"]
    assert not any("aoti" in reasons for reasons in of_auto.values())


def test_an_artifact_for_rtx_cards_says_where_it_runs() -> None:
    recorded = Fingerprint(
        mingc="0", torch="2.13.0", target="rtx:sm86,sm120", device="cuda", capability="8.6,12.0", dtype="float32",
        world_size=1, config_sha256="", checkpoint_sha256="",
    )  # fmt: skip
    check_fingerprint(recorded, Host(torch="2.13.0", device="cuda", capability="12.0"))
    with pytest.raises(IncompatibleError, match="for RTX cards") as refused:
        check_fingerprint(recorded, Host(torch="2.13.0", device="cpu", capability="AVX2"))
    assert "compute capability 8.6 or 12.0" in (refused.value.fix or "")
    with pytest.raises(IncompatibleError, match=r"capability: built for 8.6,12.0, here 9.0"):
        check_fingerprint(recorded, Host(torch="2.13.0", device="cuda", capability="9.0"))


def arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    x, window, rows = (torch.randn(size, 3, generator=generator) for size in (3, 4, 9))
    return x, window, rows, torch.randperm(9, generator=generator)[:3]


class Session:
    """A context of the stand-in."""

    def __init__(self, model: bytes) -> None:
        self._session = onnxruntime.InferenceSession(model)
        self._addresses: dict[str, int] = {}
        self.memory = 0

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = size

    def set_tensor_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        assert self.memory == 640
        feeds = {}
        for each in self._session.get_inputs():
            kind = {"tensor(int64)": np.int64, "tensor(bool)": np.bool_, "tensor(float)": np.float32}[
                each.type
            ]
            feeds[each.name] = self._view(each.name, tuple(each.shape), kind).copy()
        values = self._session.run(None, feeds)
        for each, value in zip(self._session.get_outputs(), values, strict=True):
            self._view(each.name, value.shape, np.float32)[...] = value
        return True

    def _view(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = (ctypes.c_char * size).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype=dtype).reshape(shape)


class StandIn:
    """The calls of the library that the loader makes."""

    __version__ = "1.2.3"
    contexts = 0

    class ILogger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    ComputeCapability = SimpleNamespace(SM86=1, SM89=2)
    DataType = SimpleNamespace(FLOAT=1, HALF=2, BF16=3, INT64=4, INT32=5, INT8=6, UINT8=7, BOOL=8)
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=2)

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, plan: bytes) -> Any:
            if plan == b"another":
                self._logger.log(1, "the plan is for another driver")
                return None
            graph = onnx.load_from_string(plan).graph
            names = [each.name for each in (*graph.input, *graph.output)]
            shapes = {
                each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim]
                for each in (*graph.input, *graph.output)
            }

            def create_execution_context(strategy: int) -> Session:
                assert strategy == 2
                StandIn.contexts += 1
                return Session(plan)

            return SimpleNamespace(
                num_io_tensors=len(names),
                device_memory_size_v2=640,
                get_tensor_name=names.__getitem__,
                get_tensor_shape=shapes.__getitem__,
                get_tensor_dtype=lambda name: 1,
                create_execution_context=create_execution_context,
            )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "import_library", lambda name: StandIn)
    monkeypatch.setattr(loader, "gpu", lambda device: SimpleNamespace(capability=(8, 9)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    StandIn.contexts = 0
    yield


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sliding, Path]:
    torch.manual_seed(2)
    module = Sliding()
    with torch.no_grad():
        program = torch.export.export(module, arguments(), strict=False)
    model = to_onnx(program, "test.graph")
    layout = json.loads(model.metadata_props[0].value)
    names = [each.name for each in model.graph.input]
    plan = model.SerializeToString()
    count = len(names) - layout["weights"]
    header = EngineHeader(
        library="tensorrt_rtx",
        version="1.2.3",
        capabilities=("8.6", "8.9"),
        inputs=tuple(names[:count]),
        weights=tuple(name.removeprefix("model.") for name in names[count:]),
        outputs=tuple(each.name for each in model.graph.output),
        state=tuple(index for index, _ in layout["state"]),
        plan_bytes=len(plan),
    )
    path = tmp_path_factory.mktemp("sliding") / "sliding.trt"
    write_engine(path, EngineFile(header=header, plan=plan))
    return module, path


def test_an_engine_reads_and_writes_the_tensors_it_is_given(
    sliding: tuple[Sliding, Path], stand_in: None
) -> None:
    module, path = sliding
    engine = loader.TensorRtEngine(path, CPU)
    assert sorted(engine.constants()) == ["bias", "weight"]
    engine.bind(module.model.state_dict())
    for _ in range(2):
        mine, theirs = arguments(), arguments()
        addresses = [each.data_ptr() for each in mine]
        with torch.no_grad():
            expected = module(*theirs)
        for value, reference in zip((*engine.run(mine), *mine), (*expected, *theirs), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
        assert [each.data_ptr() for each in mine] == addresses
    assert StandIn.contexts == 1
    x, window, rows, places = arguments()
    strided = torch.zeros(3, 9).t().copy_(rows)
    engine.run([x, window, strided, places])
    assert torch.equal(strided, rows.index_copy(0, places, 2 * x))
    weight = torch.zeros(5, 3)
    engine.bind({"weight": weight, "bias": torch.arange(5.0)})
    x, window, rows, places = arguments()
    before = window.sum()
    torch.testing.assert_close(
        engine.run([x, window, rows, places])[0], torch.arange(5.0).expand(4, 5) + before
    )


@pytest.fixture
def on_gpu(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export path for a GPU with tensors on the CPU; the plan that is built is an ONNX model of the program."""
    card = SimpleNamespace(capability=(8, 9))
    monkeypatch.setattr(ExportRecipe, "device", "cpu")
    monkeypatch.setattr(tensorrt_backend, "compiler_problem", lambda *words: None)
    monkeypatch.setattr(tensorrt_backend, "compiling_library", lambda: "tensorrt_rtx")
    monkeypatch.setattr(tensorrt_backend, "import_library", lambda name: StandIn)
    monkeypatch.setattr(tensorrt_program, "version", lambda name: "2.11.0")
    monkeypatch.setattr(tensorrt_program, "import_library", lambda name: StandIn)
    monkeypatch.setattr(tensorrt_program, "gpu", lambda: card)
    monkeypatch.setattr(tensorrt_program, "build_plan", build_model)


def build_model(program: torch.export.ExportedProgram, inputs: Sequence[str], *words: Any) -> bytes:
    """In place of torch-tensorrt and TensorRT's builder: the program as an ONNX model with their names."""
    assert not program.state_dict and program.example_inputs is None, "no weights are saved"
    graph = (model := to_onnx(program, "")).graph
    names = dict(zip(program.graph_signature.user_inputs, inputs, strict=True))
    names |= {each.name: f"output{index}" for index, each in enumerate(graph.output)}
    for node in graph.node:
        for held in (node.input, node.output):
            held[:] = [names.get(name, name) for name in held]
    for each in (*graph.input, *graph.output):
        each.name = names.get(each.name, each.name)
    content: bytes = model.SerializeToString()
    return content


def replay_on_stand_in(
    engine: Path, backend: str, spec: GraphSpec, weights: Any, calls: Any, device: str
) -> list[dict[str, Tensor]]:
    assert backend == "tensorrt"
    loaded = loader.TensorRtEngine(engine, CPU)
    loaded.bind(load_file(weights[0]))
    results = []
    for call in calls:
        tensors = {each.name: call[each.name].clone() for each in (*spec.inputs, *spec.state)}
        values = loaded.run([*tensors.values()])
        results.append({each.name: value for each, value in zip(spec.outputs, values, strict=True)})
        results[-1] |= {f"state.{each.name}": tensors[each.name] for each in spec.state}
    return results


def prepare(
    graph: str, checkpoint: Checkpoint, folder: Path, **options: Any
) -> tuple[ExportRecipe, GraphTask, GraphDef]:
    """The recipe, the task and the definition of a graph whose weights are written."""
    name, _, method = graph.partition(".")
    stage = find(name)
    config = stage.config(checkpoint)
    for each in ("weights", "engines", "goldens"):
        (folder / each).mkdir()
    words: dict[str, Any] = {"backend": ("tensorrt",), **options}
    made = ExportRecipe(checkpoint=checkpoint.root, output=folder / "out", **words)
    found, weights = stage_options(made), "weights/w"
    write_weights(checkpoint, stage, config, Shard(), found.dtype, folder / weights)
    task = GraphTask(
        recipe=made, stage=name, graph=method, folder=folder, weights=(weights,), backend="tensorrt"
    )
    return made, task, graph_of(stage, config, method, found)


@pytest.mark.parametrize(
    "graph",
    [
        "talker.prefill",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("cfm.aggregate", "talker.step", "audio_vae.stream")
        ),
    ],
)
def test_a_graph_is_built_for_a_gpu_with_the_states_of_a_batch_and_agrees_with_float32(
    graph: str, on_gpu: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Parity is measured as for AOTInductor: by `check_graph`, at the golden's sizes, in pools of three rows."""
    made, task, plan = prepare(
        graph, checkpoint, tmp_path, target="cuda", batch_sizes=(1, 2), prefill_chunk_size=32
    )
    records = []
    for sizes in stage_options(made).engine_sizes(plan):
        built = build_engine(task, sizes).record
        records.append(built)
        file = read_engine(tmp_path / built.file)
        shapes = [each.type.tensor_type.shape.dim for each in onnx.load_from_string(file.plan).graph.input]
        assert not [dim.dim_param for dims in shapes for dim in dims if dim.dim_param], "all dims are static"
        assert file.header.capabilities == ("8.9",)
        names = [each.name for each in plan.spec.inputs]
        assert file.header.slots == (None if plan.slots is None else names.index(plan.slots))
        assert (built.backend, built.dims) == ("tensorrt", sizes) and built.cost
    result = check_graph(task, tuple(records), replay_on_stand_in)
    assert result.record.parity.compiled < 1e-5 and (tmp_path / result.record.golden).exists()


def test_without_a_card_the_module_stands_for_its_engines(
    on_gpu: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    made, task, plan = prepare("cfm.speaker", checkpoint, tmp_path, target="rtx:sm86,sm89", dtype="bfloat16")
    (sizes,) = stage_options(made).engine_sizes(plan)
    built = build_engine(task, sizes).record
    assert read_engine(tmp_path / built.file).header.capabilities == ("8.6", "8.9") and built.dims == sizes

    def replay(*words: Any) -> Any:
        raise AssertionError("no card is here")

    parity = check_graph(task, (built,), replay).record.parity
    assert 0 < parity.compiled == parity.eager < 1e-2


def test_only_the_rows_of_a_batch_are_read_and_written(
    on_gpu: None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A pool of any size: two of its rows, not in order, and row 0, which is padding."""
    stage = find("talker")
    config = stage.config(checkpoint)
    options = StageOptions(static_buckets=True, batch_sizes=(1, 3))
    plan = graph_of(stage, config, "step", options)
    module = float32_module(stage, config, checkpoint)
    backend = BACKEND.for_graph(plan, {"B": 3}, "cuda")
    assert dict(backend.pool_dims) == {"S": 4}
    program = trace_graph(backend, plan, module, stage="talker", sizes={"B": 3}, device="cpu")
    path = tmp_path / "step.trt"
    backend.compile(program, path, device="rtx:sm86,sm89", cache=None, where="talker.step")
    assert read_engine(path).header.capabilities == ("8.6", "8.9")
    engine = loader.TensorRtEngine(path, CPU)
    engine.bind(module.state_dict())
    for size in (7, 11):
        example = plan.example({"B": 3, "S": size}, torch.Generator().manual_seed(size))
        example["slots"] = torch.tensor([5, 2, 0])
        before = {name: each.clone() for name, each in example.items()}
        theirs = {name: each.clone() for name, each in example.items()}
        with torch.no_grad():
            (expected,) = getattr(module, plan.method)(*theirs.values())
        (got,) = engine.run(list(example.values()))
        assert relative_error(got[:2], expected[:2]) < 1e-5
        assert torch.equal(example["slots"], before["slots"])
        for each in plan.spec.state:
            assert relative_error(example[each.name][1:], theirs[each.name][1:]) < 1e-5
            untouched = [row for row in range(1, size) if row not in (5, 2)]
            assert torch.equal(example[each.name][untouched], before[each.name][untouched])
            assert not torch.equal(example[each.name][5], before[each.name][5])
    assert StandIn.contexts == 1, "one for every size of the pool"
    with pytest.raises(WorkerError, match=r"takes .*slots.* of \[3\], not of \[2\]|of \[3, "):
        engine.run([each[:2] if each.shape[0] == 3 else each for each in example.values()])


def test_an_engine_for_a_gpu_is_of_one_version_and_one_capability(
    on_gpu: None, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cache of an export has no engine for another version or GPU, and builds a damaged one again."""
    stage = find("cfm")
    options = StageOptions(static_buckets=True)
    config = stage.config(checkpoint)
    plan = graph_of(stage, config, "speaker", options)
    module = float32_module(stage, config, checkpoint)
    (sizes,) = plan.spec.bucket_sizes()
    program = trace_graph(BACKEND, plan, module, stage="cfm", sizes=sizes, device="cpu")
    built: list[int] = []
    monkeypatch.setattr(
        tensorrt_program, "build_plan", lambda *words: (built.append(len(built)), build_model(*words))[1]
    )
    engine = tmp_path / "engine.trt"

    def compiled() -> float:
        return BACKEND.compile(program, engine, device="cuda", cache=tmp_path / "cache", where="cfm.speaker")

    (tmp_path / "cache").mkdir()
    assert compiled() > 0 and compiled() == 0.0 and built == [0]
    monkeypatch.setattr(tensorrt_program, "gpu", lambda: SimpleNamespace(capability=(9, 0)))
    assert compiled() > 0 and read_engine(engine).header.capabilities == ("9.0",)
    monkeypatch.setattr(StandIn, "__version__", "1.2.4")
    assert compiled() > 0 and built == [0, 1, 2]
    assert read_engine(engine).header.version == "1.2.4"
    for kept in (tmp_path / "cache").iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])
    assert compiled() > 0 and compiled() == 0.0


def changed(path: Path, folder: Path, *, plan: bytes | None = None, **fields: Any) -> Path:
    file = read_engine(path)
    content = file.plan if plan is None else plan
    header = dataclasses.replace(file.header, plan_bytes=len(content), **fields)
    write_engine(folder / "changed.trt", EngineFile(header=header, plan=content))
    return folder / "changed.trt"


def test_an_engine_of_another_version_gpu_or_library_is_refused(
    sliding: tuple[Sliding, Path], stand_in: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = sliding[1]
    for fields, message, fix in (
        ({"version": "9.9"}, "built by TensorRT for RTX 9.9, here is 1.2.3", "pip install 'tensorrt-rtx==9.9'"),
        ({"capabilities": ("12.0",)}, "for a GPU of compute capability 12.0, here is 8.9", "run it on such a GPU"),
        ({"library": "other"}, "built by other, which this mingc does not know", "export again"),
        ({"plan": b"another"}, "refuses the engine: the plan is for another driver", "export again"),
    ):  # fmt: skip
        with pytest.raises(ArtifactError, match=message) as refused:
            loader.TensorRtEngine(changed(path, tmp_path, **fields), CPU)
        assert fix in (refused.value.fix or "")

    def absent(name: str) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(loader, "import_library", absent)
    with pytest.raises(ArtifactError, match="needs TensorRT for RTX, which cannot be imported") as refused:
        loader.TensorRtEngine(path, CPU)
    assert refused.value.fix == "pip install 'tensorrt-rtx==1.2.3'"


def test_a_damaged_file_is_refused(sliding: tuple[Sliding, Path], tmp_path: Path) -> None:
    content = sliding[1].read_bytes()
    broken = tmp_path / "broken.trt"
    for part, message in (
        (content[:-1], r"has \d+ bytes, its header states \d+"),
        (content + b"x", r"has \d+ bytes, its header states \d+"),
        (content[:9], "not a TensorRT engine of mingc"),
        (content.replace(b'"version"', b'"another"', 1), "header of the engine is damaged"),
        (content[:40], "header of the engine is damaged"),
        (content[:8] + struct.pack("<I", 100_000) + b"[" * 100_000, "header of the engine is damaged"),
        (b"ONNX" + content, "not a TensorRT engine of mingc"),
        (b"", "not a TensorRT engine of mingc"),
    ):
        broken.write_bytes(part)
        with pytest.raises(ArtifactError, match=message):
            read_engine(broken)


GRAPHS = (
    "vision_encoder.encode", "audio_encoder.encode", "talker.prefill", "talker.step", "cfm.aggregate", "cfm.sample",
    "audio_vae.decode", "audio_vae.encode", "audio_vae.stream",
)  # fmt: skip


@needs_torch_tensorrt
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "graph",
    [
        "cfm.speaker",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in GRAPHS),
    ],
)
def test_torch_tensorrt_converts_every_graph_for_cards_that_are_not_here(
    graph: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """No card runs the plans; torch runs the programs that they were built from."""
    name, _, method = graph.partition(".")
    stage = find(name)
    config = stage.config(checkpoint)
    options = StageOptions(static_buckets=True, batch_sizes=(1, 2), dtype=dtype)
    plan = graph_of(stage, config, method, options)
    write_weights(checkpoint, stage, config, Shard(), dtype, tmp_path / "weights")
    module = load_module(stage, config, Shard(), tmp_path / "weights")
    sizes = options.engine_sizes(plan)[0]
    backend = BACKEND.for_graph(plan, sizes, "rtx:sm86,sm89")
    program = trace_graph(backend, plan, module, stage=name, sizes=sizes, device="cpu")
    path, words = tmp_path / "engine.trt", {"cache": tmp_path, "where": graph}
    assert backend.compile(program, path, device="rtx:sm86,sm89", **words) > 0
    assert backend.compile(program, path, device="rtx:sm86,sm89", **words) == 0.0, "from the cache"
    file = read_engine(path)
    assert file.header.capabilities == ("8.6", "8.9") and file.plan
    assert len(file.header.outputs) == len(plan.spec.outputs) + len(file.header.state)
    largest = max(
        (module.state_dict()[weight] for weight in file.header.weights), key=lambda each: each.nbytes
    )
    stored = largest.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    some = stored[len(stored) // 2 :][:64]
    assert some.strip(b"\0") and some not in file.plan, "weights are inputs"
    example = plan.example(
        {**plan.check_dims, **sizes, **backend.pool_dims}, torch.Generator().manual_seed(3)
    )
    theirs = {name: each.clone() for name, each in example.items()}
    _, weights, state, pure = without_weights(program, graph)
    values = [module.state_dict()[each.removeprefix("model.")] for each in weights]
    with torch.no_grad():
        expected = getattr(module, plan.method)(*theirs.values())
        got = pure.module()(*example.values(), *values)
    for value, reference in zip(
        got, (*expected, *([*theirs.values()][index] for index in state)), strict=True
    ):
        torch.testing.assert_close(value, reference)


@needs_torch_tensorrt
def test_a_graph_that_torch_tensorrt_refuses_is_an_error_of_the_export(
    tmp_path: Path,
) -> None:
    with torch.no_grad():
        program = torch.export.export(Spectrum(), (torch.randn(2, 8),), strict=False)
    with pytest.raises(CompileError, match=r"TensorRT for RTX .*torch-tensorrt [\d.]+\S* .*fft") as refused:
        BACKEND.compile(program, tmp_path / "x.trt", device="rtx:sm89", cache=None, where="test.graph")
    assert refused.value.where == "test.graph" and "--backend aoti:STAGE" in (refused.value.fix or "")
