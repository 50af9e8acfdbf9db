"""Loads: requests in closed and open loops, sent by processes of their own.

Bodies are written before the first one is sent: a process that writes a clip would stamp other answers too late. Every
answer is handed to the parent when it is complete, so that an interrupted load keeps what was measured.
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import math
import multiprocessing
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import httpx
import msgspec

from mingc.bench.clients import Request, Target, Wishes, ask, build, client_of
from mingc.bench.items import Source
from mingc.bench.records import ClientState, Load, Run, Sample
from mingc.bench.server import Server
from mingc.errors import BenchError
from mingc.host.parent_watchdog import watch_pool_owner

_LAG_STEP_S = 0.01  # how often the event loop of a client is looked at
_START_S = 0.05  # from the word of the parent to the first request
_END_S = 3.0  # of all processes together
_CLIENTS_A_PROCESS = 8
_MAX_PROCESSES = 16
_encode, _decode_sample = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Sample).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one process sends of a load.

    Attributes:
        queues: of a closed loop: numbers of the items that each client sends one after the other.
        until: seconds after which clients send no more, but one request each; None: they send all.
        due: of an open loop: seconds after the beginning, and the number of the item.
        transcriber: writes what was spoken, after the load; None: the server itself.
    """

    path: str
    targets: tuple[Target, ...]
    source: Source
    wishes: Wishes
    queues: tuple[tuple[int, ...], ...] = ()
    until: float | None = None
    due: tuple[tuple[float, int], ...] = ()
    transcriber: Target | None = None


def poisson(rate: float, burst: int, duration_s: float, seed: str) -> list[float]:
    """Seconds of arrivals: bursts of `burst` requests, `rate` requests a second on average, at least one burst."""
    draw, times = random.Random(seed), list[float]()
    at = draw.expovariate(rate / burst)
    while at < duration_s or not times:
        times += [at] * burst
        at += draw.expovariate(rate / burst)
    return times


