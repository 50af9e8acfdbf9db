"""Speech through HTTP: a server over an artifact of the released dims with random weights, and clients on loopback.

Measures first audio, gaps between chunks, audio seconds a second and underruns at several concurrencies, streamed
and whole; the phases of a cold start; a ten-minute text; and how soon a cancelled request's slot is taken again.
Random speech never stops by itself: every request lasts `--patches` patches.

    python benchmarks/speech_http.py --artifact /tmp/speech --json benchmarks/results/speech-http-….json

makes the artifact when the folder does not exist.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
from arguments import whole, wholes
from clients import Clients, client_of
from serving import server
from speech_clients import RATE, SENTENCES, ReceivedSpeech, ask, body, speak

from mingc.artifacts.artifact import open_artifact

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "tiny-ming"
PATCH_SAMPLES = 14_112


def make_configs(folder: Path) -> None:
    """The released configs, with tokenizer, voices and speaker network of the tiny checkpoint."""
    shutil.copytree(ROOT / "benchmarks" / "released", folder)
    for name in ("tokenizer.json", "talker/llm/tokenizer.json", "talker/campplus.onnx"):
        shutil.copyfile(TINY / name, folder / name)
    shutil.copytree(TINY / "talker" / "data", folder / "talker" / "data")


def make_artifact(output: Path, given: argparse.Namespace) -> None:
    """Export the three speech stages over random weights."""
    with tempfile.TemporaryDirectory() as scratch:
        configs = TINY if given.tiny else Path(scratch) / "configs"
        if not given.tiny:
            make_configs(configs)
        words = ["--synthetic", "--stages", "talker,cfm,audio_vae", "--batch-sizes"]
        words += [",".join(map(str, given.batch_sizes))]
        words += ["--target", given.target, "--dtype", given.dtype, "--jobs", str(given.jobs)]
        words += ["--output", str(output), *(["--cache", str(given.cache)] if given.cache else [])]
        subprocess.run([sys.executable, "-m", "mingc", "export", str(configs), *words], check=True, cwd=ROOT)


def figures_of(
    received: list[ReceivedSpeech], concurrency: int, patches: int, *, streamed: bool
) -> list[dict[str, Any]]:
    first, last = min(each.sent_at for each in received), max(each.arrivals[-1][0] for each in received)
    seconds = sum(each.num_bytes for each in received) / 2 / RATE
    expected = patches * PATCH_SAMPLES * 2
    short = [each.num_bytes for each in received if each.num_bytes != expected]
    common = {"concurrency": concurrency, "streamed": streamed, "patches": patches, "n": len(received)}
    figures = [
        {**common, "name": "audio_s_per_s", "median": round(seconds / (last - first), 1), "unit": "s/s"},
        {**common, "name": "incomplete_answers", "median": len(short), "unit": "answers"},
    ]
    if streamed:
        gaps = [gap for each in received for gap in each.gaps_ms()]
        underruns = sum(each.underruns() for each in received)
        firsts = [each.first_ms for each in received]
        figures += [
            {**common, "name": "first_audio_ms", **harness.summary(firsts), "unit": "ms"},
            {**common, "name": "chunk_gap_ms", **harness.summary(gaps or [0.0]), "unit": "ms"},
            {**common, "name": "underruns", "median": underruns, "unit": "chunks"},
        ]
    return figures


async def long_text(url: str, pid: int, patches: int, segments: int) -> list[dict[str, Any]]:
    """One request of `segments` segments: memory of the server and of the device, drift, completeness."""
    text = " ".join(f"{SENTENCES[index % len(SENTENCES)]}, number {index}." for index in range(segments))
    memory: list[tuple[float, int, int]] = []

    async def watch() -> None:
        while True:
            memory.append((time.perf_counter(), _resident_bytes(pid), _device_bytes()))
            await asyncio.sleep(0.5)

    async with client_of(url) as client:
        watching = asyncio.create_task(watch())
        received = await ask(client, body(7, patches, streamed=True, text=text))
        watching.cancel()
    gaps = received.gaps_ms()
    part = max(1, len(gaps) // 5)
    drift = statistics.median(gaps[-part:]) / max(1e-9, statistics.median(gaps[:part]))
    half = len(memory) // 2
    grown = [memory[-1][column] - memory[half][column] for column in (1, 2)]
    seconds = received.num_bytes / 2 / RATE
    return [
        {"name": "long_text_audio_s", "median": round(seconds, 2), "unit": "s", "n": 1},
        {"name": "long_text_whole_patches", "median": float(received.num_bytes % (2 * PATCH_SAMPLES) == 0)},
        {
            "name": "long_text_wall_s",
            "median": round(received.arrivals[-1][0] - received.sent_at, 2),
            "unit": "s",
        },
        {"name": "long_text_patch_drift", "median": round(drift, 3), "unit": "last fifth / first fifth"},
        {"name": "long_text_host_growth", "median": grown[0], "unit": "bytes, second half", "n": len(memory)},
        {"name": "long_text_device_growth", "median": grown[1], "unit": "bytes, second half"},
        {"name": "long_text_underruns", "median": received.underruns(), "unit": "chunks"},
    ]


def slots_of(artifact: Path) -> int:
    """Number of requests that a server of `artifact` speaks concurrently."""
    step = open_artifact(artifact).manifest.stages["talker"].graphs["step"].spec
    return max(step.dim("B").buckets)


async def cancel(url: str, slots: int, patches: int) -> list[dict[str, Any]]:
    """All `slots` speak, one more request waits; one client hangs up: how long until the waiting one gets audio."""
    async with client_of(url) as client, client_of(url) as leaving:
        going = [
            asyncio.create_task(ask(client, body(index, patches, streamed=True)))
            for index in range(slots - 1)
        ]
        stopped = asyncio.create_task(ask(leaving, body(77, patches, streamed=True), chunks=6))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(ask(client, body(78, patches, streamed=True), chunks=1))
        await stopped
        left_at = time.perf_counter()
        received = await waiting
        others = await asyncio.gather(*going)
    return slot_figures(left_at, received, others)


def slot_figures(
    left_at: float, received: ReceivedSpeech, others: list[ReceivedSpeech]
) -> list[dict[str, Any]]:
    """Time from `left_at`, when a client hung up, to the first audio of the request that waited; [] if none waited."""
    passed = 1e3 * (received.arrivals[0][0] - left_at)
    gaps = [gap for each in others for gap in each.gaps_ms()]
    if passed <= 0 or not gaps:
        print("slot_taken_again is left out: the waiting request had a slot already", file=sys.stderr)
        return []
    return [
        {
            "name": "slot_taken_again_ms",
            "median": round(passed, 2),
            "unit": "ms from hanging up to first audio",
        },
        {"name": "slot_taken_again_patches", "median": round(passed / statistics.median(gaps), 2)},
    ]


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} is gone")


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True, help="made when it does not exist")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="dims of the tiny checkpoint: to try the script")
    parser.add_argument("--batch-sizes", type=wholes(1), default="1,4,8,16,32")
    parser.add_argument("--jobs", type=whole(1), default=12, help="compiler processes at a time")
    parser.add_argument("--cache", type=Path, help="folder of engines to use again")
    parser.add_argument("--concurrency", type=wholes(1, 256), default="1,4,8,16,32")
    parser.add_argument("--rounds", type=whole(1), default=3, help="requests of each client")
    parser.add_argument("--patches", type=whole(1), default=60, help="patches of each request")
    parser.add_argument(
        "--client-processes", type=whole(1, 64), default=4, help="processes the clients are spread over"
    )
    parser.add_argument("--segments", type=whole(1), default=70, help="sentences of the long text")
    parser.add_argument("--only-artifact", action="store_true")
    parser.add_argument("--json", type=Path)
    given = harness.parse_args(parser)
    if not given.artifact.exists():
        make_artifact(given.artifact, given)
    if given.only_artifact:
        return
    clients = Clients(given.client_processes)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        caches, log = Path(scratch) / "caches", Path(scratch) / "server.log"
        with server(given.artifact, caches, log) as (url, phases, pid):
            figures += [
                {"name": "cold_start_s", "phase": name, "median": seconds, "unit": "s", "n": 1}
                for name, seconds in phases.items()
            ]
            started = time.perf_counter()
            clients.load(speak, url, 1, 1, 4, True)
            first = round(time.perf_counter() - started, 3)
            figures.append({"name": "cold_start_s", "phase": "first request", "median": first, "unit": "s"})
            for concurrency in given.concurrency:
                clients.load(speak, url, concurrency, 1, 8, True)
                for streamed in (True, False):
                    received = clients.load(speak, url, concurrency, given.rounds, given.patches, streamed)
                    figures += figures_of(received, concurrency, given.patches, streamed=streamed)
                rates = [each["median"] for each in figures if each["name"] == "audio_s_per_s"][-2:]
                ratio = {"name": "stream_ratio", "concurrency": concurrency, "unit": "streamed / whole"}
                figures.append({**ratio, "median": round(rates[0] / rates[1], 3)})
            figures += asyncio.run(long_text(url, pid, given.patches, given.segments))
            figures += asyncio.run(cancel(url, slots_of(given.artifact), given.patches))
        written = sorted(str(path.relative_to(caches)) for path in caches.rglob("*") if path.is_file())
        figures.append({"name": "compiler_cache_files", "median": len(written), "unit": "files"})
        print(log.read_text()[-2000:], file=sys.stderr)
    clients.close()
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    if given.json:
        rates = harness.peak_rates() if torch.cuda.is_available() else {}
        harness.write(given.json, harness.result("speech_http", rates, figures))


if __name__ == "__main__":
    main()
