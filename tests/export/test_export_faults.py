"""What an export does when it is killed, when its cache is damaged, and when it is asked for nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import mingc
from mingc.errors import CheckpointError, ConfigError
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.compile.backends.aoti import compile_graph
from mingc.export.plan import plan_export
from mingc.export.recipe import ExportRecipe
from mingc.export.run import Step, run
from mingc.export.stage import StageOptions
from mingc.export.stages import find
from mingc.verify.engine_run import run_engine

_END_S = 60
_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
# A pool like that of an export, whose process then waits to be killed.
_EXPORT = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from mingc.export.process_pool import start_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(sys.argv[1],)
    )
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def test_workers_end_with_a_killed_export(tmp_path: Path) -> None:
    script = tmp_path / "export.py"
    script.write_text(_EXPORT, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as export:
        assert export.stdout is not None
        line = export.stdout.readline()
        export.kill()
    worker = int(line)
    for _ in range(_END_S * 10):
        if not _is_running(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlives the export")


def _is_running(process: int) -> bool:
    # Without an init to collect it, an ended orphan stays as a zombie.
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_compilers_write_into_the_folder_of_their_export(tmp_path: Path) -> None:
    words = "import os, sys, tempfile; from mingc.export.process_pool import start_worker; start_worker(sys.argv[1]);"
    words += "print(tempfile.gettempdir(), os.environ['TMPDIR'], os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    # The script is no worker of a pool, so there is no owner to watch.
    context = "import mingc.host.parent_watchdog as watchdog; watchdog.watch_pool_owner = lambda: None;"
    done = subprocess.run(
        [sys.executable, "-c", context + words, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path), str(tmp_path), str(tmp_path / "inductor")]


class _Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_engine_of_the_cache_is_compiled_anew(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_and_package(program: object, *, package_path: str, inductor_configs: object) -> None:
        compiled.append(package_path)
        with zipfile.ZipFile(package_path, "w") as package:
            package.writestr("engine.so", b"code" * 100)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_and_package)
    program = torch.export.export(_Doubled(), (torch.ones(4),))
    cache, engine = tmp_path / "cache", tmp_path / "engine.pt2"
    (cache / "engine-0123abcd.partial").mkdir(parents=True)  # an export was killed while it wrote this

    def count_compiles() -> int:
        compile_graph(program, engine, device="cpu", cache=cache, where="test")
        return len(compiled)

    assert count_compiles() == 1
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    changed = whole.replace(b"codecode", b"codeCode", 1)
    kept.write_bytes({"cut": whole[: len(whole) // 2], "changed": changed, "emptied": b""}[damage])
    assert count_compiles() == 2
    assert count_compiles() == 2
    assert engine.read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("stages", [(), ("talker", "talker")])
def test_stages_are_named_once_and_at_least_one(tmp_path: Path, stages: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--stages"):
        ExportRecipe(checkpoint=tmp_path, output=tmp_path / "out", stages=stages)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sizes": (1, 10**20)}, "--batch-sizes 1000"),
        ({"max_model_len": 10**24}, "--max-model-len 1000"),
        ({"max_model_len": 64, "prefill_chunk_size": 32}, "--max-model-len 64: must be at least 128"),
        ({"model_name": " "}, "--model-name: is empty"),
        ({"model_name": "\udcff"}, "--model-name '.*udcff': contains unprintable characters"),
        ({"backend": ()}, "--backend: is empty"),
        ({"backend": ("",)}, "--backend is empty: not one of auto, aoti"),
        ({"backend": ("aoti:",)}, "--backend aoti:: names no stage"),
        ({"backend": ("aoti:talker,",)}, "--backend aoti:talker,: names no stage"),
    ],
)
def test_sizes_and_names_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ExportRecipe(checkpoint=tmp_path, output=tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("stages", "options", "says"),
    [
        ("talker", {"world_size": 2}, "--tp 2: is for thinker"),
        ("talker", {"max_model_len": 8192}, "--max-model-len 8192: is for thinker"),
        ("cfm,audio_vae", {"prefill_chunk_size": 64}, "--prefill-chunk-size 64: is for thinker and talker"),
        ("talker", {"quantize": ("fp8", "thinker=int4")}, "--quantize thinker=int4: is for thinker"),
        (
            "vision_encoder",
            {"quantize": ("fp8",)},
            "--quantize fp8: is for thinker and talker and cfm and audio_vae",
        ),
    ],
)
def test_what_concerns_no_stage_to_be_built_is_refused_before_anything_is_written(
    tmp_path: Path, stages: str, options: dict[str, Any], says: str
) -> None:
    recipe = ExportRecipe(
        checkpoint=_TINY, output=tmp_path / "out", stages=tuple(stages.split(",")), **options
    )
    with pytest.raises(ConfigError, match=says):
        run(plan_export(recipe), run_engine, print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        ("talker,thinker", {"world_size": 2, "max_model_len": 8192}),
        ("talker", {"prefill_chunk_size": 64, "quantize": ("fp8",)}),
        ("cfm", {"world_size": 1, "max_model_len": 4096}),
    ],
)
def test_what_concerns_one_of_the_stages_is_taken(
    tmp_path: Path, stages: str, options: dict[str, Any]
) -> None:
    recipe = ExportRecipe(checkpoint=_TINY, output=tmp_path, **options)
    recipe.check_stages([find(name) for name in stages.split(",")])


@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_target_that_is_not_here_is_refused_before_anything_is_written(
    tmp_path: Path, synthetic: bool
) -> None:
    recipe = ExportRecipe(
        checkpoint=_TINY, output=tmp_path / "out", target="cuda", dtype="bfloat16", synthetic=synthetic
    )
    with pytest.raises(ConfigError, match="no CUDA device"):
        run(plan_export(recipe), run_engine, print)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recipe = ExportRecipe(checkpoint=_TINY, output=tmp_path / "out", cache=tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="is not a writable folder") as caught:
        run(plan_export(recipe), run_engine, print)
    assert caught.value.where == "--cache"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def _with_voices(root: Path, document: object) -> Checkpoint:
    shutil.copytree(_TINY, root)
    (root / "talker" / "data" / "voice_name.json").write_text(json.dumps(document), encoding="utf-8")
    return open_checkpoint(root)


def test_a_voice_without_its_wave_is_not_the_default(tmp_path: Path) -> None:
    voices = {
        "DB30": {"prompt_text": "one", "prompt_wav_path": "data/spks/lost.wav"},
        "other": {"prompt_text": "two", "prompt_wav_path": "/authoring/prompt16k.wav"},
    }
    checkpoint = _with_voices(tmp_path / "checkpoint", voices)
    stage = find("talker")
    parameters = stage.parameters(stage.config(checkpoint), StageOptions())
    assert parameters.default_voice == "other"


@pytest.mark.parametrize("document", [{"DB30": {}}, ["DB30"], {"DB30": 3}])
def test_a_voice_list_of_another_form_is_reported(tmp_path: Path, document: object) -> None:
    checkpoint = _with_voices(tmp_path / "checkpoint", document)
    with pytest.raises(CheckpointError, match="voice list"):
        find("talker").config(checkpoint)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "the thinker's tokenizer.json is missing"),
        ("tokenizer.json", b'{"added_tokens": []}', "not a tokenizer"),
        ("talker/llm/tokenizer.json", b"{", "not a tokenizer"),
        ("talker/llm/tokenizer.json", b"\xff", "not a tokenizer"),
    ],
)
def test_tokenizers_are_read_before_anything_is_built(
    tmp_path: Path, file: str, content: bytes | None, says: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(_TINY, checkpoint)
    if content is None:
        (checkpoint / file).unlink()
    else:
        (checkpoint / file).write_bytes(content)
    recipe = ExportRecipe(checkpoint=checkpoint, output=tmp_path / "out", stages=("thinker", "talker"))
    steps: list[object] = []
    with pytest.raises(CheckpointError, match=says) as caught:
        run(plan_export(recipe), run_engine, steps.append)
    assert caught.value.where == str(checkpoint / file)
    assert steps == [] and list(tmp_path.iterdir()) == [checkpoint]


def test_voices_are_registered_before_anything_is_built(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(_TINY, checkpoint)
    wave = next((checkpoint / "talker" / "data").rglob("*.wav"))
    wave.write_bytes(b"no sound")
    recipe = ExportRecipe(
        checkpoint=checkpoint, output=tmp_path / "out", stages=("talker", "cfm", "audio_vae")
    )
    steps: list[Step] = []
    with pytest.raises(CheckpointError, match="the voice's wave cannot be read"):
        run(plan_export(recipe), run_engine, steps.append)
    assert {step.name for step in steps} <= {"voice"}
    assert list(tmp_path.iterdir()) == [checkpoint]
