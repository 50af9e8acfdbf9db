"""Pack, sign, verify, unpack, map and serve a bundle of any size, and kill pack and unpack half-way; on a CPU.

    python benchmarks/bundle_trial.py ARTIFACT --gigabytes 20 --kills 10 --json benchmarks/results/bundle-cpu.json

The bundle is ARTIFACT (an artifact that serves on this machine) with weights files of random bytes added, which nothing
reads but which are hashed and packed like any others. Each figure is one run. Needs twice the size in disk space.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import random
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import mingc
from mingc.artifacts.artifact import open_artifact, write_manifest
from mingc.artifacts.manifest import FILE_NAME
from mingc.runtime.engines.stage_loader import opened_weights

_ROOT = Path(__file__).parents[1]
_FILE_BYTES = 4 << 30
_BLOCK_BYTES = 64 << 20
_READY_S = 900
Figure = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, help="folder of an artifact that serves here")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the bundle in 10^9 bytes")
    parser.add_argument(
        "--kills", type=int, default=0, help="random moments at which pack and unpack are killed"
    )
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if given.json and not commit:
        parser.error("--json needs the measured commit")
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="bundle-trial-") as folder:
        figures = trial(given.artifact, Path(folder), int(given.gigabytes * 1e9), given.kills)
    if given.json:
        words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        document = {
            "schema": 1,
            "benchmark": "bundle",
            "commit": commit,
            "command": shlex.join(["python", "benchmarks/bundle_trial.py", *words]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hardware": {
                "cpu": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            },
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "mingc": mingc.__version__,
            },
            "figures": figures,
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def trial(artifact: Path, folder: Path, size: int, kills: int) -> list[Figure]:
    """All figures, each printed as soon as it is known."""
    figures: list[Figure] = []

    def note(name: str, value: float, unit: str) -> None:
        figures.append({"name": name, "value": round(value, 3), "unit": unit})
        print(f"name={name} value={value:.3f} unit={unit!r}", flush=True)

    def rate(name: str, seconds: float, count: int) -> None:
        note(f"{name}_seconds", seconds, "s")
        note(f"{name}_rate", count / 1e9 / seconds, "GB/s")

    source, bundle, out = folder / "artifact", folder / "large.mingc", folder / "out"
    total = _enlarge(artifact, source, size)
    note("artifact_bytes", total, "bytes")
    if kills:
        resumed, times = _kill(["bundle", "pack", source, bundle], bundle, kills)
        note("pack_kills", times, "kills")
        note("pack_resumed_share", resumed, "of the bundle, there already when the last run began")
        bundle.unlink()
    rate("pack", _timed("bundle", "pack", source, bundle), total)
    shutil.rmtree(source)
    _timed("bundle", "keygen", folder / "k.key")
    rate("sign", _timed("bundle", "sign", bundle, "--secret-key", folder / "k.key"), total)
    check = ["bundle", "verify-signature", bundle, "--public-key", folder / "k.pub"]
    rate("verify_signature", _timed(*check), total)
    if kills:
        resumed, times = _kill(["bundle", "unpack", bundle, out], out, kills)
        note("unpack_kills", times, "kills")
        note("unpack_resumed_share", resumed, "of the bundle, there already when the last run began")
        shutil.rmtree(out)
        _timed("bundle", "prune", folder)
    rate("unpack", _timed("bundle", "unpack", bundle, out), total)
    note(
        "unpack_again_shared", _timed("bundle", "unpack", bundle, folder / "second"), "s, all weights linked"
    )
    started = time.perf_counter()
    read = _read_mapped(bundle)
    rate("map_and_read", time.perf_counter() - started, read)
    for name, path in (("folder", out), ("bundle", bundle)):
        note(f"serve_{name}_ready", _ready(path), "s, hashes compared")
        note(f"serve_{name}_ready_unchecked", _ready(path, "--no-check-hashes"), "s, --no-check-hashes")
    return figures


def _enlarge(artifact: Path, target: Path, size: int) -> int:
    """A copy of `artifact` with random weights files up to `size` bytes; the bytes of all files."""
    shutil.copytree(artifact, target)
    opened = open_artifact(target)
    left = size - sum(record.size_bytes for record in opened.manifest.files.values())
    block = bytearray(random.Random(0).randbytes(_BLOCK_BYTES))
    number = 0
    while left > 0:
        count = min(left, _FILE_BYTES)
        header = {"padding": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-(len(encoded) + 8) % 64)
        with (target / f"weights/padding{number}.safetensors").open("wb") as stream:
            stream.write(struct.pack("<Q", len(encoded)) + encoded)
            written = 0
            while written < count:
                block[:16] = struct.pack("<QQ", number, written)  # no two blocks are equal
                part = memoryview(block)[: min(_BLOCK_BYTES, count - written)]
                written += stream.write(part)
        left -= count
        number += 1
    (target / FILE_NAME).unlink()
    manifest = write_manifest(target, dataclasses.replace(opened.manifest, files={}))
    return sum(record.size_bytes for record in manifest.files.values())


def _start(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mingc", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _timed(*words: object) -> float:
    started = time.perf_counter()
    process = _start(*words)
    process.communicate()
    if process.returncode:
        raise SystemExit(f"mingc {' '.join(map(str, words))} ended with {process.returncode}")
    return time.perf_counter() - started


def _kill(words: list[Any], target: Path, kills: int) -> tuple[float, int]:
    """Kill the command `kills` times at random moments, then let it finish; verify whatever it ever leaves.

    Returns the share that the last run did not have to do, and the number of runs that were really killed.
    """
    chosen = random.Random(1)
    whole = _timed(*words)
    _remove(target)
    if words[1] == "unpack":
        _timed("bundle", "prune", target.parent)  # or files would only be linked
    times = 0
    for _ in range(kills):
        process = _start(*words)
        try:
            process.wait(chosen.uniform(0.1, 0.9) * whole)
        except subprocess.TimeoutExpired:
            process.kill()
            times += 1
        process.communicate()
        if target.exists():
            _timed("verify", target, "--no-replay")
            _remove(target)
    report = subprocess.run(
        [sys.executable, "-m", "mingc", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(report.stdout)
    resumed = document["resumed_bytes"] / document["size_bytes"]
    _timed("verify", target, "--no-replay")
    return resumed, times


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_mapped(bundle: Path) -> int:
    """Map every weights file of the bundle and read each byte; the bytes."""
    artifact = open_artifact(bundle)
    count = 0
    for name in artifact.manifest.files:
        if name.startswith("weights/"):
            with opened_weights(artifact.region(name)) as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_tensor(key).view(torch.uint8).flatten()
                    count += tensor.numel()
                    even = tensor[: tensor.numel() // 8 * 8].view(torch.int64)
                    int(even.sum()) if even.numel() else 0
    return count


def _ready(path: Path, *options: object) -> float:
    """Seconds from the start of `mingc serve` to its address on stdout."""
    started = time.perf_counter()
    process = _start("serve", path, "--port", 0, "--drain-seconds", 0, *options)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        if not line.startswith("http://"):
            raise SystemExit(f"serve {path.name} ended with {process.wait(_READY_S)}")
        return seconds
    finally:
        process.terminate()
        process.communicate(timeout=60)


if __name__ == "__main__":
    main()
