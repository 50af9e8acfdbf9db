"""Engines of TensorRT, or of `--backend`, on one GPU: beside AOTInductor and plain torch, served, and tried by `auto`.

    python benchmarks/backend_engines.py --output DIR [--parts released,served,auto] [--limit SECONDS] [--commit HASH]

Parts, in the order given:

`released`  graphs of the released dims with random weights, `--layers` layers of each transformer, at one or more
            buckets. Both backends build them through the export's own code. Errors follow the rule of an export; times
            are taken in turns, as CUDA graphs. Two more cases ask whether the float32 of TensorRT is TF32.
`served`    the speech stages of the tiny checkpoint: exported, verified, served, and asked for speech.
`auto`      `export --backend auto` of the same stages, with the times it chose from.

Every slow step is a process with its own limit, so that a step that fails, crashes or hangs leaves the others. After
each step the script writes `results.json` in DIR, and with a commit the result file `result.json`. Nothing is patched.

`--target cpu --backend onnx` rehearses all of it without a GPU; its times say nothing. `--dry-run` makes what a backend
builds from, of the part `released` on a CPU, and nothing else.
"""

from __future__ import annotations

import argparse
import array
import datetime
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from arguments import seconds, whole, wholes
from part_driver import ROOT, Driver, Running, write_whole

PARTS = {"released": 5.0, "served": 3.0, "auto": 3.0}
"""Names of parts, and their shares of the time."""
SPEECH = ("talker", "cfm", "audio_vae")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "tensorrt_rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx"),
    "torch_tensorrt": ("torch-tensorrt-rtx", "torch-tensorrt"),
    "onnx": ("onnx",),
    "onnxscript": ("onnxscript",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One graph at one size. `layers` are those of the stage's transformers; 0: as released."""

    graph: str
    sizes: Mapping[str, int]
    layers: int = 0
    config: str = "released"
    dtype: str = "bfloat16"
    environment: Mapping[str, str] = field(default_factory=dict)  # of the processes that build and run

    @property
    def name(self) -> str:
        dims = "-".join(f"{name}{size}" for name, size in self.sizes.items())
        layers = f"-{self.layers}layers" if self.layers else ""
        changed = "".join(f"-{name}={value}" for name, value in self.environment.items())
        return f"{self.config}-{self.dtype}-{self.graph}-{dims}{layers}{changed}"


# The first size of every graph comes before any second size, so that a run that is cut short has every graph.
SIZES: tuple[Mapping[str, Mapping[str, int]], ...] = (
    {
        "cfm.sample": {"B": 1},
        "talker.step": {"B": 1},
        "talker.prefill": {"T": 256},
        "audio_vae.stream": {"B": 1},
        "vision_encoder.encode": {"M": 1024},
        "audio_encoder.encode": {"N": 1, "T4": 375},
        "audio_vae.decode": {"L": 64},
        "audio_vae.encode": {"T": 32},
        "cfm.aggregate": {"N": 128},
        "cfm.speaker": {"N": 8},
    },
    {
        "cfm.sample": {"B": 8},
        "talker.step": {"B": 8},
        "talker.prefill": {"T": 32},
        "audio_vae.stream": {"B": 8},
        "vision_encoder.encode": {"M": 256},
        "audio_encoder.encode": {"N": 1, "T4": 100},
    },
    {
        "talker.step": {"B": 4},
        "talker.prefill": {"T": 128},
        "vision_encoder.encode": {"M": 64},
        "audio_encoder.encode": {"N": 1, "T4": 750},
        "audio_vae.decode": {"L": 256},
        "audio_vae.encode": {"T": 128},
        "cfm.sample": {"B": 4},
        "audio_vae.stream": {"B": 4},
    },
)


def cases_of(layers: int, num_sizes: int, words: tuple[str, ...] = (), dtype: str = "bfloat16") -> list[Case]:
    """The cases of the part `released` whose names have one of `words`; no words: all.

    CFM has half the layers, as its engine holds ten steps.
    """
    tiny: dict[str, Any] = {"graph": "cfm.sample", "sizes": {"B": 1}, "config": "tiny", "dtype": "float32"}
    found = [
        Case(
            graph=graph,
            sizes=sizes,
            layers=-(-layers // 2) if graph.startswith("cfm") else layers,
            dtype=dtype,
        )
        for group in SIZES[:num_sizes]
        for graph, sizes in group.items()
    ]
    found += [Case(**tiny), Case(**tiny, environment={"NVIDIA_TF32_OVERRIDE": "0"})]
    return [each for each in found if not words or any(word in each.name for word in words)]


# Where the configs of a checkpoint have the number of layers.
_LAYERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "config.json": (("vision_config", "depth"), ("audio_config", "whisper_encoder_config", "n_layer")),
    "talker/config.json": (("flowmodel", "depth"), ("aggregator", "depth")),
    "talker/llm/config.json": (("num_hidden_layers",),),
    "talker/vae/config.json": (
        ("enc_kwargs", "backbone", "num_hidden_layers"),
        ("dec_kwargs", "backbone", "num_hidden_layers"),
    ),
}


def write_configs(target: Path, layers: int) -> Path:
    """The configs of the released dims with at most so many layers, in the folder `target`."""
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}-{os.getpid()}")  # several processes make it
    shutil.copytree(ROOT / "benchmarks" / "released", partial)
    for file, places in _LAYERS.items():
        document = json.loads((partial / file).read_text(encoding="utf-8"))
        for *path, last in places:
            part = document
            for key in path:
                part = part[key]
            part[last] = min(layers, part[last])
        document.get("vision_config", {}).pop("deepstack_visual_indexes", None)
        (partial / file).write_text(json.dumps(document), encoding="utf-8")
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return target


