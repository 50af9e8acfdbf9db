"""Rank group: all ranks of the thinker behind the interface of one worker.

Rank 0 runs in this process, the others in child processes (`rank_process`). The thinker's loop passes each step to
the group, which sends it to the children (`step_codec`), runs it on rank 0, and watches for ranks that die or hang.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mingc.artifacts.codec import encode
from mingc.errors import RankError
from mingc.python_module import module_command, module_environment
from mingc.runtime.distributed import process_group
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.logit_edits import NO_OPTIONS, SampleOptions
from mingc.runtime.thinker.ranks.hard_exit import hard_exit
from mingc.runtime.thinker.ranks.rank_process import LOADED, READY, WorkerConfig
from mingc.runtime.thinker.ranks.step_codec import broadcast_num_pages, broadcast_step
from mingc.runtime.thinker.ranks.watchdog import StepWatchdog
from mingc.runtime.thinker.step import DecodeStep, Ints, PrefillStep, SampleStep
from mingc.runtime.thinker.step_options import DEFAULT_STEPS, STEP_TIMEOUT_S, StepOptions
from mingc.runtime.thinker.worker import LaunchedTokens, ThinkerWorker

_RENDEZVOUS_TIMEOUT_S = 60.0
_SEND_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 600.0  # loading the released weights from a cold disk takes minutes
_SHUTDOWN_TIMEOUT_S = 10.0  # for leaving the process group
_CHILD_EXIT_TIMEOUT_S = 5.0
_CHILD_EXIT_NOTICE_S = 0.2  # this process sees the closed socket of a child before the end of the child

_RESTART = "restart the server"

_Step = TypeVar("_Step", PrefillStep, DecodeStep, SampleStep)
_Result = TypeVar("_Result")

log = logging.getLogger("mingc.ranks")


class RankGroup:
    """Starts and watches the rank processes; runs each step on every rank.

    Args:
        devices: one per rank; the first one belongs to this process.
        load: loads this process's stage while the rank processes load theirs.
        count_pages: KV pages of every rank; called when all ranks have loaded, so that it can measure the memory left.
        start: creates this process's worker from stage and pages, after the process group is initialized.
        on_failure: called once, on any thread, when a rank process has ended unexpectedly, or a step fails or hangs.
        step_timeout_s: a step that takes longer counts as hanging.
        options: the options with which `start` creates the worker.

    Attributes:
        worker: the worker of rank 0.

    On CUDA a failure also ends this process (`hard_exit`): a kernel that waits for a dead rank cannot be cancelled.
    """

    def __init__(
        self,
        artifact: Path,
        devices: list[torch.device],
        load: Callable[[], LoadedStage],
        count_pages: Callable[[], int],
        start: Callable[[LoadedStage, int], ThinkerWorker],
        *,
        on_failure: Callable[[RankError], None],
        step_timeout_s: float = STEP_TIMEOUT_S,
        options: StepOptions = DEFAULT_STEPS,
    ) -> None:
        self._on_failure = on_failure
        self._children: list[subprocess.Popen[str]] = []
        self._sockets: list[socket.socket] = []
        self._is_closing = threading.Event()
        self._watchdog: StepWatchdog | None = None  # None until all ranks are ready
        self._failure: RankError | None = None
        self._lock = threading.Lock()
        self._pipe_read, self._pipe_write = os.pipe()
        self.device = devices[0]
        self._store = process_group.host_store()
        timeout_s = max(_RENDEZVOUS_TIMEOUT_S, step_timeout_s)
        try:
            for rank in range(1, len(devices)):
                self._spawn(
                    WorkerConfig(
                        artifact=str(artifact),
                        rank=rank,
                        world_size=len(devices),
                        device=str(devices[rank]),
                        num_threads=max(1, torch.get_num_threads() // len(devices)),
                        port=self._store.port,
                        timeout_s=timeout_s,
                        step_socket=0,  # set by `_spawn`
                        parent_pipe=self._pipe_read,
                        options=options,
                    )
                )
            stage = load()
            self._wait_for(LOADED)
            num_pages = count_pages()
            broadcast_num_pages(self._sockets, num_pages, timeout_s=_START_TIMEOUT_S)
            process_group.init(
                rank=0,
                world_size=len(devices),
                port=self._store.port,
                device=str(devices[0]),
                timeout_s=timeout_s,
            )
            self.worker = start(stage, num_pages)
            self._wait_for(READY)
        except BaseException:
            self.close()
            raise
        self._watchdog = StepWatchdog(self.device, step_timeout_s, self._on_step_timeout)

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._is_closing.is_set()

    @property
    def samples_on_device(self) -> bool:
        return self.worker.samples_on_device

    def prefill(self, step: PrefillStep) -> Tensor:
        """As `ThinkerWorker.prefill`. Raises: WorkerError when a rank has failed."""
        return self._run(step, self.worker.prefill)

    def decode(self, step: DecodeStep) -> Tensor:
        """As `ThinkerWorker.decode`. Raises: WorkerError when a rank has failed."""
        return self._run(step, self.worker.decode)

    def launch_sampling(self, step: SampleStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        """As `ThinkerWorker.launch_sampling`, with the options of rank 0. Raises: WorkerError as the others do."""
        return self._run(step, partial(self.worker.launch_sampling, options=options))

    def launch_decode(self, step: DecodeStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        """As `ThinkerWorker.launch_decode`. Raises: WorkerError when a rank has failed."""
        return self._run(step, partial(self.worker.launch_decode, options=options))

    def launch_prefill(self, step: PrefillStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        """As `ThinkerWorker.launch_prefill`. Raises: WorkerError when a rank has failed."""
        return self._run(step, partial(self.worker.launch_prefill, options=options))

    def take_rows(self, tokens: Ints) -> AsyncHostCopy:
        """As `ThinkerWorker.take_rows`, of rank 0: after the last all-reduce all ranks have the same rows."""
        return self.worker.take_rows(tokens)

    def close(self) -> None:
        """End the rank processes by closing their sockets; kill those that remain after a timeout."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        is_whole = self._watchdog is not None and self._failure is None
        if self._watchdog is not None:
            self._watchdog.close()
        for sock in self._sockets:
            sock.close()
        if is_whole:
            self._leave_group()
        else:
            self._kill()
            process_group.shutdown(is_whole=False)
        for child in self._children:
            try:
                child.wait(_CHILD_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        os.close(self._pipe_write)
        os.close(self._pipe_read)

    def _leave_group(self) -> None:
        """Leave the process group; `hard_exit` if that hangs, because a step may be stuck on the device."""

        def leave() -> None:
            self.worker.close()
            process_group.shutdown()

        thread = threading.Thread(target=leave, name="mingc-leave-group", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_TIMEOUT_S)
        if thread.is_alive():
            error = RankError(
                f"leaving the process group took more than {_SHUTDOWN_TIMEOUT_S:g} s", where="rank 0"
            )
            log.error("%s", error.message)
            hard_exit(error, self)

    def _spawn(self, config: WorkerConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = {**encode(config), "step_socket": theirs.fileno()}
            child = subprocess.Popen(
                module_command("mingc.runtime.thinker.ranks.rank_process", json.dumps(arguments)),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
                pass_fds=(theirs.fileno(), config.parent_pipe),
                process_group=0,  # Ctrl-C would interrupt it while it imports, before it ignores signals
            )
        ours.settimeout(_START_TIMEOUT_S)
        self._sockets.append(ours)
        self._children.append(child)
        threading.Thread(
            target=_forward, args=(child,), name=f"mingc-output-{config.rank}", daemon=True
        ).start()
        # Watch from now on: a rank that dies during startup may leave this rank in a collective.
        threading.Thread(
            target=self._watch_child,
            args=(config.rank, child),
            name=f"mingc-watch-{config.rank}",
            daemon=True,
        ).start()

    def _wait_for(self, message: bytes) -> None:
        for rank, (sock, child) in enumerate(zip(self._sockets, self._children, strict=True), start=1):
            try:
                received = sock.recv(1)
            except OSError as error:
                raise RankError(f"rank {rank} did not start: {error}", where=f"rank {rank}") from error
            if received != message:
                code = child.wait()
                # `_failure` is set if this rank was killed because another one died.
                raise self._failure or RankError(
                    f"rank {rank} exited with code {code} during startup", where=f"rank {rank}"
                )

    def _run(self, step: _Step, run: Callable[[_Step], _Result]) -> _Result:
        if self._failure is not None:
            raise self._failure
        assert self._watchdog is not None, "all ranks are ready"
        try:
            with self._watchdog.step():
                broadcast_step(self._sockets, step, timeout_s=_SEND_TIMEOUT_S)
                return run(step)
        except Exception as error:
            # The ranks may be at different steps now, so no later step can be trusted.
            found = self._find_dead_child()
            raise self._fail(
                found or RankError(f"a step of the thinker failed: {error}", where="rank 0", fix=_RESTART)
            ) from error

    def _watch_child(self, rank: int, child: subprocess.Popen[str]) -> None:
        code = child.wait()
        if not self._is_closing.is_set():
            self._fail(_exit_error(rank, code))

    def _on_step_timeout(self, problem: str) -> None:
        self._fail(
            RankError(
                f"{problem}: a rank hangs",
                where=f"{len(self._children) + 1} ranks",
                fix=f"{_RESTART}; with a larger --step-timeout if steps may take that long",
            )
        )

    def _find_dead_child(self) -> RankError | None:
        """The error of a rank process that has just exited, which explains a failed step; None while all run."""
        for rank, child in enumerate(self._children, start=1):
            try:
                return _exit_error(rank, child.wait(_CHILD_EXIT_NOTICE_S))
            except subprocess.TimeoutExpired:
                continue
        return None

    def _fail(self, error: RankError) -> RankError:
        """Run no further step. Returns the first failure, which may be an earlier one."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            self._failure = error
        log.error("%s", error.message)
        if self.device.type == "cuda":
            hard_exit(error, self)
        # The others may wait in a collective for the dead rank. Once they are killed, rank 0's collective fails too.
        self._kill()
        self._on_failure(error)
        return error

    def _kill(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()


def _exit_error(rank: int, code: int) -> RankError:
    return RankError(
        f"rank {rank} of the thinker exited with code {code}", where=f"rank {rank}", fix=_RESTART
    )


def _forward(child: subprocess.Popen[str]) -> None:
    """Write what a rank prints to stderr of this process."""
    if child.stdout is not None:
        with child.stdout:
            for line in child.stdout:
                sys.stderr.write(line)
