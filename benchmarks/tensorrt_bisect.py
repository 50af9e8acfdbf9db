"""The smallest program of a graph that TensorRT computes wrongly, refuses, or crashes on.

    python benchmarks/tensorrt_bisect.py --graph vision_encoder.encode --sizes M=1024 --output DIR [--layers 2]

First the first operator is searched up to which a prefix of the graph fails, then the fewest operators before it whose
inputs, computed by torch, still make it fail, then every kind of operator is tried alone. Each trial builds a plan,
runs it and compares the last value with torch's (3 % with values in bfloat16, else 0.01 %), in one of `--jobs`
processes with a limit. A program that fails is tried again in a fresh process, because an earlier one may have damaged
the first.

DIR gets every trial as it ends (`trials.jsonl`), the smallest failing program so far (`smallest.pt2` and
`smallest.json`, with what happened), and at last `alone.json`; so a run that is cut off leaves what it found. The exit
code is 0 if nothing fails, else 1. With `LD_PRELOAD=libc_malloc_debug.so.0 MALLOC_CHECK_=3` glibc (2.34 or later) also
finds small writes beyond an allocation.

`--backend onnx --target cpu --dtype float32 --config tiny --sizes M=16` rehearses it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from arguments import whole
from part_driver import ROOT, python_path, write_whole
from torch import Tensor, fx

Values = dict[fx.Node, Any]
Part = tuple[fx.GraphModule, list[Tensor]]
Fails = Callable[[Sequence[Part]], list[str | None]]
"""What is wrong with each of several programs on its inputs; they may run side by side."""
Keep = Callable[[fx.GraphModule, list[Tensor], str], None]
"""Called with each smaller program that fails, its inputs and what happened."""
_REFUSED = "refused: "


def operators_of(module: fx.GraphModule) -> list[fx.Node]:
    return [each for each in module.graph.nodes if each.op == "call_function"]


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)


def record(module: fx.GraphModule, given: Sequence[Tensor]) -> Values:
    recorder = _Recorder(module)
    with torch.no_grad():
        recorder.run(*given)
    return dict(recorder.env)


def cut(
    module: fx.GraphModule, values: Values, last: int, count: int
) -> tuple[fx.GraphModule, list[Tensor], int]:
    """The last operator and what it needs of the `count` operators that end with it; other values become inputs.

    Returns the graph, its inputs, and its number of operators.
    """
    nodes = operators_of(module)
    inside = {*nodes[max(0, last + 1 - count) : last + 1]}
    graph, made, inputs = fx.Graph(), {}, []

    def copy(node: fx.Node) -> fx.Node:
        if node not in made:
            is_tensor = isinstance(values[node], Tensor)
            if node.op == "get_attr" or (node.op == "call_function" and (node in inside or not is_tensor)):
                for each in node.all_input_nodes:
                    copy(each)
                made[node] = graph.node_copy(node, made.__getitem__)
            else:
                made[node] = graph.placeholder(f"value{len(inputs)}")
                inputs.append(values[node])
        return made[node]

    end = copy(nodes[last])
    for placeholder in reversed(graph.find_nodes(op="placeholder")):
        first = next(iter(graph.nodes))
        if placeholder is not first:
            first.prepend(placeholder)
    graph.output((end,))
    graph.lint()
    found = fx.GraphModule(module, graph)
    return found, inputs, len(operators_of(found))


def alone(module: fx.GraphModule, given: Sequence[Tensor], fails: Fails) -> list[dict[str, Any]]:
    """What is wrong with every kind of operator by itself: those that differ in operator, arguments or shapes."""
    values, parts = record(module, given), {}
    for index, node in enumerate(operators_of(module)):
        if isinstance(values[node], Tensor):
            part, inputs, _ = cut(module, values, index, 1)
            found = describe(part, inputs, "")
            parts[str((found["operators"], found["inputs"], node.args[1:], node.kwargs))] = part, inputs
    reasons = fails([*parts.values()])
    return [
        describe(*part, str(reason)) for part, reason in zip(parts.values(), reasons, strict=True) if reason
    ]


def smallest(
    module: fx.GraphModule,
    given: Sequence[Tensor],
    fails: Fails,
    ways: int = 1,
    keep: Keep = lambda part, inputs, reason: None,
) -> tuple[fx.GraphModule, list[Tensor], str] | None:
    """The smallest failing part of `module`, its inputs and what happened; None when no prefix fails.

    Both searches assume that a longer prefix, and more operators before the last one, fail as well. A part that is
    refused counts only where the whole is refused. `ways` is the number of programs that are tried at a time.
    """
    values, nodes = record(module, given), operators_of(module)
    ends = [
        index
        for index, node in enumerate(nodes)
        if isinstance(values[node], Tensor) and values[node].is_floating_point()
    ]

    whole, inputs, _ = cut(module, values, ends[-1], len(nodes))
    (reason,) = fails([(whole, inputs)])
    if reason is None:
        return None
    is_refused, best = reason.startswith(_REFUSED), (whole, inputs, reason)
    keep(*best)

    def search(low: int, high: int, last: Callable[[int], int], count: Callable[[int], int]) -> int:
        """The first place that fails, where `high` is known to."""
        nonlocal best
        while low < high:
            places = sorted({low + (high - low) * each // (ways + 1) for each in range(1, ways + 1)})
            parts = [cut(module, values, last(each), count(each))[:2] for each in places]
            found = fails(parts)
            alike = [each and each.startswith(_REFUSED) == is_refused for each in found]
            bad = next((index for index, each in enumerate(alike) if each), len(places))
            if bad < len(places):
                high, best = places[bad], (*parts[bad], str(found[bad]))
                keep(*best)
            low = places[bad - 1] + 1 if bad else low
        return high

    last = ends[search(0, len(ends) - 1, ends.__getitem__, lambda _: len(nodes))]
    search(1, last + 1, lambda _: last, lambda each: each)
    return best


def describe(part: fx.GraphModule, inputs: Sequence[Tensor], reason: str) -> dict[str, Any]:
    return {
        "reason": reason,
        "operators": [
            each.target.__name__ if each.target is operator.getitem else str(each.target)
            for each in operators_of(part)
        ],
        "inputs": [f"{str(each.dtype)[6:]} {[*each.shape]}" for each in inputs],
        "code": part.code,
    }


class Worker:
    """A process (`words`) that tries one program after the other; it is started again when one fails."""

    def __init__(self, folder: Path, words: Sequence[str], limit: float) -> None:
        self.folder, self._words, self._limit, self._log = folder, words, limit, folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        self._start()

    def _start(self) -> None:
        self._is_fresh = True
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._words, str(self.folder)],
                cwd=ROOT,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path()},
            )

    def ask(self) -> dict[str, Any]:
        """What came of the program in the folder; the text of a crash as `reason`."""
        was_fresh, found = self._is_fresh, self._try()
        if found["is_right"] or str(found.get("reason")).startswith(_REFUSED):
            return found
        self._restart()
        if not was_fresh:
            found = self._try()
            self._restart()
        return found

    def _restart(self) -> None:
        self.stop()
        self._start()

    def _try(self) -> dict[str, Any]:
        self._is_fresh, process = False, self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(b"\n")
            ready, _, _ = select.select([process.stdout], [], [], self._limit)
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.stop()
        text = self._log.read_text(errors="replace").partition("\nExtension modules:")[0][-1500:]
        return {
            "is_right": False,
            "reason": f"ended with {process.returncode} within {self._limit:.0f} s: {text}",
        }

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def in_processes(folder: Path, workers: Sequence[Worker]) -> Fails:
    """Trials in the processes of `workers`, noted in `folder` as they end."""
    from safetensors.torch import save_file

    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for each in workers:
        free.put(each)

    def one(part: fx.GraphModule, inputs: list[Tensor], worker: Worker) -> str | None:
        started = time.monotonic()
        try:
            found = worker.ask()
        finally:
            free.put(worker)
        found["seconds"] = round(time.monotonic() - started, 1)
        text = json.dumps({**describe(part, inputs, ""), "code": "", **found})
        with (folder / "trials.jsonl").open("a") as file:
            file.write(f"{text}\n")
        print(f"{len(operators_of(part))} operators: {found}", file=sys.stderr, flush=True)
        return None if found["is_right"] else str(found.get("reason", found))

    def fails(parts: Sequence[Part]) -> list[str | None]:
        waiting = []
        with ThreadPoolExecutor(len(workers)) as pool:
            for part, inputs in parts:
                worker = free.get()
                with torch.no_grad():
                    program = torch.export.export(part, tuple(inputs), strict=False)
                torch.export.save(program, worker.folder / "trial.pt2")
                save_file(
                    {f"value{index}": each.contiguous() for index, each in enumerate(inputs)},
                    worker.folder / "trial.safetensors",
                )
                waiting.append(pool.submit(one, part, inputs, worker))
        return [each.result() for each in waiting]

    return fails


def trial(folder: Path, backend: str, target: str) -> dict[str, Any]:
    """Build and run the program in `folder`, and compare it with torch."""
    from safetensors.torch import load_file

    from mingc.export.compile.backends import find_backend
    from mingc.numerics.relative_error import relative_error
    from mingc.runtime.engines.backends import load_engine

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    program = torch.export.load(folder / "trial.pt2")
    values = load_file(folder / "trial.safetensors", device=target)
    given = [values[f"value{index}"] for index in range(len(values))]
    with torch.no_grad():
        (expected,) = program.module()(*given)
    builder = find_backend(backend)
    path = folder / f"trial{builder.suffix}"
    builder.compile(program, path, device=target, cache=None, where="trial")
    engine = load_engine(backend, path, torch.device(target, 0))
    engine.bind({name.removeprefix("model."): value for name, value in program.state_dict.items()})
    (got,) = engine.run(given)
    if not got.is_floating_point() or not bool(expected.isfinite().all()):
        same = torch.equal(got.nan_to_num(), expected.nan_to_num())
        return {"is_right": same, "note": "compared bit by bit: no floats, or infinite ones"}
    error, is_finite = relative_error(got, expected), bool(got.isfinite().all())
    dtypes = {
        node.meta["val"].dtype for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)
    }
    limit = 3e-2 if torch.bfloat16 in dtypes else 1e-4
    return {"is_right": is_finite and error <= limit, "error": error, "finite": is_finite}


def answer(folder: Path, backend: str, target: str) -> None:
    """Try the program in `folder` each time a line is read, and print what came of it."""
    from mingc.errors import CompileError

    for _ in sys.stdin:
        try:
            found = trial(folder, backend, target)
        except Exception as error:
            kind = _REFUSED if isinstance(error, CompileError) else ""
            found = {"is_right": False, "reason": f"{kind}{type(error).__name__}: {error}"[:900]}
        print(json.dumps(found), flush=True)


def program_of(case: Any, folder: Path, backend: str, target: str) -> Any:
    """The program that the backend gets for a graph, and its inputs with weights."""
    from backend_engines import load_case

    from mingc.export.compile.backends import find_backend
    from mingc.export.compile.onnx_program import to_functional
    from mingc.export.compile.trace import trace_graph

    stage, plan, module = load_case(case, folder, target, getattr(torch, case.dtype))
    builder = find_backend(backend).for_graph(plan, case.sizes, target)
    program = trace_graph(builder, plan, module, stage=stage, sizes=case.sizes, device=target)
    return to_functional(program, case.graph)[1].module(), program.example_inputs[0]


def main() -> int:
    sys.path[:0] = [str(ROOT)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graph", default="vision_encoder.encode")
    parser.add_argument("--sizes", default="M=1024", help="of the dims with buckets, as M=1024")
    parser.add_argument("--config", choices=("released", "tiny"), default="released")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=whole(0, 64), default=2, help="of each transformer; 0: all")
    parser.add_argument("--jobs", type=whole(1, 64), default=8)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one trial")
    parser.add_argument("--backend", default="tensorrt")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trial", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trial is not None:
        answer(given.trial, given.backend, given.target)
        return 0
    from backend_engines import Case

    given.output.mkdir(parents=True, exist_ok=True)
    folder = given.output.resolve()
    sizes = {name: int(size) for name, _, size in (each.partition("=") for each in given.sizes.split(","))}
    case = Case(graph=given.graph, sizes=sizes, layers=given.layers, config=given.config, dtype=given.dtype)
    words = [sys.executable, "-X", "faulthandler", "-u", "-W", "ignore", __file__]
    words += ["--backend", given.backend, "--target", given.target, "--trial"]
    workers = [Worker(folder / f"worker{index}", words, given.limit) for index in range(given.jobs)]

    def keep(part: fx.GraphModule, values: list[Tensor], reason: str) -> None:
        with torch.no_grad():
            torch.export.save(torch.export.export(part, tuple(values), strict=False), folder / "smallest.pt2")
        write_whole(folder / "smallest.json", describe(part, values, reason))

    try:
        module, inputs = program_of(case, folder, given.backend, given.target)
        fails = in_processes(folder, workers)
        found = smallest(module, inputs, fails, given.jobs, keep)
        wrong = alone(module, inputs, fails)
        write_whole(folder / "alone.json", wrong)
    finally:
        for each in workers:
            each.stop()
    print(json.dumps(describe(*found), indent=1) if found else "no prefix of the graph fails")
    return 1 if found or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
