"""The group of ranks: start, steps, failures and shutdown, with child processes that load nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mingc.errors import RankError
from mingc.runtime.thinker.ranks import rank_group
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.ranks.watchdog import StepWatchdog
from mingc.runtime.thinker.step import DecodeStep
from mingc.runtime.thinker.worker import StepOptions

_WAIT_S = 60
# A rank that reports what rank_process reports (loaded, ready), then reads steps until its socket closes.
_CHILD = """
import json, socket, sys
config = json.loads(sys.argv[1])
with socket.socket(fileno=config["step_socket"]) as sock:
    sock.sendall(b"L")
    assert sock.recv(8) == (4).to_bytes(8, "little"), "the number of KV pages"
    sock.sendall(b"R")
    while sock.recv(1 << 16):
        pass
"""
STEP = DecodeStep(
    input_ids=np.array([3]), positions=np.array([8]), lengths=np.array([9]), pages=np.array([[1]])
)


class Ranks:
    """Three ranks on the CPU: fakes of the worker and the process group, and what they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, child: str = _CHILD) -> None:
        self.failures: list[RankError] = []
        self.failed = threading.Event()
        self.group_options: dict[str, Any] = {}
        self.shutdowns: list[bool] = []
        self.configs: list[str] = []
        self.worker = SimpleNamespace(
            decode=lambda step: step.input_ids + 1, close=lambda: self.shutdowns.append(True)
        )
        fake_group = SimpleNamespace(
            host_store=lambda: SimpleNamespace(port=1),
            init=lambda **options: self.group_options.update(options),
            shutdown=lambda is_whole=True: self.shutdowns.append(is_whole),
        )
        popen = subprocess.Popen

        def start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
            *_, module, config = words
            assert module == "mingc.runtime.thinker.ranks.rank_process"
            self.configs.append(config)
            return popen([sys.executable, "-c", child, config], **{**options, "stdout": subprocess.DEVNULL})

        monkeypatch.setattr(rank_group, "process_group", fake_group)
        monkeypatch.setattr(subprocess, "Popen", start)

    def start(self, **options: Any) -> RankGroup:
        stage: Any = object()

        def start(given: object, num_pages: int) -> Any:
            assert (given, num_pages) == (stage, 4), "all ranks have as many pages"
            return self.worker

        return RankGroup(
            Path("artifact"),
            [torch.device("cpu")] * 3,
            lambda: stage,
            options.pop("count_pages", lambda: 4),
            start,
            on_failure=self.fail,
            **options,
        )

    def fail(self, error: RankError) -> None:
        self.failures.append(error)
        self.failed.set()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.fixture
def group(ranks: Ranks) -> Iterator[RankGroup]:
    group = ranks.start()
    yield group
    group.close()


def test_a_group_runs_steps_and_ends_its_children_without_killing_them(
    ranks: Ranks, group: RankGroup
) -> None:
    assert group.is_alive
    assert group.decode(STEP).tolist() == [4]
    group.close()
    assert [child.wait(_WAIT_S) for child in group._children] == [0, 0]
    assert ranks.shutdowns == [True, True], "the worker, then the process group"
    assert [group.is_alive, *ranks.failures] == [False]