def default_processes(loads: Sequence[Load], cores: int) -> int:
    """One process for each eight requests at a time, and at least half of the cores for others."""
    most = max(each.concurrency if each.kind == "closed" else math.ceil(4 * each.rate) for each in loads)
    return max(1, min(-(-most // _CLIENTS_A_PROCESS), cores // 2, _MAX_PROCESSES))


class Clients:
    """Processes that send requests. They end with `close`, or when this process ends."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes, self._ends = list[Any](), list[Connection]()
        for number in range(num_processes):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(its,), name=f"bench-client-{number}", daemon=True)
            process.start()
            its.close()
            self._processes.append(process)
            self._ends.append(mine)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():  # waits for a server that does not answer
                process.kill()
                process.join()

    def run(
        self, job: Job, load: Load, repeat: int, first: int, count: int = 0, due: Sequence[float] = ()
    ) -> Run:
        """Send one load: `count` requests of its clients, or a request at each of `due`; items count from `first`.

        `job` has neither. KeyboardInterrupt ends it: the run has what was answered until then, and is not complete.
        Raises: BenchError when a client process ends by itself.
        """
        processes = len(self._ends)
        clients = range(min(load.concurrency, count))
        queues = [tuple(range(first + client, first + count, load.concurrency)) for client in clients]
        numbered = [(at, first + place) for place, at in enumerate(due)]
        for place, end in enumerate(self._ends):
            own = tuple(queues[place::processes]), tuple(numbered[place::processes])
            end.send(replace(job, queues=own[0], due=own[1]))
        samples, states, is_complete = list[Sample](), list[tuple[float, float]](), True
        written, transcripts = 0, dict[str, dict[str, str]]()
        began = datetime.datetime.now(datetime.UTC)
        start = time.perf_counter()
        try:
            while len(states) < processes:
                for ready in connection.wait(self._ends):
                    end = next(each for each in self._ends if each is ready)
                    kind, value = self._receive(end)
                    if kind == "sample":
                        samples.append(_decode_sample(value))
                    elif kind == "written":
                        written += 1
                        if written == processes:
                            began = datetime.datetime.now(datetime.UTC)
                            start = time.perf_counter() + _START_S
                            for each in self._ends:
                                each.send(start)
                    elif kind == "transcript":
                        transcripts.update([value])
                    elif kind == "done":
                        states.append(value)
                    else:
                        raise BenchError(
                            f"a client cannot write its requests: {value}", fix="check the data set"
                        )
        except KeyboardInterrupt:
            is_complete = False
        samples = [msgspec.structs.replace(each, **transcripts.get(each.item, {})) for each in samples]
        samples.sort(key=lambda each: each.scheduled)
        return Run(
            path=job.path,
            load=load,
            repeat=repeat,
            began=began.isoformat(timespec="milliseconds"),
            wall_s=max((each.ended for each in samples), default=time.perf_counter() - start),
            samples=tuple(samples),
            client=ClientState(
                num_processes=processes,
                busy=max((busy for busy, _ in states), default=0.0),
                lag_s=max((lag for _, lag in states), default=0.0),
                clock_s=time.get_clock_info("perf_counter").resolution,
            ),
            is_complete=is_complete,
        )

    def _receive(self, end: Connection) -> tuple[str, Any]:
        try:
            kind, value = end.recv()
        except (EOFError, OSError):
            raise BenchError(
                "a client process of the benchmark ended", fix="look at its output above, and for free memory"
            ) from None
        return kind, value


def _serve(end: Connection) -> None:
    """What a process of clients does: jobs of the parent, until it closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    watch_pool_owner()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        asyncio.run(_Process(end).serve())


class _Process:
    def __init__(self, end: Connection) -> None:
        self._end = end
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._spoken = dict[str, bytes]()

    async def serve(self) -> None:
        try:
            while True:
                await self._work(await asyncio.to_thread(self._end.recv))
        finally:
            for each in self._clients.values():
                await each.aclose()

    async def _work(self, job: Job) -> None:
        for target in job.targets:
            self._clients.setdefault(target.url, client_of(target))
        try:
            queues = [[self._build(job, number) for number in queue] for queue in job.queues]
            due = [(at, *self._build(job, number)) for at, number in job.due]
        except (ValueError, TypeError) as error:
            self._end.send(("failed", str(error)))
            return
        # A full collection would look like a late chunk.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._end.send(("written", None))
        began = await asyncio.to_thread(self._end.recv)
        lags = list[float]()
        watch = asyncio.create_task(_watch_lag(lags))
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(
            *(self._one_client(job, queue, began) for queue in queues),
            *(self._one_request(job, began + at, target, request, began) for at, target, request in due),
        )
        has_worked = any(queues) or bool(due)  # with fewer clients than processes, some have none
        busy = (time.process_time() - cpu) / (time.perf_counter() - wall) if has_worked else 0.0
        watch.cancel()
        gc.enable()
        gc.unfreeze()
        lags.sort()
        self._transcribe(job)
        self._end.send(("done", (min(busy, 1.0), lags[int(0.99 * len(lags))] if lags else 0.0)))

    def _build(self, job: Job, number: int) -> tuple[Target, Request]:
        target = job.targets[number % len(job.targets)]
        return target, build(job.source.item(job.path, number), job.path, target, job.wishes)

    async def _one_client(self, job: Job, queue: Sequence[tuple[Target, Request]], began: float) -> None:
        await asyncio.sleep(began - time.perf_counter())
        for place, (target, request) in enumerate(queue):
            if place and job.until is not None and time.perf_counter() - began >= job.until:
                break
            await self._ask(job, target, request, None, began)

    async def _one_request(
        self, job: Job, due: float, target: Target, request: Request, began: float
    ) -> None:
        await asyncio.sleep(due - time.perf_counter())
        await self._ask(job, target, request, due, began)

    async def _ask(self, job: Job, target: Target, request: Request, due: float | None, began: float) -> None:
        sample = await ask(self._clients[target.url], target, request, due, began, job.wishes, self._spoken)
        self._end.send(("sample", _encode(sample)))

    def _transcribe(self, job: Job) -> None:
        """Send the words of what was spoken and is judged."""
        by = job.transcriber or job.targets[0]
        if self._spoken:
            with Server(by.url, by.key, by.model) as server:
                for item, clip in self._spoken.items():
                    try:
                        found = {"text": server.transcribe(clip, "speech.wav")}
                    except BenchError as error:
                        found = {"error": f"the speech cannot be transcribed: {error.message}"}
                    self._end.send(("transcript", (item, found)))
        self._spoken.clear()


async def _watch_lag(lags: list[float]) -> None:
    """How late the event loop was, again and again: as late are the times of arrivals."""
    while True:
        due = time.perf_counter() + _LAG_STEP_S
        await asyncio.sleep(_LAG_STEP_S)
        lags.append(time.perf_counter() - due)
