"""The main function of a rank process, with a fake worker: start, steps, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.codec import encode
from mingc.runtime.thinker.ranks import rank_process
from mingc.runtime.thinker.ranks.rank_process import LOADED, READY, WorkerConfig
from mingc.runtime.thinker.ranks.step_codec import Step, broadcast_num_pages, broadcast_step
from mingc.runtime.thinker.step import DecodeStep, PrefillStep, SampleStep
from mingc.runtime.thinker.worker import StepOptions

_WAIT_S = 20.0


def prefill(*, is_sampled: bool) -> PrefillStep:
    return PrefillStep(
        input_ids=np.array([1, 2]),
        positions=np.zeros((3, 2), np.int64),
        embed_kind=np.zeros(2, np.int64),
        embeds=None,
        counts=np.array([2]),
        starts=np.array([0]),
        pages=np.array([[1]]),
        slots=np.array([1]),
        ended=np.array([0]) if is_sampled else None,
        sampling=np.zeros((1, 6)) if is_sampled else None,
    )


def decode(*, is_sampled: bool) -> DecodeStep:
    return DecodeStep(
        input_ids=np.array([3]),
        positions=np.array([8]),
        lengths=np.array([9]),
        pages=np.array([[1]]),
        slots=np.array([1]) if is_sampled else None,
        sampling=np.zeros((1, 6)) if is_sampled else None,
    )


STEPS: list[tuple[Step, str]] = [
    (prefill(is_sampled=False), "prefill"),
    (prefill(is_sampled=True), "launch_prefill"),
    (decode(is_sampled=True), "launch_decode"),
    (decode(is_sampled=False), "decode"),
    (SampleStep(slots=np.array([1]), sampling=np.zeros((1, 6))), "launch_sampling"),
]


@pytest.mark.timeout(60)
def test_a_rank_runs_the_steps_of_rank_0_until_its_socket_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step runs as on rank 0: a rank that did not sample too would wait for the others in a collective."""
    calls: list[str] = []
    signals: dict[int, Any] = {}
    joined: dict[str, Any] = {}
    stage = object()

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    def load_stage(artifact: object, decoder: object, device: torch.device, *, rank: int) -> object:
        assert (decoder, rank, str(device)) == ("decoder", 2, "cpu")
        return stage

    def create_worker(
        given: object, manifest: object, *, num_pages: int, device: torch.device, options: StepOptions
    ) -> Any:
        assert (given, num_pages, str(device)) == (stage, 33, "cpu")
        assert options == StepOptions(is_static=True, max_chunk=16), "chunks and sampling are those of rank 0"
        assert calls == ["watch", "load", "join"], "the parent is watched first, the group joined before"
        methods = ("prefill", "launch_prefill", "decode", "launch_decode", "launch_sampling", "close")
        return SimpleNamespace(**{name: note(name) for name in methods})

    def join(**options: Any) -> None:
        joined.update(options)
        calls.append("join")

    def load(*arguments: Any, **options: Any) -> object:
        calls.append("load")
        return load_stage(*arguments, **options)

    read, write = os.pipe()

    def watch(fd: int) -> None:
        assert fd == read
        calls.append("watch")

    graph = SimpleNamespace(text_decoder=lambda: "decoder")
    opened: list[Path] = []

    manifest: Any = SimpleNamespace(graph=graph)

    def open_unchecked(root: Path) -> Artifact:
        opened.append(root)
        return Artifact(root=root, manifest=manifest)

    monkeypatch.setattr(rank_process, "open_unchecked", open_unchecked)
    monkeypatch.setattr(rank_process, "load_stage", load)
    monkeypatch.setattr(rank_process, "create_worker", create_worker)
    monkeypatch.setattr(rank_process, "watch_pipe", watch)
    monkeypatch.setattr(
        rank_process, "process_group", SimpleNamespace(init=join, shutdown=lambda: calls.append("leave"))
    )
    monkeypatch.setattr(signal, "signal", signals.__setitem__)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: joined.update(num_threads=count))
    ours, theirs = socket.socketpair()
    config = WorkerConfig(
        artifact=str(Path("artifact")),
        rank=2,
        world_size=4,
        device="cpu",
        num_threads=3,
        port=1234,
        timeout_s=5.0,
        step_socket=theirs.detach(),
        parent_pipe=read,
        options=StepOptions(is_static=True, max_chunk=16),
    )
    monkeypatch.setattr(sys, "argv", ["rank_process", json.dumps(encode(config))])

    def rank_0() -> None:
        with ours:
            ours.settimeout(_WAIT_S)
            assert ours.recv(1) == LOADED
            broadcast_num_pages([ours], 33, timeout_s=_WAIT_S)
            assert ours.recv(1) == READY
            for step, _ in STEPS:
                broadcast_step([ours], step, timeout_s=_WAIT_S)

    thread = threading.Thread(target=rank_0)
    thread.start()
    try:
        rank_process.main()
    finally:
        thread.join(_WAIT_S)
        os.close(read)
        os.close(write)
    assert opened == [Path("artifact")]
    assert calls[3:] == [*(name for _, name in STEPS), "close", "leave"]
    assert joined == {
        "rank": 2,
        "world_size": 4,
        "port": 1234,
        "device": "cpu",
        "timeout_s": 5.0,
        "num_threads": 3,
    }
    assert signals == dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN), (
        "the server ends its ranks"
    )
