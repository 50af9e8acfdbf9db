"""The Serve application on one machine: throughput and chunk lag beside bare servers, lost replicas, updates, scaling.

Starts Ray on 127.0.0.1 without dashboard and statistics, and measures, in this order (`--parts` selects some):

    lag          how late chunks arrive from a bare server and through Serve's proxy
    throughput   mixed requests of many clients: one and two bare processes, one and two replicas; answers are compared
    kill         SIGKILL of one of two replicas amid streams
    rank         SIGKILL of a rank of a replica with two ranks (--tp2)
    hang         SIGSTOP of a rank of a replica with two ranks (--tp2)
    update       a rolling update to another artifact under load: another model name, other weights
    voices       an update of the speech deployment to an artifact with another voice
    scale        up under load, down when idle
    disconnect   clients that leave at random moments
    affinity     requests of one session
    metrics      our metrics as Ray exports them
    apart        first audio of spoken chats: one replica that does both, or text and speech apart
    settings     chunk lag with settings of Ray, each with a Ray instance of its own, between two runs without any

A part that fails, or does not end in time, is a row `part_failed` with the reason; the others run. Exit code 1 then.

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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import clock_replica
import cpu_result
import httpx
import numpy as np
import psutil
from changed_artifact import changed_artifact
from ray_cluster import deploy, python_path, ray_cluster

ROOT = Path(__file__).resolve().parent.parent
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
_LIMIT_S = 90.0  # for one answer, one start of replicas, one wait
_PART_LIMIT_S = 240
_STEP_TIMEOUT_S = 3.0  # after which a rank counts as hanging
_POLL_S = 0.05
_ENDLESS = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 3000,
    "stream": True,
    "temperature": 1.0,
    "ignore_eos": True,
}
_SHORT = {
    "messages": [{"role": "user", "content": "Hello, how are you?"}],
    "max_tokens": 8,
    "ignore_eos": True,
}
_ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
_ROUTER = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
_SETTINGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("none", {}),
    ("app in the loop of the replica", _ONE_LOOP),
    ("router in the loop of the proxy", _ROUTER),
    ("both", {**_ONE_LOOP, **_ROUTER}),
    ("both, gRPC to replicas", {**_ONE_LOOP, **_ROUTER, "RAY_SERVE_PROXY_USE_GRPC": "1"}),
    ("none, asyncio's loop", {"RAY_USE_UVLOOP": "0"}),  # the same as none where there is no uvloop
    ("none again", {}),
)
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
    """Answer to one mixed request: text, samples, seconds to the first content and to the end."""

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
            raise RuntimeError(f"not within {_LIMIT_S:g} s: {what}")
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
    """Run a server in a child process; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
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
            raise RuntimeError(f"{' '.join(words)}: no server, exit code {process.poll()}")
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
        body = {**_ENDLESS, "seed": seed}
        # A daemon: a stream that hangs must not keep the script.
        self._thread = threading.Thread(target=self._read, args=(url + CHAT, body), daemon=True)
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with http() as client, client.stream("POST", url, json=body) as response:
                for line in response.iter_lines():
                    if line:
                        self.last = line
                        self.num_lines += 1
                    if self._leave:
                        return
        except httpx.HTTPError as error:  # the connection broke; there is no error event then
            self.last = f"{type(error).__name__}: {error}"
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
        from mingc.deploy.ray import app

        given = {"artifact": str(artifact), "num_cpus": 0.1, "num_torch_threads": 1, **arguments}
        self.handle = deploy(app(given), "mingc", self.url, "/", _LIMIT_S)

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


