"""The processes of an export: in what order they get their work, and that they end when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import mingc
from mingc.artifacts.manifest import EngineRecord, GraphRecord, Parity
from mingc.errors import CompileError
from mingc.export import pipeline
from mingc.export.build import BuiltEngine, GraphResult, GraphTask
from mingc.export.checkpoint import open_checkpoint
from mingc.export.recipe import ExportRecipe
from mingc.export.stages import find
from mingc.export.workers import result_of
from mingc.runtime.replay import replay

_END_S = 100
_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_STAGES = ("vision_encoder", "audio_encoder", "cfm", "audio_vae")
# A worker compiles for ten minutes when the export fails.
_EXPORT = """
import os, time
from mingc.export.workers import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600)
        raise SystemExit(7)
"""


def test_a_failed_export_ends_its_workers_and_leaves_no_folder(tmp_path: Path) -> None:
    script, scratch = tmp_path / "export.py", tmp_path / "scratch"
    script.write_text(_EXPORT, encoding="utf-8")
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1]), "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_END_S,
        check=False,
    )
    assert done.returncode == 7
    assert not Path(f"/proc/{int(done.stdout)}").exists()
    assert not list(scratch.iterdir())


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str | None) -> list[pipeline.Step]:
    """The steps of building four stages one job at a time, when compiling takes no time and `bad` fails its check."""
    steps: list[pipeline.Step] = []

    @contextmanager
    def one_thread(jobs: int) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(jobs) as pool:
            yield pool

    def build(task: GraphTask, fixed: dict[str, int] | None) -> BuiltEngine:
        file = f"engines/{task.stage}.{task.graph}.pt2"
        record = EngineRecord(backend="aoti", file=file, dims=fixed, compile_seconds=1.0, work=None)
        return BuiltEngine(record=record, peak_rss_bytes=1)

    def check(task: GraphTask, engines: tuple[EngineRecord, ...], _: object) -> GraphResult:
        name = f"{task.stage}.{task.graph}"
        if name == bad:
            raise CompileError(name)
        plans = find(task.stage).graphs(configs[task.stage], pipeline.Shard(), pipeline.stage_options(recipe))
        spec = next(plan.spec for plan in plans if plan.spec.name == task.graph)
        parity = Parity(compiled=0.0, eager=0.0)
        record = GraphRecord(spec=spec, engines=engines, golden="", parity=parity)
        return GraphResult(stage=task.stage, record=record, peak_rss_bytes=2)

    monkeypatch.setattr(pipeline, "worker_pool", one_thread)
    monkeypatch.setattr(pipeline, "build_engine", build)
    monkeypatch.setattr(pipeline, "check_graph", check)
    checkpoint, stages = open_checkpoint(_TINY), [find(name) for name in _STAGES]
    configs = {stage.name: stage.config(checkpoint) for stage in stages}
    recipe = ExportRecipe(checkpoint=_TINY, output=tmp_path / "out")
    run = pipeline._Run(recipe, checkpoint, stages, configs, tmp_path, replay, steps.append)
    try:
        run.build_graphs({name: () for name in _STAGES})
    except CompileError:
        assert bad is not None
    return steps


def test_every_engine_is_told_when_it_is_compiled_and_checked_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _run(tmp_path, monkeypatch, None)
    assert [step.name for step in steps] == ["engine", "check"] * (len(steps) // 2)
    assert [step.subject for step in steps[::2]] == [step.subject for step in steps[1::2]]
    assert steps[0].subject == "cfm.sample"
    rest = len(_STAGES) + 1  # a weights file each, the manifest
    assert (steps[-1].done, steps[-1].total) == (len(steps), len(steps) + rest)


def test_a_failed_check_ends_the_export_before_the_next_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step,) = _run(tmp_path, monkeypatch, "cfm.sample")
    assert (step.name, step.subject) == ("engine", "cfm.sample")


def test_too_little_memory_on_the_device_is_told_and_no_bug() -> None:
    future: Future[None] = Future()
    future.set_exception(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.40 GiB. GPU 0 has …")
    )
    with pytest.raises(CompileError, match="memory does not suffice: CUDA out of memory") as caught:
        result_of(future, "thinker.prefill_experts")
    assert caught.value.where == "thinker.prefill_experts" and "--jobs" in str(caught.value.fix)
