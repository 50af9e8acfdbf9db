"""Two ranks meet the goldens; when one dies everybody is told, nothing hangs, and no process outlives the server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
from golden_checks import check_goldens
from mingc_command import mingc, serving

_BODY = {
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 2000,
    "stream": True,
    "temperature": 1.0,
}


def test_every_golden_is_met_by_two_ranks(two_rank_artifact: Path) -> None:
    check_goldens(two_rank_artifact)


def test_a_probe_times_the_share_of_one_rank(two_rank_artifact: Path) -> None:
    words = ("--engine", "thinker.head,thinker.decode_attention", "--batch", 1, "--repetitions", 1, "--json")
    done = mingc("probe", two_rank_artifact, *words)
    assert done.code == 0, done.stderr
    assert "thinker: the share of rank 0 of 2, without what the ranks exchange" in done.document["notes"]
    layers = {row["engine"]: row["instances"] for row in done.document["engines"]}
    assert layers == {"thinker.head": 1, "thinker.decode_attention": 4}


def test_a_killed_rank_fails_chats_and_readiness_but_not_speech(two_rank_artifact: Path) -> None:
    with (
        serving(two_rank_artifact) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        (child,) = _ranks(server.process.pid)
        assert "it is for CUDA devices" in client.get("/health").json()["all_reduce"]
        lines: list[str] = []
        with client.stream("POST", "/v1/chat/completions", json=_BODY) as response:
            for line in response.iter_lines():
                if line:
                    lines.append(line)
                if len(lines) == 3:
                    child.kill()
        assert "rank 1" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/chat/completions", json={**_BODY, "stream": False})
        assert refused.status_code == 503 and "rank 1" in refused.json()["error"]["message"]
        assert client.post("/v1/audio/speech", json={"input": "Good morning."}).status_code == 200


def test_ranks_die_with_a_killed_server(two_rank_artifact: Path) -> None:
    with serving(two_rank_artifact) as server:
        ranks = _ranks(server.process.pid)
        server.process.kill()
        _gone, alive = psutil.wait_procs(ranks, timeout=10)
        assert ranks and alive == []


def _ranks(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "mingc.runtime.rank" in child.cmdline()]
