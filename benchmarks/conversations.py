"""Conversations, speech, long prompts, realtime sessions and crowds of listeners through HTTP, on one server.

Starts `prose_server.py` on an artifact of random weights, sends requests with the clients of `mingc bench`, and writes
the result anew after each case. The clients of a case begin together. No request is sent twice; words of prompts are
tokens from the whole vocabulary of the random checkpoint's tokenizer. The server has places for a crowd. Speech of the
cases `… unpaced` has `speech_lead` 0, other speech the server's default.

    python benchmarks/conversations.py ARTIFACT --json benchmarks/results/conversations-….json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from arguments import seconds, whole, wholes
from served import PROSE_SERVER, serve

from mingc.bench.clients import Target, Wishes, alternatives, merged
from mingc.bench.figures import STREAMED_SPEECH, measures, playback
from mingc.bench.items import Listed, Synthetic
from mingc.bench.load import Clients, Job
from mingc.bench.records import Item, Load, Run
from mingc.bench.traps import find_traps
from mingc.errors import BenchError
from mingc.export.assets.byte_tokenizer import word

Row = dict[str, Any]
Items = list[Item]
_IDS = range(1_000, 150_000)
_RATE, _PATCH_S = 44_100, 0.32
_CROWD = "--max-speech-seqs 1000 --max-concurrent-requests 1600 --max-connections 1800"
_UNPACED = {"speech_lead": 0}
_TURN_S, _SENTENCE_S = 3.0, 15.0  # of a turn of a session, of a listener's sentence
_SPREAD_S = 6.0  # within which the listeners of a crowd come
_TOO_LATE = 20  # late patches after which a crowd is too large
_STREAMS, _STREAM_TOKENS = 16, 400
_BEFORE_S = 3.0  # for which they stream before others come
_LATE_PATCHES = "mingc_speech_underruns_total"
_COUNTERS = (_LATE_PATCHES, "mingc_prefix_cache_hit_tokens_total", "mingc_encoder_cache_hits_total")
_NO_OVERLAP = "--no-two-batch-overlap"
_CASES = (
    "spoken, unpaced",
    "text",
    "image",
    "speech, unpaced",
    "long prompt",
    "speech",
    "spoken",
    "listeners",
    "speakers beside streams",
    "realtime",
    "listeners beside streams",
)


class Writer:
    """Writes items that were not written before."""

    def __init__(self, words: int, clip_s: float, listener_s: float) -> None:
        seed = random.SystemRandom().getrandbits(32)
        self._words, self._draw = words, random.Random(seed)
        self._made = Synthetic(seed, 1, 512, clip_s)
        self._turns = Synthetic(seed, 1, 512, _TURN_S)
        self.sentences = max(1, round(listener_s / _SENTENCE_S))
        self._next = 0

    def write(self, path: str, count: int) -> Items:
        return [self._item(path) for _ in range(count)]

    def prompts(self, words: int, count: int) -> Items:
        return [self._chat("text", {"type": "text", "text": self._text(words)}) for _ in range(count)]

    def listeners(self, count: int) -> Items:
        """English texts of sentences that are a segment each."""
        texts = [
            " ".join(self._take("speech-stream").text for _ in range(self.sentences)) for _ in range(count)
        ]
        return [
            Item(id=f"listener-{self._next}-{place}", path="speech-stream", text=text)
            for place, text in enumerate(texts)
        ]

    def _item(self, path: str) -> Item:
        text = {"type": "text", "text": self._text(self._words)}
        if path == "text":
            return self._chat(path, text)
        if path == "spoken":
            return self._chat(path, self._take("clip").messages[0]["content"][0])
        made = self._take(path)
        return self._chat(path, made.messages[0]["content"][0], text) if path == "image" else made

    def _chat(self, path: str, *content: Mapping[str, Any]) -> Item:
        self._next += 1
        return Item(id=f"{path}-{self._next}", path=path, messages=({"role": "user", "content": [*content]},))

    def _take(self, path: str) -> Item:
        self._next += 2  # even numbers are English
        return (self._turns if path == "realtime" else self._made).item(path, self._next)

    def _text(self, words: int) -> str:
        return "".join(f" {word(number)}" for number in self._draw.choices(_IDS, k=words))


class Measurement:
    """Sends cases to the server at `url`; `rows` has what they saw."""

    def __init__(
        self,
        url: str,
        clients: Clients,
        given: argparse.Namespace,
        keep: Callable[[list[Row]], None],
        end: float,
    ) -> None:
        self.rows: list[Row] = []
        self._url, self._given, self._keep = url, given, keep
        self._end = end
        self._writer = Writer(given.words, given.clip, given.listener_seconds)
        self._model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        self._clients = clients

    def close(self) -> None:
        self._clients.close()

    def run(self) -> None:
        """The cases that are wanted, those first that take little time."""
        given, most = self._given, 0
        unpaced: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("spoken, unpaced", "spoken", {"audio": {"max_steps": given.segment_patches, **_UNPACED}}),
            ("text", "text", {}),
            ("image", "image", {}),
            ("speech, unpaced", "speech-stream", {"max_steps": given.speech_patches, **_UNPACED}),
        )
        for (name, path, fields), count in itertools.product(unpaced, given.concurrency):
            with self._case(name):
                self._closed(name, path, count, fields)
        with self._case("long prompt"):
            prompts = self._writer.prompts(given.long, 1 + given.long_rounds)
            self._closed("long prompt", "text", 1, items=prompts)
        self._paced([count for count in given.concurrency if count > 1])
        with self._case("listeners"):
            most = self._crowds("listeners", given.listeners)
        self._paced([count for count in given.concurrency if count == 1])
        with self._case("speakers beside streams"):
            self._speakers()
        for count in given.sessions:
            with self._case("realtime"):
                self._closed("realtime", "realtime", count, {"max_output_tokens": 8}, 1 + (count == 1))
        with self._case("listeners beside streams"):
            beside = [each for each in given.beside if not most or each <= most]
            self._crowds("listeners beside streams", beside)

    def _paced(self, counts: Sequence[int]) -> None:
        """Speech that takes as long as it sounds."""
        steps = {"max_steps": self._given.paced_patches}
        for count in counts:
            with self._case("speech"):
                self._closed("speech", "speech-stream", count, steps, 3 if count == 1 else 1)
        for count in counts:
            with self._case("spoken"):
                self._closed("spoken", "spoken", count, {"audio": steps}, 3 if count == 1 else 1)

    @contextmanager
    def _case(self, name: str) -> Iterator[None]:
        """Notes when clients of a case failed as a whole, and goes on with the next one."""
        try:
            yield
        except (BenchError, httpx.HTTPError) as error:
            self._note({"case": name, "error": repr(error)})

    def _closed(
        self,
        name: str,
        path: str,
        count: int,
        fields: Mapping[str, Any] | None = None,
        paced_rounds: int = 0,
        items: Items | None = None,
    ) -> None:
        """Clients that send one request after the other. A round that does not count goes before, but takes too long
        where speech is paced.
        """
        if self._skips(name):
            return
        given, warm = self._given, 0 if paced_rounds else count
        rounds = given.single_rounds if count == 1 else given.rounds
        items = items or self._writer.write(path, warm + count * (paced_rounds or rounds))
        job, load = self._job(path, items, fields or {}), Load(kind="closed", concurrency=count)
        if warm:
            self._clients.run(job, load, 0, 0, warm)
        before = self._counters()
        run = self._clients.run(job, load, 0, warm, len(items) - warm)
        self._add(name, self._counted(run, before))

    def _crowds(self, name: str, counts: Sequence[int]) -> int:
        """Crowds until one hears no late chunk. Returns how many it had; 0: none."""
        crowd_s = _SPREAD_S + self._given.listener_seconds + 2.0
        for count in counts:
            if self._skips(name, least_s=crowd_s):
                break
            with self._streams(name, crowd_s) if "streams" in name else nullcontext(_nothing) as end:
                if self._crowd(name, count):
                    return count
                end()
        return 0

    def _crowd(self, name: str, count: int) -> bool:
        """Listeners who come one after the other. Returns whether all heard all of it in time."""
        patches = round(self._given.listener_seconds / self._writer.sentences / _PATCH_S)
        job = self._job("speech-stream", self._writer.listeners(count), {"max_steps": patches})
        due = [place * _SPREAD_S / count for place in range(count)]
        load = Load(kind="open", rate=round(count / _SPREAD_S, 3))
        before, began, run = self._counters(), time.perf_counter(), None
        with suppress(KeyboardInterrupt), self._interrupted_when_late():
            run = self._clients.run(job, load, 0, 0, 0, due)
        if run is None or not run.is_complete:
            passed, late = (
                time.perf_counter() - began,
                self._counters()[_LATE_PATCHES] - before[_LATE_PATCHES],
            )
            self._clients.close()  # its listeners hang up
            self._clients = Clients(self._given.client_processes)
            self._note(
                {"case": name, "listeners": count, "ended_after_s": round(passed, 1), "late_patches": late}
            )
            return False
        row = self._add(name, self._counted(run, before), listeners=count)
        return not row["failed"] and not row["late_chunks"]

    @contextmanager
    def _interrupted_when_late(self) -> Iterator[None]:
        """Interrupts the main thread when a crowd is too large."""
        done, first = threading.Event(), self._counters()[_LATE_PATCHES]

        def watch() -> None:
            while not done.wait(1.0):
                if self._counters()[_LATE_PATCHES] - first > _TOO_LATE:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _speakers(self) -> None:
        """Streams of text, alone and beside speakers."""
        name = "speakers beside streams"
        if self._skips(name):
            return
        with self._streams("no speakers", 4.0):
            pass
        patches, count = self._given.speech_patches, self._given.speakers
        with self._streams(name, patches * _PATCH_S):
            self._closed(name, "speech-stream", count, {"max_steps": patches}, 1)

    @contextmanager
    def _streams(self, beside: str, for_s: float) -> Iterator[Callable[[], None]]:
        """Streams of text, which begin before the block and go on for `for_s`, or until the function is called."""
        items = self._writer.write("text", _STREAMS * max(4, math.ceil(for_s)))
        job = replace(self._job("text", items, {}, tokens=_STREAM_TOKENS), until=_BEFORE_S + for_s)
        load, runs = Load(kind="closed", concurrency=_STREAMS), list[Run]()
        with closing(Clients(min(4, self._given.client_processes))) as clients:

            def stream() -> None:
                with suppress(BenchError):  # its processes were ended
                    runs.append(clients.run(job, load, 0, 0, len(items)))

            thread = threading.Thread(target=stream)
            thread.start()
            time.sleep(_BEFORE_S)
            try:
                yield clients.close
            finally:
                thread.join()
        for run in runs:
            self._add(f"streams, {beside}", run)

    def _job(self, path: str, items: Items, fields: Mapping[str, Any], tokens: int | None = None) -> Job:
        wishes = Wishes(tokens=tokens or self._given.tokens, model_rate=_RATE, server_vad=True, fields=fields)
        first = merged(next(alternatives(path, wishes)), fields)
        target = Target(url=self._url, model=self._model, fields={path: first})
        return Job(path=path, targets=(target,), source=Listed(items), wishes=wishes)

    def _counters(self) -> dict[str, float]:
        text = httpx.get(f"{self._url}/metrics", timeout=20).text
        return {
            name: float(found[1]) for name in _COUNTERS if (found := re.search(rf"^{name} (\S+)", text, re.M))
        }

    def _counted(self, run: Run, before: Mapping[str, float]) -> Run:
        changes = {name: value - before.get(name, 0.0) for name, value in self._counters().items()}
        return msgspec.structs.replace(run, counters=changes)

    def _skips(self, name: str, least_s: float = 5.0) -> bool:
        """Whether a case is not wanted, or no time is left for it, which is noted."""
        if self._given.cases and name not in self._given.cases:
            return True
        is_over = time.perf_counter() + least_s > self._end
        if is_over:
            self._note({"case": name, "is_run": False})
        return is_over

    def _note(self, row: Row) -> None:
        hidden = ("errors", "counters", "findings", "client", "figures")
        times = {label: value for label, value in row.get("figures", {}).items() if label.endswith("ms")}
        print(json.dumps({**{key: row[key] for key in row if key not in hidden}, **times}), flush=True)
        self.rows.append(row)
        self._keep(self.rows)

    def _add(self, name: str, run: Run, **more: Any) -> Row:
        """The row of a run."""
        good = [each for each in run.samples if not each.error]
        failed = [each.error for each in run.samples if each.error]
        row: Row = {"case": name, "path": run.path, "load": run.load.label, **more, "requests": len(good)}
        row |= {"failed": len(failed), "errors": sorted(set(failed))[:3], "wall_s": round(run.wall_s, 2)}
        prompts = [each.prompt_tokens for each in good if each.prompt_tokens]
        if prompts:
            row["prompt_tokens"] = statistics.median(prompts)
        if run.path in STREAMED_SPEECH and good:
            row["audio_s"] = round(statistics.median(each.audio_s for each in good), 2)
            row["chunks"] = sum(len(each.audio_times) for each in good)
            row["late_chunks"] = sum(playback(each).num_underruns for each in good)
        row["counters"] = run.counters
        row["findings"] = [f"{each.trap}: {each.message}" for each in find_traps([run])]
        row["client"] = {"busy": round(run.client.busy, 3), "lag_ms": round(1e3 * run.client.lag_s, 2)}
        row["figures"] = {
            figure.label: round(float(measure.of(np.ones((1, measure.num_requests)))[0]), 3)
            for figure, measure in measures(run)
        }
        self._note(row)
        return row


def _nothing() -> None:
    """Ends no streams."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--cases", nargs="+", choices=_CASES, help="only these; otherwise all")
    parser.add_argument("--concurrency", type=wholes(1, 256), default="16,1,32")
    parser.add_argument("--single-rounds", type=whole(1), default=20, help="requests at concurrency 1")
    parser.add_argument("--rounds", type=whole(1), default=3, help="requests of each client at others")
    parser.add_argument("--words", type=whole(1), default=40, help="words of a prompt")
    parser.add_argument("--tokens", type=whole(2), default=32, help="tokens of each answer of text")
    parser.add_argument("--clip", type=seconds, default=10.0, help="seconds of a clip, at least")
    parser.add_argument("--long", type=whole(1), default=7600, help="words of a long prompt")
    parser.add_argument("--long-rounds", type=whole(1), default=6, help="long prompts")
    parser.add_argument(
        "--paced-patches", type=whole(1), default=6, help="most patches of a segment of paced speech"
    )
    parser.add_argument(
        "--segment-patches", type=whole(2), default=10, help="most patches of a segment of an answer"
    )
    parser.add_argument(
        "--speech-patches", type=whole(3), default=30, help="most patches of a speech request"
    )
    parser.add_argument(
        "--listeners", type=wholes(1, 1000), default="700,600,500", help="crowds, the largest first"
    )
    parser.add_argument(
        "--beside", type=wholes(1, 1000), default="400,300,200", help="the same beside 16 streams"
    )
    parser.add_argument(
        "--listener-seconds", type=seconds, default=60.0, help="of speech that each listener hears"
    )
    parser.add_argument("--speakers", type=whole(1, 256), default=16, help="speakers beside 16 streams")
    parser.add_argument("--sessions", type=wholes(1, 64), default="1,16", help="realtime sessions")
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument(
        _NO_OVERLAP,
        action="store_true",
        help="run the chunks of a prompt one after the other on several ranks",
    )
    parser.add_argument("--limit", type=seconds, default=600.0, help="seconds after which no case is begun")
    parser.add_argument("--client-processes", type=whole(1, 64), default=16)
    parser.add_argument("--log", type=Path, default=Path("server.log"), help="log of the server")
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    return parser


def main() -> None:
    import harness  # and torch, which the processes of the clients do not need
    import torch

    given, began = harness.parse_args(make_parser()), time.perf_counter()
    weights = sum(path.stat().st_size for path in (given.artifact / "weights").rglob("*") if path.is_file())
    clients = Clients(given.client_processes)  # they import while the server starts
    command = (*PROSE_SERVER, *([_NO_OVERLAP] * given.no_two_batch_overlap))
    words = f"{_CROWD} {given.serve}".rstrip()
    with serve(given.artifact, words, given.log, command) as served:
        about = {"serve": words, "start_s": served.start_s, "weights_bytes": weights}
        about["health"] = httpx.get(f"{served.url}/health").json()
        print(json.dumps(about), flush=True)

        def keep(rows: list[Row]) -> None:
            if given.json:
                gpus = torch.cuda.device_count()
                harness.write(given.json, harness.result("conversations", None, rows, gpus=gpus, **about))

        keep([{"case": "start"}])
        with closing(Measurement(served.url, clients, given, keep, began + given.limit)) as measurement:
            measurement.run()


if __name__ == "__main__":
    main()
