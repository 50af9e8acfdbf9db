"""Weights written by worker processes: their files and bytes, and failed or interrupted exports."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import mingc
from mingc.artifacts.spec import Quantization
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.plan import plan_export
from mingc.export.process_pool import worker_pool
from mingc.export.recipe import ExportRecipe
from mingc.export.run import Step, run
from mingc.export.source import open_source
from mingc.export.stage import Shard
from mingc.export.stages import discover
from mingc.export.stages.thinker import STAGE
from mingc.export.tasks.rank_weights import rank_weights, write_rank
from mingc.export.weights.loading import load_module, weights_files, write_weights
from mingc.verify.engine_run import run_engine

_END_S = 60
_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_RANKS = 4


def test_a_worker_writes_the_same_bytes(tmp_path: Path) -> None:
    """For every rank, from a checkpoint and synthetic; in bfloat16, INT4 and FP8."""
    recipes = [
        ExportRecipe(
            checkpoint=_TINY,
            output=tmp_path / "out",
            world_size=2,
            dtype="bfloat16",
            quantize=("thinker=int4",) if is_drawn else (),
            synthetic=is_drawn,
        )
        for is_drawn in (False, True)
    ]
    (tmp_path / "weights").mkdir()
    with worker_pool(1) as pool:
        for recipe in recipes:
            checkpoint = open_source(recipe)
            for rank, weights in enumerate(rank_weights(STAGE, recipe, ("head",))):
                assert weights.name == f"thinker.rank{rank}"
                written = pool.submit(write_rank, weights, recipe, tmp_path).result(_END_S)
                assert written.seconds > 0 and written.peak_rss_bytes > 10 << 20
                expected = tmp_path / "expected"
                write_weights(
                    checkpoint,
                    STAGE,
                    STAGE.config(checkpoint),
                    Shard(rank=rank, world_size=2),
                    torch.bfloat16,
                    expected,
                    recipe.quantization("thinker"),
                    omitted=("head",),
                )
                [one], [other] = weights_files(tmp_path / weights.path), weights_files(expected)
                assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_files_have_at_most_the_given_size_unless_one_weight_is_larger(
    quantization: Quantization | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    config, shard = STAGE.config(checkpoint), Shard(rank=1, world_size=2)

    def write(name: str, **options: int) -> list[dict[str, torch.Tensor]]:
        path = tmp_path / name
        write_weights(checkpoint, STAGE, config, shard, torch.bfloat16, path, quantization, **options)
        return [load_file(file) for file in weights_files(path)]

    [whole] = write("whole")
    limit = max(value.nbytes for value in whole.values()) - 1
    parts = write("parts", file_bytes=limit)
    assert [name for part in parts for name in part] == [*whole]
    for part in parts:
        for name, value in part.items():
            assert value.dtype == whole[name].dtype and torch.equal(
                value.view(torch.uint8), whole[name].view(torch.uint8)
            )
    sizes = [sum(value.nbytes for value in part.values()) for part in parts]
    large = [index for index, size in enumerate(sizes) if size > limit]
    assert large and len(parts) > len(large) + 1
    assert all(len({name.removesuffix("_scale") for name in parts[index]}) == 1 for index in large)
    # No file would have had room for the first weight of the next one.
    firsts = [next(iter(part)) for part in parts[1:]]
    for size, part, first in zip(sizes, parts[1:], firsts, strict=False):
        assert size + sum(part[name].nbytes for name in (first, f"{first}_scale") if name in part) > limit
    one, other = (
        load_module(STAGE, config, shard, tmp_path / name, quantization) for name in ("whole", "parts")
    )
    for name, value in one.state_dict().items():
        assert torch.equal(value.view(torch.uint8), other.state_dict()[name].view(torch.uint8)), name


# Float weights that no export stores in its compute dtype: what they decide or sum up needs float32.
FLOAT32 = {
    "thinker": r"embed\.inv_freq|layers\.\d+\.feed_forward\.router\.bias",
    "audio_vae": r"decoder\.head\..*|decoder\.blend|(en|de)coder\.(stack|aggregator)\.inv_freq",
    "cfm": r"(dit|aggregator)\.(cos|sin)|time_embeddings|step_sizes",
    "talker": r"stack\.inv_freq",
    "vision_encoder": r"position_table|inverse_frequency",
    "audio_encoder": r"positions",
    "image_condition": r"connector\.inv_freq",
    "image_dit": r"ends\.angles_\d",
}


@pytest.mark.parametrize("name", FLOAT32)
def test_a_bfloat16_export_keeps_some_weights_in_float32(
    name: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Inverse Fourier transforms, rotary frequencies, position tables, biases of the router, the solver's grid."""
    stage = discover()[name]
    path = tmp_path / "weights"
    size = write_weights(checkpoint, stage, stage.config(checkpoint), Shard(), torch.bfloat16, path)
    tensors = load_file(path / "000.safetensors")
    assert size == sum(each.numel() * each.itemsize for each in tensors.values())
    floats = {key: value.dtype for key, value in tensors.items() if value.is_floating_point()}
    kept = {key for key, dtype in floats.items() if dtype == torch.float32}
    assert kept == {key for key in floats if re.fullmatch(FLOAT32[name], key)} != set()
    assert {*floats.values()} == {torch.float32, torch.bfloat16}


