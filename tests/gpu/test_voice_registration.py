"""A voice that is registered over HTTP equals the exported one, with engines on a GPU."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile
import torch
from mingc_command import CACHE, CHECKPOINT, DATA, mingc, serving
from safetensors.numpy import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORDS = "One sentence. Another one. And a third."


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clip_gives_the_same_voice_by_export_and_over_http(dtype: str, tmp_path: Path) -> None:
    checkpoint, artifact, folder = tmp_path / "checkpoint", tmp_path / "artifact", tmp_path / "voices"
    shutil.copytree(CHECKPOINT, checkpoint)
    samples, rate = soundfile.read(DATA / "speech" / "three-sentences.ogg", dtype="int16")
    data = checkpoint / "talker" / "data"
    soundfile.write(data / "clone.wav", samples, rate)
    listed = json.loads((data / "voice_name.json").read_text())
    listed["clone"] = {"prompt_wav_path": "data/clone.wav", "prompt_text": WORDS}
    (data / "voice_name.json").write_text(json.dumps(listed))
    options = ("--stages", "talker,cfm,audio_vae", "--batch-sizes", "1", "--cache", CACHE)
    jobs = ("--jobs", os.cpu_count() or 1)
    exported = mingc(
        "export", checkpoint, "--target", "cuda", "--dtype", dtype, *options, *jobs, "--output", artifact
    )
    assert exported.code == 0, exported.stderr
    with serving(artifact, "--voices-dir", folder) as server:
        response = httpx.post(
            f"{server.url}/v1/audio/voices",
            data={"name": "mine", "consent": "The speaker agreed.", "ref_text": WORDS},
            files={"audio_sample": ("clone.wav", (data / "clone.wav").read_bytes())},
            timeout=60,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        body = {"input": "Say this.", "seed": 5, "max_steps": 3, "response_format": "wav", "stream": False}
        spoken = [
            httpx.post(
                f"{server.url}/v1/audio/speech", json={**body, "voice": voice}, timeout=60, trust_env=False
            ).content
            for voice in ("clone", "mine")
        ]
    assert spoken[0] == spoken[1] and len(spoken[0]) > 10_000
    manifest = json.loads((artifact / "manifest.json").read_text())
    (file,) = (each["file"] for each in manifest["voices"] if each["name"] == "clone")
    exported_voice, (path,) = load_file(artifact / file), folder.glob("*.safetensors")
    registered = load_file(path)
    np.testing.assert_array_equal(exported_voice["latents"][0], registered["latents"])
    for name in ("embeds", "speaker"):
        np.testing.assert_array_equal(exported_voice[name], registered[name])
