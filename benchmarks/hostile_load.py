#!/usr/bin/env python
"""Attack a server on the loopback interface and print latency of `/health`, pace of streams and resources.

Phases: trickling connections, clients that do not read, half-sent bodies, whole bodies of 100 MB text; each is bounded
in number and time. The server runs `mingc.server.http` over a fake service with paced streams, with the defaults of
`mingc serve`, in its own process; the probe of `/health` and the measured streams run in other processes.

    python benchmarks/hostile_load.py
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
CHAT = "/v1/chat/completions"
NUM_STREAMS = 4
_TOKEN_S = 0.02
_PHASES = ("trickle", "stall", "half", "texts")
_CHILD = f"""
import asyncio, dataclasses, random, sys
from fake_service import FakeService
from mingc.runtime.request import TextDelta
from mingc.prompts.conversation import TextPart
from mingc.server.options import ServeOptions
from mingc.server.app import create_app
from mingc.server.lifecycle import serve
try:
    from mingc.server.logs import configure_logging
    configure_logging("info", "text")
except ImportError:  # an earlier server
    import logging
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")

class Paced(FakeService):
    def chat(self, request):
        text = request.messages[-1].text[:100]  # the fake repeats it; a real service refuses texts that are too long
        message = dataclasses.replace(request.messages[-1], parts=(TextPart(text=text),))
        return super().chat(dataclasses.replace(request, messages=(message,)))

    async def _run(self, name, text, events, *, spoken):
        if text not in ("paced", "bulk"):
            async for event in super()._run(name, text, events, spoken=spoken):
                yield event
            return
        self.running.add(name)
        try:
            await self._sleep(0.5 * random.random())
            while True:
                yield TextDelta(text=" more" if text == "paced" else "x" * 32768)
                await self._sleep({_TOKEN_S} if text == "paced" else 0.5)
        finally:
            self.running.discard(name)

