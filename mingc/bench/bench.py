"""A whole benchmark: look at the servers, send every load, and look for traps in what came back."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from mingc import __version__
from mingc.bench.clients import Target, Wishes, client_of, find_fields
from mingc.bench.items import Listed, Source, Synthetic
from mingc.bench.load import Clients, Job, default_processes, poisson
from mingc.bench.options import BenchOptions
from mingc.bench.paths import PATHS
from mingc.bench.records import BenchFile, Item, Load, Run
from mingc.bench.server import Server
from mingc.bench.traps import find_traps
from mingc.console.progress import Progress, step_logger
from mingc.errors import BenchError
from mingc.host.description import processor_name

_MING_RATE = 44_100  # of the VAE
_ABOUT_TIMEOUT_S = 30.0
_COUNTED = ("_total", "_sum", "_count")
_WARM_UP = 8  # requests before an open loop


def bench(
    urls: Sequence[str],
    options: BenchOptions,
    progress: Progress,
    *,
    command: str,
    key: str = "",
    items: Sequence[Item] = (),
    keep: Callable[[BenchFile], None] = lambda _: None,
) -> BenchFile:
    """Measure the servers at `urls`, which share the requests.

    Args:
        key: API key; empty: none.
        items: of a data set, each sent once a run; empty: the built-in ones.
        keep: gets the result so far after every repeat of a load.

    Ctrl-C ends it early, and so does a server that answers no more: the result has what was measured. Raises:
    BenchError when nothing was.
    """
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    settings = msgspec.json.decode(msgspec.json.encode({**dataclasses.asdict(options), "seed": seed}))
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(each, key, options.model)) for each in urls]
        file = BenchFile(
            command=command, date=date, hardware=_hardware(), versions=_versions(), settings=settings,
            servers={each.url: each.about() for each in servers}, runs=(), is_complete=False,
        )  # fmt: skip
        session = _Session(servers, options, seed, items)
        try:
            for run in session.runs(progress):
                file = msgspec.structs.replace(file, runs=(*file.runs, run))
                keep(file)
            is_complete = all(run.is_complete for run in file.runs)
            file = msgspec.structs.replace(file, is_complete=is_complete)
        except (KeyboardInterrupt, BenchError) as error:
            if not file.runs:
                raise
            if isinstance(error, BenchError):
                step_logger("bench")(f"ends early: {error}")
    return msgspec.structs.replace(file, findings=find_traps(file.runs))


class _Session:
    def __init__(
        self, servers: Sequence[Server], options: BenchOptions, seed: int, items: Sequence[Item]
    ) -> None:
        self._options, self._seed, self._servers = options, seed, servers
        self._next = Counter[str]()  # the first item of each path that was not sent
        self._items = items
        self._synthetic = Synthetic(seed, options.words, options.picture, options.clip)
        fields = options.more_fields
        asked = fields.get("sample_rate") or fields.get("audio", {}).get("sample_rate")
        known = _MING_RATE if re.search(r"\bming", servers[0].model.lower()) else 0
        self._wishes = Wishes(
            tokens=options.tokens,
            model_rate=asked or options.sample_rate or known,
            server_vad=options.server_vad,
            fields=fields,
        )
        self._transcriber = None
        if options.transcriber is not None:
            with Server(options.transcriber, servers[0].key) as writer:
                self._transcriber = Target(url=writer.url, model=writer.model, key=writer.key)

    def runs(self, progress: Progress) -> Iterator[Run]:
        """Every load of every path that all servers have, after a warm-up."""
        options = self._options
        paths = dict.fromkeys(each.path for each in self._items) if self._items else options.paths or PATHS
        targets = {path: found for path in paths if (found := self._targets(path))}
        if not targets:
            raise BenchError(
                "the server has none of the paths", where=self._servers[0].url, fix="name one with --path"
            )
        processes = options.client_processes or default_processes(options.loads, os.cpu_count() or 1)
        steps = [
            (path, load, repeat)
            for path in targets
            for load in options.loads
            for repeat in range(options.repeats)
        ]
        with closing(Clients(processes)) as clients:
            for done, (path, load, repeat) in enumerate(steps):
                name = f"{path} {load.label}, repeat {repeat + 1}"
                progress(done, len(steps), name, None)
                begun = time.perf_counter()
                if repeat == 0:
                    self._warm_up(clients, path, load, targets[path])
                yield (run := self._run(clients, path, load, repeat, targets[path]))
                progress(done + 1, len(steps), name, time.perf_counter() - begun)
                if not run.is_complete:
                    return

    def _take(self, path: str, count: int) -> int:
        """Numbers of built-in items that were never sent."""
        first = self._next[path]
        self._next[path] += count
        return first

    def _targets(self, path: str) -> tuple[Target, ...]:
        """The servers with the fields that they take on a path; none where one of them lacks it."""

        async def look(target: Target) -> Target | str:
            async with client_of(target) as client:
                item = self._synthetic.item(path, self._take(path, 1))
                found = await find_fields(client, target, path, item, self._wishes)
            return found if isinstance(found, str) else dataclasses.replace(target, fields={path: found})

        targets = list[Target]()
        for each in self._servers:
            found = asyncio.run(look(Target(url=each.url, model=each.model, key=each.key)))
            if isinstance(found, str):
                if self._items or self._options.paths:
                    raise BenchError(f"path {path}: {found}", where=each.url, fix="leave it out of --path")
                step_logger("bench")(f"{path} is left out, the server refuses it: {found[:200]}")
                return ()
            targets.append(found)
        return tuple(targets)

    def _warm_up(self, clients: Clients, path: str, load: Load, targets: tuple[Target, ...]) -> None:
        """As many requests as come at a time, and no figures of them."""
        most = load.concurrency or max(_WARM_UP, load.burst)
        warm = Load(kind="closed", concurrency=most)
        job = Job(path=path, targets=targets, source=self._synthetic, wishes=self._wishes)
        run = clients.run(job, warm, 0, self._take(path, most), most)
        if not run.is_complete:
            raise KeyboardInterrupt
        if all(each.error for each in run.samples):
            where, why = f"{path} {load.label}", run.samples[0].error
            raise BenchError(f"no request was answered: {why}", where=where, fix="look at the server")

    def _run(self, clients: Clients, path: str, load: Load, repeat: int, targets: tuple[Target, ...]) -> Run:
        own = [each for each in self._items if each.path == path]
        source: Source = Listed(own) if own else self._synthetic
        due, number = list[float](), 0
        if load.kind == "open":
            seed = f"{self._seed} {path} {load.rate} {repeat}"
            due = poisson(load.rate, load.burst, self._options.open_s, seed)
        else:
            number = len(own) or load.concurrency * self._options.rounds
        first = 0 if own else self._take(path, number or len(due))
        before = _counters(self._servers)
        job = Job(
            path=path, targets=targets, source=source, wishes=self._wishes, transcriber=self._transcriber,
            until=None if own else self._options.duration,
        )  # fmt: skip
        run = clients.run(job, load, repeat, first, number, due)
        try:
            after = _counters(self._servers) if run.is_complete else before
        except KeyboardInterrupt:
            return msgspec.structs.replace(run, is_complete=False)
        changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return msgspec.structs.replace(
            run, counters={name: value for name, value in changes.items() if value > 0}
        )


def _counters(servers: Sequence[Server]) -> dict[str, float]:
    """Counters of all servers together; those of a server without Prometheus' `/metrics` are missing."""
    found = defaultdict[str, float](float)
    for server in servers:
        try:
            families = [*text_string_to_metric_families(server.metrics())]
        except ValueError:
            continue
        for name, labels, value, *_ in (sample for family in families for sample in family.samples):
            if name.endswith(_COUNTED):
                shown = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
                found[f"{name}{{{shown}}}" if shown else name] += value
    return dict(found)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "mingc": __version__, "httpx": version("httpx")}
    checkout = Path(__file__).parents[2]
    commit = _output("git", "-C", str(checkout), "rev-parse", "HEAD") if (checkout / ".git").exists() else ""
    return found | ({"commit": commit} if commit else {})


def _output(*command: str) -> str:
    """What a program writes, without blanks around it; empty where there is none, or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ABOUT_TIMEOUT_S, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _hardware() -> dict[str, str]:
    found = {"cpu": processor_name(), "cores": str(os.cpu_count())}
    gpus = Counter(_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())
    return found | ({"gpu": ", ".join(f"{number} × {name}" for name, number in gpus.items())} if gpus else {})
