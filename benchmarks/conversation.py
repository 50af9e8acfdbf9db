"""Conversations through HTTP: a server over a whole artifact, and clients on loopback that read, look, listen and play.

Workloads: text → text, image and text → text, spoken clip → text and speech, text → speech. Each of `--servers` server
processes, one after the other, is measured

- in a closed loop at several concurrencies: first token, first audio, time per output token (TPOT), underruns of the
  client's own playback, lengths of answers, and the stages of the first token and audio as the server saw them;
- in an open loop (Poisson arrivals, varied lengths): the highest rate with less than 1 % underruns and a p95 of the
  first audio of at most 300 ms, by bisection;
- with listeners alone: the most of the given numbers that are served at real time;
- with text streams alone and beside speakers: their TPOT.

Every request of a measurement has content of its own, and the measurement fails when the server answers a part of one
from a cache. Every answer of text has all its tokens (`ignore_eos`), so weights may be random. SIGTERM ends the
measurement: what was measured is written, with a note.

    python benchmarks/conversation.py --artifact /tmp/omni --json benchmarks/results/conversation-….json
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import httpx
from arguments import seconds, whole, wholes
from clients import Clients
from conversation_clients import (
    MAX_TURNS,
    SPOKEN,
    WORKLOADS,
    Answer,
    Sizes,
    closed_loop,
    open_loop,
    poisson,
    varied_open_loop,
)
from prometheus_client.parser import text_string_to_metric_families
from serving import server

from mingc.artifacts.artifact import open_artifact
from mingc.probe.stopwatch import percentile
from mingc.server.stages import stages_ms

Figures = list[dict[str, Any]]
Key = tuple[tuple[str, Any], ...]
PROSE_SERVER = Path(__file__).with_name("prose_server.py")
_PATCH_S = 0.32
_MAX_UNDERRUNS, _MAX_FIRST_AUDIO_MS = 0.01, 300.0
_LOAD_INDEXES = 10**7  # indexes of one load's requests: every load has requests that no other one sends
# Prompts share the beginning of the chat template, which is in the prefix cache after the first one.
_TEMPLATE_TOKENS = 64
_BUILD_S = 0.5  # for building the requests of an open loop before the first one is sent
# For writing a request in a process of clients of a closed loop: more than twice what it takes.
_WRITE_S = {"text": 0.002, "image": 0.02, "clip": 0.05, "speech": 0.002}


@dataclass(slots=True)
class Samples:
    """Samples by figure, of all servers, and the median of each server."""

    values: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    servers: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, unit: str, samples: Sequence[float | None], **keys: Any) -> None:
        """Add samples of a figure; None is left out."""
        found = [sample for sample in samples if sample is not None]
        if found:
            self.values[("name", name), *keys.items(), ("unit", unit)] += found

    def merge(self, other: Samples) -> None:
        """Add those of one server."""
        for key, values in other.values.items():
            self.values[key] += values
            self.servers[key].append(round(percentile(values, 0.5), 4))

    def figures(self) -> Figures:
        return [
            {**dict(key), **harness.summary(values), "p99": round(percentile(values, 0.99), 4)}
            | {"servers": self.servers[key]}
            for key, values in self.values.items()
        ]


def add_answers(samples: Samples, answers: Sequence[Answer], **keys: Any) -> None:
    """Figures of answers of one workload under one load."""
    samples.add("ttft_ms", "ms", [each.first_token_ms for each in answers], **keys)
    samples.add("first_audio_ms", "ms", [each.first_audio_ms for each in answers], **keys)
    samples.add("tpot_ms", "ms", [each.tpot_ms for each in answers], **keys)
    chats = [each.text for each in answers if each.text is not None]
    samples.add("answer_tokens", "tokens", [len(each.arrivals) for each in chats], **keys)
    spoken = [each for each in answers if each.speech is not None]
    samples.add("answer_audio_s", "s", [each.audio_s for each in spoken], **keys)
    samples.add("underruns", "chunks of an answer", [each.num_underruns for each in spoken], **keys)
    for each in chats:
        for stage, passed in stages_ms(each.timings_ms):
            samples.add("stage_ms", "ms", [passed], **keys, stage=stage)


def underrun_share(answers: Sequence[Answer]) -> float:
    """Share of the chunks that came after the sound before them had been played."""
    chunks = sum(each.num_chunks for each in answers)
    return sum(each.num_underruns for each in answers) / chunks if chunks else 0.0


def is_sustained(answers: Sequence[Answer | None]) -> bool:
    """Whether no request was refused, fewer than 1 % of the chunks came late, and p95 of the first audio is in time."""
    complete = [each for each in answers if each is not None]
    first_audio = [each.first_audio_ms for each in complete if each.first_audio_ms is not None]
    if len(complete) < len(answers) or not first_audio:
        return False
    return underrun_share(complete) < _MAX_UNDERRUNS and percentile(first_audio, 0.95) <= _MAX_FIRST_AUDIO_MS


def capacity(is_in_time: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The highest rate that was tried and is in time, by `steps` bisections between `low` and `high`; 0: none is.

    `high` itself is tried after `low`: a server that sustains it is not measured to its limit.
    """
    if not is_in_time(low):
        return 0.0
    if is_in_time(high):
        return high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_in_time(middle) else (low, middle)
    return low


