"""The processes of an export: that they end when it fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import mingc
from mingc.artifacts.manifest import EngineRecord
from mingc.errors import CompileError
from mingc.export.compile.backends.aoti import BACKEND
from mingc.export.process_pool import (
    gives_memory_back,
    peak_rss_bytes,
    result_of,
    start_processes,
    submit,
    worker_pool,
)
from mingc.export.recipe import ExportRecipe
from mingc.export.tasks import compile_engine, graph_task
from mingc.export.tasks.graph_task import GraphTask, OpenGraph

_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_END_S = 100
# A worker that holds a lock compiles for ten minutes when the export fails.
_EXPORT = """
import os, time
from mingc.export.process_pool import worker_pool

if __name__ == "__main__":
    with worker_pool(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(exec, "import builtins, multiprocessing; builtins.held = multiprocessing.RLock()").result()
        pool.submit(time.sleep, 600)
        pool.submit_alone("cfm.sample", time.sleep, 600)
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
        capture_output=True,
        text=True,
        timeout=_END_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert not Path(f"/proc/{int(done.stdout)}").exists()
    assert not list(scratch.iterdir())


def test_processes_start_before_they_have_tasks_and_see_the_gpus_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    others = set(multiprocessing.active_children())
    with worker_pool(3, ("5", "GPU-7e")) as pool:
        start_processes(pool, 3)
        assert len(set(multiprocessing.active_children()) - others) == 3
        seen: dict[int, str] = {}
        while len(seen) < 3:
            seen.update((process, gpu) for process, gpu, _ in pool.map(_seen, range(3)))
    assert sorted(seen.values()) == ["5", "5", "GPU-7e"]


def test_each_task_that_runs_alone_sees_the_next_gpu_that_is_free_and_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    cores = len(os.sched_getaffinity(0))
    with worker_pool(3, ("5", "GPU-7e")) as pool:
        together = [pool.submit_alone("g", _seen, place) for place in range(3)]
        assert [each.result()[1:] for each in together] == [
            (gpu, max(1, cores // 3)) for gpu in ("5", "GPU-7e", "5")
        ]
        assert pool.submit_alone("g", _seen, 0).result()[1] in ("5", "GPU-7e")
    with worker_pool(1, ("5",)) as pool:
        assert pool.submit_alone("g", _seen, 0).result()[2] == cores
    with worker_pool(8 * cores) as pool:
        assert pool.submit_alone("g", _seen, 0).result()[1:] == ("9", torch.get_num_threads())


def _seen(_: int) -> tuple[int, str, int]:
    """This process, what CUDA would see in it, and the threads of torch's operations."""
    time.sleep(0.05)  # so that one process does not take all tasks
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], torch.get_num_threads()


def test_a_process_that_dies_idle_is_reported_with_the_next_task_and_not_as_a_bug() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(CompileError, match=r"died \(out of memory\?\)") as caught:
            result_of(submit(pool, "cfm.sample", os._exit, 9), "cfm.sample")
        assert caught.value.where == "cfm.sample"
        with pytest.raises(CompileError, match=r"died \(out of memory\?\)") as caught:
            submit(pool, "talker.step", os.getpid)
        assert caught.value.where == "talker.step" and "--jobs" in str(caught.value.fix)


def test_tasks_that_run_alone_end_with_their_process_and_take_no_other_task_with_them(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    deaths: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
        (os.abort, (), "signal 6"),
        (os._exit, (7,), "exit code 7"),
        (signal.raise_signal, (signal.SIGKILL,), r"signal 9: out of memory\?"),
    ]
    with worker_pool(1) as pool:
        shared = pool.submit(os.getpid).result()
        waiting = pool.submit(pipe.read_text)
        with pytest.raises(KeyError) as failed:
            result_of(pool.submit_alone("g", exec, "import os; raise KeyError(os.getpid())"), "g")
        (alone,) = failed.value.args
        assert alone != shared and not Path(f"/proc/{alone}").exists()
        for work, arguments, cause in deaths:
            with pytest.raises(CompileError, match=rf"^its process died \({cause}\)") as caught:
                result_of(pool.submit_alone("cfm.sample", work, *arguments), "cfm.sample")
            assert caught.value.where == "cfm.sample" and "--backend" in str(caught.value.fix)
        pipe.write_text("works on")
        assert result_of(waiting, "talker.step") == "works on"
        assert pool.submit(os.getpid).result() == shared


def test_too_little_memory_on_the_device_is_reported_and_not_as_a_bug() -> None:
    future: Future[None] = Future()
    future.set_exception(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.40 GiB. GPU 0 has …")
    )
    with pytest.raises(CompileError, match="does not have enough memory: CUDA out of memory") as caught:
        result_of(future, "thinker.prefill_experts")
    assert caught.value.where == "thinker.prefill_experts" and "stop other processes" in str(caught.value.fix)


def test_a_task_that_fails_keeps_none_of_its_tensors() -> None:
    """A worker keeps the error of its last task, and with it the frames of its causes."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def run_engine() -> None:
        output = torch.zeros(1)
        kept.append(weakref.ref(output))
        raise RuntimeError("CUDA out of memory")

    @gives_memory_back()
    def check() -> None:
        weights = torch.zeros(1)
        kept.append(weakref.ref(weights))
        try:
            run_engine()
        except RuntimeError as error:
            raise CompileError("the engine does not run") from error

    with pytest.raises(CompileError) as caught:
        check()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert [each() for each in kept] == [None, None]


def test_a_task_keeps_none_of_the_weights_that_it_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps the last graph until it traces another one."""
    monkeypatch.setattr("torch._inductor.codecache.AotCodeCompiler.compile", lambda *_, **__: [])
    kept: list[weakref.ref[torch.Tensor]] = []

    @gives_memory_back()
    def build() -> None:
        module = torch.nn.Linear(9, 9).requires_grad_(False)
        kept.append(weakref.ref(module.weight))
        program = torch.export.export(module, (torch.zeros(1, 9),))
        BACKEND.compile(program, tmp_path / "engine.pt2", device="cpu", cache=None, where="toy")

    build()
    assert [each() for each in kept] == [None]


@pytest.mark.parametrize("fails", [False, True])
def test_a_compile_frees_weights_that_something_still_holds(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where torch keeps weights of compiled graphs."""
    module = torch.nn.BatchNorm1d(9)  # with parameters and buffers
    held: list[torch.Tensor] = []

    def compile_(task: GraphTask, opened: OpenGraph, _: object) -> EngineRecord:
        held.extend(each.detach() for each in opened.module.state_dict().values())
        if fails:
            raise CompileError("CUDA out of memory", where=task.name)
        return EngineRecord(backend="aoti", file="", dims=None, compile_seconds=0.0)

    monkeypatch.setattr(graph_task, "load_shard", lambda *_: module)
    monkeypatch.setattr(compile_engine, "compile_engine", compile_)
    recipe = ExportRecipe(checkpoint=_TINY, output=tmp_path, target="cpu", dtype="float32")
    task = GraphTask(recipe=recipe, stage="cfm", graph="speaker", folder=tmp_path, weights=("w",))
    with pytest.raises(CompileError) if fails else nullcontext():
        compile_engine.build_engine(task, None)
    assert [each.untyped_storage().nbytes() for each in held] == [0] * 5


def test_the_peak_is_that_of_the_kernel() -> None:
    """`VmHWM` in /proc is in KiB."""
    peak = peak_rss_bytes()
    (line,) = [
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:")
    ]
    assert peak == pytest.approx(1024 * int(line.split()[1]), rel=0.02) and peak > 1 << 24
