"""Artifacts of the tiny checkpoint that nothing is compiled for: exported in seconds, run operation by operation."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from mingc_command import CACHE, CHECKPOINT, EAGER, PARTLY, REPOSITORY, mingc

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
    CACHE.mkdir(parents=True, exist_ok=True)
    artifact = CACHE / f"{backend}-{_key(options, checkpoint)}"
    with artifact.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not artifact.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                # A second process would import and trace for the first time what the first one has: a fifth more.
                words = (
                    "--backend",
                    backend,
                    "--output",
                    Path(folder) / "tiny",
                    "--cache",
                    CACHE,
                    "--jobs",
                    1,
                    *options,
                )
                done = mingc("export", checkpoint, *words)
                assert done.code == 0, done.stderr
                os.replace(Path(folder) / "tiny", artifact)
    return artifact


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
