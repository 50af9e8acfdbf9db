"""What `mingc bench` sends and what it saw, as its JSON file keeps it.

Times of a `Sample` are seconds since the beginning of its `Run`, in steps of 10 µs, on a clock that all client
processes share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from mingc.bench.paths import PATHS as PATHS
from mingc.console.report_page import write_text
from mingc.errors import ConfigError

SCHEMA = 1


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request to be sent.

    Attributes:
        id: names it in its data set; unique there.
        messages: of a chat, as the API takes them.
        text: to be spoken, or drawn.
        clip: a sound file: of `realtime` and `transcription`; of `speech` and `speech-stream` the voice to speak with.
        clip_text: the words of that voice's clip.
        expected: the right answer, for the score of a data set; None: the answer is not scored.
        max_tokens: most tokens of the answer; None: as the command says.
    """

    id: str
    path: str
    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    clip: bytes = b""
    clip_text: str = ""
    expected: str | None = None
    max_tokens: int | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer as the client saw it.

    Attributes:
        item: `Item.id`.
        server: base URL that got it.
        scheduled: when it was due. Latencies count from here, so that a server that stalls cannot hide.
        sent: when its first byte was given to the socket; the client was late by the difference to `scheduled`.
            Of `realtime`, both are the end of the speaker's turn.
        ended: when the answer was complete, or failed.
        error: why it failed; empty: it did not.
        status: HTTP status; 0: there was no response.
        first_byte: when the first byte of the body came.
        token_times: when each piece of text came.
        text: the answer; of speech whose item has an expected answer, its transcript.
        prompt_tokens, output_tokens, cached_tokens: as the server counts them; None: it does not say.
        stated_audio_s: seconds of speech as the server counts them (usage); None: it does not say.
        fixed_tokens: number of tokens that was asked for; 0: as many as a right answer needs; None: the server takes no
            number.
        finish_reason: as the server says.
        audio_times: when each chunk of sound came.
        audio_samples: sample frames in each of these chunks.
        sample_rate: at which the samples count: the one that was asked for or known, otherwise of the header.
        header_rate: of the sound file's header; None: sound without a header.
        picture_times: when each picture came, unfinished ones too.
        num_pictures: finished ones.
        digest: hash of all samples of sound, or of the pictures; empty: neither.
        stages: milliseconds of each stage as the server saw it (our `timings_ms`, by the names of our metrics).
    """

    item: str
    server: str
    scheduled: float
    sent: float
    ended: float
    error: str = ""
    status: int = 0
    first_byte: float | None = None
    token_times: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    stated_audio_s: float | None = None
    fixed_tokens: int | None = None
    finish_reason: str = ""
    audio_times: tuple[float, ...] = ()
    audio_samples: tuple[int, ...] = ()
    sample_rate: int = 0
    header_rate: int | None = None
    picture_times: tuple[float, ...] = ()
    num_pictures: int = 0
    digest: str = ""
    stages: dict[str, float] = {}

    @property
    def audio_s(self) -> float:
        """Seconds of sound that came."""
        return sum(self.audio_samples) / self.sample_rate if self.sample_rate else 0.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests arrive.

    Attributes:
        kind: `closed`: `concurrency` clients, each of which waits for its answer; `open`: Poisson arrivals.
        rate: requests a second of an open loop, on average.
        burst: requests that arrive together in an open loop; `rate` counts requests, not bursts.
    """

    kind: Literal["closed", "open"]
    concurrency: int = 0
    rate: float = 0.0
    burst: int = 1

    @property
    def label(self) -> str:
        if self.kind == "closed":
            return f"c={self.concurrency}"
        return f"{self.rate:g}/s" + (f" in bursts of {self.burst}" if self.burst > 1 else "")


class ClientState(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the clients of a run were.

    Attributes:
        num_processes: that sent the requests.
        busy: share of the wall time in which the busiest process computed.
        lag_s: how late the event loop of the worst process was, 99th percentile: so wrong may times be.
        clock_s: resolution of their clock.
    """

    num_processes: int
    busy: float
    lag_s: float
    clock_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat of one load of one path.

    Attributes:
        repeat: number of the repeat, from 0.
        began: date and time, ISO 8601, UTC.
        wall_s: from the beginning until the last answer ended.
        samples: of all requests, in the order in which they were due.
        counters: increase of the server's counters (`/metrics`) in the run, all servers together, by name and labels
            as in Prometheus' text; empty where the server has none.
        is_complete: whether the run went to its end: Ctrl-C ends it earlier.
    """

    path: str
    load: Load
    repeat: int
    began: str
    wall_s: float
    samples: tuple[Sample, ...]
    client: ClientState
    counters: dict[str, float] = {}
    is_complete: bool = True


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that makes figures wrong, or might.

    Attributes:
        trap: name of the kind, such as `blob`.
        where: path and load, such as `speech c=8`.
        message: what was seen, and what it does to the figures.
    """

    trap: str
    where: str
    message: str


class BenchFile(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call of `mingc bench`.

    Attributes:
        command: the command line.
        date: of the beginning, ISO 8601, UTC.
        hardware: of the machine of the clients (`cpu`, `cores`, `gpu` where there is one).
        versions: of Python, mingc and the HTTP client; `commit` of mingc in a checkout.
        servers: by base URL: what the server says about itself (`/health` or `/v1/models`).
        settings: the options, by name.
        scores: of data sets: name → figure → value.
        is_complete: whether every load was measured: Ctrl-C and a server that answers no more end it earlier.
    """

    schema: int = SCHEMA
    command: str
    date: str
    hardware: dict[str, str]
    versions: dict[str, str]
    servers: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    runs: tuple[Run, ...]
    findings: tuple[Finding, ...] = ()
    scores: dict[str, dict[str, float]] = {}
    is_complete: bool = True


def grouped(runs: Sequence[Run]) -> Mapping[tuple[str, Load], list[Run]]:
    """The repeats of each path and load, in the order in which they ran."""
    found: dict[tuple[str, Load], list[Run]] = {}
    for run in runs:
        found.setdefault((run.path, run.load), []).append(run)
    return found


def encode(file: BenchFile) -> bytes:
    return msgspec.json.encode(file)


def write(path: Path, file: BenchFile) -> None:
    write_text(encode(file).decode() + "\n", path)


def read(path: Path) -> BenchFile:
    """Raises: ConfigError when the file is not one of `write`."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=BenchFile)
        if file.schema != SCHEMA:
            raise ValueError(f"its schema is {file.schema}, this version reads {SCHEMA}")
        return file
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no result of `mingc bench` can be read: {error}",
            where=str(path),
            fix="name a file that `mingc bench --output` wrote",
        ) from None
