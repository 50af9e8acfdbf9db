"""The smallest program of a graph that TensorRT computes wrongly, refuses, or crashes on.

    python benchmarks/tensorrt_bisect.py --graph vision_encoder.encode --sizes M=1024 --output DIR [--layers 4]

First the first operator is searched up to which a prefix of the graph fails, then the fewest operators before it whose
inputs, computed by torch, still make it fail. Each trial is a process with a limit: it builds the plan, runs it and
compares the last value with torch's (bfloat16 may differ by 3 %, float32 by 0.1 %). DIR gets `smallest.pt2` and
`smallest.json` with the operators, shapes and what happened. The exit code is 0 if nothing fails, else 1.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from arguments import whole
from part_driver import ROOT, python_path, write_whole
from torch import Tensor, fx

Values = dict[fx.Node, Any]
Fails = Callable[[fx.GraphModule, list[Tensor]], str | None]


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


def smallest(
    module: fx.GraphModule, given: Sequence[Tensor], fails: Fails
) -> tuple[fx.GraphModule, list[Tensor], str] | None:
    """The smallest failing part of `module`, its inputs and what happened; None when no prefix fails.

    Both searches halve: they assume that a longer prefix, and more operators before the last one, fail as well.
    """
    values, nodes = record(module, given), operators_of(module)
    ends = [index for index, node in enumerate(nodes) if isinstance(values[node], Tensor)]

    def problem(last: int, count: int) -> str | None:
        part, inputs, _ = cut(module, values, last, count)
        return fails(part, inputs)

    low, high = 0, len(ends) - 1
    reason = problem(ends[high], len(nodes))
    if reason is None:
        return None
    while low < high:
        middle = (low + high) // 2
        found = problem(ends[middle], len(nodes))
        low, high, reason = (low, middle, found) if found else (middle + 1, high, reason)
    last, least, most = ends[high], 1, ends[high] + 1
    while least < most:
        middle = (least + most) // 2
        found = problem(last, middle)
        least, most, reason = (least, middle, found) if found else (middle + 1, most, reason)
    part, inputs, _ = cut(module, values, last, most)
    return part, inputs, str(reason)


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


def in_process(folder: Path, limit: float) -> Fails:
    """A trial in a process of its own; failing programs are kept until the next one."""
    from safetensors.torch import save_file

    def fails(part: fx.GraphModule, inputs: list[Tensor]) -> str | None:
        with torch.no_grad():
            program = torch.export.export(part, tuple(inputs), strict=False)
        torch.export.save(program, folder / "trial.pt2")
        save_file(
            {f"value{index}": each.contiguous() for index, each in enumerate(inputs)},
            folder / "trial.safetensors",
        )
        words = [sys.executable, "-X", "faulthandler", "-W", "ignore", __file__, "--trial", str(folder)]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        try:
            done = subprocess.run(
                words, cwd=ROOT, capture_output=True, text=True, timeout=limit, env=environment
            )
        except subprocess.TimeoutExpired:
            return f"no result after {limit:.0f} s"
        if done.returncode:
            return f"ended with {done.returncode}: {done.stderr[-600:]}"
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{len(operators_of(part))} operators: {found}", file=sys.stderr, flush=True)
        return None if found["is_right"] else json.dumps(found)

    return fails


def trial(folder: Path) -> dict[str, Any]:
    """Build and run the program in `folder` on the GPU, and compare it with torch."""
    from safetensors.torch import load_file

    from mingc.export.compile.backends.tensorrt import BACKEND
    from mingc.numerics.relative_error import relative_error
    from mingc.runtime.engines.backends.tensorrt import load

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    program = torch.export.load(folder / "trial.pt2")
    values = load_file(folder / "trial.safetensors", device="cuda")
    given = [values[f"value{index}"] for index in range(len(values))]
    with torch.no_grad():
        (expected,) = program.module()(*given)
    BACKEND.compile(program, folder / "trial.trt", device="cuda", cache=None, where="trial")
    engine = load(folder / "trial.trt", torch.device("cuda", 0))
    engine.bind({name.removeprefix("model."): value for name, value in program.state_dict.items()})
    (got,) = engine.run(given)
    if not got.is_floating_point() or not bool(expected.isfinite().all()):
        same = torch.equal(got.nan_to_num(), expected.nan_to_num())
        return {"is_right": same, "note": "compared bit by bit: no floats, or infinite ones"}
    error, is_finite = relative_error(got, expected), bool(got.isfinite().all())
    limit = 3e-2 if got.dtype != torch.float32 else 1e-3
    return {"is_right": is_finite and error <= limit, "error": error, "finite": is_finite}


def program_of(graph: str, sizes: dict[str, int], layers: int, folder: Path) -> Any:
    """The program that the backend gets for a graph of the released dims, bfloat16, and its inputs with weights."""
    from backend_engines import Case, load_case

    from mingc.export.compile.backends import find_backend
    from mingc.export.compile.onnx_program import to_functional
    from mingc.export.compile.trace import trace_graph

    case = Case(graph=graph, sizes=sizes, layers=layers)
    stage, plan, module = load_case(case, folder, "cuda", torch.bfloat16)
    backend = find_backend("tensorrt").for_graph(plan, sizes, "cuda")
    program = trace_graph(backend, plan, module, stage=stage, sizes=sizes, device="cuda")
    return to_functional(program, graph)[1].module(), program.example_inputs[0]


def main() -> int:
    sys.path[:0] = [str(ROOT)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graph", default="vision_encoder.encode")
    parser.add_argument("--sizes", default="M=1024", help="of the dims with buckets, as M=1024")
    parser.add_argument("--layers", type=whole(1, 64), default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one trial")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trial", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trial is not None:
        print(json.dumps(trial(given.trial)))
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    sizes = {name: int(size) for name, _, size in (each.partition("=") for each in given.sizes.split(","))}
    module, inputs = program_of(given.graph, sizes, given.layers, given.output)
    found = smallest(module, inputs, in_process(given.output, given.limit))
    if found is None:
        print("no prefix of the graph fails")
        return 0
    part, values, reason = found
    with torch.no_grad():
        torch.export.save(
            torch.export.export(part, tuple(values), strict=False), given.output / "smallest.pt2"
        )
    write_whole(given.output / "smallest.json", describe(part, values, reason))
    print(json.dumps(describe(part, values, reason), indent=1))
    return 1


if __name__ == "__main__":
    sys.exit(main())
