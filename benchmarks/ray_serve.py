"""The Serve application on one machine: throughput and chunk lag beside bare servers, lost replicas, updates, scaling.

Starts Ray on 127.0.0.1 without dashboard and statistics, and measures, in this order (`--parts` selects some):

    lag          how late chunks arrive from a bare server and through Serve's proxy
    throughput   mixed requests of many clients: one and two bare processes, two replicas; all answers are compared
    kill         SIGKILL of one of two replicas amid streams
    rank         SIGKILL of a rank of a replica with two ranks (--tp2)
    update       a rolling update under load
    scale        up under load, down when idle
    disconnect   clients that leave at random moments
    apart        first audio of spoken chats: one replica that does both, or text and speech apart

    python benchmarks/ray_serve.py ARTIFACT --tp2 ARTIFACT2 --json benchmarks/results/ray-serve-cpu-….json
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import clock_replica
import cpu_result
import httpx
import numpy as np
import psutil
from ray_cluster import ray_cluster

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("lag", "throughput", "kill", "rank", "update", "scale", "disconnect", "apart")
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
_LIMIT_S = 300.0
_POLL_S = 0.05
_ENDLESS = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 3000,
    "stream": True,
    "temperature": 1.0,
    "ignore_eos": True,
}
_MIXED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": "Hello, how are you?"}], "max_tokens": 16, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "Write a line."}], "max_tokens": 24, "stream": True,
            "temperature": 0.9, "seed": 11}),
    (CHAT, {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 12, "stream": True, "seed": 5,
            "modalities": ["text", "audio"], "audio": {"voice": "DB30", "format": "pcm16", "max_steps": 3}}),
    (SPEECH, {"input": "The first voice.", "voice": "DB30", "seed": 1, "max_steps": 4,
              "response_format": "pcm", "stream_format": "sse"}),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one mixed request gave: text, samples, seconds to the first content and in all."""

    text: str
    samples: np.ndarray[Any, Any]
    first_s: float
    seconds: float

    def equals(self, other: Answer) -> bool:
        """Same text and length; samples within the rounding of other batches."""
        if self.text != other.text or len(self.samples) != len(other.samples):
            return False
        return bool(len(self.samples) == 0 or np.abs(self.samples - other.samples).max() <= 8)