def configs(case: Case, folder: Path) -> Path:
    if case.config == "tiny":
        return ROOT / "tests" / "data" / "tiny-ming"
    return (
        write_configs(folder / f"configs-{case.layers}", case.layers)
        if case.layers
        else ROOT / "benchmarks" / "released"
    )


def load_case(case: Case, folder: Path, device: str, dtype: Any) -> tuple[Any, Any, Any]:
    """Name of the stage, graph definition, and module over the random weights of the configs."""
    from talker_engines import load_module

    from mingc.export.checkpoint import open_checkpoint
    from mingc.export.stage import Shard, StageOptions
    from mingc.export.stages import find
    from mingc.export.synthetic.checkpoint import open_synthetic

    stage_name, _, graph = case.graph.partition(".")
    stage = find(stage_name)
    root = configs(case, folder)
    checkpoint = open_checkpoint(root) if case.config == "tiny" else open_synthetic(root, device)
    options = StageOptions(dtype=dtype, device=device, static_buckets=True, batch_sizes=(1, 2, 4, 8))
    plans = stage.graphs(stage.config(checkpoint), Shard(), options)
    (plan,) = [each for each in plans if each.spec.name == graph]
    return stage_name, plan, load_module(stage, checkpoint, dtype, device)


def build(case: Case, folder: Path, backend_name: str, target: str, *, dry: bool) -> dict[str, Any]:
    """Build one engine of a case as an export does; with `dry` only what it is built from, on a CPU."""
    import torch

    from mingc.export.compile import tensorrt_program
    from mingc.export.compile.backends import find_backend
    from mingc.export.compile.onnx_program import to_onnx
    from mingc.export.compile.trace import trace_graph

    device = "cpu" if dry else target
    started = time.perf_counter()
    stage, plan, module = load_case(case, folder, device, getattr(torch, case.dtype))
    loaded = time.perf_counter()
    backend = find_backend(backend_name).for_graph(plan, case.sizes, target)
    program = trace_graph(backend, plan, module, stage=stage, sizes=case.sizes, device=device)
    captured = time.perf_counter()
    row: dict[str, Any] = {"load_s": loaded - started, "capture_s": captured - loaded}
    backend.check_graph(plan, module, lambda: program, where=case.name)
    if dry and backend_name == "tensorrt":
        _, weights, _, pure = tensorrt_program.without_weights(program, case.name)
        seconds, operators = time.perf_counter() - captured, len(pure.graph.nodes)
        return {**row, "program_s": seconds, "nodes": operators, "weights": len(weights)}
    if dry:
        model = to_onnx(program, case.name)
        dynamic = [each.name for each in model.graph.input if _is_dynamic(each)]
        return {
            **row,
            "onnx_s": time.perf_counter() - captured,
            "nodes": len(model.graph.node),
            "dynamic": dynamic,
        }
    path = folder / f"{case.name}.{backend_name}{backend.suffix}"
    backend.compile(program, path, device=target, cache=None, where=case.name)
    return {**row, "compile_s": time.perf_counter() - captured, "bytes": path.stat().st_size}


