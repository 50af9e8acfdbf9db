"""ONNX engines compared with eager modules: state, weights, other dims; what is refused, and what a process loads."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import onnx
import pytest
import torch
from engine_checks import CPU, check_engine
from mingc_command import CHECKPOINT, REPOSITORY, mingc, mingc_here
from safetensors import safe_open
from safetensors.torch import save_file
from sliding_window import Sliding
from stage_checks import graph_of
from torch import Tensor, nn

from mingc.artifacts.spec import Dim, DType, GraphSpec
from mingc.errors import ArtifactError, CompileError, ConfigError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile import onnx_program
from mingc.export.compile.backends import onnx as onnx_backend
from mingc.export.compile.backends.onnx import BACKEND
from mingc.export.compile.trace import share_weights
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stage import Shard
from mingc.export.stages import find
from mingc.export.tasks.early_refusals import early_refusals
from mingc.export.weights.loading import float32_module
from mingc.runtime.engines.backends import onnx as onnx_loader
from mingc.runtime.engines.backends.onnx import OnnxEngine, load

TOLERANCE = 1e-5
# One graph of each kind: state in slots, pages and rings, experts, attention with masks, a solver, an inverse FFT.
GRAPHS = {
    "thinker.prefill_attention": ({"T": 64}, {}),
    "thinker.decode_experts": ({}, {}),
    "talker.step": ({"B": 1}, {"B": 2}),
    "vision_encoder.encode": ({}, {}),
    "audio_vae.stream": ({}, {}),
}


SLOW = ("talker.step", "vision_encoder.encode", "audio_vae.stream")  # to translate


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if name in SLOW else []) for name in GRAPHS],
)
def test_a_graph_agrees_with_its_module(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    stage_name, _, graph = name.partition(".")
    stage = find(stage_name)
    config = stage.config(checkpoint)
    plan = graph_of(stage, config, graph)
    module = float32_module(stage, config, checkpoint, submodule=plan.spec.layer_instances[0])
    # As in a weights file: the reference keeps routed experts in the checkpoint's dtype.
    module = module.float()
    shared = share_weights(plan, module)
    sizes = [*({**shared.check_dims, **each} for each in GRAPHS[name]), shared.trace_dims]
    check_engine(module, shared, sizes, tmp_path, TOLERANCE, BACKEND)
    (file,) = tmp_path.iterdir()
    model = onnx.load(file)
    floats = [each for each in model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    assert sum(len(each.raw_data) for each in floats) < 1024, "no weight is in the model"


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sliding, Path]:
    torch.manual_seed(2)
    module, path = Sliding(), tmp_path_factory.mktemp("sliding") / "sliding.onnx"
    compile_program(module, sliding_arguments(3), ({0: "T"}, {}, {}, {0: "T"}), path)
    return module, path


def sliding_arguments(count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    x, window, rows = (torch.randn(size, 3, generator=generator) for size in (count, 4, 9))
    return x, window, rows, torch.randperm(9, generator=generator)[:count]


def compile_program(
    module: nn.Module, arguments: tuple[Tensor, ...], dims: tuple[Mapping[int, str], ...], path: Path
) -> None:
    named = {name: torch.export.Dim(name, min=1, max=1 << 16) for each in dims for name in each.values()}
    shapes = tuple({axis: named[name] for axis, name in each.items()} for each in dims)
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
    BACKEND.compile(program, path, device="cpu", cache=None, where="test.graph")


def test_state_is_written_in_place_and_old_values_stay_readable(sliding: tuple[Sliding, Path]) -> None:
    module, path = sliding
    engine = load(path, CPU)
    engine.bind(module.model.state_dict())
    for count in (3, 1, 6):
        mine, theirs = sliding_arguments(count), sliding_arguments(count)
        addresses = [each.data_ptr() for each in mine]
        with torch.no_grad():
            expected = module(*theirs)
        for value, reference in zip((*engine.run(mine), *mine), (*expected, *theirs), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
        assert [each.data_ptr() for each in mine] == addresses
    document = json.loads(onnx.load(path).metadata_props[0].value)
    assert document["state"] == [[1, False], [2, True]], "only rows that are scattered may share memory"


def test_state_that_is_not_contiguous_is_written_as_well(sliding: tuple[Sliding, Path]) -> None:
    module, path = sliding
    engine = load(path, CPU)
    engine.bind(module.model.state_dict())
    x, window, rows, places = sliding_arguments(2)
    strided = torch.zeros(3, 9).t().copy_(rows)
    engine.run([x, window.clone(), strided, places])
    with torch.no_grad():
        module(x, window, rows, places)
    torch.testing.assert_close(strided, rows)


def test_an_engine_runs_with_the_weights_that_it_is_bound_to(sliding: tuple[Sliding, Path]) -> None:
    _, path = sliding
    engine = load(path, CPU)
    assert {*engine.constants()} == {"weight", "bias"}
    weight, bias = torch.zeros(5, 3), torch.arange(5.0)
    engine.bind({"weight": weight, "bias": bias})
    x, window, rows, places = sliding_arguments(2)
    before = window.sum()
    torch.testing.assert_close(engine.run([x, window, rows, places])[0], bias.expand(4, 5) + before)
    bias += 1  # the engine reads the tensor itself
    before = window.sum()
    torch.testing.assert_close(engine.run([x, window, rows, places])[0], bias.expand(4, 5) + before)


class Order:
    """Streams that only note in which order they wait for each other."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.own, self.current = Stream(self, "own"), Stream(self, "current")


