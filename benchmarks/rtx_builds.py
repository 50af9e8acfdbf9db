"""Build TensorRT engines for RTX cards without a GPU: time, size and sha256 of every graph, and its ONNX model's error.

    python benchmarks/rtx_builds.py CHECKPOINT --cards sm86,sm89,sm120 --json benchmarks/results/rtx-builds-cpu.json

Of each graph one engine with a profile over all sizes is built for each card, and one for all of them together, twice.
The ONNX model that the engines are made of is run by ONNX Runtime at the sizes of the graph's golden and compared with
the float32 module. Engines are not run. Weights are no part of an engine.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_result
import torch

from mingc.artifacts.tensorrt_engine import read_engine
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.checks.eager_reference import run_eager
from mingc.export.checks.parity import worst_error
from mingc.export.compile.backends.tensorrt import BACKEND
from mingc.export.compile.trace import capture, share_weights
from mingc.export.stage import Shard, Stage, StageOptions
from mingc.export.stages import find
from mingc.export.weights.loading import float32_module
from mingc.runtime.engines.backends.tensorrt import load

CPU = torch.device("cpu")
STAGES = "vision_encoder,audio_encoder,talker,cfm,audio_vae"


def build_stage(stage: Stage, checkpoint: Checkpoint, cards: list[str], folder: Path) -> list[dict[str, Any]]:
    """A row for each graph of `stage`."""
    config = stage.config(checkpoint)
    rows = []
    for plan in stage.graphs(config, Shard(), StageOptions()):
        module = float32_module(stage, config, checkpoint, submodule=plan.spec.layer_instances[0])
        plan = share_weights(plan, module)
        name = f"{stage.name}.{plan.spec.name}"
        program = capture(plan, module, stage=stage.name, static_shapes=None, device=CPU)
        row: dict[str, Any] = {"graph": name, "engines": []}
        path = folder / f"{name}.trt"
        for target in (*cards, ",".join(cards), ",".join(cards)):
            started = time.perf_counter()
            BACKEND.compile(program, path, device=f"rtx:{target}", cache=None, where=name)
            row["engines"].append(
                {
                    "cards": target,
                    "seconds": round(time.perf_counter() - started, 2),
                    "plan_bytes": read_engine(path).header.plan_bytes,
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                }
            )
        model = read_engine(path).model
        row["model"] = {"bytes": len(model), "sha256": hashlib.sha256(model).hexdigest()}
        *_, first, second = (each["sha256"] for each in row["engines"])
        row["equal_twice"] = first == second
        engine = load(path, CPU)
        engine.bind(module.state_dict())
        example = plan.example(plan.check_dims, torch.Generator().manual_seed(1))
        expected = run_eager(plan, module, example)
        mine = [example[each.name].clone() for each in (*plan.spec.inputs, *plan.spec.state)]
        outputs = engine.run([*mine, *(module.state_dict()[each] for each in plan.spec.weights)])
        made = {each.name: value for each, value in zip(plan.spec.outputs, outputs, strict=True)}
        state = mine[len(plan.spec.inputs) :]
        made.update({f"state.{each.name}": value for each, value in zip(plan.spec.state, state, strict=True)})
        row["onnx_error"] = worst_error(made, expected)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stages", default=STAGES)
    parser.add_argument("--cards", default="sm86,sm89,sm120")
    parser.add_argument("--json", type=Path)
    given = cpu_result.parse_args(parser)
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(given.checkpoint)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        rows = [
            row
            for name in given.stages.split(",")
            for row in build_stage(find(name), checkpoint, given.cards.split(","), Path(folder))
        ]
    if given.json is not None:
        cpu_result.write(given.json, "rtx_builds", rows)


if __name__ == "__main__":
    main()
