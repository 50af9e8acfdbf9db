"""Kill or stop a rank of a served thinker while it streams: errors at clients, memory left on GPUs, restart.

Serves an artifact of several ranks, opens streams, sends SIGKILL (or SIGSTOP with --hang) to the last rank, and notes
when each client gets its error event, when and how the server ends, how much memory its GPUs still hold, and that a new
server answers. For a CPU artifact no memory is reported. With --spoken the answers are spoken (`prose_server.py`).

    python benchmarks/rank_failure.py artifacts/tp2 --json benchmarks/results/rank-failure-h200-….json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import httpx
import psutil
from arguments import seconds, whole
from served import PROSE_SERVER

from mingc.console.serve_child import serve_child

ERROR_LIMIT_S = 5.0
_START_S, _END_S = 600.0, 120.0
_WARM_LINES = 5  # lines of a stream, after which it counts as running
_LEAST_TOKENS = 100  # of an answer: shorter ones may end before all of them run
_MOST_CLIENTS = 128  # that a server lets wait at once
_FREED_MIB = 64  # a GPU that holds no more than this beyond what it held before is free
_SPEECH = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
_OPTIONS = ("--port", "0", "--drain-seconds", "0", "--no-check-hashes")
_RANK = "mingc.runtime.thinker.ranks.rank_process"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server: its process, address, ranks above 0 by process id, and seconds until it was ready."""

    process: subprocess.Popen[bytes]
    url: str
    ranks: list[int]
    start_s: float


@dataclass(kw_only=True)
class Stream:
    """Answer of a client: number of lines so far, the last one, when it ended, and whether speech was among them."""

    lines: int = 0
    has_speech: bool = False
    last: str = ""
    ended_at: float = 0.0

    @property
    def has_error(self) -> bool:
        return self.last.startswith('data: {"error"')


@contextmanager
def serving(artifact: Path, options: list[str], log: Path, command: Sequence[str] = ()) -> Iterator[Served]:
    started = time.perf_counter()
    words = [str(artifact), *_OPTIONS, *options]
    with (
        log.open("ab") as errors,
        serve_child(words, stop_s=_END_S, log=errors, command=command) as (child, stdout),
    ):
        if not (url := stdout.readline().decode().strip()):
            raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
        took = time.perf_counter() - started
        yield Served(process=child, url=url, ranks=rank_ids(child.pid), start_s=took)


def rank_ids(parent: int) -> list[int]:
    """Processes of the ranks above 0, in their order."""
    return sorted(each.pid for each in psutil.Process(parent).children() if _RANK in each.cmdline())


