"""Compare engines of several artifacts of one checkpoint, made by different backends, on a CPU.

    python benchmarks/backends.py AOTI_ARTIFACT ONNX_ARTIFACT --json benchmarks/results/backends-cpu.json

Every graph is loaded and run on the inputs of its golden. The artifacts take turns, so that a change of the
machine's load reaches all of them. Figures of a graph and backend: bytes of the engine, seconds of compilation and
error at export (from the manifest), milliseconds to load and to run the engine, and the ratio to the first
artifact's. Then new processes, in turns as well, each load all engines of one artifact and run every graph once:
seconds from the start of the interpreter until all are loaded, and memory that files back (weights are mapped) or
not. On a shared machine only ratios are meaningful.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu_result
import torch
from safetensors.torch import load_file

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.manifest import EngineRecord, GraphRecord
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.base import Engine
from mingc.runtime.engines.stage_loader import _within, load_stage, opened_weights

CPU = torch.device("cpu")


class Candidate:
    """One engine of one artifact with bound weights, and the time it took to load."""

    def __init__(self, artifact: Artifact, stage: str, record: GraphRecord) -> None:
        self.artifact, self.stage, self.record = artifact, stage, record
        self.engine_record: EngineRecord = record.engines[0]
        with opened_weights(artifact.region(artifact.manifest.stages[stage].weights[0])) as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        self._weights = _within(weights, record.spec.layer_instances[0])
        self.load_ms: list[float] = []
        self.run_ms: list[float] = []
        self._engine: Engine | None = None

    def load(self) -> None:
        started = time.perf_counter()
        path = self.artifact.path(self.engine_record.file)
        self._engine = load_engine(self.engine_record.backend, path, CPU)
        self._engine.bind(self._weights)
        self.load_ms.append(1e3 * (time.perf_counter() - started))

    def run(self, golden: dict[str, torch.Tensor]) -> None:
        spec = self.record.spec
        tensors = [golden[f"in.{each.name}"] for each in spec.inputs]
        tensors += [golden[f"state.{each.name}"].clone() for each in spec.state]
        tensors += [self._weights[name] for name in spec.weights]
        assert self._engine is not None, "load it first"
        started = time.perf_counter()
        with torch.no_grad():
            self._engine.run(tensors)
        self.run_ms.append(1e3 * (time.perf_counter() - started))

    def figures(self) -> dict[str, Any]:
        return {
            "backend": self.engine_record.backend,
            "engine_bytes": self.artifact.manifest.files[self.engine_record.file].size_bytes,
            "compile_seconds": self.engine_record.compile_seconds,
            "error": self.record.parity.compiled,
            "load_ms": round(statistics.median(self.load_ms), 2),
            "run_ms": {
                "median": round(statistics.median(self.run_ms), 4),
                "min": round(min(self.run_ms), 4),
                "n": len(self.run_ms),
            },
        }


def compare(artifacts: list[Artifact], loads: int, runs: int) -> list[dict[str, Any]]:
    """Figures of every graph in every artifact."""
    names = {
        (stage, graph): None
        for artifact in artifacts
        for stage, record in artifact.manifest.stages.items()
        for graph in record.graphs
    }
    rows = []
    for stage, graph in names:
        candidates = [
            Candidate(artifact, stage, artifact.manifest.stages[stage].graphs[graph])
            for artifact in artifacts
            if stage in artifact.manifest.stages
        ]
        first = candidates[0]
        golden = load_file(first.artifact.path(first.record.golden))
        for step, count in (("load", loads), ("run", runs)):
            for _ in range(count):
                for candidate in candidates:
                    candidate.load() if step == "load" else candidate.run(golden)
        engines = [each.figures() for each in candidates]
        for each in engines:
            each["run_ratio"] = round(each["run_ms"]["median"] / engines[0]["run_ms"]["median"], 3)
            each["load_ratio"] = round(each["load_ms"] / engines[0]["load_ms"], 3)
        rows.append({"graph": f"{stage}.{graph}", "engines": engines})
        print(f"{rows[-1]['graph']}: {rows[-1]['engines']}", file=sys.stderr)
    return rows


def load_all(artifact: Artifact, started: float) -> dict[str, Any]:
    """Load every stage and run every graph on its golden. Returns seconds since `started`, and memory."""
    imported = time.time()
    stages = {name: load_stage(artifact, name, CPU) for name in artifact.manifest.stages}
    loaded = time.time()
    memory = memory_kib()
    for name, record in artifact.manifest.stages.items():
        for graph_name, graph in record.graphs.items():
            golden = load_file(artifact.path(graph.golden))
            inputs = {each.name: golden[f"in.{each.name}"] for each in graph.spec.inputs}
            state = {each.name: golden[f"state.{each.name}"].clone() for each in graph.spec.state}
            with torch.no_grad():
                stages[name][graph_name].run(**inputs, **state)
    modules = {name.split(".")[0] for name in sys.modules} | {*sys.modules}
    return {
        "import_s": imported - started,
        "load_s": loaded - imported,
        "anonymous_kib": memory["RssAnon"],
        "anonymous_after_runs_kib": memory_kib()["RssAnon"],
        "file_backed_kib": memory["RssFile"],
        "compilers": sorted(
            modules & {"torch._dynamo", "torch._inductor", "onnx", "onnxscript", "torch.onnx"}
        ),
    }


def memory_kib() -> dict[str, int]:
    """Resident memory of this process by kind."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}


