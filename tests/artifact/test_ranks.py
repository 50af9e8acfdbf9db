"""Two ranks reproduce the goldens; when one dies or hangs, requests fail and no process outlives the server."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from golden_checks import PAIRS, check_goldens
from mingc_command import ENVIRONMENT, mingc_here, serving

_NUM_CLIENTS = 8
_BODY = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 2000,
    "stream": True,
    "temperature": 1.0,
    "ignore_eos": True,
}


def test_two_ranks_reproduce_every_golden(two_rank_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded requests are served in the way that differs from the server of test_isolation.py."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    check_goldens(two_rank_artifact, ways=(PAIRS,))


def test_probe_times_the_share_of_one_rank(two_rank_artifact: Path) -> None:
    words = ("--engine", "thinker.head,thinker.decode_attention", "--batch", 1, "--repetitions", 1)
    done = mingc_here("probe", two_rank_artifact, *words, "--no-cold-start", "--no-transfers", "--json")
    assert done.code == 0, done.stderr
    assert "thinker: rank 0 of 2, without all-reduces" in done.document["notes"]
    layers = {row["engine"]: row["layer_instances"] for row in done.document["engines"]}
    assert layers == {"thinker.head": 1, "thinker.decode_attention": 4}


def test_a_killed_rank_fails_all_requests_and_ends_the_server(two_rank_artifact: Path) -> None:
    with (
        serving(two_rank_artifact) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        (child,) = _ranks(server.process.pid)
        assert "they need CUDA devices" in client.get("/health").json()["all_reduce"]
        family = [psutil.Process(server.process.pid), child]
        with ThreadPoolExecutor(_NUM_CLIENTS) as threads:
            streams = [_Stream(client, seed) for seed in range(_NUM_CLIENTS)]
            answers = [threads.submit(stream.read) for stream in streams]
            for stream in streams:
                assert stream.is_running.wait(60)
            child.kill()
            for answer in answers:
                assert "rank 1" in json.loads(answer.result().removeprefix("data: "))["error"]["message"]
        assert server.process.wait(60) == 4
        with pytest.raises(httpx.ConnectError):
            client.get("/health")
        _gone, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []


def test_a_rank_that_hangs_ends_the_server(two_rank_artifact: Path) -> None:
    with (
        serving(two_rank_artifact, "--step-timeout", 3) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        (child,) = _ranks(server.process.pid)
        with ThreadPoolExecutor(1) as threads:
            stream = _Stream(client, 0)
            answer = threads.submit(stream.read)
            assert stream.is_running.wait(60)
            child.suspend()
            assert "did not return within 3 s" in answer.result()
        assert server.process.wait(60) == 4
        _gone, alive = psutil.wait_procs([child], timeout=10)
        assert alive == []


def test_ranks_die_with_a_killed_server(two_rank_artifact: Path) -> None:
    with serving(two_rank_artifact) as server:
        ranks = _ranks(server.process.pid)
        server.process.kill()
        _gone, alive = psutil.wait_procs(ranks, timeout=10)
        assert ranks and alive == []


def _ranks(pid: int) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(pid).children()
        if "mingc.runtime.thinker.ranks.rank_process" in child.cmdline()
    ]


class _Stream:
    """A long answer; `is_running` is set when it has begun."""

    def __init__(self, client: httpx.Client, seed: int) -> None:
        self._client = client
        self._body = {**_BODY, "seed": seed}
        self.is_running = threading.Event()

    def read(self) -> str:
        """The last line of the stream."""
        lines: list[str] = []
        with self._client.stream("POST", "/v1/chat/completions", json=self._body) as response:
            for line in response.iter_lines():
                if line:
                    lines.append(line)
                if len(lines) == 3:
                    self.is_running.set()
        return lines[-1]
