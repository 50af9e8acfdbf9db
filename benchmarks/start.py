"""Process start → ready with all weights on disk: writes an artifact with every layer, and starts `mingc serve` on it.

An artifact of random weights stores one layer of each kind, and loading draws the others. This script writes the
drawn layers to FOLDER too, or as many of them as the disk holds, beside hard links to all other files. A FOLDER that is
there is served as it is. Before each of `--repeats` starts the page cache is dropped; the last start finds the files in
it. Each server answers one request.

    python benchmarks/start.py ARTIFACT FOLDER --json benchmarks/results/start-….json
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import harness
import httpx
import torch
from arguments import whole
from served import serve

import mingc
from mingc.artifacts.artifact import Artifact, new_artifact, open_artifact
from mingc.artifacts.manifest import FILE_NAME, FileRecord, StageRecord
from mingc.artifacts.spec import join_path
from mingc.export.weights.loading import file_groups, safetensors_header
from mingc.runtime.engines.random_layers import drawn_like
from mingc.runtime.engines.stage_loader import opened_weights, weights_regions, weights_within

_THREADS = min(8, os.cpu_count() or 1)
_PIECE_BYTES = 16 << 20
_ANSWER_S, _END_S = 60, 30
_SPARE_BYTES = 2 << 30  # of the disk, for other writes


@dataclass(frozen=True)
class DrawnWeight:
    """A weight that is drawn like the stored one `like`."""

    name: str
    like: torch.Tensor


def drawn_weights(
    artifact: Artifact, stage: StageRecord, rank: int, device: torch.device
) -> dict[str, list[DrawnWeight]]:
    """The weights of a rank that loading draws, by layer instance. Those that they are drawn like are on `device`."""
    with opened_weights(weights_regions(artifact, stage, rank)) as files:
        stored = {name: file.get_tensor(name) for name, file in files.items()}
    sources = {
        source: {name: value.to(device) for name, value in weights_within(stored, source).items()}
        for source in {*stage.repeated.values()}
    }
    return {
        instance: [DrawnWeight(join_path(instance, name), value) for name, value in sources[source].items()]
        for instance, source in stage.repeated.items()
    }


def fitting(instances: Sequence[dict[str, list[DrawnWeight]]], room: int) -> tuple[list[str], int]:
    """The first layer instances that fit into `room` bytes, and what is left. `instances` has those of each rank."""
    names = list[str]()
    for instance in instances[0]:
        size = sum(weight.like.nbytes for rank in instances for weight in rank[instance])
        if size > room:
            break
        names.append(instance)
        room -= size
    return names, room


def write_file(path: Path, weights: list[DrawnWeight]) -> FileRecord:
    """Write a file of weights; returns its size and hash."""
    digest, size = hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def write(content: bytes | memoryview) -> None:
            nonlocal size
            digest.update(content)
            size += file.write(content)

        write(safetensors_header({each.name: (each.like.dtype, each.like.shape) for each in weights}))
        for each in weights:
            value = drawn_like(each.like, each.name).cpu()
            content = value.contiguous().view(-1).view(torch.uint8).numpy().data
            for at in range(0, len(content), _PIECE_BYTES):
                write(content[at : at + _PIECE_BYTES])
    print(f"wrote {path.name} of {path.parent.name}, {size / 1e9:.2f} GB", file=sys.stderr, flush=True)
    return FileRecord(size_bytes=size, sha256=digest.hexdigest())


def write_artifact(root: Path, folder: Path) -> None:
    """Write to `folder` the artifact `root` with the layers that it draws, or the first of them that the disk holds."""
    artifact, device = open_artifact(root), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    manifest, jobs = artifact.manifest, dict[str, list[DrawnWeight]]()
    stages = dict(manifest.stages)
    room = shutil.disk_usage(folder.absolute().parent).free - _SPARE_BYTES
    is_linked = root.stat().st_dev == folder.absolute().parent.stat().st_dev
    room -= 0 if is_linked else sum(record.size_bytes for record in manifest.files.values())
    for name, stage in manifest.stages.items():
        if not stage.repeated:
            continue
        ranks = [drawn_weights(artifact, stage, rank, device) for rank in range(len(stage.weights))]
        written, room = fitting(ranks, room)
        if not written:
            continue
        weights = list[tuple[str, ...]]()
        for rank, files in zip(ranks, stage.weights, strict=True):
            place = PurePosixPath(files[0]).parent
            drawn = [weight for instance in written for weight in rank[instance]]
            groups = file_groups(drawn, lambda weight: weight.like.nbytes)
            rank_files = {
                f"{place}/drawn-{index:03}.safetensors": group for index, group in enumerate(groups)
            }
            jobs |= rank_files
            weights.append((*files, *rank_files))
        left = {instance: source for instance, source in stage.repeated.items() if instance not in written}
        stages[name] = replace(stage, weights=(*weights,), repeated=left)
    if not jobs:
        raise SystemExit(
            f"{folder}: no layer fits on the disk, which keeps {_SPARE_BYTES / 1e9:.1f} GB to spare"
        )
    needed = sum(weight.like.nbytes for group in jobs.values() for weight in group)
    print(f"writing {needed / 1e9:.2f} GB in {len(jobs)} files", file=sys.stderr, flush=True)
    with new_artifact(folder, replace_existing=False) as work:
        for name in manifest.files:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (os.link if is_linked else shutil.copyfile)(root / name, work / name)
        with ThreadPoolExecutor(_THREADS) as pool:
            records = pool.map(lambda name: write_file(work / name, jobs[name]), jobs)
            all_files = manifest.files | dict(zip(jobs, records, strict=True))
        (work / FILE_NAME).write_text(
            replace(manifest, stages=stages, files=all_files).to_json(), encoding="utf-8"
        )


def drop_caches(folder: Path) -> str:
    """Drop the page cache, or at least the files in `folder`. Returns what was dropped."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError as error:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return f"only the artifact's files, by posix_fadvise: drop_caches: {error.strerror}"
    return "the page cache"


