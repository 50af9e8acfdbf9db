#!/usr/bin/env python
"""CPU time of the talker's thread for each patch of a listener, and late chunks, over a device that only waits.

Loop, scheduler, pacing and worker are the server's; the engines take the times of one H200 and return noise. The clock
is the CPU time of this thread plus the time that it would have waited, so other work on the machine delays nothing.
What the event loop does with a patch (`--reader-us`) is on the same clock, as Python's lock would have it, but only the
talker's steps count as its time. Every listener hears `--seconds` of speech in segments of `--segment` patches; they
begin within `--stagger` seconds.

    python benchmarks/talker_host.py --listeners 64,450
    python benchmarks/talker_host.py --compare ../other-checkout --rounds 3
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import arguments
import numpy as np
import torch
from torch import Tensor

from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.request import AudioDelta
from mingc.runtime.request_stream import EventQueue, Item, RequestStream
from mingc.runtime.talker import loop as loop_module
from mingc.runtime.talker import worker as worker_module
from mingc.runtime.talker.engines import TalkerEngines
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker

RATE, PATCH_SAMPLES, TAIL = 44_100, 14_112, 1_764
HIDDEN, LATENTS, LATENT_DIM, HISTORY = 896, 4, 64, 32
FLOW = CfmParameters(
    num_steps=10, latents_per_patch=LATENTS, history_latents=HISTORY, latent_dim=LATENT_DIM, speaker_dim=192,
    guidance=2.0, sigma=0.25, temperature=0.0,
)  # fmt: skip
PROMPT, PREFIX = 90, 50  # tokens
# One H200 (benchmarks/NOTES.md): ms of a patch by batch size, of a call that prefills prompts, and of each prompt.
PATCH_MS = {1: 2.4, 2: 4.6, 4: 5.2, 8: 6.1, 16: 8.1, 32: 13.2, 64: 24.5}
CALL_MS, PROMPT_MS = 0.4, 0.6
MAX_PENDING = 128  # unread patches, as in a server


class Clock:
    """CPU time of this thread, and what it has waited."""

    def __init__(self) -> None:
        self.waited = 0.0

    def __call__(self) -> float:
        return self.waited + time.thread_time()

    def wait_until(self, at: float) -> None:
        self.waited += max(0.0, at - self())


class Patch:
    """A patch on the device; `wait` returns silence."""

    def __init__(self, clock: Clock, end: float, outputs: tuple[np.ndarray, ...]) -> None:
        self._clock, self._end, self._outputs = clock, end, outputs

    @property
    def is_ready(self) -> bool:
        return self._clock() >= self._end

    def wait(self) -> tuple[np.ndarray, ...]:
        self._clock.wait_until(self._end)
        return self._outputs


class Engines(TalkerEngines):
    """Stands in for `TalkerEngines`."""

    chunk_sizes = (32, 64, 128, 256, 512, 1024, 2048)
    max_prompts = 16
    embed_dtype = torch.float32

    def __init__(self, clock: Clock, max_batch: int) -> None:
        self._clock, self._free_at, self._flow = clock, 0.0, FLOW
        self._hidden, self._history = torch.zeros(1, HIDDEN), torch.zeros(1, HISTORY, LATENT_DIM)
        self.batch_sizes = [size for size in PATCH_MS if size <= max_batch]
        generator = np.random.default_rng(0)
        self._outputs = {
            size: (
                generator.uniform(-1, 1, (size, PATCH_SAMPLES + TAIL)).astype(np.float32),
                *np.zeros((2, size), np.float32),
                np.zeros((size, LATENTS, LATENT_DIM), np.float32),
            )
            for size in self.batch_sizes
        }

    def launch(self, size: int, inputs: Mapping[str, Tensor]) -> Patch:
        return Patch(self._clock, self._occupy(PATCH_MS[size]), self._outputs[size])

    def run_prompts(self, size: int, inputs: Mapping[str, Tensor]) -> None:
        self._occupy(CALL_MS + PROMPT_MS * int((inputs["slots"] > 0).sum()))

    def read_rows(self, slot: int, count: int) -> Tensor:
        return torch.zeros(1)

    def write_rows(self, slot: int, rows: Tensor) -> None:
        pass

    def _occupy(self, ms: float) -> float:
        self._free_at = max(self._free_at, self._clock()) + ms / 1e3
        return self._free_at


class EventLoop:
    """Stands in for asyncio's: runs what the talker hands over when the talker's step has ended."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


