"""Pack, sign, verify, unpack, map and serve a bundle of any size; kill export, pack and unpack; memory of an export.

    python benchmarks/bundle_trial.py ARTIFACT --gigabytes 20 --json benchmarks/results/bundle-cpu.json
    python benchmarks/bundle_trial.py ARTIFACT --parts kills,export-kills --gigabytes 0.5 --kills 10 --json FILE
    python benchmarks/bundle_trial.py --parts export --config released --layers 3 --stages thinker --dtype bfloat16 \
        --json FILE

The bundle is ARTIFACT (which must serve on this machine) with added weights files of random bytes. No engine reads
them, but they are hashed and packed like others. Each figure is one run. Needs twice the size in disk space.

Kills: the script kills the command (SIGKILL) at a random moment, looks at what it left, runs the same command to its
end, and verifies the result. Work redone: the bytes that both runs wrote, less the bytes of an uninterrupted run. An
export is killed at successive moments with one engine cache; its work redone is in seconds and includes every start
of Python and torch.

Export: a random checkpoint (`mingc synth`) is exported without the cache; the memory of its process tree is sampled
(PSS: shared pages count once) and compared with the largest weights file that it wrote, with and without pages of
mapped files, which the kernel takes back when memory is short.
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
from collections.abc import Callable
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
Note = Callable[[str, float, str], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "artifact", type=Path, nargs="?", help="folder of an artifact that serves here, for bundle and kills"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the bundle in 10^9 bytes")
    parser.add_argument(
        "--parts", default="bundle", help="of bundle, kills, export-kills, export; with commas"
    )
    parser.add_argument(
        "--kills", type=int, default=10, help="random moments at which export, pack and unpack are killed"
    )
    parser.add_argument("--config", default="tiny", help="of the checkpoint to export: see mingc synth")
    parser.add_argument("--layers", type=int, help="of its thinker; default: the config's")
    parser.add_argument("--stages", default="audio_encoder", help="stages to export (default: audio_encoder)")
    parser.add_argument("--dtype", default="float32", help="of the export whose memory is sampled")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    if given.json and not commit:
        parser.error("--json needs the measured commit")
    parts = given.parts.split(",")
    if unknown := {*parts} - {"bundle", "kills", "export-kills", "export"}:
        parser.error(f"--parts {','.join(sorted(unknown))}: not one of bundle, kills, export-kills, export")
    if given.artifact is None and {*parts} & {"bundle", "kills"}:
        parser.error("--parts bundle and kills need ARTIFACT")
    figures: list[Figure] = []

    def note(name: str, value: float, unit: str) -> None:
        figures.append({"name": name, "value": round(value, 3), "unit": unit})
        print(f"name={name} value={value:.3f} unit={unit!r}", flush=True)

    note("load_average_at_start", os.getloadavg()[0], "processes that want a core, mean of a minute")
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="bundle-trial-") as folder:
        if "bundle" in parts:
            measure(given.artifact, Path(folder), int(given.gigabytes * 1e9), note)
        if "kills" in parts:
            kill_bundles(given.artifact, Path(folder), int(given.gigabytes * 1e9), given.kills, note)
        if "export-kills" in parts:
            kill_export(Path(folder), given.stages, given.kills, note)
        if "export" in parts:
            measure_export(Path(folder), given.config, given.layers, given.stages, given.dtype, note)
    note("load_average_at_end", os.getloadavg()[0], "processes that want a core, mean of a minute")
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


def measure(artifact: Path, folder: Path, size: int, note: Note) -> None:
    """Rates of every step, each noted as soon as it is known."""

    def rate(name: str, seconds: float, count: int) -> None:
        note(f"{name}_seconds", seconds, "s")
        note(f"{name}_rate", count / 1e9 / seconds, "GB/s")

    source, bundle, out = folder / "artifact", folder / "large.mingc", folder / "out"
    total = _enlarge(artifact, source, size)
    note("artifact_bytes", total, "bytes")
    rate("pack", _timed("bundle", "pack", source, bundle), total)
    shutil.rmtree(source)
    _timed("bundle", "keygen", folder / "k.key")
    rate("sign", _timed("bundle", "sign", bundle, "--secret-key", folder / "k.key"), total)
    check = ["bundle", "verify-signature", bundle, "--public-key", folder / "k.pub"]
    rate("verify_signature", _timed(*check), total)
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
    for path in (bundle, out, folder / "second", folder / ".mingc-files"):
        _remove(path)


def kill_bundles(artifact: Path, folder: Path, size: int, kills: int, note: Note) -> None:
    """Kill pack and unpack, and verify every file that appears under the name of the result."""
    source, bundle, out = folder / "artifact", folder / "killed.mingc", folder / "killed"
    note("killed_bytes", _enlarge(artifact, source, size), "bytes of the artifact")
    for name, words, target in (
        ("pack", ["bundle", "pack", source, bundle], bundle),
        ("unpack", ["bundle", "unpack", bundle, out], out),
    ):
        chosen = random.Random(1)
        started = time.perf_counter()
        whole = _finished(words, target)
        seconds = time.perf_counter() - started
        redone: list[float] = []
        complete = 0
        while len(redone) < kills:
            _remove(target)
            _timed("bundle", "prune", folder)  # else unpack links what the last one left in the store
            process = _start(*words)
            try:
                process.wait(chosen.uniform(0.1, 0.9) * seconds)
                written = 0  # it had ended by then
            except subprocess.TimeoutExpired:
                written = _written(process.pid)
                process.kill()
            process.communicate()
            if target.exists():
                _timed("verify", target, "--no-replay")
                complete += 1
                seconds *= 0.8  # the first run is slower: its input is not in the page cache
                continue
            written += _finished(words, target)
            _timed("verify", target, "--no-replay")
            redone.append(100 * max(0.0, written / whole - 1))
        note(
            f"{name}_kills",
            len(redone),
            f"runs killed, {complete} more had ended before; none left half a result",
        )
        if redone:
            note(f"{name}_redone_mean", sum(redone) / len(redone), "% of the bytes, written again")
            note(f"{name}_redone_worst", max(redone), "% of the bytes, written again")
    for path in (source, bundle, out):
        _remove(path)
    _timed("bundle", "prune", folder)


def kill_export(folder: Path, stages: str, kills: int, note: Note) -> None:
    """Kill an export of the tiny checkpoint at successive moments. All runs share one cache."""
    checkpoint, output = _ROOT / "tests" / "data" / "tiny-ming", folder / "exported"

    def words(cache: str) -> list[Any]:
        return ["export", checkpoint, "--stages", stages, "--output", output, "--cache", folder / cache]

    whole = _timed(*words("cache-of-one"))
    expected = _hashes(output)
    _remove(output)
    chosen, seconds, times, complete = random.Random(2), 0.0, 0, 0
    while times < kills or not output.exists():
        if output.exists():  # it had ended before the kill: begin anew
            _remove(output)
            _remove(folder / "cache-of-killed")
        started = time.perf_counter()
        process = _start(*words("cache-of-killed"))
        try:
            process.wait(chosen.uniform(0.1, 0.9) * whole if times < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            times += 1
        process.communicate()
        seconds += time.perf_counter() - started
        if process.returncode > 0:
            raise SystemExit(f"mingc export ended with {process.returncode}")
        if output.exists():
            _timed("verify", output)
            complete += 1
    found = _hashes(output)
    differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    note(
        "export_kills",
        times,
        f"runs of an export of {stages} killed, {complete} ended; none left half a result",
    )
    note(
        "export_files_differing", len(differing), f"of {len(expected)} from the export in peace: {differing}"
    )
    note(
        "export_redone",
        100 * (seconds / complete / whole - 1),
        "% of the seconds of one export in peace, starts included",
    )
    left = [path.name for path in folder.iterdir() if path.name.startswith(".exported.")]
    note("export_folders_left", len(left), "folders of killed runs after the next one")
    for path in (output, folder / "cache-of-one", folder / "cache-of-killed"):
        _remove(path)


def measure_export(
    folder: Path, config: str, layers: int | None, stages: str, dtype: str, note: Note
) -> None:
    """Memory and speed of an export of a random checkpoint."""
    checkpoint, output = folder / "checkpoint", folder / "exported"
    given = [] if layers is None else ["--layers", layers]
    seconds = _timed("synth", checkpoint, "--config", config, *given)
    size = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
    note("checkpoint_bytes", size, f"bytes, --config {config} --layers {layers}")
    note("synth_rate", size / 1e9 / seconds, "GB/s")
    started = time.perf_counter()
    words = ["--stages", stages, "--dtype", dtype, "--output", output, "--no-cache"]
    process = _start("export", checkpoint, *words)
    peak = anonymous = 0
    while process.poll() is None:
        of_all, of_own = _tree_bytes(process.pid)
        peak, anonymous = max(peak, of_all), max(anonymous, of_own)
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"mingc export ended with {process.returncode}")
    seconds = time.perf_counter() - started
    sizes = [path.stat().st_size for path in (output / "weights").iterdir()]
    note("export_seconds", seconds, f"s, --stages {stages} --dtype {dtype}, engines compiled anew")
    note("export_rate", sum(sizes) / 1e9 / seconds, "GB of weights written per second, compiling included")
    note("export_largest_weights_bytes", max(sizes), "bytes")
    note("export_peak_bytes", peak, "bytes, PSS of the process tree")
    note("export_peak_rss_ratio", peak / max(sizes), "peak of the tree / largest weights file")
    note("export_peak_anonymous_bytes", anonymous, "bytes, the same without pages of mapped files")
    note(
        "export_peak_anonymous_ratio",
        anonymous / max(sizes),
        "peak without mapped files / largest weights file",
    )
    _remove(output)
    _remove(checkpoint)


def _tree_bytes(pid: int) -> tuple[int, int]:
    """PSS of a process and its descendants, and the part that is no mapped file. A process that has ended counts 0."""
    total = {"Pss:": 0, "Pss_Anon:": 0}
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            for line in lines:
                name, *rest = line.split()
                if name in total:
                    total[name] += int(rest[0]) << 10
            for task in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return total["Pss:"], total["Pss_Anon:"]


def _written(pid: int) -> int:
    """Bytes that the process has written so far."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["wchar"])


def _finished(words: list[Any], target: Path) -> int:
    """Run to the end. Returns the bytes written."""
    process = _start(*words)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its counts are there until it is waited for
    written = _written(process.pid)
    process.communicate()
    if process.returncode or not target.exists():
        raise SystemExit(f"mingc {' '.join(map(str, words))} ended with {process.returncode}")
    return written


def _hashes(artifact: Path) -> dict[str, str]:
    """sha256 of every file of an artifact but the manifest, which has the seconds of compiling."""
    return {name: record.sha256 for name, record in open_artifact(artifact).manifest.files.items()}


def _enlarge(artifact: Path, target: Path, size: int) -> int:
    """Copy `artifact` and add random weights files up to `size` bytes. Returns the bytes of all files."""
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


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_mapped(bundle: Path) -> int:
    """Map every weights file of the bundle and read it. Returns the bytes read."""
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