def measure_lag(proxy: str, counts: Sequence[int], num_chunks: int) -> list[dict[str, Any]]:
    from ray import serve

    figures: list[dict[str, Any]] = []
    with bare_server("benchmarks/clock_replica.py") as bare:
        for count in counts:
            row = {"name": "chunk_lag_ms", "front": "mingc serve", "streams": count, "unit": "ms"}
            figures.append({**row, **quantiles(lags_ms(bare, count, num_chunks))})
    deploy(clock_replica.application(2), "clock", proxy, "/clock", _LIMIT_S)
    for count in counts:
        row = {"name": "chunk_lag_ms", "front": "Ray Serve", "streams": count, "unit": "ms"}
        figures.append({**row, **quantiles(lags_ms(f"{proxy}/clock", count, num_chunks))})
    serve.delete("clock")
    return figures


def measure_settings(
    name: str, settings: dict[str, str], counts: Sequence[int], num_chunks: int
) -> list[dict[str, Any]]:
    """Chunk lag through a proxy, and CPU seconds of proxy and replicas per 1,000 chunks."""
    row = {"settings": name, "uvloop": find_spec("uvloop") is not None}
    figures = []
    with ray_cluster(settings=settings) as proxy:
        deploy(clock_replica.application(2), "clock", proxy, "/clock", _LIMIT_S)
        lags_ms(f"{proxy}/clock", 4, 20)  # connections and code paths are warm
        for count in counts:
            before = serve_cpu_s()
            late = lags_ms(f"{proxy}/clock", count, num_chunks)
            used = {kind: seconds - before[kind] for kind, seconds in serve_cpu_s().items()}
            figures.append({"name": "chunk_lag_ms", **row, "streams": count, **quantiles(late), "unit": "ms"})
            for kind, seconds in used.items():
                figures.append({"name": "cpu_s_per_1000_chunks", **row, "streams": count, "process": kind,
                                "median": round(1000 * seconds / (count * num_chunks), 3), "unit": "s"})  # fmt: skip
    return figures


def serve_cpu_s() -> dict[str, float]:
    """CPU seconds of the proxies and of the replicas of this machine, so far, and of this process, the clients."""
    used = {"proxy": 0.0, "replicas": 0.0, "clients": sum(psutil.Process().cpu_times()[:2])}
    for process in psutil.Process().children(recursive=True):
        try:
            name, times = " ".join(process.cmdline()[:1]), process.cpu_times()
        except psutil.Error:
            continue
        kind = "proxy" if "ProxyActor" in name else "replicas" if "ServeReplica" in name else ""
        if kind:
            used[kind] += times.user + times.system
    return used


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


def measure_rank(application: Application, artifact: Path, name: str) -> list[dict[str, Any]]:
    """A rank of a replica with two ranks that ends (`rank`), or that stops without ending (`hang`)."""
    application.deploy(
        artifact, min_replicas=1, max_replicas=1, step_timeout_s=_STEP_TIMEOUT_S if name == "hang" else 60.0
    )
    application.wait_for_replicas(1)
    (pid,) = application.states()
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    (rank,) = [each for each in family if any("rank_process" in word for word in each.cmdline())]
    streams = begin_streams(application, 4)
    began = time.monotonic()
    rank.send_signal(signal.SIGSTOP if name == "hang" else signal.SIGKILL)
    try:
        wait_for(lambda: all(stream.ended_at for stream in streams), "error events")
        errors = [stream.ended_at - began for stream in streams]
        with_error = sum(stream.has_error for stream in streams)
        application.wait_for_replicas(1, without=pid)
        with http() as client:
            wait_for(lambda: client.post(application.url + CHAT, json={**_ENDLESS, "stream": False, "max_tokens": 3})
                     .status_code == 200, "an answer")  # fmt: skip
        ready_s = time.monotonic() - began
        _gone, alive = psutil.wait_procs(family, timeout=60)
    finally:
        if rank.is_running():  # a stopped process would outlive the script
            rank.kill()
    row = {"step_timeout_s": _STEP_TIMEOUT_S} if name == "hang" else {}
    return [
        {"name": f"{name}_error_event_s", "median": round(statistics.median(errors), 3), "max": round(max(errors), 3),
         "with_error_event": with_error, "n": len(errors), **row, "unit": "s"},
        {"name": f"{name}_new_replica_s", "median": round(ready_s, 2), "n": 1, "unit": "s"},
        {"name": f"{name}_processes_left", "median": len(alive), "n": len(family), "unit": "processes"},
    ]  # fmt: skip