@dataclass
class Stream:
    order: Order
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.order.waits.append(f"{self.name} waits for {other.name}")


def as_on_cuda(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[OnnxEngine, Order]:
    """An engine with the code for CUDA devices, over memory of the CPU."""
    order = Order()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: order.own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: order.current)
    open_session = onnx_loader._open_session
    monkeypatch.setattr(
        onnx_loader, "_open_session", lambda path, device, stream: open_session(path, CPU, None)
    )
    engine = OnnxEngine(path, torch.device("cuda"))
    engine._device = CPU
    return engine, order


def test_on_cuda_an_engine_waits_for_torch_and_torch_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    module, path = Sliding(), tmp_path / "fixed.onnx"
    compile_program(module, sliding_arguments(3), ({}, {}, {}, {}), path)
    engine, order = as_on_cuda(path, monkeypatch)
    assert not engine.is_capturable and load(path, CPU).is_capturable
    engine.bind(module.model.state_dict())
    for is_strided in (False, True):
        mine, theirs = sliding_arguments(3), sliding_arguments(3)
        if is_strided:
            mine = (*mine[:2], torch.zeros(3, 9).t().copy_(mine[2]), mine[3])
        addresses = [each.data_ptr() for each in mine]
        with torch.no_grad():
            expected = module(*theirs)
        for value, reference in zip((*engine.run(mine), *mine), (*expected, *theirs), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
        assert [each.data_ptr() for each in mine] == addresses
    assert order.waits == ["own waits for current", "current waits for own"] * 2
    first, second = (engine.run(sliding_arguments(3)) for _ in range(2))
    assert not {each.data_ptr() for each in first} & {each.data_ptr() for each in second}


def test_on_cuda_results_without_fixed_sizes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = nn.Module(), tmp_path / "rows.onnx"
    module.model = nn.Linear(3, 5)
    module.forward = lambda x: module.model(x)  # type: ignore[method-assign]
    compile_program(module, (torch.ones(4, 3),), ({0: "T"},), path)
    with pytest.raises(
        ArtifactError, match=r"the engine gives .*\[.*, 5\]; on CUDA sizes must be fixed"
    ) as refused:
        as_on_cuda(path, monkeypatch)
    assert refused.value.where == str(path) and refused.value.fix == "export again with --target cuda"


@dataclass
class Session:
    """What ONNX Runtime says about the operators of a model: their providers and names."""

    nodes: tuple[tuple[str, str], ...]
    providers: tuple[str, ...] = ("CUDAExecutionProvider", "CPUExecutionProvider")

    def get_providers(self) -> list[str]:
        return list(self.providers)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def part(provider: str, name: str) -> Any:
            return SimpleNamespace(ep_name=provider, get_nodes=lambda: [SimpleNamespace(op_type=name)])

        return [part(*each) for each in self.nodes]


def test_operators_that_would_run_on_the_cpu_are_refused_but_for_shapes() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    good = Session(((cuda, "Gemm"), (cpu, "Shape"), (cpu, "Concat")))
    onnx_loader._check_device(good, "1.31.1", Path("x.onnx"))
    bad = Session((*good.nodes, (cpu, "Softmax"), (cpu, "Attention"), (cpu, "Softmax")))
    with pytest.raises(ArtifactError, match=r"1\.31\.1 would run Attention, Softmax on the CPU") as refused:
        onnx_loader._check_device(bad, "1.31.1", Path("x.onnx"))
    assert refused.value.where == "x.onnx" and "--backend aoti:STAGE" in (refused.value.fix or "")
    with pytest.raises(ArtifactError, match="cannot run models on CUDA devices here") as refused:
        onnx_loader._check_device(Session((), (cpu,)), "1.31.1", Path("x.onnx"))
    assert "mingc[onnx-gpu]" in (refused.value.fix or "")


def test_an_engine_for_cuda_needs_a_runtime_for_it(sliding: tuple[Sliding, Path]) -> None:
    """The tests have the ONNX Runtime for CPUs, which only warns of the provider that it lacks."""
    stream: Any = SimpleNamespace(cuda_stream=0)
    with warnings.catch_warnings(), pytest.raises(ArtifactError, match="cannot run models on CUDA devices"):
        warnings.simplefilter("ignore")
        onnx_loader._open_session(sliding[1], torch.device("cuda"), stream)


def anonymous_kib() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [each for each in lines if each.startswith("RssAnon")]
    return int(line.split()[1])


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    module = nn.Module()
    module.model = nn.Linear(4096, 4096)  # 64 MiB
    module.forward = lambda x: module.model(x)  # type: ignore[method-assign]
    compile_program(module, (torch.ones(2, 4096),), ({},), tmp_path / "wide.onnx")
    save_file(module.model.state_dict(), tmp_path / "weights.safetensors")
    before = anonymous_kib()
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in ("weight", "bias")}
    engine = load(tmp_path / "wide.onnx", CPU)
    engine.bind(weights)
    (out,) = engine.run([torch.ones(2, 4096)])
    grown = anonymous_kib() - before
    torch.testing.assert_close(out, module(torch.ones(2, 4096)), rtol=1e-4, atol=1e-4)
    assert grown < 24 << 10, f"{grown} KiB beside the mapped file"