def paged_in_bytes() -> int | None:
    """Bytes that this machine has read from block devices; None where the kernel does not say."""
    try:
        return 1024 * int(re.findall(r"^pgpgin (\d+)", Path("/proc/vmstat").read_text("ascii"), re.M)[0])
    except (OSError, IndexError):
        return None


def disk_rate(path: Path) -> dict[str, Any]:
    """The rate at which threads read the file `path`, which is in no cache."""
    size = path.stat().st_size
    share = -(-size // _THREADS)

    def read(at: int) -> None:
        buffer, end = bytearray(_PIECE_BYTES), min(size, at + share)
        with path.open("rb", buffering=0) as file:
            while at < end:
                at += os.preadv(file.fileno(), [memoryview(buffer)[: end - at]], at)

    began, before = time.perf_counter(), paged_in_bytes()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, range(0, size, share)))
    passed, after = time.perf_counter() - began, paged_in_bytes()
    row = {"case": "disk", "bytes": size, "threads": _THREADS, "gb_s": round(size / 1e9 / passed, 3)}
    return row | {"disk_bytes": None if before is None or after is None else after - before}


def start(folder: Path, more: str, log: Path, dropped: str) -> dict[str, Any]:
    """Start a server, ask it for a few tokens, and end it by Ctrl-C."""
    before = paged_in_bytes()
    with serve(folder, more, log) as served:
        after, began = paged_in_bytes(), time.perf_counter()
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        with httpx.Client(base_url=served.url, timeout=_ANSWER_S, trust_env=False) as client:
            client.post("/v1/chat/completions", json=body).raise_for_status()
        answer_s = round(time.perf_counter() - began, 3)
        served.process.send_signal(signal.SIGINT)
        code = served.process.wait(_END_S)
    row: dict[str, Any] = {"case": "cold" if dropped else "warm", "dropped": dropped or "nothing"}
    row |= {
        "start_s": served.start_s,
        "disk_bytes": None if before is None or after is None else after - before,
    }
    return row | {"first_answer_s": answer_s, "exit_code": code}


def medians(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each phase over the starts with a dropped cache: median, minimum, maximum."""
    starts = [row["start_s"] for row in rows if row["case"] == "cold"]
    for phase in starts[0] if starts else ():
        seconds = [each.get(phase, 0.0) for each in starts]
        middle = round(statistics.median(seconds), 3)
        yield {"name": phase, "median": middle, "min": min(seconds), "max": max(seconds), "n": len(starts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("folder", type=Path, help="where the artifact with all layers is, or is written")
    parser.add_argument("--repeats", type=whole(1), default=3, help="starts with a dropped page cache")
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument("--log", type=Path, default=Path("server.log"), help="log of the server")
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    given = harness.parse_args(parser)
    about: dict[str, Any] = {"serve": given.serve}
    if not given.folder.exists():
        began = time.perf_counter()
        # In another process: a server has the whole device, and starts it.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(write_artifact, given.artifact, given.folder).result()
        about["write_s"] = round(time.perf_counter() - began, 1)
    manifest = open_artifact(given.folder).manifest
    weights = manifest.weights_files
    about["weights_bytes"] = sum(manifest.files[name].size_bytes for name in weights)
    about["weights_files"] = len(weights)
    about["drawn_layers"] = sum(len(stage.repeated) for stage in manifest.stages.values())
    rows = list[dict[str, Any]]()
    # An installed package has byte code. A checkout has none where Python may not write it.
    compileall.compile_dir(Path(mingc.__file__).parent, quiet=1)

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.json:
            figures, gpus = [*medians(rows), *rows], torch.cuda.device_count()
            harness.write(given.json, harness.result("start", None, figures, gpus=gpus, **about))

    dropped = drop_caches(given.folder)
    largest = max(weights, key=lambda name: manifest.files[name].size_bytes)
    add(disk_rate(given.folder / largest) | {"dropped": dropped})
    for _ in range(given.repeats):
        add(start(given.folder, given.serve, given.log, drop_caches(given.folder)))
    add(start(given.folder, given.serve, given.log, ""))


if __name__ == "__main__":
    main()
