"""TensorRT engines beside AOTInductor's and plain torch on one GPU: errors, latency, what is refused.

    python benchmarks/tensorrt_engines.py --output DIR [--limit SECONDS] [--cases unit,tiny,...]

Every part is a process of its own, so that one that fails or crashes leaves the others: first one small engine
(`unit`), then engines are built side by side, then they are measured one after the other, in turns within a case.
`results.json` in DIR is written anew after every part. Without a GPU only `--dry-run` works: graphs are traced and
turned into ONNX models.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_WAY = "MINGC_BENCHMARK_TENSORRT_CONTEXT"  # how contexts are made: `config`, `user`, `own` or `ownconfig`


@dataclass(frozen=True, kw_only=True)
class Case:
    """One graph at one size. `layers` are those of the stage's transformer; None: as released."""

    graph: str
    sizes: dict[str, int]
    layers: int | None = None
    config: str = "released"
    dtype: str = "bfloat16"
    others: dict[str, int] = field(default_factory=dict)  # further dims, static as well

    @property
    def name(self) -> str:
        dims = "-".join(f"{name}{size}" for name, size in self.sizes.items())
        layers = "" if self.layers is None else f"-{self.layers}layers"
        return f"{self.config}-{self.dtype}-{self.graph}-{dims}{layers}"


CASES = [
    Case(graph="cfm.sample", sizes={"B": 8}, layers=2),
    Case(graph="cfm.sample", sizes={"B": 1}, layers=2),
    Case(graph="cfm.sample", sizes={"B": 1}, config="tiny", dtype="float32"),
    Case(graph="talker.step", sizes={"B": 1}, others={"S": 9}),
    Case(graph="talker.step", sizes={"B": 8}, others={"S": 9}),
    Case(graph="talker.prefill", sizes={"T": 256}, others={"S": 9}),
    Case(graph="audio_vae.stream", sizes={"B": 1}, others={"S": 9}),
    Case(graph="audio_vae.stream", sizes={"B": 8}, others={"S": 9}),
    Case(graph="audio_vae.decode", sizes={"L": 64}),
    Case(graph="vision_encoder.encode", sizes={"M": 256}, layers=9),
    Case(graph="vision_encoder.encode", sizes={"M": 1024}, layers=9),
    Case(graph="audio_encoder.encode", sizes={"N": 1, "T4": 375}, layers=8),
    Case(graph="talker.step", sizes={"B": 2}, config="tiny", dtype="float32", others={"S": 3}),
    Case(graph="talker.prefill", sizes={"T": 32}, config="tiny", dtype="float32", others={"S": 3}),
    Case(graph="audio_vae.stream", sizes={"B": 2}, config="tiny", dtype="float32", others={"S": 3}),
    Case(graph="audio_vae.encode", sizes={"T": 64}, config="tiny", dtype="float32"),
    Case(graph="vision_encoder.encode", sizes={"M": 256}, config="tiny", dtype="float32"),
    Case(graph="audio_encoder.encode", sizes={"N": 1, "T4": 50}, config="tiny", dtype="float32"),
]


def find_case(name: str) -> Case:
    (found,) = [each for each in CASES if each.name == name]
    return found


def configs(case: Case, folder: Path) -> Path:
    """A folder of configs with the layers of the case."""
    source = ROOT / ("tests/data/tiny-ming" if case.config == "tiny" else "benchmarks/released")
    if case.layers is None:
        return source
    made = folder / f"configs-{case.name}"
    if not made.exists():
        shutil.copytree(source, made)
        changes = {
            "config.json": [
                ("vision_config", "depth"),
                ("audio_config", "whisper_encoder_config", "n_layer"),
            ],
            "talker/config.json": [("flowmodel", "depth"), ("aggregator", "depth")],
        }
        for file, places in changes.items():
            document = json.loads((made / file).read_text())
            for *path, last in places:
                part = document
                for key in path:
                    part = part[key]
                part[last] = case.layers
            document.get("vision_config", {}).pop("deepstack_visual_indexes", None)
            (made / file).write_text(json.dumps(document))
    return made