def test_a_process_with_onnx_engines_loads_no_compiler(sliding: tuple[Sliding, Path]) -> None:
    code = (
        "import json, sys, pathlib, torch\n"
        "from mingc.runtime.engines.backends import load_engine\n"
        "before = {*sys.modules}\n"
        f"engine = load_engine('onnx', pathlib.Path({str(sliding[1])!r}), torch.device('cpu'))\n"
        "engine.bind({'weight': torch.zeros(5, 3), 'bias': torch.zeros(5)})\n"
        "engine.run([torch.ones(2, 3), torch.ones(4, 3), torch.ones(9, 3), torch.arange(2)])\n"
        "print(json.dumps(sorted({*sys.modules} - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert "onnxruntime" in loaded and not loaded & {"onnx", "onnxscript", "onnx_ir"}
    assert not {"torch._dynamo", "torch._inductor", "torch.onnx"} & {*json.loads(done.stdout)}


class Transform(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x).abs()


class GatherWeight(nn.Module):
    """Gathers a matrix of 128 KiB for each of up to 65,536 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, 128, 256))

    def forward(self, ids: Tensor) -> Tensor:
        return self.experts[ids].sum(-1)


class Counter(nn.Module):
    """Counts its calls in a buffer, which is neither input nor state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


def test_a_graph_that_writes_its_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="the graph writes calls of its module"):
        compile_program(Counter(), (torch.zeros(3),), ({},), tmp_path / "x.onnx")
    assert not [*tmp_path.iterdir()]


