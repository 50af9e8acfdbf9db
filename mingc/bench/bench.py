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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from mingc import __version__
from mingc.bench.clients import Target, Wishes, client_of, find_fields
from mingc.bench.items import Listed, Source, Synthetic
from mingc.bench.load import Clients, default_processes, poisson
from mingc.bench.options import BenchOptions
from mingc.bench.paths import PATHS
from mingc.bench.records import BenchFile, Item, Load, Run
from mingc.bench.traps import find_traps
from mingc.console.progress import Progress, step_logger
from mingc.errors import BenchError

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
    servers = {(url := _base(each)): _look_at(url, key, options.model) for each in urls}
    seed = secrets.randbits(32) if options.seed is None else options.seed
    settings = msgspec.json.decode(msgspec.json.encode({**dataclasses.asdict(options), "seed": seed}))
    file = BenchFile(
        command=command, date=date, hardware=_hardware(), versions=_versions(), servers=servers, settings=settings,
        runs=(), is_complete=False,
    )  # fmt: skip
    session = _Session(servers, options, seed, key, items)
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
        self,
        servers: Mapping[str, Mapping[str, Any]],
        options: BenchOptions,
        seed: int,
        key: str,
        items: Sequence[Item],
    ) -> None:
        self._options, self._seed = options, seed
        self._next = Counter[str]()  # the first item of each path that was not sent
        self._items = items
        self._synthetic = Synthetic(seed, options.words, options.picture, options.clip)
        model = next(each["model"] for each in servers.values())
        fields = options.more_fields
        asked = fields.get("sample_rate") or fields.get("audio", {}).get("sample_rate")
        known = _MING_RATE if re.search(r"\bming", model.lower()) else 0
        self._wishes = Wishes(
            tokens=options.tokens,
            model_rate=asked or options.sample_rate or known,
            server_vad=options.server_vad,
            fields=fields,
        )
        self._transcriber = None
        if options.transcriber is not None:
            url = _base(options.transcriber)
            self._transcriber = Target(url=url, model=_look_at(url, key, None)["model"], key=key)
        self._servers = [Target(url=url, model=about["model"], key=key) for url, about in servers.items()]

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
            found = asyncio.run(look(each))
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
        first = self._take(path, most)
        run = clients.run(path, warm, 0, targets, self._synthetic, self._wishes, first=first, count=most)
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
        before = _counters(targets)
        run = clients.run(
            path, load, repeat, targets, source, self._wishes,
            first=first, count=number, due=due, transcriber=self._transcriber,
            until=None if own else self._options.duration,
        )  # fmt: skip
        try:
            after = _counters(targets) if run.is_complete else before
        except KeyboardInterrupt:
            return msgspec.structs.replace(run, is_complete=False)
        changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return msgspec.structs.replace(
            run, counters={name: value for name, value in changes.items() if value > 0}
        )


def _base(url: str) -> str:
    """The address without the path of the API."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise BenchError(
            "this is no address of a server", where=url, fix="pass one such as http://127.0.0.1:8000"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _look_at(url: str, key: str, model: str | None) -> dict[str, Any]:
    """What a server says about itself, and the model to ask. Raises: BenchError when it does not answer."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_ABOUT_TIMEOUT_S, trust_env=False) as client:
        try:
            models = client.get("/v1/models")
            health = client.get("/health")
        except httpx.HTTPError as error:
            raise BenchError(
                f"the server does not answer: {error}", where=url, fix="start it, or mend the address"
            ) from None
    if models.status_code in (401, 403):
        raise BenchError("the server wants an API key", where=url, fix="set OPENAI_API_KEY")
    if models.has_redirect_location:
        raise BenchError(
            f"the server sends on to {models.headers['location']}", where=url, fix="pass that address"
        )
    try:
        listed = ["" + each["id"] for each in models.json()["data"]] if models.is_success else []
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            f"/v1/models does not list models: {models.text[:200]}",
            where=url,
            fix="pass the address of an OpenAI API",
        ) from None
    if not listed and model is None:
        raise BenchError(
            f"/v1/models names no model: status {models.status_code}",
            where=url,
            fix="mend the address, or name a model with --model",
        )
    try:
        about = health.json() if health.status_code == 200 else {}
    except ValueError:  # others say nothing, or OK
        about = {}
    return {**(about if isinstance(about, dict) else {}), "model": model or listed[0]}


def _counters(targets: Sequence[Target]) -> dict[str, float]:
    """Counters of all servers together; those of a server without `/metrics` are missing."""
    found = defaultdict[str, float](float)
    for target in targets:
        try:
            answer = httpx.get(
                f"{target.url}/metrics", headers=target.headers, timeout=_ABOUT_TIMEOUT_S, trust_env=False
            )
        except httpx.HTTPError:
            continue
        if answer.status_code != 200 or "text/plain" not in answer.headers.get("content-type", ""):
            continue
        try:
            families = [*text_string_to_metric_families(answer.text)]
        except ValueError:  # not Prometheus' text
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
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"cpu": names[0] if names else platform.machine(), "cores": str(os.cpu_count())}
    gpus = Counter(_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())
    return found | ({"gpu": ", ".join(f"{number} × {name}" for name, number in gpus.items())} if gpus else {})