class _Ended(Exception):
    """The process was asked to end."""


class Measurement:
    """Measures one server after the other, until `--limit` seconds have passed."""

    def __init__(self, clients: Clients, given: argparse.Namespace) -> None:
        self._clients = clients
        self._given = given
        self._end = time.perf_counter() + given.limit
        self._sizes = Sizes(
            given.words,
            given.tokens,
            given.patches,
            image_pixels=given.image_pixels,
            clip_s=given.clip_seconds,
            segment_patches=given.segment_patches,
            sampling=given.sampling,
        )
        self._num_loads = 0
        self.notes: list[str] = []

    def run(self, url: str, samples: Samples) -> None:
        """All loads on one server; their figures are added to `samples` one after another."""
        loads = [*self._closed_loops(), self._open_loop, self._listeners, self._beside]
        for load in loads:
            if time.perf_counter() > self._end:
                self.notes.append(f"--limit {self._given.limit:g}: a server was not measured to the end")
                break
            load(url, samples)

    def _load(
        self,
        run: Callable[..., list[Any]],
        url: str,
        concurrency: int,
        workloads: Sequence[str],
        *when: Any,
        sizes: Sizes | None = None,
    ) -> list[Any]:
        """Answers of one load, none of whose requests was sent before. `when`: rounds, or times, and an end."""
        self._num_loads += 1
        before = encoder_hits(httpx.get(f"{url}/metrics").text)
        arguments = (workloads, when[0], sizes or self._sizes, self._num_loads * _LOAD_INDEXES, *when[1:])
        answers = self._clients.load(run, url, concurrency, *arguments)
        check_cold(answers, encoder_hits(httpx.get(f"{url}/metrics").text) - before)
        return answers

    def _closed(
        self, url: str, concurrency: int, workloads: Sequence[str], rounds: int, until: float | None = None
    ) -> list[Answer]:
        """Answers of a closed loop. Its clients begin together, when all have written their requests."""
        most = -(-concurrency // self._given.client_processes) * (rounds if until is None else 1)
        begin = time.perf_counter() + _BUILD_S + most * max(_WRITE_S[each] for each in workloads)
        return self._load(closed_loop, url, concurrency, workloads, rounds, begin, until)

    def _closed_loops(self) -> list[Callable[[str, Samples], None]]:
        def load(workload: str, concurrency: int) -> Callable[[str, Samples], None]:
            def run(url: str, samples: Samples) -> None:
                self._closed(url, concurrency, (workload,), 1)  # warms up
                rounds = self._given.single_rounds if concurrency == 1 else self._given.rounds
                keys = {"load": "closed", "workload": workload, "concurrency": concurrency}
                answers = self._closed(url, concurrency, (workload,), rounds)
                add_answers(samples, answers, **keys)

            return run

        return [
            load(workload, concurrency)
            for workload in self._given.workloads
            for concurrency in self._given.concurrency
        ]

    def _open_loop(self, url: str, samples: Samples) -> None:
        spoken = [each for each in self._given.workloads if each in SPOKEN]
        if not spoken or not self._given.bisections:
            return

        def is_in_time(rate: float) -> bool:
            least = len(self._given.workloads)
            offsets = poisson(rate, self._given.window, seed=round(1e3 * rate), least=least)
            begin = time.perf_counter() + _BUILD_S
            due = [begin + offset for offset in offsets]
            found = self._load(varied_open_loop, url, len(due), self._given.workloads, due)
            answers = [each for each in found if each is not None]
            keys = {"load": "open", "requests_per_s": round(rate, 3)}
            add_answers(samples, answers, **keys)
            samples.add("underrun_share", "of all chunks", [underrun_share(answers)], **keys)
            samples.add("failed_requests", f"of {len(due)}", [len(due) - len(answers)], **keys)
            return is_sustained([each for each in found if each is None or each.speech is not None])

        low, high = self._given.rates
        found = capacity(is_in_time, float(low), float(high), self._given.bisections)
        if found == high:
            self.notes.append(
                f"--rates {low},{high}: the highest one was sustained, so the capacity is above it"
            )
        samples.add("capacity", "requests/s", [found], load="open", workloads=",".join(self._given.workloads))

    def _listeners(self, url: str, samples: Samples) -> None:
        if "speech" not in self._given.workloads:
            return
        most = 0
        for count in self._given.listeners:
            # All start within the time of a few patches, not in the same instant.
            begin = time.perf_counter() + _BUILD_S
            due = [begin + index * self._given.stagger / count for index in range(count)]
            long = replace(self._sizes, patches=math.ceil(self._given.listener_seconds / _PATCH_S))
            found = self._load(open_loop, url, count, ("speech",), due, sizes=long)
            answers = [each for each in found if each is not None]
            keys = {"load": "listeners", "listeners": count}
            add_answers(samples, answers, **keys)
            samples.add("underrun_share", "of all chunks", [underrun_share(answers)], **keys)
            samples.add("failed_requests", f"of {count}", [count - len(answers)], **keys)
            if len(answers) < count or underrun_share(answers) >= _MAX_UNDERRUNS:
                break
            most = count
        samples.add("listeners", "at real time", [most], load="listeners")

    def _beside(self, url: str, samples: Samples) -> None:
        streams, speakers = self._given.streams, self._given.speakers
        if not {"text", "speech"} <= {*self._given.workloads} or not (streams and speakers):
            return
        for count in (0, speakers):
            until = time.perf_counter() + 2 * _BUILD_S + self._given.window
            keys = {"load": "beside", "streams": streams, "speakers": count}
            workloads = ("text",) * streams + ("speech",) * count
            found = self._closed(url, len(workloads), workloads, MAX_TURNS, until)
            answers = [each for each in found if each.text is not None]
            spoken = [each for each in found if each.text is None]
            texts = [each.text for each in answers if each.text is not None]
            gaps = [1e3 * (end - begin) for each in texts for begin, end in each.gaps()]
            samples.add("inter_token_ms", "ms", gaps, **keys)
            add_answers(samples, answers, **keys, workload="text")
            if spoken:
                add_answers(samples, spoken, **keys, workload="speech")
                samples.add("underrun_share", "of all chunks", [underrun_share(spoken)], **keys)


def encoder_hits(metrics: str) -> float:
    """Media that the server did not encode again, of a scrape of `/metrics`."""
    samples = (each for family in text_string_to_metric_families(metrics) for each in family.samples)
    return sum(each.value for each in samples if each.name == "mingc_encoder_cache_hits_total")


def check_cold(answers: Sequence[Answer | None], hits: float) -> None:
    """Raises: SystemExit when a request was answered from the prefix cache, or `hits` media from the encoder cache."""
    cached = max((each.text.cached_tokens for each in answers if each and each.text), default=0)
    if hits or cached > _TEMPLATE_TOKENS:
        raise SystemExit(
            f"requests were repeated: {cached} tokens of a prompt and {hits:g} media came from a cache"
        )


def beside_ratios(samples: Samples) -> Figures:
    """How much longer the time between tokens is beside speakers than without, of all servers."""
    found = {
        dict(key)["speakers"]: values
        for key, values in samples.values.items()
        if dict(key)["name"] == "inter_token_ms"
    }
    if len(found) < 2:
        return []
    alone, beside = (found[count] for count in sorted(found))
    return [
        {
            "name": "inter_token_ratio",
            "share": share,
            "median": round(ratio, 4),
            "unit": "with / without speakers",
        }
        for share in (0.5, 0.99)
        for ratio in [percentile(beside, share) / percentile(alone, share)]
    ]


def workload_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(WORKLOADS)}")
    return names