def load_case(case: Case, folder: Path, device: str, dtype: Any) -> tuple[Any, Any, Any]:
    """Stage name, graph definition and module over the random weights of the configs."""
    import torch

    from mingc.export.checkpoint import open_checkpoint
    from mingc.export.stage import Shard, StageOptions
    from mingc.export.stages import find
    from mingc.export.weights.loading import part_of
    from mingc.export.weights.quantization import prepare, stored_tensors
    from mingc.export.weights.synthetic import open_synthetic

    stage_name, _, graph = case.graph.partition(".")
    stage = find(stage_name)
    root = configs(case, folder)
    checkpoint = open_checkpoint(root) if case.config == "tiny" else open_synthetic(root, device)
    config: Any = stage.config(checkpoint)
    sizes = (1, 2, 4, 8)
    options = StageOptions(dtype=dtype, device=device, static_buckets=True, batch_sizes=sizes)
    (plan,) = [each for each in stage.graphs(config, Shard(), options) if each.spec.name == graph]
    sources = stage.weights(config, Shard())
    with torch.device("meta"):
        module = prepare(stage.build(config, Shard()), sources, None)
    tensors = {}
    for source in sources:
        part = part_of(checkpoint, source.part)
        value = source.compute(*[part.read(name) for name in source.tensors])
        plain = source.dtype or (dtype if value.is_floating_point() else value.dtype)
        for name, tensor in stored_tensors(source, value, None, plain).items():
            tensors[name] = tensor.to(device).contiguous()
    module.load_state_dict(tensors, strict=True, assign=True)
    return stage_name, plan, module.eval().requires_grad_(False)