def _is_dynamic(value: Any) -> bool:
    return any(each.dim_param for each in value.type.tensor_type.shape.dim)


def measure(case: Case, folder: Path, backends: tuple[str, ...], target: str) -> dict[str, Any]:
    """Errors by the rule of an export; time of each implementation in turns, on CUDA as CUDA graphs."""
    import torch

    from mingc.export.checks import parity as rule
    from mingc.export.checks.eager_reference import EagerRanks, float32_inputs
    from mingc.export.compile.backends import find_backend
    from mingc.kernels.dispatch import plain_torch
    from mingc.runtime.engines.backends import load_engine

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    is_cuda = target == "cuda"
    device, dtype = torch.device("cuda", 0) if is_cuda else torch.device("cpu"), getattr(torch, case.dtype)
    wait: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    _, plan, module = load_case(case, folder, target, dtype)
    _, exact_plan, exact = load_case(case, folder, target, torch.float32)
    pools = {each.name: 9 for each in plan.spec.dims if not each.buckets}
    sizes = {**plan.check_dims, **pools, **case.sizes}
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
    steps: dict[str, Callable[[], object]] = {}

    def torch_step() -> None:
        with plain_torch(), torch.no_grad():
            getattr(module, plan.method)(*[inputs[each.name] for each in tensors])

    steps["torch"] = torch_step
    for name in backends:
        path = folder / f"{case.name}.{name}{find_backend(name).suffix}"
        found: dict[str, Any] = {}
        row["engines"][name] = found
        try:
            started = time.perf_counter()
            engine = load_engine(name, path, device)
            engine.bind(module.state_dict())
            mine = {each.name: inputs[each.name].clone() for each in tensors}
            outputs = engine.run([mine[each.name] for each in tensors])
            wait()
            found["load_and_first_run_ms"] = round(1e3 * (time.perf_counter() - started), 1)
            made = {each.name: value for each, value in zip(plan.spec.outputs, outputs, strict=True)}
            made.update({f"state.{each.name}": mine[each.name] for each in plan.spec.state})
            found["error"] = rule.worst_error(made, expected)
            found["finite"] = all(bool(each.isfinite().all()) for each in outputs)
            found["within_limit"] = found["error"] <= row["limit"]
            steps[name] = lambda engine=engine, mine=mine: engine.run([mine[each.name] for each in tensors])
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"[:1500]
    wait()
    fcntl.flock(turns, fcntl.LOCK_UN)
    fcntl.flock(turns, fcntl.LOCK_EX)
    row["clocks_before"] = clocks()
    times, refused = _times_ms(steps, is_cuda=is_cuda)
    for name, each in times.items():
        row["engines"].setdefault(name, {})["ms"] = each
    for name, reason in refused.items():
        row["engines"].setdefault(name, {})["capture_refused"] = reason
    row["clocks_after"] = clocks()
    return row


