"""Copy an artifact so that it gives other answers, for tests of updates: a second export takes minutes."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import load_file, save_file

from mingc.artifacts.manifest import FILE_NAME, FileRecord, read_manifest


def changed_artifact(artifact: Path, folder: Path, *, model: str, voice: str | None = None) -> Path:
    """Copy `artifact` to `folder` with another model name, other weights and a valid manifest.

    The output weights of the thinker and the latents of all voices are negated. `voice`: new name of the last voice.
    """
    shutil.copytree(artifact, folder)
    manifest = read_manifest(folder)
    files = dict(manifest.files)

    def negate(file: str, part: str) -> int:
        tensors = load_file(folder / file)
        chosen = [name for name in tensors if part in name]
        save_file({**tensors, **{name: -tensors[name] for name in chosen}}, folder / file)
        content = (folder / file).read_bytes()
        files[file] = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        return len(chosen)

    thinker = manifest.stages.get("thinker")
    if thinker is not None and not sum(negate(file, "lm_head") for file in thinker.weights):
        raise SystemExit(f"{artifact.name}: the thinker has no lm_head")
    for record in manifest.voices:
        negate(record.file, "latents")
    voices = manifest.voices
    if voice is not None:
        voices = (*voices[:-1], replace(voices[-1], name=voice))
    changed = replace(manifest, model=model, files=files, voices=voices)
    (folder / FILE_NAME).write_text(changed.to_json(), encoding="utf-8")
    return folder