def http() -> httpx.Client:
    return httpx.Client(timeout=_LIMIT_S, trust_env=False)


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Wait for `condition`; returns the seconds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > _LIMIT_S:
            raise SystemExit(f"not within {_LIMIT_S:g} s: {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - began


def ask(client: httpx.Client, url: str, request: tuple[str, dict[str, Any]]) -> Answer:
    """Send a streamed request of `_MIXED` and read its answer."""
    path, body = request
    began, first = time.monotonic(), 0.0
    text, sound = [], []
    with client.stream("POST", url + path, json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            delta = event["choices"][0]["delta"] if event.get("choices") else {}
            audio = event.get("audio", "") or delta.get("audio", {}).get("data", "")
            if (audio or delta.get("content")) and not first:
                first = time.monotonic() - began
            text.append(delta.get("content") or "")
            sound.append(base64.b64decode(audio))
    samples = np.frombuffer(b"".join(sound), "<i2").astype(np.int32)
    return Answer("".join(text), samples, first, time.monotonic() - began)


@contextmanager
def bare_server(*words: str) -> Iterator[str]:
    """A server in a process of its own; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], _LIMIT_S)
        url = process.stdout.readline().strip() if readable else ""
        if not url.startswith("http://"):
            raise SystemExit(f"{' '.join(words)}: no server, exit code {process.poll()}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Stream:
    """An endless chat, read in a thread. `stamps`: monotonic seconds at which its lines arrived."""

    def __init__(self, url: str, seed: int) -> None:
        self.last = ""
        self.ended_at = 0.0
        self.num_lines = 0
        self._leave = False
        self._thread = threading.Thread(target=self._read, args=(url + CHAT, {**_ENDLESS, "seed": seed}))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with http() as client, client.stream("POST", url, json=body) as response:
            for line in response.iter_lines():
                if line:
                    self.last = line
                    self.num_lines += 1
                if self._leave:
                    return
        self.ended_at = time.monotonic()

    @property
    def has_error(self) -> bool:
        return self.last.startswith('data: {"error"')

    def leave(self) -> None:
        self._leave = True
        self._thread.join(_LIMIT_S)


@dataclass
class Application:
    """The deployed model."""

    url: str
    handle: Any = None
    pids: set[int] = field(default_factory=set)

    def deploy(self, artifact: Path, **arguments: Any) -> None:
        from ray import serve

        from mingc.deploy.options import parse_arguments
        from mingc.deploy.ray import build_application

        given = {"artifact": str(artifact), "num_cpus": 0.1, "num_torch_threads": 1, **arguments}
        self.handle = serve.run(build_application(parse_arguments(given)), name="mingc", route_prefix="/")

    def states(self) -> dict[int, Any]:
        """States of the replicas that answered some calls, by process."""
        found = {}
        for _ in range(6):
            try:
                state = self.handle.state.remote().result(timeout_s=10)
            except Exception as error:  # a replica that is being replaced
                print(type(error).__name__, file=sys.stderr)
                continue
            found[state.pid] = state
        return {pid: state for pid, state in found.items() if psutil.pid_exists(pid)}

    def wait_for_replicas(self, count: int, without: int | None = None) -> float:
        """Wait until `count` replicas answer; returns the seconds."""
        seen: set[int] = set()

        def are_there() -> bool:
            seen.update(self.states())
            return len({pid for pid in seen if psutil.pid_exists(pid) and pid != without}) >= count

        return wait_for(are_there, f"{count} replicas")

    def num_running(self) -> int:
        """Replicas that Serve counts as running."""
        from ray import serve

        status = serve.status().applications["mingc"].deployments["mingc"]
        return int(status.replica_states.get("RUNNING", 0))


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "n": len(ordered),
    }


def lags_ms(url: str, num_streams: int, num_chunks: int) -> list[float]:
    """Milliseconds from making a chunk to reading it, of `num_streams` streams at once, without their first chunks."""

    def read(_: int) -> list[float]:
        late = []
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": num_chunks, "stream": True}
        with http() as client, client.stream("POST", url + CHAT, json=body) as response:
            for line in response.iter_lines():
                now = time.monotonic_ns()
                if line.startswith("data: {"):
                    text = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content")
                    if text:
                        late.append((now - int(text)) / 1e6)
        return late[5:]

    with ThreadPoolExecutor(num_streams) as pool:
        return [each for late in pool.map(read, range(num_streams)) for each in late]


def measure_lag(proxy: str, counts: tuple[int, ...], num_chunks: int) -> list[dict[str, Any]]:
    from ray import serve

    figures: list[dict[str, Any]] = []
    with bare_server("benchmarks/clock_replica.py") as bare:
        for count in counts:
            row = {"name": "chunk_lag_ms", "front": "mingc serve", "streams": count, "unit": "ms"}
            figures.append({**row, **quantiles(lags_ms(bare, count, num_chunks))})
    serve.run(clock_replica.application(2), name="clock", route_prefix="/clock")
    for count in counts:
        row = {"name": "chunk_lag_ms", "front": "Ray Serve", "streams": count, "unit": "ms"}
        figures.append({**row, **quantiles(lags_ms(f"{proxy}/clock", count, num_chunks))})
    serve.delete("clock")
    return figures


def measure_throughput(urls: list[str], front: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """`clients` mixed streams at a time; every answer is compared with the same request alone."""
    with http() as client:
        alone = [ask(client, urls[0], request) for request in _MIXED]
    different = 0
    firsts: list[float] = []

    def run(index: int) -> list[tuple[int, Answer]]:
        with http() as client:
            kinds = [(index + turn) % len(_MIXED) for turn in range(rounds)]
            return [(kind, ask(client, urls[index % len(urls)], _MIXED[kind])) for kind in kinds]

    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = [each for some in pool.map(run, range(clients)) for each in some]
    seconds = time.monotonic() - began
    for kind, answer in answers:
        different += not answer.equals(alone[kind])
        firsts.append(answer.first_s * 1000)
    row = {"front": front, "clients": clients}
    return [
        {
            **row,
            "name": "requests_per_s",
            "median": round(len(answers) / seconds, 3),
            "n": len(answers),
            "unit": "1/s",
        },
        {**row, "name": "different_answers", "median": different, "n": len(answers), "unit": "answers"},
        {**row, "name": "first_content_ms", **quantiles(firsts), "unit": "ms"},
    ]


def begin_streams(application: Application, count: int) -> list[Stream]:
    streams = [Stream(application.url, seed) for seed in range(count)]
    wait_for(lambda: all(stream.num_lines > 3 for stream in streams), "running streams")
    return streams


def measure_kill(application: Application, artifact: Path) -> list[dict[str, Any]]:
    application.deploy(artifact, min_replicas=2, max_replicas=2)
    application.wait_for_replicas(2)
    streams = begin_streams(application, 8)
    victim = next(iter(application.states()))
    family = psutil.Process(victim).children(recursive=True)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: any(stream.has_error for stream in streams), "an error event")
    time.sleep(2.0)
    failed = [stream for stream in streams if stream.has_error]
    survived = [stream for stream in streams if not stream.has_error and not stream.ended_at]
    application.wait_for_replicas(2, without=victim)
    ready_s = time.monotonic() - began
    for stream in streams:
        stream.leave()
    _gone, alive = psutil.wait_procs(family, timeout=30)
    errors = [stream.ended_at - began for stream in failed if stream.ended_at]
    return [
        {"name": "kill_error_event_s", "median": round(statistics.median(errors), 3), "max": round(max(errors), 3),
         "n": len(errors), "unit": "s"},
        {"name": "kill_streams", "median": len(failed), "failed": len(failed), "went_on": len(survived), "n": 8,
         "unit": "streams"},
        {"name": "kill_new_replica_s", "median": round(ready_s, 2), "n": 1, "unit": "s"},
        {"name": "kill_processes_left", "median": len(alive), "n": len(family), "unit": "processes"},
    ]  # fmt: skip


def measure_rank(application: Application, artifact: Path) -> list[dict[str, Any]]:
    application.deploy(artifact, min_replicas=1, max_replicas=1)
    application.wait_for_replicas(1)
    (pid,) = application.states()
    family = psutil.Process(pid).children(recursive=True)
    (rank,) = [each for each in family if any("rank_process" in word for word in each.cmdline())]
    streams = begin_streams(application, 4)
    began = time.monotonic()
    rank.kill()
    wait_for(lambda: all(stream.ended_at for stream in streams), "error events")
    errors = [stream.ended_at - began for stream in streams]
    with_error = sum(stream.has_error for stream in streams)
    application.wait_for_replicas(1, without=pid)
    with http() as client:
        wait_for(lambda: client.post(application.url + CHAT, json={**_ENDLESS, "stream": False, "max_tokens": 3})
                 .status_code == 200, "an answer")  # fmt: skip
    ready_s = time.monotonic() - began
    _gone, alive = psutil.wait_procs(
        [*family, psutil.Process(pid)] if psutil.pid_exists(pid) else family, timeout=60
    )
    return [
        {"name": "rank_error_event_s", "median": round(statistics.median(errors), 3), "max": round(max(errors), 3),
         "with_error_event": with_error, "n": len(errors), "unit": "s"},
        {"name": "rank_new_replica_s", "median": round(ready_s, 2), "n": 1, "unit": "s"},
        {"name": "rank_processes_left", "median": len(alive), "n": len(family) + 1, "unit": "processes"},
    ]  # fmt: skip


@contextmanager
def load(url: str, clients: int) -> Iterator[list[tuple[int, str]]]:
    """Clients that send short chats until the block ends; status and model of every answer."""
    seen: list[tuple[int, str]] = []
    stop = threading.Event()

    def run(_: int) -> None:
        with http() as client:
            while not stop.is_set():
                try:
                    answer = client.post(url + CHAT, json={**_ENDLESS, "stream": False, "max_tokens": 8})
                    seen.append((answer.status_code, answer.json().get("model", "")))
                except (httpx.HTTPError, ValueError) as error:
                    seen.append((0, type(error).__name__))

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(run, index) for index in range(clients)]
        try:
            yield seen
        finally:
            stop.set()
    for each in running:
        each.result()


def measure_update(application: Application, artifact: Path, clients: int) -> list[dict[str, Any]]:
    application.deploy(artifact, min_replicas=2, max_replicas=2)
    application.wait_for_replicas(2)
    with load(application.url, clients) as seen:
        time.sleep(2.0)
        began = time.monotonic()
        application.deploy(artifact, min_replicas=2, max_replicas=2, served_model_names="updated")
        wait_for(
            lambda: {state.model for state in application.states().values()} == {"updated"}, "the update"
        )
        seconds = time.monotonic() - began
        time.sleep(2.0)
    failed = sum(status != 200 for status, _ in seen)
    models = sorted({model for status, model in seen if status == 200})
    return [
        {"name": "update_s", "median": round(seconds, 2), "replicas": 2, "n": 1, "unit": "s"},
        {
            "name": "update_failed_requests",
            "median": failed,
            "n": len(seen),
            "models": models,
            "unit": "requests",
        },
    ]


def measure_scale(application: Application, artifact: Path, clients: int) -> list[dict[str, Any]]:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2.0}
    delays = {"upscale_delay_s": 1.0, "downscale_delay_s": 5.0}
    application.deploy(artifact, **scaling, **delays)
    wait_for(lambda: application.num_running() == 1, "one replica")
    with load(application.url, clients) as seen:
        up_s = wait_for(lambda: application.num_running() == 2, "a second replica")
    down_s = wait_for(lambda: application.num_running() == 1, "one replica again")
    failed = sum(status != 200 for status, _ in seen)
    return [
        {"name": "scale_up_s", "median": round(up_s, 2), "upscale_delay_s": 1.0, "n": 1, "unit": "s"},
        {"name": "scale_down_s", "median": round(down_s, 2), "downscale_delay_s": 5.0, "n": 1, "unit": "s"},
        {"name": "scale_failed_requests", "median": failed, "n": len(seen), "unit": "requests"},
    ]


def measure_disconnect(application: Application, artifact: Path, count: int) -> list[dict[str, Any]]:
    application.deploy(artifact, min_replicas=1, max_replicas=1)
    application.wait_for_replicas(1)
    chance = random.Random(1)

    def leave(index: int) -> None:
        path, body = _MIXED[index % len(_MIXED)]
        body = {**body, "max_tokens": 400} if path == CHAT else body
        patience = httpx.Timeout(_LIMIT_S, read=chance.uniform(0.001, 0.4))
        with http() as client:
            try:
                with client.stream("POST", application.url + path, json=body, timeout=patience) as response:
                    until = time.monotonic() + chance.uniform(0.0, 0.5)
                    for _ in response.iter_raw():
                        if time.monotonic() > until:
                            break
            except httpx.TimeoutException:
                pass  # left before anything arrived

    def is_free() -> bool:
        states = application.states().values()
        return bool(states) and all(
            state.kv_pages_used == state.num_running == sum(state.num_waiting.values()) == 0
            for state in states
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(count)))
    seconds = wait_for(is_free, "free pages and slots")
    return [{"name": "disconnect_all_free_s", "median": round(seconds, 3), "n": count, "unit": "s"}]


def measure_apart(application: Application, artifact: Path, rounds: int) -> list[dict[str, Any]]:
    figures = []
    body = {
        **_MIXED[2][1],
        "max_tokens": 60,
        "audio": {"voice": "DB30", "format": "pcm16", "max_steps": 6},
    }
    for form, arguments in (("joint", {}), ("apart", {"speech_artifact": str(artifact)})):
        application.deploy(artifact, **arguments)
        application.wait_for_replicas(1)
        for clients in (1, 4):

            def run(_: int) -> list[tuple[float, float]]:
                times = []
                with http() as client:
                    for _ in range(rounds):
                        times.append(spoken_chat(client, application.url, body))
                return times

            run(0)  # warm up
            with ThreadPoolExecutor(clients) as pool:
                times = [each for some in pool.map(run, range(clients)) for each in some]
            row = {"form": form, "clients": clients, "unit": "ms"}
            figures.append(
                {"name": "apart_first_audio_ms", **row, **quantiles([1000 * first for first, _ in times])}
            )
            figures.append(
                {"name": "apart_answer_ms", **row, **quantiles([1000 * whole for _, whole in times])}
            )
    return figures


def spoken_chat(client: httpx.Client, url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first audio and to the end of a streamed spoken chat."""
    began, first = time.monotonic(), 0.0
    with client.stream("POST", url + CHAT, json=body) as response:
        for line in response.iter_lines():
            if not first and '"audio"' in line and '"data"' in line:
                first = time.monotonic() - began
            if '"error"' in line:
                raise RuntimeError(line)
    return first, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path, help="a CPU artifact with all stages")
    parser.add_argument("--tp2", type=Path, help="the same for two ranks, for the part `rank`")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument("--clients", type=int, default=32, help="clients of the part `throughput`")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--json", type=Path, help="result file to write")
    given = cpu_result.parse_args(parser)
    parts = given.parts.split(",")
    if unknown := set(parts) - {*PARTS}:
        parser.error(f"--parts {','.join(sorted(unknown))}: no such part")
    if "rank" in parts and given.tp2 is None:
        parser.error("the part `rank` needs --tp2")
    artifact = given.artifact.resolve()
    figures: list[dict[str, Any]] = []
    serve_words = (
        "-m",
        "mingc",
        "serve",
        str(artifact),
        "--port",
        "0",
        "--drain-seconds",
        "0",
        "--threads",
        "1",
    )

    def note(found: list[dict[str, Any]]) -> None:
        for row in found:
            print(json.dumps(row), flush=True)
        figures.extend(found)

    if "throughput" in parts:
        for count in (1, 2):
            with ExitStack() as stack:
                urls = [stack.enter_context(bare_server(*serve_words)) for _ in range(count)]
                note(measure_throughput(urls, f"{count} × mingc serve", given.clients, given.rounds))
    began = time.monotonic()
    with ray_cluster() as proxy:
        note([{"name": "ray_start_s", "median": round(time.monotonic() - began, 2), "n": 1, "unit": "s"}])
        application = Application(proxy)
        if "lag" in parts:
            note(measure_lag(proxy, (1, 8, 32), 100))
        if "throughput" in parts:
            for count in (1, 2):
                application.deploy(artifact, min_replicas=count, max_replicas=count)
                application.wait_for_replicas(count)
                note(
                    measure_throughput([proxy], f"Ray Serve, {count} replica(s)", given.clients, given.rounds)
                )
        if "kill" in parts:
            note(measure_kill(application, artifact))
        if "rank" in parts:
            note(measure_rank(application, given.tp2.resolve()))
        if "update" in parts:
            note(measure_update(application, artifact, 4))
        if "scale" in parts:
            note(measure_scale(application, artifact, 8))
        if "disconnect" in parts:
            note(measure_disconnect(application, artifact, 60))
        if "apart" in parts:
            note(measure_apart(application, artifact, 5))
    if given.json is not None:
        cpu_result.write(given.json, "ray_serve", figures)


if __name__ == "__main__":
    main()