def _times_ms(
    steps: Mapping[str, Callable[[], object]], *, is_cuda: bool
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Milliseconds of each step, run in turns, and why a step could not be captured, by name."""
    import torch
    from harness import capture, summary

    refused: dict[str, str] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, step in steps.items():
        try:
            runs[name] = capture(step).replay if is_cuda else step
        except Exception as error:
            torch.cuda.synchronize()
            refused[name] = f"{type(error).__name__}: {error}"[:1500]
            runs[name] = step  # called without a graph instead, which the result says
    repeats, turns = (5, 40) if is_cuda else (1, 3)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(repeats):
            run()
    for _ in range(turns):
        for name, run in runs.items():
            if is_cuda:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            if is_cuda:
                end.record()
                end.synchronize()
                samples[name].append(start.elapsed_time(end) / repeats)
            else:
                samples[name].append(1e3 * (time.perf_counter() - started) / repeats)
    return {name: summary(each) for name, each in samples.items()}, refused


def clocks() -> str:
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        return subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    except OSError as error:
        return str(error)


def document(results: Mapping[str, Any], commit: str, command: list[str]) -> dict[str, Any]:
    """The result file of what is known so far."""
    machine = results.get("machine", {})
    gpu, _, rest = str(machine.get("gpu", "")).partition(",")
    words = [Path(word).name if word.startswith("/") else word for word in command]
    return {
        "schema": 1,
        "benchmark": "backend_engines",
        "commit": commit,
        "command": shlex.join(["python", "benchmarks/backend_engines.py", *words]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"gpu": gpu, "count": 1, "driver": rest.strip().partition(",")[0]},
        "versions": machine.get("versions", {}),
        "figures": figures(results),
    }


def figures(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the result file, from the results of parts by name."""
    rows: list[dict[str, Any]] = []
    for name, found in results.items():
        kind, _, case = name.partition("-")
        if kind == "build":
            case, _, backend = case.rpartition(".")
            rows.append(_build_row(case, backend, found))
        elif kind == "measure":
            rows += _measure_rows(case, found)
        elif kind == "auto" and case == "export":
            rows += found.get("times", [])
        elif "answers" in found:
            rows += _served_rows(found)
        for each in (found.get("document") or {}).get("graphs", ()):
            row = {
                "case": f"tiny {each['stage']}.{each['graph']}",
                "backend": each["backend"],
                "n": each["engines"],
            }
            built = {
                "median": each["compile_seconds"],
                "unit": "s of all engines",
                "bytes": each["size_bytes"],
            }
            rows += [
                {"name": "build_s", **row, **built},
                {"name": "error", **row, "median": each["error"], "unit": "of the largest value"},
            ]
        if kind in ("served", "auto") and "exit" in found:
            rows.append(_command_row(name, found))
    return rows


def _build_row(case: str, backend: str, found: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": "build_s", "case": case, "backend": backend, "n": 1, "unit": "s"}
    if "compile_s" in found:
        return {**row, "median": round(found["compile_s"], 2), "bytes": found["bytes"]}
    return {**row, "median": None, "refused": found.get("refused", found.get("exit"))}


def _measure_rows(case: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "engines" not in found:
        return [{"name": "latency_ms", "case": case, "median": None, "refused": found.get("exit"), "n": 0}]
    rows: list[dict[str, Any]] = []
    for backend, each in found["engines"].items():
        of = {"case": case, "backend": backend}
        if "ms" in each:
            captured = {} if "capture_refused" not in each else {"without_graph": each["capture_refused"]}
            rows.append({"name": "latency_ms", **of, **each["ms"], "unit": "ms", **captured})
        if "error" in each:
            limit = {"tolerance": found["limit"], "n": 1, "unit": "of the largest value"}
            rows.append(
                {"name": "error", **of, "median": each["error"], **limit, "finite": each.get("finite", True)}
            )
            first = each["load_and_first_run_ms"]
            rows.append({"name": "load_and_first_run_ms", **of, "median": first, "n": 1, "unit": "ms"})
        if "refused" in each:
            rows.append({"name": "latency_ms", **of, "median": None, "refused": each["refused"], "n": 0})
    return rows


def _served_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    of = {"name": "served", "engines": found["engines"], "n": 1, "unit": "s"}
    rows = [{**of, "case": f"speech {index}", **each} for index, each in enumerate(found["answers"], 1)]
    start = {"name": "server_start_s", "median": found["start_s"], "n": 1, "unit": "s"}
    return [*rows, {**start, "libraries": found["libraries"]}]


def _command_row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    made = found.get("document") or {}
    kept = ("seconds", "passed", "checked", "failed", "notes")
    row = {"name": "command", "case": name, "median": found["exit"], "n": 1, "unit": "exit code"}
    problem = {} if found["exit"] == 0 else {"log": found.get("log", "")[-600:]}
    return {**row, **{key: made[key] for key in kept if key in made}, **problem}


def export_words(given: argparse.Namespace, artifact: Path, backend: str) -> list[str]:
    """The command that exports the speech stages of the tiny checkpoint."""
    words = [sys.executable, "-u", "-W", "ignore", "-m", "mingc", "export", "tests/data/tiny-ming", "--json"]
    words += ["--backend", backend, "--target", given.target, "--dtype", given.dtype]
    words += ["--stages", ",".join(SPEECH), "--prefill-chunk-size", "64"]
    words += ["--batch-sizes", ",".join(map(str, given.batch_sizes))]
    words += ["--jobs", str(given.jobs), "--cache", str(given.folder / "cache"), "--force"]
    return [*words, "--output", str(artifact)]


def verify(driver: Driver, name: str, artifact: Path, limit: float) -> None:
    """Run `mingc verify`, and keep the comparisons that failed, of thousands."""
    words = [sys.executable, "-u", "-W", "ignore", "-m", "mingc", "verify", str(artifact), "--json"]
    checked = driver.finish(driver.start(name, words, limit))
    if "document" in checked:
        report = checked["document"]
        failed = [each for each in report["comparisons"] if each["outcome"] == "FAIL"]
        kept = {key: report[key] for key in report if key not in ("comparisons", "not_engine_outputs")}
        driver.keep(name, {**checked, "document": {**kept, "failures": failed[:20]}})


def run_released(driver: Driver, given: argparse.Namespace, end: float) -> None:
    """Build engines side by side, then measure, a case after the other within each step."""
    cases = cases_of(given.layers, given.sizes, given.cases, given.dtype)
    if given.backend != "tensorrt":
        cases = [each for each in cases if each.config != "tiny"]
    names = (given.backend,) if given.dry_run else (given.backend, "aoti")
    waiting = [(case, name) for case in cases for name in names if (case.config, name) != ("tiny", "aoti")]
    building: list[tuple[Case, Running]] = []
    measuring_s = 0.0 if given.dry_run else 0.4 * (end - time.monotonic())
    while waiting or building:
        if end - time.monotonic() < measuring_s:
            waiting = []
        while waiting and len(building) < given.jobs:
            case, name = waiting.pop(0)
            words = ["--part", "build", "--case", case.name, "--layers", str(given.layers)]
            words += ["--sizes", str(given.sizes), "--backend", name, "--target", given.target]
            words += ["--dtype", given.dtype]
            words += ["--dry-run"] if given.dry_run else []
            limit = min(given.build_limit, end - measuring_s - time.monotonic())
            label = f"build-{case.name}.{name}"
            started = driver.start(label, driver.part(*words), limit, case.environment)
            building.append((case, started))
        building = [each for each in building if not driver.is_done(each[1])]
        time.sleep(0.1)
    if given.dry_run:
        return
    left = [
        case for case in cases if "compile_s" in driver.results.get(f"build-{case.name}.{given.backend}", {})
    ]
    measuring: list[Running] = []
    while left or measuring:
        if time.monotonic() > end:
            break
        while left and len(measuring) < min(4, given.jobs):
            case = left.pop(0)
            built = [
                name for name in names if "compile_s" in driver.results.get(f"build-{case.name}.{name}", {})
            ]
            words = ["--part", "measure", "--case", case.name, "--layers", str(given.layers)]
            words += ["--sizes", str(given.sizes), "--backend", ",".join(built), "--target", given.target]
            words += ["--dtype", given.dtype]
            started = driver.start(
                f"measure-{case.name}", driver.part(*words), end - time.monotonic(), case.environment
            )
            measuring.append(started)
        measuring = [each for each in measuring if not driver.is_done(each)]
        time.sleep(0.1)
    for each in measuring:
        driver.is_done(each)


def run_served(driver: Driver, given: argparse.Namespace, end: float) -> None:
    """Export, verify and serve with engines of the backend."""
    artifact = given.folder / "served"
    words = export_words(given, artifact, given.backend)
    made = driver.finish(driver.start("served-export", words, end - time.monotonic()))
    if made.get("exit") == 0:
        verify(driver, "served-verify", artifact, end - time.monotonic())
        words = ["--part", "serve", "--case", str(artifact)]
        driver.finish(driver.start("served-speech", driver.part(*words), end - time.monotonic()))


def serve(artifact: Path, folder: Path) -> dict[str, Any]:
    """Serve `artifact`, ask for speech three times, and list the libraries of compilers that the server has loaded."""
    from mingc.console.serve_child import serve_child

    body = json.dumps({"input": "Hello there.", "response_format": "pcm", "seed": 5}).encode()
    started, answers = time.perf_counter(), []
    with (
        (folder / "server.log").open("wb") as log,
        serve_child([str(artifact), "--port", "0", "--drain-seconds", "0"], stop_s=30, log=log) as (
            child,
            out,
        ),
    ):
        url = out.readline().decode().strip()
        start_s = round(time.perf_counter() - started, 1)
        if not url:
            raise SystemExit((folder / "server.log").read_text(errors="replace")[-2000:])
        for _ in range(3):
            request = urllib.request.Request(
                f"{url}/v1/audio/speech", body, {"Content-Type": "application/json"}
            )
            asked = time.perf_counter()
            with urllib.request.urlopen(request, timeout=120) as answer:
                samples = array.array("h", answer.read())
            elapsed = round(time.perf_counter() - asked, 3)
            answers.append(
                {"median": elapsed, "samples": len(samples), "loudest": max(map(abs, samples), default=0)}
            )
        maps = Path(f"/proc/{child.pid}/maps").read_text(errors="replace")
    libraries = {
        *re.findall(r"/([\w.+-]*(?:tensorrt|torchtrt|onnxruntime|triton)[\w.+-]*\.so[\w.]*)\n", maps)
    }
    stages = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))["stages"]
    backends = {
        f"{stage}={engine['backend']}"
        for stage, record in stages.items()
        for graph in record["graphs"].values()
        for engine in graph["engines"]
    }
    return {
        "start_s": start_s,
        "engines": ",".join(sorted(backends)),
        "answers": answers,
        "libraries": sorted(libraries),
    }


def run_auto(driver: Driver, given: argparse.Namespace, end: float) -> None:
    """Let an export choose between all backends that are installed, and keep the times that it chose from."""
    artifact = given.folder / "auto"
    words = export_words(given, artifact, "auto")
    made = driver.finish(driver.start("auto-export", words, end - time.monotonic()))
    if made.get("exit") == 0:
        manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
        driver.keep("auto-export", {**made, "times": trial_rows(manifest)})
        verify(driver, "auto-verify", artifact, end - time.monotonic())


def trial_rows(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Times of every engine that was tried, and what was refused, from the manifest of an artifact."""
    rows: list[dict[str, Any]] = []
    for stage, record in manifest["stages"].items():
        for name, graph in record["graphs"].items():
            trial = graph.get("trial") or {"timings": [], "refused": []}
            kept = [(each["backend"], each["dims"]) for each in graph["engines"]]
            for each in trial["timings"]:
                is_kept = any(
                    backend == each["backend"]
                    and all(each["dims"].get(dim) == size for dim, size in (dims or {}).items())
                    for backend, dims in kept
                )
                rows.append(
                    {"name": "auto_us", "case": f"{stage}.{name}", "backend": each["backend"], "dims": each["dims"],
                     "median": each["median_us"], "n": each["calls"], "unit": "us", "kept": is_kept}
                )  # fmt: skip
            rows += [
                {"name": "auto_us", "case": f"{stage}.{name}", "backend": each["backend"], "median": None, "n": 0,
                 "refused": each["reason"]}
                for each in trial["refused"]
            ]  # fmt: skip
    return rows


def drive(given: argparse.Namespace) -> None:
    given.output.mkdir(parents=True, exist_ok=True)
    commit = given.commit or _commit()
    has_commit = _COMMIT.fullmatch(commit) is not None
    driver = Driver(
        Path(__file__),
        given.output,
        given.folder,
        given.limit,
        (lambda results: document(results, commit, sys.argv[1:])) if has_commit else None,
    )
    driver.keep(
        "machine", {"gpu": clocks(), "cpus": os.cpu_count(), "versions": versions(), "commit": commit}
    )
    runs = {"released": run_released, "served": run_served, "auto": run_auto}
    parts = ("released",) if given.dry_run else given.parts
    try:
        for index, part in enumerate(parts):
            shares = [PARTS[each] for each in parts[index:]]
            runs[part](driver, given, time.monotonic() + driver.left * shares[0] / sum(shares))
    finally:
        driver.stop_all()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mingc": "0"}
    for name, distributions in {**_PACKAGES, "mingc": ("mingc",)}.items():
        for each in distributions:
            try:
                found[name] = version(each)
                break
            except PackageNotFoundError:
                continue
    code = "import torch, mingc, json; print(json.dumps([torch.__version__, torch.version.cuda, mingc.__version__]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if done.returncode == 0:
        torch_version, cuda, own = json.loads(done.stdout)
        found |= {"torch": torch_version, "mingc": own, **({"cuda": cuda} if cuda else {})}
    return found


def _commit() -> str:
    try:
        words = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return ""


def _listed(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Names of `known`, separated by commas, each once."""

    def read(text: str) -> tuple[str, ...]:
        words = tuple(part.strip() for part in text.split(","))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        if len({*words}) < len(words):
            raise argparse.ArgumentTypeError(f"{text} names a word twice")
        return words

    return read


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder of results.json and result.json")
    parser.add_argument("--parts", type=_listed(tuple(PARTS)), default=tuple(PARTS))
    parser.add_argument("--limit", type=seconds, default=480, help="seconds of the whole run")
    parser.add_argument("--build-limit", type=seconds, default=150, help="seconds of one build of `released`")
    parser.add_argument("--jobs", type=whole(1, 256), default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--layers", type=whole(0, 64), default=4, help="of each transformer; 0: as released")
    parser.add_argument("--sizes", type=whole(1, len(SIZES)), default=2, help="sizes of a graph")
    parser.add_argument("--cases", type=lambda text: tuple(filter(None, text.split(","))), default=())
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="tensorrt")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the tiny checkpoint")
    parser.add_argument("--batch-sizes", type=wholes(1, 16), default=(1,), help="of the tiny checkpoint")
    parser.add_argument("--commit", default="", help="commit that is measured, where this is no git checkout")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mingc-backend-engines"), help="scratch")
    parser.add_argument("--dry-run", action="store_true")
    for name in ("--part", "--case"):  # of the processes that this one starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is None and given.output is None:
        parser.error("--output is needed")
    given.dtype = given.dtype or ("bfloat16" if given.target == "cuda" else "float32")
    return given


def main() -> None:
    sys.path[:0] = [str(ROOT)]
    given = parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part is None:
        drive(given)
        return
    if given.part == "serve":
        write_whole(given.folder / "served-speech.json", serve(Path(given.case), given.folder))
        return
    every = cases_of(given.layers, given.sizes, dtype=given.dtype)
    (case,) = [each for each in every if each.name == given.case]
    if given.part == "build":
        name = f"build-{case.name}.{given.backend}"
        found = build(case, given.folder, given.backend, given.target, dry=given.dry_run)
    else:
        name = f"measure-{case.name}"
        found = measure(case, given.folder, tuple(given.backend.split(",")), given.target)
    write_whole(given.folder / f"{name}.json", found)


if __name__ == "__main__":
    main()
