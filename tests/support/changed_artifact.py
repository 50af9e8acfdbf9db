"""Copies of an artifact that give other answers: a second export takes minutes."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import load_file, save_file

from mingc.artifacts.manifest import FILE_NAME, FileRecord, read_manifest
from mingc.verify.served.cases import read_goldens, write_goldens


def changed_artifact(artifact: Path, folder: Path, *, model: str) -> Path:
    """Copy `artifact` to `folder` with another model name, other weights and a valid manifest.

    The output weights of the thinker are negated.
    """
    shutil.copytree(artifact, folder)
    manifest = read_manifest(folder)
    files = dict(manifest.files)

    num_changed = 0
    for file in manifest.stages["thinker"].weights_files:
        tensors = load_file(folder / file)
        chosen = {name: -tensor for name, tensor in tensors.items() if "lm_head" in name}
        save_file({**tensors, **chosen}, folder / file)
        content = (folder / file).read_bytes()
        files[file] = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        num_changed += len(chosen)
    assert num_changed, "the thinker has no lm_head"
    changed = replace(manifest, model=model, files=files)
    (folder / FILE_NAME).write_text(changed.to_json(), encoding="utf-8")
    return folder


def record_only(artifact: Path, *names: str) -> None:
    """Leave these requests in `artifact`, of those that its export recorded: a replay of all takes half a minute."""
    manifest = read_manifest(artifact)
    assert manifest.served_goldens is not None
    path = artifact / manifest.served_goldens
    goldens = read_goldens(path)
    cases = tuple(case for case in goldens.cases if case.name in names)
    assert len(cases) == len(names)
    write_goldens(path, replace(goldens, cases=cases))
    content = path.read_bytes()
    record = FileRecord(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    changed = replace(manifest, files={**manifest.files, manifest.served_goldens: record})
    (artifact / FILE_NAME).write_text(changed.to_json(), encoding="utf-8")


def terse_artifact(artifact: Path, folder: Path) -> Path:
    """Copy `artifact` to `folder` so that no segment of its speech has more than four patches.

    The random model hardly ever stops before the cap, which allows for slow readers: seconds of sound for each word.
    """
    shutil.copytree(artifact, folder)
    manifest = read_manifest(folder)
    talker = replace(manifest.parameters["talker"], min_stop_step=2, max_steps=4)
    changed = replace(manifest, parameters={**manifest.parameters, "talker": talker})
    (folder / FILE_NAME).write_text(changed.to_json(), encoding="utf-8")
    return folder