@contextmanager
def load(url: str, clients: int) -> Iterator[list[tuple[int, str, str]]]:
    """Clients that send short chats until the block ends; status, model and text of every answer."""
    seen: list[tuple[int, str, str]] = []
    stop = threading.Event()

    def run(_: int) -> None:
        with http() as client:
            while not stop.is_set():
                try:
                    answer = client.post(url + CHAT, json=_SHORT)
                    seen.append((answer.status_code, *model_and_text(answer)))
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    seen.append((0, type(error).__name__, ""))

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(run, index) for index in range(clients)]
        try:
            yield seen
        finally:
            stop.set()
    for each in running:
        each.result()


def model_and_text(answer: httpx.Response) -> tuple[str, str]:
    document = answer.json()
    return document["model"], document["choices"][0]["message"]["content"]


def measure_update(
    application: Application, artifact: Path, other: Path, clients: int
) -> list[dict[str, Any]]:
    """Two replicas of `artifact` become two of `other`, whose name and weights differ."""
    application.deploy(artifact, min_replicas=2, max_replicas=2)
    application.wait_for_replicas(2)
    with http() as client:
        old = model_and_text(client.post(application.url + CHAT, json=_SHORT))
    with load(application.url, clients) as seen:
        time.sleep(2.0)
        began = time.monotonic()
        application.deploy(other, min_replicas=2, max_replicas=2)
        wait_for(lambda: old[0] not in {state.model for state in application.states().values()}, "the update")
        seconds = time.monotonic() - began
        ended = len(seen)
        wait_for(lambda: len(seen) > ended + 3 * clients, "answers after the update")
    after = {each[1:] for each in seen[ended + clients :]}  # earlier ones may have begun before
    failed = sum(status != 200 for status, _, _ in seen)
    answers = {each[1:] for each in seen if each[0] == 200}
    if len(after) != 1 or old in after or len(answers) != 2:
        raise RuntimeError(f"answers before the update {old}, after it {after}, in all {answers}")
    return [
        {"name": "update_s", "median": round(seconds, 2), "replicas": 2, "n": 1, "unit": "s"},
        {"name": "update_failed_requests", "median": failed, "n": len(seen),
         "models": sorted({model for model, _ in answers}), "unit": "requests"},
        {"name": "update_other_answers_after", "median": 0, "n": len(seen) - ended - clients, "unit": "answers"},
    ]  # fmt: skip


def measure_voices(application: Application, artifact: Path, other: Path) -> list[dict[str, Any]]:
    """Text and speech apart; the speech deployment is updated to an artifact with another voice."""
    with http() as client:

        def voices() -> list[str]:
            return list(client.get(application.url + "/v1/audio/voices").json()["voices"])

        application.deploy(artifact, speech_artifact=str(artifact))
        application.wait_for_replicas(1)
        before = voices()
        began = time.monotonic()
        application.deploy(artifact, speech_artifact=str(other))
        wait_for(lambda: voices() != before, "the voices of the other artifact")
        seconds = time.monotonic() - began
        new = [voice for voice in voices() if voice not in before]
        body = {"input": "A new voice.", "voice": new[0], "max_steps": 2, "response_format": "pcm"}
        status = client.post(application.url + SPEECH, json=body).status_code
    if status != 200:
        raise RuntimeError(f"the new voice {new} is refused with {status}")
    return [{"name": "new_voice_known_s", "median": round(seconds, 2), "n": 1, "unit": "s"}]


def measure_scale(application: Application, artifact: Path, clients: int) -> list[dict[str, Any]]:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2.0}
    delays = {"upscale_delay_s": 1.0, "downscale_delay_s": 5.0}
    application.deploy(artifact, **scaling, **delays)
    wait_for(lambda: application.num_running() == 1, "one replica")
    with load(application.url, clients) as seen:
        up_s = wait_for(lambda: application.num_running() == 2, "a second replica")
    down_s = wait_for(lambda: application.num_running() == 1, "one replica again")
    failed = sum(status != 200 for status, _, _ in seen)
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


