"""The Serve application on a Ray instance: HTTP contract, equal answers, lost replicas, updates, disconnects."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import ray
import yaml
from changed_artifact import changed_artifact
from fake_replica import fake_application
from mingc_command import DATA, REPOSITORY
from mixed_clients import send, send_together
from mixed_requests import MIXED
from ray import serve
from ray.serve.schema import ServeDeploySchema
from ray_cluster import deploy
from ray_front import on_ray
from realtime_client import Event, RealtimeClient, speech
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket

from mingc.deploy.ray import app
from mingc.deploy.replica import ReplicaState

pytestmark = pytest.mark.timeout(700)  # replicas start slowly on a busy machine with two cores
_WAIT_S = 300.0
_STATES_AT_ONCE = 16
_ENDLESS = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 3000,
    "stream": True,
    "temperature": 1.0,
    "ignore_eos": True,
}
_NO_PARAMETERS = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
CHAT = "/v1/chat/completions"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {_WAIT_S:g} s: {what}"
        time.sleep(0.25)


class Application:
    """The deployed model at a route prefix of its own."""

    def __init__(self, proxy: str) -> None:
        self._proxy = proxy
        self.url = f"{proxy}/tiny"
        self._handle: Any = None
        self._arguments: dict[str, Any] = {}

    def deploy(self, artifact: Path, **arguments: Any) -> None:
        """Deploy it, unless it runs with these arguments: Serve would replace its replicas by equal ones."""
        defaults = {"artifact": str(artifact), "num_cpus": 0.1, "health_check_period_s": 0.5}
        if self._arguments == (arguments := {**defaults, **arguments}):
            return
        self._handle = deploy(app(arguments), "tiny", self._proxy, "/tiny", _WAIT_S)
        self._arguments = arguments

    def states(self, count: int) -> dict[int, ReplicaState]:
        """States of `count` replicas by process.

        The router sends a call to the replica with fewer requests. More calls at once than there are streams
        reach both replicas, however the streams are spread.
        """
        found: dict[int, ReplicaState] = {}

        def ask() -> bool:
            for response in [self._handle.state.remote() for _ in range(_STATES_AT_ONCE)]:
                try:
                    state = response.result(timeout_s=_WAIT_S)
                except Exception as error:  # a replica that is being replaced
                    print(error)
                else:
                    found[state.pid] = state
            return len([pid for pid in found if psutil.pid_exists(pid)]) >= count

        wait_for(ask, f"{count} replicas")
        return {pid: state for pid, state in found.items() if psutil.pid_exists(pid)}

    @contextmanager
    def streams(self, count: int) -> Iterator[list[Stream]]:
        """`count` running streams, one started after the other: the router sees how many each replica has.

        They leave at the end, after a failed check too: a replica with streams is not replaced.
        """
        streams: list[Stream] = []
        try:
            for seed in range(count):
                streams.append(Stream(f"{self.url}{CHAT}", {**_ENDLESS, "seed": seed}))
                assert streams[-1].is_running.wait(_WAIT_S)
            yield streams
        finally:
            for stream in streams:
                stream.leave()


class Stream:
    """A long streamed chat, read in a thread."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.is_running = threading.Event()
        self.lines: list[str] = []
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, body))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with (
            httpx.Client(timeout=_WAIT_S, trust_env=False) as http,
            http.stream("POST", url, json=body) as response,
        ):
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                if len(self.lines) > 3:
                    self.is_running.set()
                if self._leave.is_set():
                    return

    def leave(self) -> None:
        self._leave.set()
        self.join()

    def join(self) -> None:
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive()

    @property
    def error(self) -> dict[str, Any]:
        """The error event that ended it."""
        error: dict[str, Any] = json.loads(self.lines[-1].removeprefix("data: "))["error"]
        return error


@pytest.fixture(scope="module")
def application(proxy: str, eager_artifact: Path) -> Application:
    """Two replicas, or what the test before left."""
    application = Application(proxy)
    application.deploy(eager_artifact, min_replicas=2, max_replicas=2)
    return application


# Where the proxy and Ray's streams are between client and app: pieces sent at once, clients that leave, headers,
# limits, errors. The rest of these files is about code that runs in a replica as it does in `mingc serve`.
globals().update(
    on_ray(
        "test_server",
        ("client", "small"),
        (
            "test_models_voices_health",
            "test_a_service_that_is_not_ready",
            "test_streamed_text_has_one_delta_a_token",
            "test_streamed_audio_has_one_chunk_a_patch",
            "test_speech",
            "test_bad_requests_do_not_affect_concurrent_ones",
            "test_a_full_server_sends_retry_after",
            "test_405_lists_the_allowed_methods",
            "test_a_stream_that_fails_ends_with_an_error_event",
            "test_raw_audio_that_fails_is_broken_off",
            "test_a_bug_is_reported_without_its_details",
            "test_limits",
            "test_a_body_that_does_not_arrive",
            "test_requests_beyond_the_limit_are_refused",
            "test_metrics",
        ),
    )
    | on_ray(
        "test_openai_client",
        ("base_url",),
        (
            "test_streamed_audio_in_other_formats",
            "test_speech_is_heard_before_its_end",
            "test_an_error_in_a_stream_is_raised_by_the_client",
        ),
    )
)


