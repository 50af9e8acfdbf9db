"""What an export does when it is killed, and what it refuses before it builds anything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mingc
from mingc.errors import CheckpointError, ConfigError
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.plan import plan_export
from mingc.export.recipe import ExportRecipe
from mingc.export.run import Step, run
from mingc.export.stage import StageOptions
from mingc.export.stages import find
from mingc.runtime.service.voice_registration import open_voices
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


def test_what_concerns_no_stage_to_be_built_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    recipe = ExportRecipe(checkpoint=_TINY, output=tmp_path / "out", stages=("talker",), world_size=2)
    with pytest.raises(ConfigError, match="--tp 2: is for thinker"):
        run(plan_export(recipe), run_engine, print)
    assert not list(tmp_path.iterdir())


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


def test_voices_are_read_before_anything_is_built(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(_TINY, checkpoint)
    wave = next((checkpoint / "talker" / "data").rglob("*.wav"))
    wave.write_bytes(b"no sound")
    recipe = ExportRecipe(
        checkpoint=checkpoint, output=tmp_path / "out", stages=("talker", "cfm", "audio_vae")
    )
    steps: list[Step] = []
    with pytest.raises(ConfigError, match="nothing registers the voices DB30, lingguang"):
        run(plan_export(recipe), run_engine, steps.append)
    with pytest.raises(CheckpointError, match="the voice's wave cannot be read"):
        run(plan_export(recipe), run_engine, steps.append, open_voices=open_voices)
    assert steps == []
    assert list(tmp_path.iterdir()) == [checkpoint]
