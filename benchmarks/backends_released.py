"""ONNX Runtime, AOTInductor and plain torch at the released dims on a CPU: random weights in float32, one size a graph.

    python benchmarks/backends_released.py --json benchmarks/results/backends-released-cpu.json

Of every stage the weights file of a float32 export is written, once; all engines and the eager module read it by memory
map. Of every graph, in processes of their own with a limit of time and memory:

1. each backend compiles it, all at the same time: seconds, peak memory, bytes of the engine;
2. a process with the engine alone binds it to the file and runs it once: milliseconds to load, memory that no file
   backs before and after, which would hold a second copy of the weights, and memory that files back;
3. one process runs the eager module and all engines in turns: milliseconds, and the worst relative error of an engine's
   outputs and state to the module's.

A backend that takes longer than its limit, or fails, has the reason in place of figures. Times on a shared machine are
for comparison with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cpu_result
import torch
from backends import memory_kib

from mingc.export.checks.eager_reference import run_eager
from mingc.export.checks.parity import worst_error
from mingc.export.compile.backends import find_backend
from mingc.export.compile.trace import capture, share_weights
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.weights.loading import load_module, write_weights
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.base import Engine
from mingc.runtime.engines.stage_loader import _within, opened_weights

CPU = torch.device("cpu")
CONFIGS = cpu_result.ROOT / "benchmarks" / "released"
STAGES = ("vision_encoder", "audio_encoder", "talker", "audio_vae", "cfm")
# Of the dims of all graphs; what is not named has the size at which the golden is taken. M: 256 patches of an image,
# T4: tokens of 4 seconds of speech, T of a prompt, B requests, L and T of the VAE: latents.
SIZES = {"M": 64, "N": 1, "T4": 50, "B": 1}
BACKENDS = ("onnx", "aoti")


def graphs_of(stage: Stage) -> dict[str, GraphDef]:
    config = stage.config(open_synthetic(CONFIGS))
    return {plan.spec.name: plan for plan in stage.graphs(config, Shard(), StageOptions())}


def sizes_of(plan: GraphDef) -> dict[str, int]:
    return {name: SIZES.get(name, size) for name, size in plan.check_dims.items()}


def engine_path(folder: Path, stage: Stage, graph: str, backend: str) -> Path:
    return folder / f"{stage.name}.{graph}{find_backend(backend).suffix}"


def weights_path(folder: Path, stage: Stage) -> Path:
    return folder / f"{stage.name}.safetensors"


def write_stage(folder: Path, stage: Stage) -> dict[str, Any]:
    checkpoint = open_synthetic(CONFIGS)
    path = weights_path(folder, stage)
    write_weights(checkpoint, stage, stage.config(checkpoint), Shard(), torch.float32, path)
    return {"weight_bytes": path.stat().st_size}


def eager_module(folder: Path, stage: Stage, plan: GraphDef) -> torch.nn.Module:
    config = stage.config(open_synthetic(CONFIGS))
    part = plan.spec.layer_instances[0]
    return load_module(stage, config, Shard(), weights_path(folder, stage), submodule=part)


def compile_graph(folder: Path, stage: Stage, graph: str, backend: str) -> dict[str, Any]:
    plan = graphs_of(stage)[graph]
    module = eager_module(folder, stage, plan)
    plan = share_weights(plan, module)
    where = f"{stage.name}.{graph}"
    program = capture(plan, module, stage=stage.name, static_shapes=None, device=CPU)
    path = engine_path(folder, stage, graph, backend)
    seconds = find_backend(backend).compile(program, path, device="cpu", cache=None, where=where)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "engine_bytes": path.stat().st_size,
        "compile_s": round(seconds, 1),
        "compile_peak_mib": peak >> 10,
    }


def bound_engine(
    folder: Path, stage: Stage, plan: GraphDef, backend: str
) -> tuple[Engine, list[torch.Tensor]]:
    """An engine with mapped weights, and those that its graph takes as arguments."""
    with opened_weights(weights_path(folder, stage)) as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    weights = _within(stored, plan.spec.layer_instances[0])
    engine = load_engine(backend, engine_path(folder, stage, plan.spec.name, backend), CPU)
    engine.bind(weights)
    return engine, [weights[name] for name in plan.spec.weights]


def run_engine(
    plan: GraphDef, engine: Engine, given: list[torch.Tensor], example: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs by name and the state after the call as `state.<name>`, as `run_eager` returns them."""
    spec = plan.spec
    tensors = [example[each.name].clone() for each in (*spec.inputs, *spec.state)]
    with torch.no_grad():
        outputs = engine.run([*tensors, *given])
    made = {each.name: value for each, value in zip(spec.outputs, outputs, strict=True)}
    state = zip(spec.state, tensors[len(spec.inputs) :], strict=True)
    return made | {f"state.{each.name}": value for each, value in state}


def example_of(plan: GraphDef) -> dict[str, torch.Tensor]:
    return dict(plan.example(sizes_of(plan), torch.Generator().manual_seed(1)))


def weigh(folder: Path, stage: Stage, graph: str, backend: str) -> dict[str, Any]:
    """Load and run one engine in this process, which holds nothing else of the stage."""
    plan = share_weights(graphs_of(stage)[graph], _Names(folder, stage, graph))
    example = example_of(plan)
    torch.randn(64, 64).mm(torch.randn(64, 64))  # threads and buffers of torch itself
    before = memory_kib()
    started = time.perf_counter()
    engine, given = bound_engine(folder, stage, plan, backend)
    loaded = time.perf_counter()
    own = sum(
        (
            weights_path(folder, stage).stat().st_size,
            engine_path(folder, stage, graph, backend).stat().st_size,
        )
    )
    run_engine(plan, engine, given, example)
    after = memory_kib()
    return {
        "load_ms": round(1e3 * (loaded - started), 1),
        "anonymous_mib": (after["RssAnon"] - before["RssAnon"]) >> 10,
        "file_backed_mib": (after["RssFile"] - before["RssFile"]) >> 10,
        "files_mib": own >> 20,
    }