def test_an_operator_that_onnx_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CompileError, match=r"torch\.onnx cannot translate the graph(.|\n)*linalg_eig"
    ) as refused:
        compile_program(Transform(), (torch.randn(3, 3),), ({},), tmp_path / "x.onnx")
    assert refused.value.where == "test.graph" and "--backend aoti:STAGE" in (refused.value.fix or "")
    assert not [*tmp_path.iterdir()]


def test_a_graph_that_gathers_too_many_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"gathers 8 GiB of weights, \[65536, 128, 256\] torch.float32"):
        compile_program(GatherWeight(), (torch.tensor([1, 2, 1]),), ({0: "T"},), tmp_path / "x.onnx")


def test_large_gathers_are_refused_before_anything_is_built() -> None:
    """Only a graph whose weights and sizes could be too large is traced, and without values."""
    traced: list[bool] = []

    def check(rows: int) -> None:
        with torch.device("meta"):
            module, ids = GatherWeight(), torch.zeros(3, dtype=torch.int64)

        def trace() -> torch.export.ExportedProgram:
            traced.append(True)
            dim = torch.export.Dim("T", min=1, max=rows)
            return torch.export.export(module, (ids,), dynamic_shapes=({0: dim},), strict=False)

        spec = GraphSpec(name="graph", inputs=(), outputs=(), dims=(Dim(name="T", minimum=1, maximum=rows),))
        plan: Any = SimpleNamespace(spec=spec)
        BACKEND.check_graph(plan, module, trace, where="test.graph")

    check(4096)
    assert not traced
    check(32768)  # exactly the limit, for rows; the bound is larger
    assert traced
    with pytest.raises(CompileError, match="gathers 8 GiB of weights") as refused:
        check(65536)
    assert refused.value.where == "test.graph"


def test_the_thinker_of_the_released_dims_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """Its experts, gathered for a chunk of 256 tokens, take 256 × 8 × 2 × 1024 × 4096 float32 values: 64 GiB."""
    released = ExportRecipe(
        checkpoint=REPOSITORY / "benchmarks" / "released",
        output=tmp_path,
        synthetic=True,
        backend=("onnx",),
        stages=("thinker",),
    )
    stage: Any = find("thinker")
    config = stage.config(open_source(released))
    plan = graph_of(stage, config, "prefill_experts", stage_options(released), first_shard(stage, released))
    with pytest.raises(CompileError, match=r"the graph gathers 64 GiB of weights") as refused:
        early_refusals(released, stage, config, [plan])
    assert refused.value.where == "thinker.prefill_experts"
    assert "AOTInductor, which reads them in place: --backend aoti:STAGE" in (refused.value.fix or "")


@pytest.mark.parametrize("quantize", ["thinker=fp8", "thinker=int4"])
def test_quantized_weights_are_refused_before_anything_is_built(quantize: str, tmp_path: Path) -> None:
    """Attention is stored in FP8 with both."""
    found = ExportRecipe(
        checkpoint=CHECKPOINT, output=tmp_path, backend=("onnx",), stages=("thinker",), quantize=(quantize,)
    )
    stage: Any = find("thinker")
    config = stage.config(open_source(found))
    plan = graph_of(stage, config, "decode_attention", stage_options(found), first_shard(stage, found))
    with pytest.raises(CompileError, match=r"weights are stored as torch\.float8_e4m3fn") as refused:
        early_refusals(found, stage, config, [plan])
    assert refused.value.where == "thinker.decode_attention"
    assert "leave out --quantize" in (refused.value.fix or "")
    assert early_refusals(replace(found, quantize=()), stage, config, [plan]) == {
        "thinker.decode_attention": {}
    }