def test_two_replicas_answer_as_one_model(application: Application) -> None:
    assert len(application.states(2)) == 2
    alone = [send(application.url, request) for request in MIXED]
    for expected, got in zip([*alone, *alone], send_together(application.url, (*MIXED, *MIXED)), strict=True):
        assert got.text == expected.text and got.samples.shape == expected.samples.shape
        np.testing.assert_allclose(got.samples, expected.samples, atol=2e-4)


def test_the_id_of_a_request_is_the_proxys(application: Application) -> None:
    given = httpx.get(f"{application.url}/health", headers={"x-request-id": "abc"}, trust_env=False)
    assert given.headers.get_list("x-request-id") == ["abc"]
    made = httpx.post(f"{application.url}{CHAT}", json={}, trust_env=False)
    assert len(made.headers.get_list("x-request-id")) == 1 and made.json()["error"]["param"] == "messages"


def test_a_client_that_leaves_frees_its_pages(application: Application) -> None:
    with application.streams(4):
        assert sum(state.kv_pages_used for state in application.states(2).values()) > 0

    def is_free() -> bool:
        states = application.states(2).values()
        return all(state.kv_pages_used == 0 and state.num_running == 0 for state in states)

    wait_for(is_free, "free pages")


def test_a_killed_replica_fails_its_requests_only(application: Application) -> None:
    before = application.states(2)
    victim = next(iter(before))
    children = psutil.Process(victim).children(recursive=True)
    with application.streams(6) as streams:
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: any("error" in stream.lines[-1] for stream in streams), "an error event")
        time.sleep(0.5)  # others would fail by now
        failed = [stream for stream in streams if '"error"' in stream.lines[-1]]
        assert {stream.error["code"] for stream in failed} == {"replica_lost"}
        assert 0 < len(failed) < len(streams), "each replica had some of six streams"
    after = application.states(2)
    assert victim not in after and len(after) == 2
    _gone, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert httpx.post(f"{application.url}{CHAT}", json={**_ENDLESS, "stream": False, "max_tokens": 3},
                      timeout=_WAIT_S, trust_env=False).status_code == 200  # fmt: skip


@pytest.mark.exhaustive
def test_text_is_streamed_into_speech_by_one_replica(application: Application) -> None:
    """A WebSocket stays with its replica, and is closed with a code when that is killed."""
    config = {"voice": "DB30", "seed": 5, "max_steps": 2, "response_format": "pcm"}
    words = "All eight of these words are one sentence."
    url = f"{application.url}/v1/audio/speech"
    whole = httpx.post(url, json={"input": words, **config}, timeout=_WAIT_S, trust_env=False).content

    def utterance(connection: ClientConnection) -> bytes:
        for word in words.split():
            connection.send(json.dumps({"type": "input.text", "text": f"{word} "}))
        connection.send(json.dumps({"type": "input.done"}))
        audio = b""
        while isinstance(message := connection.recv(_WAIT_S), bytes) or "session.done" not in message:
            audio += message if isinstance(message, bytes) else b""
        return audio

    with websocket(f"{url}/stream".replace("http", "ws", 1), proxy=None) as connection:
        connection.send(json.dumps({"type": "session.config", **config}))
        assert [utterance(connection) for _ in range(3)] == [whole] * 3
        for pid in application.states(2):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(_WAIT_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
    application.states(2)  # new ones


@pytest.mark.exhaustive
def test_a_realtime_session_stays_with_its_replica(
    application: Application, eager_artifact: Path, tmp_path: Path
) -> None:
    """A turn by its silence, a call, and an update of the application, which ends the session when its time is over."""
    copies: dict[str, Any] = {
        "min_replicas": 2,
        "max_replicas": 2,
        "max_surge_percent": 100,
        "graceful_shutdown_timeout_s": 30,
    }
    application.deploy(eager_artifact, **copies)
    other = changed_artifact(eager_artifact, tmp_path / "artifact", model="other")
    tool = {"type": "function", "name": "weather", "strict": True, "parameters": _NO_PARAMETERS}
    with RealtimeClient(application.url) as client:
        num_tokens = 0

        def answer(**response: Any) -> Event:
            """Ask in text. The replica has the prompt before this one; no other has it."""
            nonlocal num_tokens
            client.send("response.create", response={"output_modalities": ["text"], **response})
            made: Event = client.until("response.done")["response"]
            assert made["status"] != "failed", made["status_details"]
            assert made["usage"]["input_token_details"]["cached_tokens"] > num_tokens - 32
            num_tokens = made["usage"]["input_tokens"]
            return made

        client.update(tools=[tool], tool_choice="none", max_output_tokens=8, parallel_tool_calls=False)
        client.append(speech(0.0, 2.2, silence_s=0.8))
        num_tokens = client.until("response.done")["response"]["usage"]["input_tokens"]
        assert client.of("input_audio_buffer.committed") and client.of("response.output_audio.delta")
        (made,) = answer(tool_choice="required", max_output_tokens=200)["output"]
        assert (made["type"], made["name"], made["arguments"]) == ("function_call", "weather", "{}")
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "sunny"}
        client.send("conversation.item.create", item=result)
        answer()
        with ThreadPoolExecutor(1) as pool:
            updating = pool.submit(application.deploy, other, **copies)
            wait_for(lambda: _model_of_a_session(application.url) == "other", "sessions of new replicas")
            answer()  # this one goes on, until the time of running requests is over
            with pytest.raises(ConnectionClosed) as closed:
                client.socket.recv(_WAIT_S)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
            updating.result()


