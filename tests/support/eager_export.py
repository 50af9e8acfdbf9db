"""Artifacts of the tiny checkpoint that nothing is compiled for: exported in seconds, run operation by operation."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mingc_command import CACHE, CHECKPOINT, EAGER, PARTLY, REPOSITORY, Finished, mingc, mingc_here
from worker_threads import worker_threads

from mingc.artifacts.manifest import FILE_NAME, Manifest, read_manifest
from mingc.export.stages import build_graph, discover

# What serves or checks an artifact does not decide what is in it. The prompts of its served goldens come from `prompts`
# but must not change with a bug planted there.
_LATER = (
    "runtime",
    "server",
    "media",
    "prompts",
    "text",
    "verify",
    "probe",
    "bench",
    "audit",
    "bundles",
    "console",
    "commands",
    "deploy",
)
_RECORDING = {
    *(f"verify/served/{name}.py" for name in ("cases", "conversion", "record", "requests")),
    *(f"runtime/{name}.py" for name in ("images/schedule", "images/tokens", "service/drawing")),
    "runtime/service/voice_registration.py",
    "runtime/talker/voice_encoder.py",
}


def export_eager(*options: object, checkpoint: Path = CHECKPOINT, backend: str = "eager") -> Path:
    """The artifact of `mingc export --backend BACKEND OPTIONS`; kept in the cache of the tests: do not write into it.

    Kept under the hash of everything that decides its content. The first process to ask exports it, others wait.
    """
    artifact = CACHE / f"{backend}-{_key(options, checkpoint)}"
    with _made_once(artifact) as folder:
        if folder is not None:
            # A second process would import and trace for the first time what the first one has: a fifth more.
            words = ("--backend", backend, "--output", folder, "--cache", CACHE, "--jobs", 1, *options)
            run = _here if backend == "eager" else mingc  # compilers have threads and files of their own
            done = run("export", checkpoint, *words)
            assert done.code == 0, done.stderr
    return artifact


def _here(*words: object) -> Finished:
    """Run `mingc WORDS` without other processes, which would import torch for half of the time of an export."""
    with pytest.MonkeyPatch.context() as patch:
        # By name: its import takes a second, which tests need not wait for when artifacts are in the cache.
        patch.setattr("mingc.export.schedule.worker_pool", worker_threads)
        return mingc_here(*words)


def joined(whole: Path, part: Path) -> Path:
    """The artifact of all stages of `part` and of those of `whole` that it lacks, which are not exported once more.

    What belongs to no stage (recorded requests, voices) is that of `whole`, the fingerprint that of `part`. Kept in the
    cache as well.
    """
    artifact = CACHE / f"{whole.name}+{part.name}"
    with _made_once(artifact) as folder:
        if folder is not None:
            _join(whole, part, folder)
    return artifact


def _join(whole: Path, part: Path, folder: Path) -> None:
    first, second = read_manifest(whole), read_manifest(part)
    replaced = {*_files_of(first, [name for name in first.stages if name in second.stages])}
    added = {*_files_of(second, second.stages)}
    kept = {name: record for name, record in first.files.items() if name not in replaced}
    files = {**kept, **{name: second.files[name] for name in added}}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link((part if name in added else whole) / name, folder / name)
    stages = {**first.stages, **second.stages}
    manifest = replace(
        first,
        fingerprint=second.fingerprint,
        stages=stages,
        parameters={**first.parameters, **second.parameters},
        graph=build_graph(discover()[name] for name in stages),
        files=files,
    )
    (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _files_of(manifest: Manifest, stages: Iterable[str]) -> Iterator[str]:
    for name in stages:
        yield from manifest.stages[name].weights_files
        for graph in manifest.stages[name].graphs.values():
            yield from (graph.golden, *(engine.file for engine in graph.engines))


@contextmanager
def _made_once(artifact: Path) -> Iterator[Path | None]:
    """A folder that becomes `artifact`; None when another process has made it, for which this waits."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with artifact.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if artifact.exists():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / "tiny"
            yield made
            os.replace(made, artifact)


def copy_of(artifact: Path, folder: Path) -> Path:
    """A copy of `artifact` in `folder`, to be written into."""
    return Path(shutil.copytree(artifact, folder / "artifact"))


def _key(options: tuple[object, ...], checkpoint: Path) -> str:
    package = REPOSITORY / "mingc"
    sources = [
        path
        for path in package.rglob("*")
        if path.suffix
        and (
            path.relative_to(package).parts[0] not in (*_LATER, "cli.py")
            or path.relative_to(package).as_posix() in _RECORDING
            or path.is_relative_to(package / "media" / "dsp")
        )
    ]
    digest = hashlib.sha256(
        f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {options}".encode()
    )
    for root, files in (
        (package, sources),
        (EAGER, EAGER.rglob("*")),
        (PARTLY, PARTLY.rglob("*")),
        (checkpoint, checkpoint.rglob("*")),
    ):
        for path in sorted(files):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"\0{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
