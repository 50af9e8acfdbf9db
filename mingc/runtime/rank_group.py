"""All ranks of the thinker as one: rank 0 in this process, the others in children that get the same steps."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mingc.artifacts.codec import encode
from mingc.errors import WorkerError
from mingc.runtime import distributed
from mingc.runtime.all_reduce import ReduceChoice
from mingc.runtime.rank import COLLECTIVE_TIMEOUT_S, LOADED, READY, RankJob
from mingc.runtime.stages import LoadedStage
from mingc.runtime.step_wire import Step, send_step
from mingc.runtime.thinker import DecodeStep, LaunchedTokens, PrefillStep, ThinkerWorker

_SEND_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 600.0  # the weights of the real model take minutes from a cold disk
_END_TIMEOUT_S = 5.0
_END_NOTICE_S = 0.2  # a closed connection is noticed before the end of its process is

_Step = TypeVar("_Step", PrefillStep, DecodeStep)
_Result = TypeVar("_Result")

log = logging.getLogger("mingc.ranks")


class RankGroup:
    """Starts and watches the children; runs each step on every rank.

    Args:
        devices: one a rank; the first one is this process's.
        load: loads this process's stage while the children load theirs.
        start: makes this process's worker of it, once the ranks have met.
        on_death: called once, on any thread, when a child has ended unasked or a step has failed.
    """

    def __init__(
        self,
        bundle: Path,
        devices: list[torch.device],
        load: Callable[[], LoadedStage],
        start: Callable[[LoadedStage], ThinkerWorker],
        *,
        num_pages: int,
        on_death: Callable[[WorkerError], None],
    ) -> None:
        self._on_death = on_death
        self._children: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._is_closing = threading.Event()
        self._death: WorkerError | None = None
        self._lock = threading.Lock()
        self._lifeline_read, self._lifeline_write = os.pipe()
        self.device = devices[0]
        self._store = distributed.host_store()
        try:
            for rank in range(1, len(devices)):
                self._spawn(
                    RankJob(
                        bundle=str(bundle),
                        rank=rank,
                        world_size=len(devices),
                        device=str(devices[rank]),
                        num_pages=num_pages,
                        num_threads=max(1, torch.get_num_threads() // len(devices)),
                        port=self._store.port,
                        steps=0,
                        lifeline=self._lifeline_read,
                    )
                )
            stage = load()
            self._await(LOADED)
            distributed.init(
                rank=0,
                world_size=len(devices),
                port=self._store.port,
                device=str(devices[0]),
                timeout_s=COLLECTIVE_TIMEOUT_S,
            )
            self._worker = start(stage)
            self._await(READY)
        except BaseException:
            self.close()
            raise
        for rank, child in enumerate(self._children, start=1):
            threading.Thread(
                target=self._watch, args=(rank, child), name=f"mingc-watch-{rank}", daemon=True
            ).start()

    @property
    def reduce_choice(self) -> ReduceChoice:
        """How the ranks sum up."""
        return self._worker.reducer.choice

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._is_closing.is_set()

    @property
    def samples(self) -> bool:
        return self._worker.samples

    def prefill(self, step: PrefillStep) -> Tensor:
        """As `ThinkerWorker.prefill`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.prefill)

    def decode(self, step: DecodeStep) -> Tensor:
        """As `ThinkerWorker.decode`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.decode)

    def launch(self, step: DecodeStep) -> LaunchedTokens:
        """As `ThinkerWorker.launch`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.launch)

    def close(self) -> None:
        """End the children: closed sockets tell them, what is left after a while is killed."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        for sock in self._sockets:
            sock.close()
        distributed.shutdown()
        for child in self._children:
            try:
                child.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        os.close(self._lifeline_write)
        os.close(self._lifeline_read)

    def _spawn(self, job: RankJob) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = {**encode(job), "steps": theirs.fileno()}
            child = subprocess.Popen(
                [sys.executable, "-m", "mingc.runtime.rank", json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(), job.lifeline),
            )
        ours.settimeout(_START_TIMEOUT_S)
        self._sockets.append(ours)
        self._children.append(child)

    def _await(self, word: bytes) -> None:
        for rank, (sock, child) in enumerate(zip(self._sockets, self._children, strict=True), start=1):
            try:
                said = sock.recv(1)
            except OSError as error:
                raise WorkerError(f"rank {rank} did not start: {error}", where=f"rank {rank}") from error
            if said != word:
                code = child.wait()
                raise WorkerError(f"rank {rank} ended with code {code} while starting", where=f"rank {rank}")

    def _run(self, step: _Step, run: Callable[[_Step], _Result]) -> _Result:
        if self._death is not None:
            raise self._death
        try:
            self._send(step)
            return run(step)
        except Exception as error:
            # The ranks may now stand at different steps; no later one could be trusted.
            death = self._find_dead_child() or WorkerError(
                f"a step of the thinker failed: {error}", where="rank 0", fix="restart the server", status=503
            )
            self._die(death)
            raise death from error

    def _send(self, step: Step) -> None:
        for rank, sock in enumerate(self._sockets, start=1):
            sock.settimeout(_SEND_TIMEOUT_S)
            try:
                send_step(sock, step)
            except OSError as error:
                raise WorkerError(
                    f"rank {rank} does not take steps: {error}", where=f"rank {rank}"
                ) from error

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if not self._is_closing.is_set():
            self._die(_death_of(rank, code))

    def _find_dead_child(self) -> WorkerError | None:
        """Why a step failed, if it is because a child has just ended."""
        for rank, child in enumerate(self._children, start=1):
            try:
                return _death_of(rank, child.wait(_END_NOTICE_S))
            except subprocess.TimeoutExpired:
                continue
        return None

    def _die(self, death: WorkerError) -> None:
        """Serve no step any more. Only the first death counts."""
        with self._lock:
            if self._death is not None:
                return
            self._death = death
        log.error("%s", death.message)
        # The others may wait in a collective for a rank that is gone; without them it fails here as well.
        for child in self._children:
            if child.poll() is None:
                child.kill()
        self._on_death(death)


def _death_of(rank: int, code: int) -> WorkerError:
    # 503: nothing is wrong with a request that comes now, another server may answer it.
    return WorkerError(
        f"rank {rank} of the thinker ended with code {code}",
        where=f"rank {rank}",
        fix="restart the server",
        status=503,
    )