class _Names(torch.nn.Module):
    """Stands in for a module whose weights' names alone are asked for."""

    def __init__(self, folder: Path, stage: Stage, graph: str) -> None:
        super().__init__()
        plan = graphs_of(stage)[graph]
        with opened_weights(weights_path(folder, stage)) as file:
            self._names = {*_within(dict.fromkeys(file.keys()), plan.spec.layer_instances[0])}

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return dict.fromkeys(self._names)


def compare(folder: Path, stage: Stage, graph: str, backends: list[str], runs: int) -> dict[str, Any]:
    """Run the eager module and the engines in turns."""
    plan = graphs_of(stage)[graph]
    module = eager_module(folder, stage, plan)
    plan = share_weights(plan, module)
    example = example_of(plan)
    calls: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "torch": lambda: run_eager(plan, module, example)
    }
    for backend in backends:
        engine, given = bound_engine(folder, stage, plan, backend)
        calls[backend] = lambda engine=engine, given=given: run_engine(plan, engine, given, example)  # type: ignore[misc]
    made = {name: call() for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs):
        for name in sorted(calls, reverse=turn % 2 == 1):
            started = time.perf_counter()
            calls[name]()
            taken[name].append(1e3 * (time.perf_counter() - started))
    first = statistics.median(taken["torch"])
    return {
        "sizes": sizes_of(plan),
        "weight_mib": sum(each.nbytes for each in module.state_dict().values()) >> 20,
        "engines": {
            name: {
                "error": worst_error(made[name], made["torch"]),
                "run_ms": round(statistics.median(of_one), 2),
                "fastest_ms": round(min(of_one), 2),
                "n": runs,
                "run_ratio": round(statistics.median(of_one) / first, 3),
            }
            for name, of_one in taken.items()
        },
    }


def child(given: argparse.Namespace, *words: str, limit: int | None = None) -> dict[str, Any]:
    """What a process of this script returns; `{"reason": …}` where it ran too long or failed. Ends all of its own."""
    command = [
        sys.executable,
        __file__,
        "--folder",
        str(given.folder),
        "--runs",
        str(given.runs),
        "--child",
        *words,
    ]

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (given.memory_gib << 30,) * 2)

    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=confine,
    )
    limit = limit or given.limit
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"reason": f"not done after {limit} s"}
    if process.returncode:
        lines = errors.strip().splitlines() or [f"ended with {process.returncode}"]
        return {"reason": lines[-1][:300]}
    return dict(json.loads(output))


def measure_graph(given: argparse.Namespace, stage: Stage, graph: str) -> dict[str, Any]:
    def compile_one(backend: str) -> dict[str, Any]:
        limit = given.aoti_limit if backend == "aoti" else given.limit
        return child(given, "compile", stage.name, graph, backend, limit=limit)

    with ThreadPoolExecutor(len(given.backends)) as pool:
        rows = dict(zip(given.backends, pool.map(compile_one, given.backends), strict=True))
    for backend, row in rows.items():
        if "reason" not in row:
            row |= child(given, "weigh", stage.name, graph, backend)
    built = [name for name, row in rows.items() if "reason" not in row]
    found = child(given, "compare", stage.name, graph, *built)
    for name, row in found.pop("engines", {}).items():
        rows[name] = rows.get(name, {}) | row
    engines = [{"backend": name, **rows[name]} for name in ("torch", *given.backends) if name in rows]
    for backend in given.backends:
        engine_path(given.folder, stage, graph, backend).unlink(missing_ok=True)
    row = {"graph": f"{stage.name}.{graph}", **found, "engines": engines}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def serve_child(given: argparse.Namespace) -> dict[str, Any]:
    kind, name, *words = given.child
    stage = find(name)
    with torch.no_grad():
        if kind == "weights":
            return write_stage(given.folder, stage)
        if kind == "compile":
            return compile_graph(given.folder, stage, *words)
        if kind == "weigh":
            return weigh(given.folder, stage, *words)
        graph, *backends = words
        return compare(given.folder, stage, graph, backends, given.runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--graphs", default="", help="STAGE.GRAPH,…; all of the stages where it is empty")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--limit", type=int, default=900, help="seconds of one process")
    parser.add_argument("--aoti-limit", type=int, default=300, help="seconds of a compilation by AOTInductor")
    parser.add_argument("--memory-gib", type=int, default=12, help="memory of one process that no file backs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = cpu_result.parse_args(parser)
    torch.set_num_threads(1)
    given.backends = given.backends.split(",")
    if given.child is not None:
        print(json.dumps(serve_child(given)))
        return
    rows, weights = [], {}
    for stage in map(find, given.stages.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            given.folder = Path(folder)
            weights[stage.name] = child(given, "weights", stage.name)
            print(f"{stage.name}: {weights[stage.name]}", file=sys.stderr, flush=True)
            for graph in graphs_of(stage):
                if not given.graphs or f"{stage.name}.{graph}" in given.graphs.split(","):
                    rows.append(measure_graph(given, stage, graph))
        if given.json is not None:  # after each stage, as the whole takes an hour
            cpu_result.write(given.json, "backends_released", rows, weights=weights)


if __name__ == "__main__":
    main()