def _lose_a_tensor(checkpoint: Path) -> str:
    """Remove a tensor from the thinker's files, which stay valid; returns its name."""
    index = checkpoint / "model.safetensors.index.json"
    document = json.loads(index.read_text(encoding="utf-8"))
    name = next(each for each in document["weight_map"] if each.endswith("word_embeddings.weight"))
    file = checkpoint / document["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, checkpoint / "new")
    (checkpoint / "new").replace(file)  # the export has the old one open
    index.write_text(json.dumps(document), encoding="utf-8")
    return name


def test_a_missing_weight_of_a_rank_is_reported_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, scratch = tmp_path / "checkpoint", tmp_path / "scratch"
    shutil.copytree(_TINY, checkpoint)
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    steps, lost = [], []

    def progress(step: Step) -> None:
        if step.seconds is None:  # it begins
            return
        steps.append((step.name, step.subject))
        if step.subject == "thinker.rank0":
            lost.append(_lose_a_tensor(checkpoint))

    recipe = ExportRecipe(
        checkpoint=checkpoint, output=tmp_path / "out", stages=("thinker",), world_size=_RANKS, jobs=1
    )
    with pytest.raises(CheckpointError) as caught:
        run(plan_export(recipe), run_engine, progress)
    assert caught.value.message == f"tensor {lost[0]} is missing"
    assert caught.value.where == f"main: {checkpoint}"
    assert ("weights", "thinker.rank1") not in steps and "check" not in dict(steps)
    assert sorted(tmp_path.iterdir()) == [checkpoint, scratch] and not list(scratch.iterdir())
    assert not multiprocessing.active_children()


def test_an_export_that_is_interrupted_while_files_are_written_leaves_nothing(tmp_path: Path) -> None:
    words = ("--stages", "thinker", "--tp", _RANKS, "--jobs", 2, "--output", tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-m", "mingc", "export", str(_TINY), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1]), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its process group shows whether any process is left
    ) as export:
        try:
            assert export.stderr is not None
            assert any("weights thinker.rank1 " in line for line in export.stderr)
            export.send_signal(signal.SIGTERM)
            assert export.wait(timeout=_END_S) == 130
        except BaseException:
            os.killpg(export.pid, signal.SIGKILL)
            raise
    assert not list(tmp_path.iterdir())
    # The shared memory tracker ends a moment after its parent.
    _, left = psutil.wait_procs(_alive(export.pid), timeout=_END_S)
    assert not left


def _alive(group: int) -> list[psutil.Process]:
    """Live processes of `group`, without zombies that no init process collects."""
    found = []
    for each in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):  # the process has just ended
            if each.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(each.pid) == group:
                found.append(each)
    return found