def compare_processes(artifacts: list[Artifact], count: int) -> list[dict[str, Any]]:
    """Medians of `count` processes per artifact, and ratios to the first artifact."""
    found: list[list[dict[str, Any]]] = [[] for _ in artifacts]
    for _ in range(count):
        for artifact, of_artifact in zip(artifacts, found, strict=True):
            words = [sys.executable, __file__, str(artifact.root), "--process", str(time.time())]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            of_artifact.append(json.loads(done.stdout))
    rows = []
    for artifact, of_artifact in zip(artifacts, found, strict=True):
        figures = {
            name: round(statistics.median(each[name] for each in of_artifact), 3)
            for name in of_artifact[0]
            if name != "compilers"
        }
        engines = {each.file for graphs in graphs_of(artifact) for each in graphs.engines}
        weights = {file for stage in artifact.manifest.stages.values() for file in stage.weights}
        files = artifact.manifest.files
        row: dict[str, Any] = {
            "backends": sorted({each for graph in graphs_of(artifact) for each in graph.backends}),
            "engine_bytes": sum(files[file].size_bytes for file in engines),
            "weight_bytes": sum(files[file].size_bytes for file in weights),
            "compilers": sorted({name for each in of_artifact for name in each["compilers"]}),
            "processes": count,
            **figures,
        }
        for name in ("load_s", "anonymous_after_runs_kib", "engine_bytes"):
            row[f"{name}_ratio"] = round(row[name] / (rows[0] if rows else row)[name], 3)
        rows.append(row)
    return rows


def graphs_of(artifact: Artifact) -> list[GraphRecord]:
    return [graph for stage in artifact.manifest.stages.values() for graph in stage.graphs.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--process", type=float, help=argparse.SUPPRESS)  # when this process was started
    parser.add_argument("--json", type=Path)
    given = cpu_result.parse_args(parser)
    torch.set_num_threads(1)
    artifacts = [open_artifact(path) for path in given.artifacts]
    if given.process is not None:
        print(json.dumps(load_all(artifacts[0], given.process)))
        return
    rows = compare(artifacts, given.loads, given.runs)
    processes = compare_processes(artifacts, given.processes)
    print(f"processes: {processes}", file=sys.stderr)
    if given.json is not None:
        cpu_result.write(given.json, "backends", rows, processes=processes)


if __name__ == "__main__":
    main()