def build(case: Case, folder: Path, backend_name: str, *, dry: bool) -> dict[str, Any]:
    """Build one engine of a case; with `dry` only its ONNX model, on a CPU."""
    import torch

    from mingc.export.compile.backends import find_backend
    from mingc.export.compile.capture import capture
    from mingc.export.compile.onnx_program import to_onnx
    from mingc.kernels.dispatch import plain_torch

    device = "cpu" if dry else "cuda"
    backend = find_backend(backend_name)
    started = time.perf_counter()
    stage, plan, module = load_case(case, folder, device, getattr(torch, case.dtype))
    loaded = time.perf_counter()
    with contextlib.nullcontext() if backend.takes_kernels else plain_torch():
        # Also the number of slots: TensorRT for RTX 1.4 refuses to size the memory of engines with dynamic dims.
        static = {**case.sizes, **case.others}
        program = capture(plan, module, stage=stage, static_shapes=static, device=torch.device(device))
    captured = time.perf_counter()
    row: dict[str, Any] = {"load_s": loaded - started, "capture_s": captured - loaded}
    if dry:
        model = to_onnx(program, case.name)
        return {**row, "onnx_s": time.perf_counter() - captured, "nodes": len(model.graph.node)}
    path = folder / f"{case.name}.{backend_name}{backend.suffix}"
    backend.compile(program, path, device=device, cache=None, where=case.name)
    return {**row, "compile_s": time.perf_counter() - captured, "bytes": path.stat().st_size}


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Errors by the rule of an export, and device time of each implementation as a CUDA graph, in turns."""
    import torch
    from harness import capture, summary

    from mingc.export.checks import parity as rule
    from mingc.export.checks.eager_reference import EagerRanks, float32_inputs
    from mingc.export.compile.backends import find_backend
    from mingc.kernels.dispatch import plain_torch
    from mingc.runtime.engines.backends import load_engine

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device, dtype = torch.device("cuda", 0), getattr(torch, case.dtype)
    torch.cuda.init()
    _, plan, module = load_case(case, folder, "cuda", dtype)
    _, exact_plan, exact = load_case(case, folder, "cuda", torch.float32)
    sizes = {**plan.check_dims, **case.sizes, **case.others}
    turns = (folder / "turns").open("w")  # timing is alone on the GPU
    fcntl.flock(turns, fcntl.LOCK_SH)
    example = plan.example(sizes, torch.Generator().manual_seed(1))
    inputs = {name: value.to(device) for name, value in example.items()}
    with plain_torch():
        wide = {name: value.to(device) for name, value in float32_inputs(exact_plan, example, sizes).items()}
        expected = EagerRanks(exact_plan, [exact], wide).run()
        eager_error = rule.worst_error(EagerRanks(plan, [module], inputs).run(), expected)
    row: dict[str, Any] = {
        "eager_error": eager_error,
        "limit": rule.max_error(eager_error, dtype),
        "engines": {},
    }
    tensors = (*plan.spec.inputs, *plan.spec.state)
    steps: dict[str, Any] = {}

    def torch_step() -> None:
        with plain_torch(), torch.no_grad():
            getattr(module, plan.method)(*[inputs[each.name] for each in tensors])

    steps["torch"] = torch_step
    for name in ("aoti", "tensorrt", "tensorrt-shared-state"):
        if name.endswith("state") and not plan.spec.state:
            continue
        backend = find_backend(name.partition("-")[0])
        path = folder / f"{case.name}.{backend.name}{backend.suffix}"
        found: dict[str, Any] = {}
        row["engines"][name] = found
        try:
            started = time.perf_counter()
            engine = load_engine(backend.name, path, device)
            engine.bind(module.state_dict())
            if name.endswith("state"):
                # The new state goes into the memory of the old one.
                engine._output = lambda shape, kind, state: (  # type: ignore[attr-defined]
                    torch.empty(shape, dtype=kind, device=device) if state is None else state
                )
            mine = {each.name: inputs[each.name].clone() for each in tensors}
            outputs = engine.run([mine[each.name] for each in tensors])
            torch.cuda.synchronize()
            found["load_and_first_run_ms"] = round(1e3 * (time.perf_counter() - started), 1)
            made = {each.name: value for each, value in zip(plan.spec.outputs, outputs, strict=True)}
            made.update({f"state.{each.name}": mine[each.name] for each in plan.spec.state})
            found["error"] = rule.worst_error(made, expected)
            found["errors"] = {
                each: rule.worst_error(made, {each: value}) for each, value in list(expected.items())[:6]
            }
            found["within_limit"] = found["error"] <= row["limit"]
            steps[name] = lambda engine=engine, mine=mine: engine.run([mine[each.name] for each in tensors])
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"[:1500]
    torch.cuda.synchronize()
    fcntl.flock(turns, fcntl.LOCK_UN)
    fcntl.flock(turns, fcntl.LOCK_EX)
    row["clocks_before"] = clocks()
    graphs, samples = {}, {}
    for name, step in steps.items():
        try:
            graphs[name] = capture(step)
            samples[name] = list[float]()
        except Exception as error:
            torch.cuda.synchronize()
            row["engines"].setdefault(name, {})["capture_refused"] = f"{type(error).__name__}: {error}"[:1500]
    for graph in graphs.values():
        for _ in range(5):
            graph.replay()
    for _ in range(40):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 5)
    for name, each in samples.items():
        row["engines"].setdefault(name, {})["ms"] = summary(each)
    row["clocks_after"] = clocks()
    return row


def unit(folder: Path) -> dict[str, Any]:
    """A matrix product, state and attention: built, run, captured and replayed, in two dtypes."""
    import torch
    from torch import Tensor, nn

    from mingc.export.compile.backends.tensorrt import BACKEND
    from mingc.runtime.engines.backends.tensorrt import load
    from mingc.tensorrt_library import find_library, import_library

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(64, 64)

        def forward(self, x: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
            rows.index_put_((places,), x)
            queries, keys = self.model(x)[None, None], self.model(rows[places])[None, None]
            attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, x[None, None])
            return self.model(rows).sum(0), attended[0, 0]

    def errors(values: Any, references: Any) -> list[float]:
        pairs = zip(values, references, strict=True)
        return [float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs]

    row: dict[str, Any] = {"version": import_library(find_library() or "").__version__}
    rows_dim = torch.export.Dim("R", min=4, max=64)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).rpartition(".")[2]
        torch.manual_seed(0)
        own = Small().cuda().eval().requires_grad_(False).to(dtype)
        x, rows = torch.randn(3, 64, device="cuda").to(dtype), torch.randn(9, 64, device="cuda").to(dtype)
        places = torch.tensor([1, 7, 4], device="cuda")
        program = torch.export.export(
            own, (x, rows.clone(), places), dynamic_shapes=({}, {0: rows_dim}, {}), strict=False
        )
        path = folder / f"unit-{name}.trt"
        print(name, "build", flush=True)
        started = time.perf_counter()
        BACKEND.compile(program, path, device="cuda", cache=None, where="unit")
        row[f"{name}_build_s"] = round(time.perf_counter() - started, 2)
        print(name, "load", flush=True)
        engine = load(path, torch.device("cuda", 0))
        print(name, "bind", flush=True)
        engine.bind(own.model.state_dict())
        mine, theirs = rows.clone(), rows.clone()
        print(name, "run", flush=True)
        got = engine.run([x, mine, places])
        torch.cuda.synchronize()
        row[f"{name}_errors"] = errors((*got, mine), (*own(x, theirs, places), theirs))
        print(name, "capture", row, flush=True)
        graph, later, static = torch.cuda.CUDAGraph(), torch.randn_like(x), x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            engine.run([static, mine, places])
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured = engine.run([static, mine, places])
        static.copy_(later)
        graph.replay()
        torch.cuda.synchronize()
        row[f"{name}_captured_errors"] = errors((*captured, mine), (*own(later, theirs, places), theirs))
        print(name, "done", row, flush=True)
    modules = "'onnx', 'onnxscript', 'torch_tensorrt', 'tensorrt_rtx_bindings', 'onnxruntime'"
    code = (
        "import sys, pathlib, torch\n"
        "from mingc.runtime.engines.backends import load_engine\n"
        f"load_engine('tensorrt', pathlib.Path({str(path)!r}), torch.device('cuda', 0))\n"
        f"print(sorted({{each.split('.')[0] for each in sys.modules}} & {{{modules}}}),\n"
        "      [each for each in ('torch._dynamo', 'torch._inductor', 'torch.onnx') if each in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    row["modules_of_a_loading_process"] = done.stdout.strip() or done.stderr[-500:]
    return row


def clocks() -> str:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        return subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    except OSError as error:
        return str(error)


class Driver:
    """Runs parts as processes and keeps what they report."""

    def __init__(self, output: Path, limit: float, folder: Path) -> None:
        self._output, self._folder = output, folder
        self._end = time.monotonic() + limit
        self.results: dict[str, Any] = {}

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{name}.log").open("wb")
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def part(self, *words: str) -> list[str]:
        return [
            sys.executable,
            "-X",
            "faulthandler",
            "-u",
            "-W",
            "ignore",
            __file__,
            "--folder",
            str(self._folder),
            *words,
        ]

    def finish(self, name: str, process: subprocess.Popen[bytes], limit: float) -> None:
        """Wait for a part and keep its result, or the end of its log."""
        try:
            code: Any = process.wait(max(1.0, min(limit, self.left)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = "out of time"
        result = self._folder / f"{name}.json"
        log = (self._folder / f"{name}.log").read_bytes().decode(errors="replace")
        if result.exists():
            self.keep(name, json.loads(result.read_text()))
        else:
            self.keep(name, {"exit": code, "log": log[-2500:]})

    def keep(self, name: str, found: Any) -> None:
        self.results[name] = found
        text = json.dumps(self.results, indent=1, sort_keys=True)
        (self._output / "results.json").write_text(text)
        print(f"{self.left:6.0f} s left  {name}: {json.dumps(found)[:600]}", flush=True)


def drive(
    output: Path, limit: float, folder: Path, chosen: list[str], *, dry: bool, tiny_backend: str
) -> None:
    import torch

    driver = Driver(output, limit, folder)
    machine = {"gpu": clocks(), "torch": torch.__version__, "python": sys.version.split()[0]}
    small = None
    driver.keep("machine", {**machine, "cpus": os.cpu_count(), "command": sys.argv})
    if not dry:
        small = driver.start("unit", driver.part("--part", "unit"))
    exporting = (
        driver.start("tiny-export", tiny_export(folder / "tiny", tiny_backend)) if tiny_backend else None
    )
    cases = [each for each in CASES if not chosen or any(word in each.name for word in chosen)]
    names = ("tensorrt",) if dry else ("tensorrt", "aoti")
    # The longest builds first: the unrolled solver of the released model.
    waiting = sorted(
        ((case, name) for case in cases for name in names if (case.config, name) != ("tiny", "aoti")),
        key=lambda each: (each[1] == "aoti", each[0].config == "tiny", "cfm" not in each[0].name),
    )
    running: dict[str, subprocess.Popen[bytes]] = {}
    measuring = 0.0 if dry else 0.47 * limit
    while (waiting or running) and driver.left > measuring:
        while waiting and len(running) < (2 if dry else 14):
            case, name = waiting.pop(0)
            label = f"build-{case.name}.{name}"
            words = ["--part", "build", "--case", case.name, "--backend", name]
            running[label] = driver.start(label, driver.part(*words, *(["--dry-run"] if dry else [])))
        for label, process in list(running.items()):
            if process.poll() is not None:
                driver.finish(label, running.pop(label), 5)
        time.sleep(0.2)
    for label, process in running.items():
        driver.finish(label, process, 0)
    if dry:
        return
    driver.finish("unit", small, 1)
    left = [case for case in cases if (folder / f"build-{case.name}.tensorrt.json").exists()]
    while left or running:
        while left and len(running) < 5:
            case = left.pop(0)
            label = f"measure-{case.name}"
            running[label] = driver.start(label, driver.part("--part", "measure", "--case", case.name))
        for label, process in list(running.items()):
            if process.poll() is not None or driver.left < 0.22 * limit:
                driver.finish(label, running.pop(label), 1)
        if driver.left < 0.22 * limit:
            break
        time.sleep(0.1)
    if exporting is not None:
        driver.finish("tiny-export", exporting, driver.left - 45)
        verify_tiny(driver, output, folder / "tiny")


def verify_tiny(driver: Driver, output: Path, artifact: Path) -> None:
    """Verify the tiny artifact, which serves its recorded requests, spoken ones among them."""
    words = ["verify", str(artifact), "--reference", str(ROOT / "tests/data"), "--json"]
    command = [sys.executable, "-u", __file__, "--mingc", *words]
    driver.finish("tiny-verify", driver.start("tiny-verify", command), driver.left - 2)


def tiny_export(artifact: Path, chosen: str) -> list[str]:
    """The command that exports the tiny checkpoint with TensorRT engines beside the thinker of AOTInductor."""
    options = [
        "--target",
        "cuda",
        "--backend",
        "aoti",
        "--backend",
        chosen,
        "--no-cache",
    ]
    options += ["--stages", "thinker,talker,cfm,audio_vae"]
    options += ["--batch-sizes", "1,2", "--prefill-chunk-size", "64", "--jobs", "7"]
    checkpoint = str(ROOT / "tests/data/tiny-ming")
    return [
        sys.executable,
        __file__,
        "--mingc",
        "export",
        checkpoint,
        *options,
        "--output",
        str(artifact),
    ]


def apply_way() -> None:
    """Let the backend build for CUDA, and make contexts as the environment says.

    `config`: as the loader does, with memory for the largest sizes; `user`: the same without a runtime configuration;
    `own` and `ownconfig`: with memory of their own.
    """
    from mingc.export.compile.backends.tensorrt import TensorRtBackend
    from mingc.runtime.engines.backends import tensorrt

    TensorRtBackend.unsupported_reason = lambda self, target, dtype: None  # type: ignore[method-assign]
    way = os.environ.get(_WAY, "config")
    real = tensorrt._create_context

    def create(library: Any, engine: Any) -> Any:
        if way == "config":
            return _Memory(real(library, engine), engine.device_memory_size_v2)
        if way == "user":
            strategy = library.ExecutionContextAllocationStrategy.USER_MANAGED
            return _Memory(engine.create_execution_context(strategy), engine.device_memory_size_v2)
        if way == "own":
            return _Memory(engine.create_execution_context(), None)
        config = engine.create_runtime_config()
        strategies = library.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        return _Memory(engine.create_execution_context(config), None)

    tensorrt._create_context = create


class _Memory:
    """A context whose memory has `size` bytes; None: it keeps memory of its own."""

    def __init__(self, context: Any, size: int | None) -> None:
        self._context, self._size = context, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def update_device_memory_size_for_shapes(self) -> int:
        return self._size or 0

    def set_device_memory(self, address: int, size: int) -> None:
        if self._size:
            self._context.set_device_memory(address, size)


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    if sys.argv[1:2] == ["--mingc"]:
        apply_way()
        from mingc.cli import main as command

        command(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--limit", type=float, default=420)
    parser.add_argument("--cases", default="")
    parser.add_argument("--tiny-export", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mingc-tensorrt-engines"))
    parser.add_argument("--part")
    parser.add_argument("--case")
    parser.add_argument("--backend")
    parser.add_argument("--tiny-backend", default="tensorrt:talker,cfm,audio_vae")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part is None:
        chosen = list(filter(None, given.cases.split(",")))
        drive(
            given.output,
            given.limit,
            given.folder,
            chosen,
            dry=given.dry_run,
            tiny_backend=given.tiny_backend if given.tiny_export else "",
        )
        return
    name = "unit" if given.part == "unit" else f"{given.part}-{given.case}"
    if given.part == "build":
        name += f".{given.backend}"
    if given.part == "unit":
        apply_way()
        found = unit(given.folder)
    elif given.part == "build":
        apply_way()
        found = build(find_case(given.case), given.folder, given.backend, dry=given.dry_run)
    else:
        apply_way()
        found = measure(find_case(given.case), given.folder)
    (given.folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__mp_main__":  # a worker process of an export
    apply_way()
if __name__ == "__main__":
    main()