def _model_of_a_session(url: str) -> Any:
    with RealtimeClient(url) as client:
        return client.next()["session"]["model"]


def test_an_update_to_another_artifact_fails_no_request(
    application: Application, eager_artifact: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Afterwards all answers are those of the new one, whose name and weights differ."""
    application.deploy(eager_artifact, min_replicas=2, max_replicas=2)
    other = changed_artifact(eager_artifact, tmp_path_factory.mktemp("other") / "artifact", model="other")
    stop = threading.Event()
    body = {**_ENDLESS, "temperature": 0.0, "stream": False, "max_tokens": 6}

    def answer(http: httpx.Client) -> tuple[int, str, str]:
        response = http.post(f"{application.url}{CHAT}", json=body)
        found = response.json()
        return response.status_code, found.get("model", ""), str(found.get("choices"))

    def ask(_: int) -> set[tuple[int, str, str]]:
        seen = set()
        with httpx.Client(timeout=_WAIT_S, trust_env=False) as http:
            while not stop.wait(0.1):  # the replicas that start need the processors
                seen.add(answer(http))
        return seen

    with ThreadPoolExecutor(3) as pool:
        clients = pool.map(ask, range(3))
        try:
            application.deploy(other, min_replicas=2, max_replicas=2)
            wait_for(lambda: {s.model for s in application.states(2).values()} == {"other"}, "new replicas")
        finally:
            stop.set()
        seen = set().union(*clients)
    assert {(status, model) for status, model, _ in seen} == {(200, "ming-omni"), (200, "other")}
    assert len({text for _, _, text in seen}) == 2, "the weights differ, and nothing else decides an answer"
    with httpx.Client(timeout=_WAIT_S, trust_env=False) as http:
        assert {answer(http) for _ in range(4)} == {each for each in seen if each[1] == "other"}


@pytest.mark.exhaustive
def test_requests_of_a_session_go_to_one_replica(proxy: str) -> None:
    """The model's name has the process of a replica."""
    deploy(fake_application(2, affinity=True), "sticky", proxy, "/sticky", _WAIT_S)

    def replica_of(session: str) -> str:
        health = httpx.get(
            f"{proxy}/sticky/health", headers={"x-session-id": session}, trust_env=False
        ).json()
        return str(health["model"])

    # The proxy learns of a replica after it runs; 24 sessions then miss one once in eight million runs.
    wait_for(
        lambda: len({replica_of(f"first {index}") for index in range(24)}) == 2, "both replicas at the proxy"
    )
    sessions = [{replica_of(f"session {index}") for _ in range(4)} for index in range(24)]
    serve.delete("sticky")
    assert [len(replicas) for replicas in sessions] == [1] * 24
    assert len(set().union(*sessions)) == 2, "sessions are spread"


def test_metrics_are_exported_by_ray_with_their_replica(application: Application) -> None:
    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    found: list[str] = []

    def is_exported() -> bool:
        lines = httpx.get(address, trust_env=False).text.splitlines()
        found[:] = [line for line in lines if line.startswith("ray_mingc_") and 'application="tiny"' in line]
        return any(f'route="{CHAT}"' in line and 'status="200"' in line for line in found)

    wait_for(is_exported, "requests in the metrics of Ray")
    assert all('deployment="mingc"' in line and 'replica="' in line for line in found)
    names = {line.partition("{")[0] for line in found}
    assert {"ray_mingc_http_requests_total", "ray_mingc_request_duration_seconds_bucket_total",
            "ray_mingc_kv_cache_usage_ratio"} <= names  # fmt: skip


@pytest.mark.exhaustive
def test_remote_speech_is_that_of_one_replica(
    application: Application, eager_artifact: Path, tmp_path: Path
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": 24,
        "seed": 5,
        "modalities": ["text", "audio"],
        "audio": {"voice": "DB30", "format": "pcm16", "max_steps": 3},
    }

    def answers() -> tuple[str, bytes, dict[str, Any], bytes]:
        chat = httpx.post(f"{application.url}{CHAT}", json=body, timeout=_WAIT_S, trust_env=False).json()
        message = chat["choices"][0]["message"]
        clip = {"input": "Good morning. 你好。", "seed": 3, "max_steps": 3, "response_format": "pcm"}
        speech = httpx.post(f"{application.url}/v1/audio/speech", json=clip, timeout=_WAIT_S, trust_env=False)
        assert speech.status_code == 200 and len(speech.content) > 10_000
        return message["content"], base64.b64decode(message["audio"]["data"]), chat["usage"], speech.content

    application.deploy(eager_artifact)
    joint = answers()
    application.deploy(eager_artifact, speech_artifact=str(eager_artifact))
    apart = answers()
    assert (apart[0], apart[2]) == (joint[0], joint[2])
    for got, expected in ((apart[1], joint[1]), (apart[3], joint[3])):
        np.testing.assert_allclose(np.frombuffer(got, "<i2"), np.frombuffer(expected, "<i2"), atol=8)
    # A voice that a text replica took, and a speech replica keeps.
    application.deploy(
        eager_artifact, speech_artifact=str(eager_artifact), speech_max_replicas=2, speech_min_replicas=2,
        voices_dir=str(tmp_path / "voices"),
    )  # fmt: skip
    recording = (DATA / "speech" / "three-sentences.ogg").read_bytes()
    words = "One sentence. Another one. And a third."
    with httpx.Client(base_url=application.url, timeout=_WAIT_S, trust_env=False) as http:
        form = {"name": "clone", "consent": "yes", "ref_text": words}
        added = http.post("/v1/audio/voices", data=form, files={"audio_sample": recording})
        assert added.status_code == 200, added.text
        assert http.get("/v1/audio/voices").json()["voices"] == ["DB30", "lingguang", "clone"]
        spoken = []
        reference = {"ref_audio": base64.b64encode(recording).decode(), "ref_text": words}
        for voice in ({"voice": "clone"}, {"voice": added.json()["id"]}, reference, {"voice": "DB30"}):
            chat = http.post(CHAT, json={**body, "audio": {**body["audio"], **voice}}).json()
            clip = http.post("/v1/audio/speech", json={"input": "Hi.", "seed": 3, "max_steps": 3, **voice})
            assert clip.status_code == 200, clip.text
            spoken.append((chat["choices"][0]["message"]["audio"]["data"], clip.content))
        assert spoken[0] == spoken[1] == spoken[2] and spoken[3][0] != spoken[0][0]
        assert http.delete("/v1/audio/voices/clone").status_code == 200
    refused = {**body, "audio": {"voice": "unknown"}}
    answer = httpx.post(f"{application.url}{CHAT}", json=refused, timeout=_WAIT_S, trust_env=False)
    assert answer.json()["error"]["param"] == "audio.voice"


@pytest.mark.exhaustive
def test_a_config_file_that_serve_builds_is_deployed(
    application: Application, eager_artifact: Path, tmp_path: Path
) -> None:
    """The way of `serve build` and of `serve deploy`, whose REST interface calls what is called here."""
    arguments = {"artifact": str(eager_artifact), "num_cpus": 0.1, "served_model_names": "built"}
    module = f"from mingc.deploy.ray import app\napplication = app({arguments!r})\n"
    (tmp_path / "bound_model.py").write_text(module)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = ["-m", "ray.serve.scripts", "build", "bound_model:application", "--app-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words, "-o", str(tmp_path / "config.yaml")],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert built["applications"][0]["import_path"] == "bound_model:application"
    config = {
        "applications": [
            {
                "name": "tiny",
                "route_prefix": "/tiny",
                "import_path": "mingc.deploy.ray:app",
                "args": arguments,
                "deployments": built["applications"][0]["deployments"],
            }
        ]
    }
    serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def is_served() -> bool:
        answer = httpx.get(f"{application.url}/v1/models", timeout=_WAIT_S, trust_env=False)
        return answer.status_code == 200 and answer.json()["data"][0]["id"] == "built"

    wait_for(is_served, "the application of the file")
