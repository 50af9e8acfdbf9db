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
from mingc.errors import RankError, WorkerError
from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.all_reduce import AllReducePlan
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.prefill_policy import StepLatencyModel
from mingc.runtime.thinker.ranks.hard_exit import hard_exit
from mingc.runtime.thinker.ranks.rank_process import LOADED, READY, WorkerConfig
from mingc.runtime.thinker.ranks.step_codec import Step, send_step
from mingc.runtime.thinker.ranks.watchdog import StepWatchdog
from mingc.runtime.thinker.scheduler import ChunkShape
from mingc.runtime.thinker.step import DecodeStep, PrefillStep
from mingc.runtime.thinker.worker import LaunchedTokens, ThinkerWorker

STEP_TIMEOUT_S = 60.0
_MEET_TIMEOUT_S = 60.0  # of ranks that wait for each other while they start
_SEND_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 600.0  # the weights of the real model take minutes from a cold disk
_PART_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 5.0
_END_NOTICE_S = 0.2  # a closed connection is noticed before the end of its process is

_RESTART = "start again"

_Step = TypeVar("_Step", PrefillStep, DecodeStep)
_Result = TypeVar("_Result")

log = logging.getLogger("mingc.ranks")


class RankGroup:
    """Starts and watches the children; runs each step on every rank.

    Args:
        devices: one a rank; the first one is this process's.
        load: loads this process's stage while the children load theirs.
        start: makes this process's worker of it, once the ranks have met.
        on_failure: called once, on any thread, when a child has ended unasked, or a step has failed or does not end.
        step_timeout_s: seconds after which a step that has not ended is taken for one that never will.

    On CUDA a death is also the end of this process (`last_resort`): a rank that waits for another one on the device
    cannot be called back.
    """

    def __init__(
        self,
        artifact: Path,
        devices: list[torch.device],
        load: Callable[[], LoadedStage],
        start: Callable[[LoadedStage], ThinkerWorker],
        *,
        num_pages: int,
        on_failure: Callable[[RankError], None],
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self._on_death = on_failure
        self._children: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._is_closing = threading.Event()
        self._watch: StepWatchdog | None = None  # from when all ranks run
        self._death: RankError | None = None
        self._lock = threading.Lock()
        self._lifeline_read, self._lifeline_write = os.pipe()
        self.device = devices[0]
        self._store = process_group.host_store()
        timeout_s = max(_MEET_TIMEOUT_S, step_timeout_s)
        try:
            for rank in range(1, len(devices)):
                self._spawn(
                    WorkerConfig(
                        artifact=str(artifact),
                        rank=rank,
                        world_size=len(devices),
                        device=str(devices[rank]),
                        num_pages=num_pages,
                        num_threads=max(1, torch.get_num_threads() // len(devices)),
                        port=self._store.port,
                        timeout_s=timeout_s,
                        steps=0,
                        lifeline=self._lifeline_read,
                    )
                )
            stage = load()
            self._await(LOADED)
            process_group.init(
                rank=0,
                world_size=len(devices),
                port=self._store.port,
                device=str(devices[0]),
                timeout_s=timeout_s,
            )
            self._worker = start(stage)
            self._await(READY)
        except BaseException:
            self.close()
            raise
        self._watch = StepWatchdog(self.device, step_timeout_s, self._end_stuck)

    @property
    def all_reduce_plan(self) -> AllReducePlan:
        """How the ranks sum up."""
        return self._worker.all_reduce.plan

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._is_closing.is_set()

    @property
    def samples_on_device(self) -> bool:
        return self._worker.samples_on_device

    @property
    def chunk(self) -> ChunkShape:
        """As `ThinkerWorker.chunk`."""
        return self._worker.chunk

    @property
    def num_layer_groups(self) -> int:
        """As `ThinkerWorker.num_layer_groups`."""
        return self._worker.num_layer_groups

    @property
    def latency_model(self) -> StepLatencyModel | None:
        """As `ThinkerWorker.latency_model`."""
        return self._worker.latency_model

    def prefill(self, step: PrefillStep) -> Tensor:
        """As `ThinkerWorker.prefill`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.prefill)

    def decode(self, step: DecodeStep) -> Tensor:
        """As `ThinkerWorker.decode`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.decode)

    def launch_decode(self, step: DecodeStep) -> LaunchedTokens:
        """As `ThinkerWorker.launch_decode`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.launch_decode)

    def launch_prefill(self, step: PrefillStep) -> LaunchedTokens:
        """As `ThinkerWorker.launch_prefill`. Raises: WorkerError when a rank is gone."""
        return self._run(step, self._worker.launch_prefill)

    def close(self) -> None:
        """End the children: closed sockets tell them, what is left after a while is killed."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        is_whole = self._watch is not None and self._death is None
        if self._watch is not None:
            self._watch.close()
        for sock in self._sockets:
            sock.close()
        if is_whole:
            self._part()
        else:
            self._kill()
            process_group.shutdown(is_whole=False)
        for child in self._children:
            try:
                child.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        os.close(self._lifeline_write)
        os.close(self._lifeline_read)

    def _part(self) -> None:
        """Leave the group, and this process with it when that does not end: a step may still hang on the device."""

        def part() -> None:
            self._worker.close()
            process_group.shutdown()

        parting = threading.Thread(target=part, name="mingc-part", daemon=True)
        parting.start()
        parting.join(_PART_TIMEOUT_S)
        if parting.is_alive():
            error = RankError(f"the ranks did not part within {_PART_TIMEOUT_S:g} s", where="rank 0")
            log.error("%s", error.message)
            hard_exit(error, self)

    def _spawn(self, job: WorkerConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = {**encode(job), "steps": theirs.fileno()}
            child = subprocess.Popen(
                [sys.executable, "-m", "mingc.runtime.thinker.ranks.rank_process", json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(), job.lifeline),
            )
        ours.settimeout(_START_TIMEOUT_S)
        self._sockets.append(ours)
        self._children.append(child)
        # From now on: a rank that ends while it starts may leave this one in a collective, too.
        threading.Thread(
            target=self._wait_for_end, args=(job.rank, child), name=f"mingc-watch-{job.rank}", daemon=True
        ).start()

    def _await(self, word: bytes) -> None:
        for rank, (sock, child) in enumerate(zip(self._sockets, self._children, strict=True), start=1):
            try:
                said = sock.recv(1)
            except OSError as error:
                raise RankError(f"rank {rank} did not start: {error}", where=f"rank {rank}") from error
            if said != word:
                code = child.wait()
                raise RankError(f"rank {rank} ended with code {code} while starting", where=f"rank {rank}")

    def _run(self, step: _Step, run: Callable[[_Step], _Result]) -> _Result:
        if self._death is not None:
            raise self._death
        assert self._watch is not None, "all ranks run"
        try:
            with self._watch.step():
                self._send(step)
                return run(step)
        except Exception as error:
            # The ranks may now stand at different steps; no later one could be trusted.
            found = self._find_dead_child()
            raise self._die(
                found or RankError(f"a step of the thinker failed: {error}", where="rank 0", fix=_RESTART)
            ) from error

    def _send(self, step: Step) -> None:
        for rank, sock in enumerate(self._sockets, start=1):
            sock.settimeout(_SEND_TIMEOUT_S)
            try:
                send_step(sock, step)
            except OSError as error:
                raise WorkerError(
                    f"rank {rank} does not take steps: {error}", where=f"rank {rank}"
                ) from error

    def _wait_for_end(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        if not self._is_closing.is_set():
            self._die(_death_of(rank, code))

    def _end_stuck(self, problem: str) -> None:
        self._die(
            RankError(
                f"{problem}: a rank hangs",
                where=f"{len(self._children) + 1} ranks",
                fix=f"{_RESTART}; if a step may take so long, with a larger --step-timeout",
            )
        )

    def _find_dead_child(self) -> RankError | None:
        """Why a step failed, if it is because a child has just ended."""
        for rank, child in enumerate(self._children, start=1):
            try:
                return _death_of(rank, child.wait(_END_NOTICE_S))
            except subprocess.TimeoutExpired:
                continue
        return None

    def _die(self, death: RankError) -> RankError:
        """Serve no step any more. Only the first death counts, and is returned."""
        with self._lock:
            if self._death is not None:
                return self._death
            self._death = death
        log.error("%s", death.message)
        if self.device.type == "cuda":
            hard_exit(death, self)
        # The others may wait in a collective for a rank that is gone; without them it fails here as well.
        self._kill()
        self._on_death(death)
        return death

    def _kill(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()


def _death_of(rank: int, code: int) -> RankError:
    return RankError(f"rank {rank} of the thinker ended with code {code}", where=f"rank {rank}", fix=_RESTART)
