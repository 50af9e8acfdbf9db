"""`mingc export --backend auto` end to end: engines are built, run and chosen by a clock that the test sets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from mingc_command import CHECKPOINT, EAGER, mingc_here
from safetensors import safe_open
from server_thread import run_server
from tokenizers import Tokenizer
from worker_threads import worker_threads

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.manifest import GraphRecord
from mingc.artifacts.spec import GraphSpec
from mingc.errors import CompileError
from mingc.export import schedule
from mingc.export.compile.backend import Backend
from mingc.export.compile.backends.aoti import BACKEND as AOTI
from mingc.export.compile.backends.onnx import BACKEND as ONNX
from mingc.export.stage import GraphDef
from mingc.host.description import processor_name
from mingc.probe import engine_trial
from mingc.runtime.engines import backends
from mingc.runtime.engines.base import Engine
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions

NO_COMPILER = "left out, as it compiles for minutes"
TOO_LARGE = "its gathers are too large"
# Microseconds of one call with `size` rows in a graph's first dim, by backend.
CLOCK: dict[str, dict[str, Callable[[int], float]]] = {
    "embed": {"eager": lambda size: 30, "onnx": lambda size: 20},
    # Faster for one row, slower for more: the geometric mean of 10, 20 and 640 is above 40.
    "dense": {"eager": lambda size: 40, "onnx": lambda size: 10 * size},
    # Slower for one row, but faster on the mean of both: that of 75 and 10 is 27 (the arithmetic one is 43).
    "head": {"eager": lambda size: 40, "onnx": lambda size: 75 if size == 1 else 10},
    "decode_experts": {"eager": lambda size: 700, "onnx": lambda size: 7000},
}
FASTEST = {
    "embed": "onnx",
    "dense": "eager",
    "head": "onnx",
    "decode_experts": "eager",
    # ONNX Runtime refuses these, by `refuse_untimed`: no times, and one backend is left.
    "prefill_attention": "eager",
    "decode_attention": "eager",
    "prefill_experts": "eager",
}


class TimedEngine(Engine):
    """A real engine, each call of which takes as long by the clock as `CLOCK` says."""

    def __init__(self, engine: Engine, takes: Callable[[int], float], clock: SimpleNamespace) -> None:
        self._engine, self._takes, self._clock = engine, takes, clock

    def constants(self) -> Sequence[str]:
        return self._engine.constants()

    def bind(self, weights: Any) -> None:
        self._engine.bind(weights)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._clock.now += self._takes(len(tensors[0])) / 1e6
        self._clock.runs.append(type(self._engine).__name__)
        return self._engine.run(tensors)


def refuse_untimed(_: Backend, plan: GraphDef, *__: object, where: str) -> None:
    """In place of ONNX Runtime's own limit, which the tiny checkpoint keeps: fewer models to translate."""
    if plan.spec.name not in CLOCK:
        raise CompileError(TOO_LARGE, where=where)


@pytest.fixture(scope="module")
def clock() -> Iterator[SimpleNamespace]:
    """Stands in for the time of trials alone."""
    found = SimpleNamespace(now=0.0, runs=[])
    load = backends.load_engine

    def timed(backend: str, path: Path, device: torch.device) -> Engine:
        stage, graph, _ = path.name.split(".")
        assert stage == "thinker" and path.suffix == f".{backend}"
        return TimedEngine(load(backend, path, device), CLOCK[graph][backend], found)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EAGER))
        patch.setattr(schedule, "worker_pool", worker_threads)  # processes know no patches
        patch.setattr(type(AOTI), "unsupported_reason", lambda *_: NO_COMPILER)
        patch.setattr(type(ONNX), "check_graph", refuse_untimed)
        patch.setattr(engine_trial, "load_engine", timed)
        patch.setattr(engine_trial, "time", SimpleNamespace(perf_counter=lambda: found.now))
        yield found