def test_the_loader_binds_every_dtype_that_is_not_refused() -> None:
    specified = {getattr(torch, name) for name in get_args(DType)}
    assert {*onnx_loader._DTYPES} == specified - {onnx_program.UNBOUND_DTYPE}
    assert {*onnx_loader._TYPES.values()} == {*onnx_loader._DTYPES}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weight: weight.bfloat16(), r"\[5, 3\], the weights files have torch\.bfloat16 \[5, 3\]"),
        (lambda weight: weight.int(), r"torch\.int32 \[5, 3\]"),
        (lambda weight: weight[:, :2], r"torch\.float32 \[5, 2\]"),
        (lambda weight: weight.flatten(), r"torch\.float32 \[15\]"),
    ],
)
def test_weights_of_another_model_are_refused_when_they_are_bound(
    sliding: tuple[Sliding, Path], change: Any, says: str
) -> None:
    engine = load(sliding[1], CPU)
    with pytest.raises(
        ArtifactError, match=rf"the engine takes weight as tensor\(float\) .*{says}"
    ) as refused:
        engine.bind({"weight": change(torch.zeros(5, 3)), "bias": torch.zeros(5)})
    assert refused.value.where == str(sliding[1]) and "of two exports" in (refused.value.fix or "")


# The model has four inputs and two weights; two outputs and two states.
@pytest.mark.parametrize(
    "change",
    [
        {"weights": -1},
        {"weights": 7},
        {"outputs": 1},
        {"outputs": 3},
        {"outputs": -2, "state": [[0, False], [1, False], [2, False], [3, False], [1, True], [2, True]]},
        {"state": []},
        {"state": [[1, False]]},
        {"state": [[1, False], [4, True]]},
        {"state": [[-1, False], [2, True]]},
        {"state": [[2, False], [2, True]]},
        {"state": [1, 2]},
        {"state": None},
        {"weights": "many"},
    ],
)
def test_metadata_that_do_not_fit_the_model_are_refused(
    sliding: tuple[Sliding, Path], change: dict[str, Any], tmp_path: Path
) -> None:
    def wrong(model: Any) -> None:
        (entry,) = model.metadata_props
        entry.value = json.dumps({**json.loads(entry.value), **change})

    with pytest.raises(ArtifactError, match="an ONNX model that mingc did not export"):
        load(damaged(sliding[1], tmp_path, wrong), CPU)


def test_a_model_that_reads_other_files_is_refused(sliding: tuple[Sliding, Path], tmp_path: Path) -> None:
    """Nothing outside the model and the weights file of the artifact is read."""

    def elsewhere(location: str) -> Any:
        def change(model: Any) -> None:
            tensor = model.graph.initializer.add(name="elsewhere", data_type=onnx.TensorProto.FLOAT, dims=[2])
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", "0"), ("length", "8")):
                tensor.external_data.add(key=key, value=value)
            model.graph.node.add(op_type="Identity", input=["elsewhere"], output=["read"])

        return change

    (tmp_path / "deep").mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    for location in (str(tmp_path / "secret"), "../secret"):
        path = tmp_path / "deep" / "x.onnx"
        model = onnx.load(sliding[1])
        elsewhere(location)(model)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ArtifactError, match="refuses the engine"):
            load(path, CPU)


def damaged(path: Path, folder: Path, change: Any) -> Path:
    model = onnx.load(path)
    change(model)
    onnx.save(model, folder / "damaged.onnx")
    return folder / "damaged.onnx"