serve(create_app(Paced(), ServeOptions(port=0)), announce=lambda url: print(url, flush=True))
"""


@contextlib.contextmanager
def serving(log: Path, root: Path) -> Iterator[tuple[tuple[str, int], psutil.Process]]:
    """A server process of the package in `root`: its address and process."""
    path = os.pathsep.join((str(root), str(root / "tests" / "support")))
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        assert child.stdout is not None
        host, _, port = child.stdout.readline().strip().removeprefix("http://").partition(":")
        yield (host, int(port)), psutil.Process(child.pid)
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stdout is not None
        child.stdout.close()


def probe_health(address: tuple[str, int], stop: Event, times: Any) -> None:
    """Every 50 ms one `/health` over a new connection; sends (start, milliseconds or None for a failure)."""
    while not stop.is_set():
        began = time.monotonic()
        connection = http.client.HTTPConnection(*address, timeout=10)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            taken = (time.monotonic() - began) * 1000 if answer.status == 200 else None
        except OSError:
            taken = None
        finally:
            connection.close()
        times.put((began, taken))
        stop.wait(0.05)


def follow_stream(address: tuple[str, int], stop: Event, times: Any) -> None:
    """Read one paced stream; sends (arrival, milliseconds since the event before)."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    body = json.dumps({"messages": [{"role": "user", "content": "paced"}], "stream": True})
    connection.request("POST", CHAT, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    last = time.monotonic()
    while not stop.is_set():
        if answer.readline().startswith(b"data: "):
            now = time.monotonic()
            times.put((now, (now - last) * 1000))
            last = now
    connection.close()


class Observers:
    """The measuring processes, and their samples by phase."""

    def __init__(self, address: tuple[str, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._queues = {"health": context.Queue(), "gap": context.Queue()}
        jobs: list[tuple[Callable[..., None], str]] = [(probe_health, "health")]
        jobs += [(follow_stream, "gap")] * NUM_STREAMS
        self._processes = [
            context.Process(target=work, args=(address, self._stop, self._queues[name]))
            for work, name in jobs
        ]
        self._samples: dict[str, list[tuple[float, float | None]]] = {"health": [], "gap": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in self._queues
        ]
        for each in (*self._processes, *self._readers):
            each.start()

    def _read(self, name: str) -> None:
        while (item := self._queues[name].get()) is not None:
            self._samples[name].append(item)

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()
        for queue in self._queues.values():
            queue.put(None)
        for reader in self._readers:
            reader.join(timeout=20)

    def figures(self, began: float, ended: float) -> dict[str, Any]:
        """Milliseconds of `/health` and between two events of a stream."""
        found: dict[str, Any] = {}
        for name, samples in self._samples.items():
            inside = [taken for at, taken in samples if began <= at < ended]
            values = sorted(taken for taken in inside if taken is not None)
            found[f"{name}_ms"] = {
                **{f"p{share}": round(_percentile(values, share), 1) for share in (50, 95, 99)},
                "max": round(max(values, default=float("nan")), 1),
                "n": len(values),
                "failed": len(inside) - len(values),
            }
        return found


def _percentile(ordered: list[float], share: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)] if ordered else float("nan")


class Attack:
    """Connections of an attacker; `send` never blocks for long."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._open: list[socket.socket] = []
        self.refused = 0

    def connect(self, receive_buffer: int | None = None) -> socket.socket | None:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(5)
        try:
            connection.connect(self._address)
        except OSError:
            self.refused += 1
            connection.close()
            return None
        self._open.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()

    def trickle(self, number: int, seconds: float) -> None:
        """Keep `number` connections open that send a byte of their headers every second."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for connection in self._open[:]:
                try:
                    connection.send(b"G")
                    connection.setblocking(False)
                    if connection.recv(65536) == b"":
                        raise ConnectionResetError
                except BlockingIOError:
                    continue
                except OSError:
                    self._open.remove(connection)
                    connection.close()
            while len(self._open) < number and time.monotonic() < end:
                self.connect()
            time.sleep(1)
        self.close()

    def stall(self, number: int, seconds: float) -> None:
        """Request `number` large streams and read nothing."""
        body = json.dumps({"messages": [{"role": "user", "content": "bulk"}], "stream": True}).encode()
        for _ in range(number):
            if connection := self.connect(4096):
                connection.send(_head(len(body)) + body)
        time.sleep(seconds)
        self.close()

    def half(self, number: int, size: int, seconds: float) -> None:
        """Send the first half of `number` bodies of `size` bytes at the same time."""
        end = time.monotonic() + seconds
        left = {connection: size // 2 for _ in range(number) if (connection := self.connect())}
        for connection in left:
            connection.send(_head(size))
            connection.setblocking(False)
        piece = b'{"' + b"x" * 262144
        while time.monotonic() < end:
            for connection in [each for each, rest in left.items() if rest > 0]:
                try:
                    left[connection] -= connection.send(piece)
                except BlockingIOError:
                    pass
                except OSError:
                    left[connection] = 0
            time.sleep(0.01)
        self.close()

    def texts(self, number: int, size: int, seconds: float) -> list[int]:
        """Send `number` chats of `size` characters at once. Returns their statuses."""
        body = json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()
        statuses: list[int] = []

        def send() -> None:
            if (connection := self.connect()) is None:
                return
            with contextlib.suppress(OSError):
                connection.settimeout(seconds)
                with contextlib.suppress(OSError):  # the server may answer before it has read everything
                    connection.sendall(_head(len(body)) + body)
                statuses.append(int(connection.recv(65536).split()[1]))

        threads = [threading.Thread(target=send) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=seconds)
        self.close()
        return sorted(statuses)


def _head(length: int) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def state(address: tuple[str, int], process: psutil.Process) -> dict[str, Any]:
    """What the process holds."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/metrics")
    rows = connection.getresponse().read().decode().splitlines()
    connection.close()
    gauges = {
        name: float(row.split()[1])
        for row in rows
        for name in ("mingc_num_requests_running", "mingc_num_connections", "mingc_body_bytes")
        if row.startswith(name + " ")
    }
    return {
        "rss_mib": round(process.memory_info().rss / 2**20),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        **gauges,
    }


class PeakMemory:
    """The largest resident memory of a process until `close`."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._stop = threading.Event()
        self.mib = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.mib = max(self.mib, round(self._process.memory_info().rss / 2**20))

    def close(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.mib


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trickling", type=int, default=1000)
    parser.add_argument("--stalled", type=int, default=300)
    parser.add_argument("--half-sent", type=int, default=64)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=100, help="size of a body")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--phases", default=",".join(_PHASES), help="separated by commas")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout whose server is attacked")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    size = arguments.megabytes * 10**6
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(log, arguments.root) as (address, process):
            report: dict[str, Any] = {"load_average": os.getloadavg(), "cores": os.cpu_count()}
            report["before"] = state(address, process)
            observers = Observers(address)
            try:
                time.sleep(5)  # spawned processes import this module
                began = time.monotonic()
                time.sleep(min(5.0, arguments.seconds))
                report["quiet"] = observers.figures(began, time.monotonic())
                for phase in arguments.phases.split(","):
                    attack, memory, began = Attack(address), PeakMemory(process), time.monotonic()
                    statuses = None
                    match phase:
                        case "trickle":
                            attack.trickle(arguments.trickling, arguments.seconds)
                        case "stall":
                            attack.stall(arguments.stalled, arguments.seconds)
                        case "half":
                            attack.half(arguments.half_sent, size, arguments.seconds)
                        case "texts":
                            statuses = attack.texts(arguments.texts, size, 4 * arguments.seconds)
                        case _:
                            raise SystemExit(f"unknown phase {phase}: one of {', '.join(_PHASES)}")
                    report[phase] = {
                        **observers.figures(began, time.monotonic()),
                        "peak_rss_mib": memory.close(),
                        "rss_mib": round(process.memory_info().rss / 2**20),
                        "log_bytes": log.stat().st_size,
                        "unconnected": attack.refused,
                        **({} if statuses is None else {"statuses": statuses}),
                    }
                    time.sleep(2)
            finally:
                observers.close()
            time.sleep(2)
            report["after"] = state(address, process)
        report["log_bytes"] = log.stat().st_size
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
