"""Fetches an artifact once per node: one replica runs the command, the other replicas of the node wait for it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path

from mingc.errors import ArtifactError


def fetched_artifact(artifact: str, command: str | None, cache: Path | None) -> Path:
    """Folder or packed bundle of `artifact` on this node; `command` fetches it unless `cache` has it already.

    Raises: ArtifactError when the command fails.
    """
    if command is None or cache is None:
        return Path(artifact)
    cache.mkdir(parents=True, exist_ok=True)
    home = cache / hashlib.sha256(f"{command}\0{artifact}".encode()).hexdigest()[:16]
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            for left in cache.glob(f"{home.name}.*.partial"):
                _remove(left)
            # A new name: the command of a killed replica may still run and write into its output.
            partial = home.with_suffix(f".{secrets.token_hex(4)}.partial")
            texts = {"{artifact}": shlex.quote(artifact), "{output}": shlex.quote(str(partial))}
            # Both in one pass, because a path may contain the other text.
            words = re.sub(r"\{artifact\}|\{output\}", lambda found: texts[found[0]], command)
            done = subprocess.run(
                words,
                shell=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode != 0 or not partial.exists():
                raise ArtifactError(
                    f"fetching {artifact} failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}",
                    where=words,
                    fix="run the command by hand on this node; it must write {output}",
                )
            os.replace(partial, home)
    return home


def _remove(path: Path) -> None:
    """Remove a file or folder; files that another process is still writing may remain."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