def measure_affinity(proxy: str, sessions: int) -> list[dict[str, Any]]:
    """Which replica answers requests of a session; `/metrics` of a replica has the time at which it started."""
    from ray import serve

    # A new application: proxies keep the first router of an application.
    deploy(clock_replica.application(2, affinity=True), "sticky", proxy, "/sticky", _LIMIT_S)

    def replica_of(client: httpx.Client, session: str) -> str:
        text = client.get(f"{proxy}/sticky/metrics", headers={"x-session-id": session}).text
        return next(line for line in text.splitlines() if line.startswith("process_start_time_seconds"))

    with http() as client:
        found = [{replica_of(client, f"session {index}") for _ in range(5)} for index in range(sessions)]
    serve.delete("sticky")
    return [
        {"name": "affinity_sessions_on_one_replica", "median": sum(len(each) == 1 for each in found), "n": sessions,
         "replicas_used": len(set().union(*found)), "unit": "sessions"}
    ]  # fmt: skip


def measure_metrics(application: Application, artifact: Path) -> list[dict[str, Any]]:
    """Time until a request is counted in what Ray exports, with the labels of its replica."""
    import ray

    application.deploy(artifact)
    application.wait_for_replicas(1)
    port = ray.nodes()[0]["MetricsExportPort"]
    with http() as client:
        client.post(application.url + CHAT, json=_SHORT).raise_for_status()
        began = time.monotonic()
        lines: list[str] = []

        def is_exported() -> bool:
            text = client.get(f"http://127.0.0.1:{port}/metrics").text
            lines[:] = [line for line in text.splitlines() if line.startswith("ray_mingc_")]
            return any(line.startswith("ray_mingc_http_requests_total") and CHAT in line for line in lines)

        wait_for(is_exported, "ray_mingc_http_requests_total")
        seconds = time.monotonic() - began
    labelled = sum(
        all(f'{name}="' in line for name in ("application", "deployment", "replica")) for line in lines
    )
    return [
        {"name": "metrics_exported_s", "median": round(seconds, 2), "n": 1, "unit": "s"},
        {"name": "metrics_series_with_replica", "median": labelled, "n": len(lines), "unit": "series"},
    ]


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


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread, whatever it waits for."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Run:
    """One run of the script: options, what is measured on, and the figures so far."""

    given: argparse.Namespace
    folder: Path
    application: Application = field(default_factory=lambda: Application(""))
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def artifact(self) -> Path:
        return Path(self.given.artifact).resolve()

    @property
    def tp2(self) -> Path:
        return Path(self.given.tp2).resolve()

    def other(self) -> Path:
        """An artifact with another name, other weights and another voice, made at its first use."""
        path = self.folder / "other"
        return path if path.exists() else changed_artifact(self.artifact, path, model="other", voice="Other")

    def note(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            print(json.dumps(row), flush=True)
        self.figures.extend(rows)

    def part(self, name: str, measure: Callable[[], None]) -> None:
        """Run a part; a failure is noted, and the next part runs."""
        began = time.monotonic()
        try:
            with limited(_PART_LIMIT_S):
                measure()
        except Exception as error:
            self.note(
                [{"name": "part_failed", "part": name, "error": f"{type(error).__name__}: {error}"[:500]}]
            )
        self.note(
            [{"name": "part_s", "part": name, "median": round(time.monotonic() - began, 1), "unit": "s"}]
        )

    def on_ray(self, names: Sequence[str]) -> None:
        """Run the parts that share a Ray instance; one that does not start or end is noted."""
        began = time.monotonic()
        try:
            with ray_cluster() as proxy:
                seconds = round(time.monotonic() - began, 2)
                self.note([{"name": "ray_start_s", "median": seconds, "n": 1, "unit": "s"}])
                self.application.url = proxy
                measures = self.ray_parts()
                for name in names:
                    if name in measures:
                        self.part(name, lambda name=name: self.note(measures[name]() or []))  # type: ignore[misc]
        except Exception as error:
            self.note(
                [{"name": "part_failed", "part": "ray", "error": f"{type(error).__name__}: {error}"[:500]}]
            )

    def bare_throughput(self) -> None:
        words = (
            "-m",
            "mingc",
            "serve",
            str(self.artifact),
            "--port",
            "0",
            "--drain-seconds",
            "0",
            "--threads",
            "1",
        )
        for count in (1, 2):
            with ExitStack() as stack:
                urls = [stack.enter_context(bare_server(*words)) for _ in range(count)]
                self.throughput(urls, f"{count} × mingc serve")

    def ray_throughput(self) -> None:
        for count in (1, 2):
            self.application.deploy(self.artifact, min_replicas=count, max_replicas=count)
            self.application.wait_for_replicas(count)
            self.throughput([self.application.url], f"Ray Serve, {count} replica(s)")

    def throughput(self, urls: list[str], front: str) -> None:
        self.note(measure_throughput(urls, front, self.given.clients, self.given.rounds))

    def ray_parts(self) -> dict[str, Callable[[], list[dict[str, Any]] | None]]:
        """The measuring function of each part, in order."""
        app, artifact = self.application, self.artifact
        counts = [int(each) for each in self.given.streams.split(",")]
        return {
            "lag": lambda: measure_lag(app.url, counts, self.given.chunks),
            "throughput": self.ray_throughput,
            "kill": lambda: measure_kill(app, artifact),
            "rank": lambda: measure_rank(app, self.tp2, "rank"),
            "hang": lambda: measure_rank(app, self.tp2, "hang"),
            "update": lambda: measure_update(app, artifact, self.other(), 4),
            "voices": lambda: measure_voices(app, artifact, self.other()),
            "scale": lambda: measure_scale(app, artifact, 8),
            "disconnect": lambda: measure_disconnect(app, artifact, 60),
            "affinity": lambda: measure_affinity(app.url, 8),
            "metrics": lambda: measure_metrics(app, artifact),
            "apart": lambda: measure_apart(app, artifact, self.given.rounds + 1),
        }


PARTS = ("lag", "throughput", "kill", "rank", "hang", "update", "voices", "scale", "disconnect", "affinity", "metrics",
         "apart", "settings")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", type=Path, help="a CPU artifact with all stages")
    parser.add_argument("--tp2", type=Path, help="the same for two ranks, for the parts `rank` and `hang`")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument("--clients", type=int, default=32, help="clients of the part `throughput`")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams of the part `lag`")
    parser.add_argument("--chunks", type=int, default=100, help="chunks of each of its streams")
    parser.add_argument("--json", type=Path, help="result file to write")
    given = cpu_result.parse_args(parser)
    parts = given.parts.split(",")
    if unknown := set(parts) - {*PARTS}:
        parser.error(f"--parts {','.join(sorted(unknown))}: no such part")
    if {"rank", "hang"} & {*parts} and given.tp2 is None:
        parser.error("the parts `rank` and `hang` need --tp2")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(given, Path(folder))
        if "throughput" in parts:
            run.part("throughput of bare servers", run.bare_throughput)
        if {*parts} - {"settings"}:
            run.on_ray([name for name in PARTS if name in parts])
        if "settings" in parts:
            counts = [int(each) for each in given.streams.split(",")][-2:]
            for name, settings in _SETTINGS:
                measure = partial(measure_settings, name, settings, counts, given.chunks)
                run.part(f"settings: {name}", lambda measure=measure: run.note(measure()))  # type: ignore[misc]
    if given.json is not None:
        cpu_result.write(given.json, "ray_serve", run.figures)
    if any(row["name"] == "part_failed" for row in run.figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