class Wake:
    """Stands in for the condition on which a held launch waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def notify(self) -> None:
        pass

    def wait(self, timeout: float) -> bool:
        self._clock.wait_until(self._clock() + timeout)
        return False


class Listener:
    """A client that reads everything; counts chunks that arrive after playback has run out of sound."""

    def __init__(self, number: int, at: float, loop: TalkerLoop, queue: EventQueue, options: Any) -> None:
        self._loop, self._at, self.num_late, self._num_samples = loop, at, 0, 0
        self._started_at: float | None = None
        self.first_s = 0.0
        self.items = RequestStream(queue)
        self.left = math.ceil(options.seconds * RATE / PATCH_SAMPLES)
        self.stream = loop.open(self.items.put, lambda: self.items.is_behind(MAX_PENDING), is_live=True)
        generator = np.random.default_rng(number)
        for index in range(-(-self.left // options.segment)):
            ids = generator.integers(0, 500, PROMPT)
            ids[:PREFIX] = 7
            loop.add(
                self.stream,
                SpeechSegment(
                    input_ids=ids,
                    embed_rows=np.array([3]),
                    embeds=np.zeros((1, HIDDEN), np.float32),
                    num_prefix=PREFIX,
                    history=np.zeros((HISTORY, LATENT_DIM), np.float32),
                    noise=PhiloxNoise(number),
                    index=index,
                    max_patches=min(options.segment, self.left - index * options.segment),
                    guidance=2.0,
                    sigma=0.25,
                    temperature=options.temperature,
                ),
            )

    def hear(self, item: Item, now: float) -> None:
        assert isinstance(item, AudioDelta), item
        if self._started_at is None:
            self._started_at, self.first_s = now, now - self._at
            self._loop.begin_playback(self.stream)
        elif now > self._started_at + self._num_samples / RATE:
            self.num_late += 1
        self._num_samples += len(item.samples)
        self.left -= 1


def make_loop(clock: Clock, options: Any) -> TalkerLoop:
    worker_module.TalkerEngines = lambda *_, **__: Engines(clock, options.max_batch)  # type: ignore[assignment,misc]
    for module in (worker_module, loop_module):
        module.time = type("time", (), {"perf_counter": clock})  # type: ignore[assignment]
    worker = TalkerWorker(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        parameters=TalkerParameters(
            hidden_size=HIDDEN, num_layers=24, vocab_size=152_000, slot_tokens=2048, min_stop_step=3, max_steps=1000,
            stop_threshold=0.5, default_voice=None, max_segment_length=50, chunk_alignment=16, cap_min_seconds=1.0,
            cap_seconds_per_character=1.0,
        ),
        flow=FLOW,
        vae=VaeParameters(
            sample_rate=RATE, hop_samples=882, frames_per_latent=4, latent_dim=LATENT_DIM, samples_per_latent=3528,
            lookahead_frames=1, tail_samples=TAIL,
        ),
        num_slots=options.slots + 1,
        device=torch.device("cpu"),
        depth=2,
    )  # fmt: skip
    scheduler = TalkerScheduler(
        SlotPool(options.slots + 1),
        max_batch=options.max_batch,
        max_prefills_per_patch=options.prefills,
        max_streams=10_000,
    )
    loop = TalkerLoop(worker, scheduler, speech_lead=options.lead, clock=clock)
    loop._wake = Wake(clock)  # type: ignore[assignment]
    return loop


def measure(count: int, options: Any) -> dict[str, float]:
    """Speak to `count` listeners. Returns figures."""
    clock, event_loop, handled = Clock(), EventLoop(), 0
    loop = make_loop(clock, options)
    queue = EventQueue(event_loop)  # type: ignore[arg-type]
    begin = clock()
    arrivals = [begin + options.stagger * number / count for number in range(count)]
    listeners: list[Listener] = []
    talker_s, speaking, num_steps = 0.0, list[Listener](), 0
    while len(listeners) < count or speaking:
        while len(listeners) < count and arrivals[len(listeners)] <= clock():
            listeners.append(Listener(len(listeners), arrivals[len(listeners)], loop, queue, options))
            speaking.append(listeners[-1])
        before = time.thread_time()
        while loop._inbox:
            loop._inbox.popleft()()
        is_busy = loop._step()
        talker_s += time.thread_time() - before
        num_steps += 1
        calls, event_loop.calls = event_loop.calls, []
        for call in calls:
            call()
        for listener in speaking if calls else ():
            while listener.items._items:
                try:
                    listener.items.get().send(None)
                except StopIteration as taken:
                    listener.hear(taken.value, clock())
                handled += 1
                clock.waited += options.reader_us / 1e6
        if calls:
            for listener in [each for each in speaking if not each.left]:
                loop.cancel(listener.stream)
                speaking.remove(listener)
        if not is_busy:
            coming = arrivals[len(listeners)] if len(listeners) < count else math.inf
            assert min(loop.due_at, coming) < math.inf or not speaking, "nothing will ever be due"
            if speaking or coming < math.inf:
                clock.wait_until(min(loop.due_at, coming))
    first = sorted(1e3 * listener.first_s for listener in listeners)
    late = [listener.num_late for listener in listeners]
    return {
        "listeners": count,
        "talker_us_per_patch": 1e6 * talker_s / handled,
        "steps": num_steps,
        "first_audio_ms": statistics.median(first),
        "first_audio_p95_ms": first[bisect_left(range(count), 0.95 * count)],
        "late_percent": 100 * sum(late) / handled,
        "listeners_with_late": sum(map(bool, late)),
        "seconds": clock() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--listeners", type=arguments.wholes(1), default=(450,))
    parser.add_argument("--seconds", type=arguments.seconds, default=20.0)
    parser.add_argument("--stagger", type=arguments.seconds, default=2.0)
    parser.add_argument("--segment", type=arguments.whole(1), default=20)
    parser.add_argument("--max-batch", type=arguments.whole(1, 64), default=32)
    parser.add_argument("--slots", type=arguments.whole(1), default=1000)
    parser.add_argument("--prefills", type=arguments.whole(1), default=16)
    parser.add_argument("--lead", type=arguments.whole(0), default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--reader-us", type=float, default=30.0)
    parser.add_argument("--compare", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=arguments.whole(1), default=1)
    options = parser.parse_args()
    if options.compare is None:
        for count in options.listeners:
            print(json.dumps(measure(count, options)), flush=True)
        return
    words = [word for word in sys.argv[1:] if word != str(options.compare)]
    words.remove("--compare")
    for _ in range(options.rounds):
        for root in (options.compare, Path(__file__).resolve().parent.parent):
            done = subprocess.run(
                [sys.executable, root / "benchmarks/talker_host.py", *words],
                env={**os.environ, "PYTHONPATH": str(root)},
                check=True,
                capture_output=True,
                text=True,
            )
            for line in done.stdout.splitlines():
                print(root.name, line, flush=True)


if __name__ == "__main__":
    main()