def test_a_model_of_an_unknown_opset_is_refused(sliding: tuple[Sliding, Path], tmp_path: Path) -> None:
    def newer(model: Any) -> None:
        (own,) = [each for each in model.opset_import if each.domain == ""]
        own.version = 999

    with pytest.raises(
        ArtifactError, match=r"ONNX Runtime [\d.]+ refuses the engine(.|\n)*[Oo]pset 999"
    ) as refused:
        load(damaged(sliding[1], tmp_path, newer), CPU)
    assert "pip install --upgrade 'mingc[onnx]'" in (refused.value.fix or "")


def test_a_model_of_other_programs_is_refused(sliding: tuple[Sliding, Path], tmp_path: Path) -> None:
    foreign = damaged(sliding[1], tmp_path, lambda model: model.ClearField("metadata_props"))
    with pytest.raises(ArtifactError, match="an ONNX model that mingc did not export"):
        load(foreign, CPU)
    foreign.write_bytes(foreign.read_bytes()[:200])
    with pytest.raises(ArtifactError, match="refuses the engine"):
        load(foreign, CPU)


def test_a_missing_package_is_named_with_its_installation(
    sliding: tuple[Sliding, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ArtifactError, match="needs ONNX Runtime") as refused:
        load(sliding[1], CPU)
    assert refused.value.fix == "pip install 'mingc[onnx]'"
    monkeypatch.setattr(onnx_backend, "_PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(
        ConfigError, match=r"needs no_such_package, not installed: pip install 'mingc\[onnx\]'"
    ):
        ExportRecipe(checkpoint=tmp_path, output=tmp_path, backend=("onnx:cfm",))


@pytest.mark.parametrize(
    ("target", "dtype", "reason"),
    [
        ("rtx:sm89", "float32", "were not run on rtx:sm89"),
        ("cpu", "bfloat16", "lack bfloat16"),
        ("cuda", "bfloat16", "engines were not run in bfloat16; use --dtype float32"),
        ("cuda", "float32", r"needs onnxruntime-gpu, not installed: .*pip install 'mingc\[onnx-gpu\]'"),
    ],
)
def test_what_was_not_run_is_refused(target: str, dtype: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--backend onnx: .*{reason}"):
        ExportRecipe(checkpoint=tmp_path, output=tmp_path, target=target, dtype=dtype, backend=("onnx",))


def test_other_dims(checkpoint: Checkpoint, tmp_path: Path) -> None:
    stage: Any = find("cfm")
    config = stage.config(checkpoint)
    aggregator = replace(config.aggregator, num_tokens=1 + 5, hidden_size=24, num_heads=3, out_size=20)
    config = replace(config, latents_per_patch=5, llm_hidden_size=20, aggregator=aggregator)
    module = stage.build(config, Shard())
    torch.manual_seed(6)
    for each in (*module.parameters(), *module.buffers()):
        nn.init.normal_(each, std=0.2)
    plan = graph_of(stage, config, "aggregate")
    check_engine(module, plan, [{"N": 1}, {"N": 8}], tmp_path, TOLERANCE, BACKEND)


@pytest.mark.exhaustive
def test_an_artifact_mixes_backends(tmp_path: Path) -> None:
    words = (
        "--backend",
        "eager",
        "--backend",
        "onnx:audio_encoder",
        "--stages",
        "audio_encoder,vision_encoder",
    )
    done = mingc("export", CHECKPOINT, *words, "--output", tmp_path / "mixed", "--jobs", 1)
    assert done.code == 0, done.stderr
    stages = mingc_here("bundle", "inspect", tmp_path / "mixed", "--json").document["stages"]
    assert {each["stage"]: each["backends"] for each in stages} == {
        "audio_encoder": ["onnx"],
        "vision_encoder": ["eager"],
    }
    report = mingc_here("verify", tmp_path / "mixed", "--json")
    assert report.code == 0 and report.document["passed"], report.stderr