@pytest.mark.parametrize(("step_timeout_s", "collective_s"), [(1.0, 60.0), (600.0, 600.0)])
def test_collectives_wait_at_least_as_long_as_a_step(
    ranks: Ranks, step_timeout_s: float, collective_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    watched: list[float] = []

    class RecordedWatchdog(StepWatchdog):
        def __init__(self, device: torch.device, timeout_s: float, report: Callable[[str], None]) -> None:
            watched.append(timeout_s)
            super().__init__(device, timeout_s, report)

    monkeypatch.setattr(rank_group, "StepWatchdog", RecordedWatchdog)
    group = ranks.start(step_timeout_s=step_timeout_s, options=StepOptions(max_chunk=48))
    group.close()
    assert watched == [step_timeout_s]
    assert ranks.group_options["timeout_s"] == collective_s
    assert (ranks.group_options["rank"], ranks.group_options["world_size"]) == (0, 3)
    assert len(ranks.configs) == 2
    for rank, config in enumerate(ranks.configs, start=1):
        assert '"num_threads": 4' in config, "a third of the machine"
        assert '"max_chunk": 48' in config, "they run the same steps as rank 0"
        assert f'"rank": {rank}, "world_size": 3' in config and f'"timeout_s": {collective_s}' in config


def test_every_rank_has_a_thread(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ranks.start().close()
    assert [json.loads(config)["num_threads"] for config in ranks.configs] == [1, 1], "torch takes no 0"


def test_a_rank_that_dies_fails_the_group_once_and_ends_the_other_ranks(
    ranks: Ranks, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group._children[1].kill()
    assert ranks.failed.wait(_WAIT_S)
    assert [child.wait(_WAIT_S) for child in group._children] == [-9, -9]
    (failure,) = ranks.failures
    assert failure.message == "rank 2 of the thinker exited with code -9"
    assert not group.is_alive
    steps: list[object] = []
    monkeypatch.setattr(rank_group, "broadcast_step", lambda _sockets, step, **_options: steps.append(step))
    with pytest.raises(RankError) as caught:
        group.decode(STEP)
    assert caught.value is failure
    assert not steps, "ranks may be at different steps: none is sent any more"
    group.close()
    assert ranks.failures == [failure] and ranks.shutdowns == [False], "no collective is left to wait for"


def test_a_rank_that_ends_by_itself_without_an_error_fails_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, _CHILD + "    sys.exit(0)\n")
    group = ranks.start()
    try:
        group._sockets[0].shutdown(socket.SHUT_WR)  # the child's loop ends as if it were done
        assert ranks.failed.wait(_WAIT_S)
        assert [each.message for each in ranks.failures] == ["rank 1 of the thinker exited with code 0"]
        assert not group.is_alive
    finally:
        group.close()


def test_a_step_that_fails_ends_the_group(ranks: Ranks, group: RankGroup) -> None:
    def decode(step: DecodeStep) -> None:
        raise ZeroDivisionError("no rank died")

    ranks.worker.decode = decode
    with pytest.raises(RankError, match="a step of the thinker failed: no rank died") as caught:
        group.decode(STEP)
    assert ranks.failures == [caught.value]
    assert [child.wait(_WAIT_S) for child in group._children] == [-9, -9]


def test_pages_are_counted_when_all_ranks_have_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is free on a device is known only then."""
    loaded = f"open(f'{tmp_path}/' + str(config['rank']), 'w').close(); sock.sendall(b'L')"
    ranks = Ranks(
        monkeypatch, _CHILD.replace('sock.sendall(b"L")', f"import time; time.sleep(0.3); {loaded}")
    )
    seen: list[set[str]] = []

    def count_pages() -> int:
        seen.append({path.name for path in tmp_path.iterdir()})
        return 4

    ranks.start(count_pages=count_pages).close()
    assert seen == [{"1", "2"}]


def test_ranks_end_when_pages_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)

    def count_pages() -> int:
        raise MemoryError("nothing is left")

    with pytest.raises(MemoryError, match="nothing is left"):
        ranks.start(count_pages=count_pages)
    assert len(started) == 2 and all(child.poll() is not None for child in started)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_ends_during_startup_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which it leaves waiting, are killed; the error is not theirs."""
    child = (
        f"import json, sys, time\nif json.loads(sys.argv[1])['rank'] == {rank}: sys.exit(7)\ntime.sleep(600)"
    )
    ranks = Ranks(monkeypatch, child)
    with pytest.raises(RankError, match=f"rank {rank} .*exited with code 7"):
        ranks.start()
    assert ranks.shutdowns == [False]