@pytest.fixture(scope="module")
def artifact(clock: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("auto") / "thinker"
    sizes = ("--max-model-len", 256, "--prefill-chunk-size", 64, "--batch-sizes", "1,2")
    words = ("--backend", "auto", "--stages", "thinker", "--no-cache", *sizes, "--output", root)
    done = mingc_here("export", CHECKPOINT, *words, "--json")
    assert done.code == 0, done.stderr
    assert {*clock.runs} == {"EagerEngine", "OnnxEngine"}, "the engines themselves were run"
    assert {row["graph"]: row["backend"] for row in done.document["graphs"]} == FASTEST
    return root


@pytest.fixture(scope="module")
def graphs(artifact: Path) -> dict[str, GraphRecord]:
    return open_artifact(artifact).manifest.stages["thinker"].graphs


def test_each_graph_keeps_the_engine_that_its_times_speak_for(
    artifact: Path, graphs: dict[str, GraphRecord]
) -> None:
    assert {name: graph.backends for name, graph in graphs.items()} == {
        name: (backend,) for name, backend in FASTEST.items()
    }
    left = {path.name for path in (artifact / "engines").iterdir()}
    assert left == {f"thinker.{name}.{backend}" for name, backend in FASTEST.items()}


def bucket_sizes(spec: GraphSpec) -> int:
    return math.prod(len(dim.buckets) for dim in spec.dims if dim.buckets)


def test_the_manifest_has_every_time_the_device_and_the_reason_of_what_was_not_tried(
    artifact: Path, graphs: dict[str, GraphRecord]
) -> None:
    for name, graph in graphs.items():
        trial = graph.trial
        assert trial is not None and trial.device == (processor_name() if name in CLOCK else "")
        refused = {each.backend: each.reason for each in trial.refused}
        assert refused.pop("aoti") == NO_COMPILER and "RTX cards" in refused.pop("tensorrt")
        if name not in CLOCK:
            assert refused == {"onnx": TOO_LARGE} and trial.timings == ()
            continue
        assert refused == {}
        rows = graph.spec.inputs[0].shape[0]
        assert isinstance(rows, str)
        for backend in ("eager", "onnx"):
            timings = [each for each in trial.timings if each.backend == backend]
            assert len(timings) == bucket_sizes(graph.spec), "one at every bucket"
            for each in timings:
                assert each.median_us == pytest.approx(CLOCK[name][backend](each.dims[rows]), abs=0.1)
                # As many as fit into a tenth of a second for the slower engine, at most 21.
                assert each.calls == (14 if name == "decode_experts" else 21)
    notes = open_artifact(artifact).manifest.notes
    (note,) = [each for each in notes if each.startswith("aoti was not used for ")]
    assert all(f"thinker.{name}" in note for name in FASTEST) and note.endswith(NO_COMPILER)


def test_inspect_says_why(artifact: Path) -> None:
    rows = mingc_here("bundle", "inspect", artifact, "--json").document["backends"]
    found = {row["graph"]: row for row in rows}
    assert {name: found[f"thinker.{name}"]["runs"] for name in FASTEST} == {
        name: [backend] for name, backend in FASTEST.items()
    }
    reason = found["thinker.decode_experts"]["reason"]
    assert f"{processor_name()}: eager 1.00, onnx 10.00" in reason
    assert f"aoti refused: {NO_COMPILER}" in reason
    assert f"onnx refused: {TOO_LARGE}" in found["thinker.prefill_experts"]["reason"]


def test_the_mixed_artifact_agrees_with_the_eager_model(artifact: Path) -> None:
    """`verify` replays goldens and requests that the eager modules in float32 recorded."""
    done = mingc_here("verify", artifact, "--json")
    assert done.code == 0, done.stderr
    document = done.document
    assert document["passed"]
    replayed = {row["file"]: row["checked"] for row in document["files"]}
    for name in FASTEST:
        assert replayed[f"thinker.{name}"] > 0
    assert replayed["served as usual"] > 0


def test_the_mixed_artifact_answers_a_request(artifact: Path) -> None:
    """With the tokens that the eager model answered the same question with when it was recorded."""
    document = open_artifact(artifact).manifest
    assert document.served_goldens is not None
    with safe_open(artifact / document.served_goldens, framework="np") as file:
        (case, *_) = json.loads(file.metadata()["cases"])["cases"]
        tokens = file.get_tensor(f"{case['name']}.tokens")
    (message,) = case["messages"]
    ((question,),) = [[part["text"] for part in message["parts"]]]
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": case["max_tokens"],
        "temperature": 0,
    }
    with (
        run_server(lambda: open_service(artifact, EngineOptions())) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokenizer = Tokenizer.from_file(str(artifact / document.tokenizers["thinker"]))
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == tokenizer.decode(list(tokens))
    assert choice["finish_reason"] == case["finish"]
