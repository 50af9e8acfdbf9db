"""Which engines a changed flag rebuilds: content keys of all engines of an export, computed without compiling.

    python benchmarks/changed_flags.py --json benchmarks/results/changed-flags-cpu.json

Every recipe writes its weights and traces its graphs as an export of the tiny checkpoint does; an engine is reused when
the key of its entry in the engine cache is that of the recipe without flags. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import mingc
from mingc.export.compile.backends import aoti
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stages import find
from mingc.export.tasks import compile_engine
from mingc.export.tasks.compile_engine import build_engine
from mingc.export.tasks.graph_task import GraphTask, engine_label
from mingc.export.tasks.weights_file import weights_files, write_file

_ROOT = Path(__file__).parents[1]
_TINY = _ROOT / "tests" / "data" / "tiny-ming"
STAGES = ("audio_encoder", "talker", "cfm", "thinker")
FLAGS: dict[str, dict[str, Any]] = {
    "--model-name other --jobs 2 --force": {"model_name": "other", "jobs": 2, "force": True},
    "--batch-sizes 1,2": {"batch_sizes": (1, 2)},
    "--max-model-len 2048": {"max_model_len": 2048},
    "--prefill-chunk-size 128": {"prefill_chunk_size": 128},
    "--quantize talker=fp8": {"quantize": ("talker=fp8",)},
    "--quantize thinker=int4": {"quantize": ("thinker=int4",)},
    "--tp 2": {"world_size": 2},
    "--dtype bfloat16": {"dtype": "bfloat16"},
}


class _KeyOnly:
    """A backend that records what the engine would be kept under."""

    name, suffix = "aoti", ".pt2"

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        options = {**aoti._OPTIONS, **aoti._cpu_options()}
        self.keys[path.stem] = aoti._key(program, options, device)
        return 0.0


def keys(recipe: ExportRecipe) -> dict[str, str]:
    """Content key of every engine of the recipe, by name."""
    checkpoint, options, backend = open_source(recipe), stage_options(recipe), _KeyOnly()
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(compile_engine, "find_backend", lambda name: backend),
    ):
        folder = Path(name)
        (folder / "weights").mkdir()
        for stage in map(find, recipe.stages or ()):
            files = weights_files(stage, recipe, {})
            write_file(files[0], recipe, checkpoint, folder)
            shard = first_shard(stage, recipe)
            for plan in stage.graphs(stage.config(checkpoint), shard, options):
                task = GraphTask(
                    recipe=recipe,
                    stage=stage.name,
                    graph=plan.spec.name,
                    folder=folder,
                    weights=tuple(file.path for file in files),
                )
                for sizes in options.engine_sizes(plan):
                    build_engine(task, sizes)
                    assert engine_label(task.name, sizes) in backend.keys
    return backend.keys


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if given.json and not commit:
        parser.error("--json needs the measured commit")
    plain = ExportRecipe(checkpoint=_TINY, output=Path("unused"), stages=STAGES)
    before = keys(plain)
    assert keys(plain) == before, "two exports of the same input have other keys"
    figures = []
    for flags, changes in FLAGS.items():
        after = keys(replace(plain, **changes))
        rebuilt = sorted(name for name, key in after.items() if before.get(name) != key)
        reused = sorted({*after} - {*rebuilt})
        figures.append({"name": "engines", "flags": flags, "rebuilt": rebuilt, "reused": reused})
        print(f"{flags}: rebuilt {', '.join(rebuilt) or 'none'}; reused {len(reused)}", flush=True)
    if given.json:
        document = {
            "schema": 1,
            "benchmark": "changed-flags",
            "commit": commit,
            "command": shlex.join(["python", "benchmarks/changed_flags.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hardware": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "mingc": mingc.__version__,
            },
            "figures": figures,
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