def memory_mib() -> list[int]:
    """Memory in use on every visible GPU; empty without a driver."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in said.split()]


async def listen(client: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line:
                stream.last, stream.lines = line, stream.lines + 1
                stream.has_speech |= '"audio":{' in line
    stream.ended_at = time.perf_counter()


def body_of(index: int, tokens: int, *, streamed: bool = True) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Count from {index} on."}],
        "max_tokens": tokens,
        "stream": streamed,
        "temperature": 1.0,
        "seed": index,
        "ignore_eos": True,
    }


async def fail(
    served: Served, clients: int, tokens: int, number: signal.Signals, more: dict[str, Any]
) -> tuple[list[Stream], float]:
    """The streams, all ended, and when the signal was sent: while all of them ran. `more`: fields of their requests."""
    streams = [Stream() for _ in range(clients)]
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(
        base_url=served.url, timeout=_END_S, limits=limits, trust_env=False
    ) as client:
        reading = [
            asyncio.create_task(listen(client, body_of(index, tokens) | more, stream))
            for index, stream in enumerate(streams)
        ]
        deadline = time.monotonic() + _END_S
        while not all(stream.lines >= _WARM_LINES and (stream.has_speech or not more) for stream in streams):
            if time.monotonic() > deadline or any(task.done() for task in reading):
                seen = [(stream.lines, stream.last[:80]) for stream in streams]
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)
                raise SystemExit(f"{clients} answers never ran at once: {seen}")
            await asyncio.sleep(0)
        sent_at = time.perf_counter()
        os.kill(served.ranks[-1], number)
        await asyncio.gather(*reading)
    return streams, sent_at


def is_open(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_until_free(before: list[int]) -> list[int]:
    """Memory in use on the GPUs, once it is back to the value before or after a time limit."""
    deadline = time.monotonic() + 10
    while True:
        after = memory_mib()
        if all(now <= then + _FREED_MIB for now, then in zip(after, before, strict=True)):
            return after
        if time.monotonic() > deadline:
            return after
        time.sleep(0.2)


def restart(artifact: Path, options: list[str], log: Path) -> tuple[float, float]:
    """Start a new server, ask it once, end it with SIGTERM. Returns the seconds of start and end."""
    with serving(artifact, options, log) as served:
        path, body = f"{served.url}/v1/chat/completions", body_of(0, 8, streamed=False)
        answer = httpx.post(path, json=body, timeout=_END_S, trust_env=False)
        if answer.status_code != 200:
            raise SystemExit(f"the restarted server answered {answer.status_code}: {answer.text[:500]}")
        asked_at = time.perf_counter()
        served.process.terminate()
        code = served.process.wait(_END_S)
        if code != 0:
            raise SystemExit(f"the restarted server ended with code {code} after SIGTERM")
        return served.start_s, time.perf_counter() - asked_at


def measure(
    arguments: argparse.Namespace, options: list[str], log: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Figures, and faults."""
    number = signal.SIGSTOP if arguments.hang else signal.SIGKILL
    before = memory_mib()
    command, more = (PROSE_SERVER, _SPEECH) if arguments.spoken else ((), {})
    with serving(arguments.artifact, options, log, command) as served:
        if not served.ranks:
            raise SystemExit(f"{arguments.artifact} is of one rank: there is none to lose")
        during = memory_mib()
        streams, sent_at = asyncio.run(fail(served, arguments.clients, arguments.tokens, number, more))
        code = served.process.wait(_END_S)
        exit_s = time.perf_counter() - sent_at
        was_open = is_open(served.url)
    after = wait_until_free(before)
    left = [each for each in served.ranks if Path(f"/proc/{each}").exists()]
    again = None if arguments.no_restart else restart(arguments.artifact, options, log)
    error_s = [stream.ended_at - sent_at for stream in streams]
    # A rank that hangs is noticed after the step's limit; a dead one at once.
    limit_s = ERROR_LIMIT_S + (arguments.step_timeout if arguments.hang else 0.0)
    problems = {
        "a client got no error event": not all(stream.has_error for stream in streams),
        f"a client waited longer than {limit_s:g} s": max(error_s) > limit_s,
        f"the server ended with code {code}": code != 4,
        "the port stayed open": was_open,
        f"processes of ranks are left: {left}": bool(left),
        f"GPUs hold {after} MiB, before {before}": any(
            now > then + _FREED_MIB for now, then in zip(after, before, strict=True)
        ),
    }
    same = {"ranks": len(served.ranks) + 1, "clients": arguments.clients, "signal": number.name}
    figures: list[dict[str, Any]] = [
        {"name": "error_event_s", **same, "median": round(statistics.median(error_s), 3),
         "max": round(max(error_s), 3), "n": len(error_s), "unit": "s",
         "samples": [round(each, 3) for each in error_s], "last_lines": sorted({each.last for each in streams})},
        {"name": "exit_s", **same, "median": round(exit_s, 3), "n": 1, "exit_code": code, "unit": "s"},
    ]  # fmt: skip
    for name, passed in zip(("restart_s", "stop_s"), again or (), strict=False):
        figures.append({"name": name, **same, "median": round(passed, 3), "n": 1, "unit": "s"})
    figures += [
        {"name": "gpu_memory_mib", **same, "gpu": index, "before": first, "serving": second, "after": third,
         "unit": "MiB"}
        for index, (first, second, third) in enumerate(zip(before, during, after, strict=True))
    ]  # fmt: skip
    return figures, [problem for problem, is_so in problems.items() if is_so]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--clients", type=whole(1, _MOST_CLIENTS), default=8)
    parser.add_argument("--tokens", type=whole(_LEAST_TOKENS), default=1900, help="longest answer")
    parser.add_argument("--spoken", action="store_true", help="let the answers be spoken")
    parser.add_argument("--hang", action="store_true", help="stop the rank instead of killing it")
    parser.add_argument("--no-restart", action="store_true", help="leave the second server out")
    parser.add_argument("--step-timeout", type=seconds, default=60.0, help="what the server gets")
    parser.add_argument("--max-total-tokens", type=whole(1), help="what the server gets")
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    arguments = harness.parse_args(parser)
    options = ["--step-timeout", str(arguments.step_timeout)]
    if arguments.max_total_tokens is not None:
        options += ["--max-total-tokens", str(arguments.max_total_tokens)]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        figures, problems = measure(arguments, options, log)
        if problems:
            print(log.read_text()[-6000:], file=sys.stderr)
    for each in figures:
        print(" ".join(f"{key}={value}" for key, value in each.items()))
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    if arguments.json:
        gpus = figures[0]["ranks"]
        value = harness.result("rank_failure", {}, figures, gpus=gpus, problems=problems)
        harness.write(arguments.json, value)
    if problems:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