def sampling_fields(text: str) -> dict[str, float]:
    """Fields of a chat's body as a JSON object of numbers."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or not all(isinstance(value, int | float) for value in fields.values()):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a JSON object of numbers, such as {{"temperature": 1}}'
        )
    return fields


def rate_pair(text: str) -> tuple[float, float]:
    """The lowest and the highest rate of the open loop."""
    low, _, high = text.partition(",")
    pair = seconds(low), seconds(high)
    if pair[0] >= pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH")
    return pair


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument(
        "--answers",
        choices=("random", "prose"),
        default="random",
        help="texts of the answers: of the random tokens, or of fixed answers in two languages (prose_server.py)",
    )
    parser.add_argument(
        "--servers", type=whole(1, 16), default=3, help="server processes, one after the other"
    )
    parser.add_argument("--workloads", type=workload_names, default=",".join(WORKLOADS))
    parser.add_argument("--concurrency", type=wholes(1, 256), default="1,2,4,8,16,32")
    parser.add_argument("--single-rounds", type=whole(1), default=50, help="requests at concurrency 1")
    parser.add_argument("--rounds", type=whole(1), default=3, help="requests of each client at others")
    parser.add_argument("--words", type=whole(1), default=40, help="words of a prompt")
    parser.add_argument("--tokens", type=whole(2), default=152, help="tokens of each answer of text")
    parser.add_argument(
        "--sampling", type=sampling_fields, default={}, help="of chats, as JSON; default: greedy"
    )
    parser.add_argument("--patches", type=whole(1), default=30, help="most patches of a speech request")
    parser.add_argument(
        "--segment-patches", type=whole(1), default=10, help="most patches of each segment of a spoken answer"
    )
    parser.add_argument("--image-pixels", type=whole(32, 8192), default=512, help="512: 1,024 patches of 16")
    parser.add_argument("--clip-seconds", type=seconds, default=10.0)
    parser.add_argument(
        "--rates", type=rate_pair, default="0.5,32", help="of the open loop, requests a second"
    )
    parser.add_argument("--bisections", type=whole(0, 12), default=5, help="between them; 0: no open loop")
    parser.add_argument("--window", type=seconds, default=20.0, help="seconds of arrivals, and of streams")
    parser.add_argument("--listeners", type=wholes(1, 1024), default="64,128,256,400,600,800")
    parser.add_argument(
        "--listener-seconds", type=seconds, default=60.0, help="of speech that each listener hears"
    )
    parser.add_argument(
        "--stagger", type=seconds, default=2.0, help="seconds within which all listeners start"
    )
    parser.add_argument(
        "--streams", type=whole(0, 256), default=16, help="text streams beside speakers; 0: none"
    )
    parser.add_argument("--speakers", type=whole(0, 256), default=16)
    parser.add_argument("--limit", type=seconds, default=7200.0, help="seconds after which no load is begun")
    parser.add_argument("--client-processes", type=whole(1, 64), default=4)
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    return parser


def _end(*_: object) -> None:
    raise _Ended


def main() -> None:
    given = harness.parse_args(make_parser())
    clients, total = Clients(given.client_processes), Samples()
    measurement = Measurement(clients, given)
    states: list[dict[str, str]] = []
    health: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        try:
            words = shlex.split(given.serve)
            programs = [[str(PROSE_SERVER)]] if given.answers == "prose" else []
            for _ in range(given.servers):
                caches = Path(scratch) / "caches"
                with server(given.artifact, caches, log, words, *programs) as (url, phases, _):
                    health = httpx.get(f"{url}/health").json()
                    samples = Samples()
                    for phase, passed in phases.items():
                        samples.add("cold_start_s", "s", [passed], phase=phase)
                    try:
                        measurement.run(url, samples)
                    finally:
                        total.merge(samples)
                        states.append(harness.device_state())
        except _Ended:
            measurement.notes.append("SIGTERM: the measurement was ended before it was complete")
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            clients.close()
            if log.exists():
                print(log.read_text()[-2000:], file=sys.stderr)
    figures = [*total.figures(), *beside_ratios(total)]
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    for note in measurement.notes:
        print(f"NOT AS ASKED: {note}", file=sys.stderr)
    if given.json:
        more = {"health": health, "notes": measurement.notes, "device_states": states}
        value = harness.result("conversation", harness.peak_rates(), figures, **more)
        value["hardware"]["count"] = open_artifact(given.artifact).manifest.fingerprint.world_size
        harness.write(given.json, value)


if __name__ == "__main__":
    main()
