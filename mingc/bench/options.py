"""What a benchmark sends. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mingc.bench.paths import PATHS
from mingc.options import SECONDS, check, option

if TYPE_CHECKING:
    from mingc.bench.records import Load

_MAX_REQUESTS = 100_000  # of a load
_OPEN_S = 30.0
_WHAT, _LOADS, _CLIENTS = "Requests", "Loads", "Clients"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to send, validated on construction."""

    paths: tuple[str, ...] | None = option(
        None, "--path", choices=(), group=_WHAT, metavar="PATH,…", shown_default="all that the server has",
        help=f"What to measure: {', '.join(PATHS)}.",
    )  # fmt: skip
    model: str | None = option(
        None, "--model", group=_WHAT, shown_default="the server's first", help="Model of the requests."
    )
    tokens: int = option(
        64, "--tokens", least=1, group=_WHAT,
        help="Tokens of an answer: exactly as many where the server knows ignore_eos, else at most.",
    )  # fmt: skip
    words: int = option(100, "--words", least=1, group=_WHAT, help="Words of a prompt, about.")
    picture: int = option(
        512, "--picture", least=1, most=8192, group=_WHAT, help="Width and height of a picture in pixels."
    )
    clip: float = option(
        5.0,
        "--clip",
        above=0,
        most=3600,
        unit=SECONDS,
        group=_WHAT,
        help="Length of a spoken clip, at least.",
    )
    fields: str = option(
        "{}", "--fields", group=_WHAT, metavar="JSON", shown_default="none",
        help='Further fields of every request, such as {"voice": "Lina", "temperature": 1}.',
    )  # fmt: skip
    server_vad: bool = option(
        False, "--server-vad", group=_WHAT,
        help="The server finds the end of a spoken turn, and its silence counts; otherwise the client says it.",
    )  # fmt: skip
    transcriber: str | None = option(
        None, "--transcriber", group=_WHAT, metavar="URL", shown_default="the server",
        help="Server that writes what was spoken, where a data set wants speech to be right.",
    )  # fmt: skip
    sample_rate: int | None = option(
        None, "--sample-rate", least=1, group=_WHAT, shown_default="44100 for a Ming, else as headers say",
        help="Hz of the model's voice, with which headers are compared.",
    )  # fmt: skip
    seed: int | None = option(
        None, "--seed", least=0, group=_WHAT, shown_default="random",
        help="The same seed sends the same requests again, which a server may have in its caches.",
    )  # fmt: skip
    concurrency: tuple[int, ...] = option(
        (1, 4, 16), "--concurrency", least=1, most=4096, group=_LOADS,
        help="Closed loops: clients at a time, each of which waits for its answer.",
    )  # fmt: skip
    rounds: int = option(4, "--rounds", least=1, group=_LOADS, help="Requests of each of these clients.")
    rates: tuple[float, ...] | None = option(
        None, "--rate", above=0, group=_LOADS, shown_default="no open loop",
        help="Open loops instead: requests a second, whether earlier ones are answered or not (Poisson).",
    )  # fmt: skip
    burst: int = option(
        1, "--burst", least=1, most=4096, group=_LOADS, help="Requests of an open loop that arrive together."
    )
    duration: float | None = option(
        None, "--duration", above=0, most=24 * 3600, unit=SECONDS, group=_LOADS,
        shown_default="30s of an open loop; a closed one ends after its rounds",
        help="Length of an open loop. A client of a closed loop sends a request, and no further one after this time.",
    )  # fmt: skip
    repeats: int = option(3, "--repeats", least=1, group=_LOADS, help="Repeats of every load.")
    client_processes: int | None = option(
        None, "--client-processes", least=1, most=256, group=_CLIENTS,
        shown_default="by concurrency, at most half of the cores", help="Processes that send requests.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        problems = [
            f"--path {name}: there is no such path; there are {', '.join(PATHS)}"
            for name in self.paths or ()
            if name not in PATHS
        ]
        problems += [
            f"{label} {value}: must be at least {least}"
            for label, values, least in (
                ("--concurrency", self.concurrency, 1),
                ("--rate", self.rates or (), 1e-6),
            )
            for value in values
            if not value >= least
        ]
        if () in (self.paths, self.rates, self.concurrency):
            problems.append("a list of --path, --rate or --concurrency is empty")
        try:
            if not isinstance(json.loads(self.fields), dict):
                raise ValueError("not an object")
            if not isinstance(self.more_fields.get("audio", {}), dict):
                raise ValueError("its 'audio' is none")
        except ValueError as error:
            problems.append(f"--fields {self.fields}: must be a JSON object: {error}")
        most = max(
            max(self.rates) * self.open_s if self.rates else max(self.concurrency, default=0) * self.rounds,
            0,
        )
        if most > _MAX_REQUESTS:
            problems.append(f"a load of {most:,.0f} requests: they are written before the first is sent, so at most"
                            f" {_MAX_REQUESTS:,}")  # fmt: skip
        check(self, *problems, where="mingc bench", fix="see mingc bench --help")

    @property
    def open_s(self) -> float:
        """Seconds of an open loop."""
        return _OPEN_S if self.duration is None else self.duration

    @property
    def more_fields(self) -> Mapping[str, Any]:
        fields: Mapping[str, Any] = json.loads(self.fields)
        return fields

    @property
    def loads(self) -> tuple[Load, ...]:
        from mingc.bench.records import Load  # msgspec, which the help of the command does not need

        if self.rates is not None:
            return tuple(Load(kind="open", rate=rate, burst=self.burst) for rate in dict.fromkeys(self.rates))
        return tuple(Load(kind="closed", concurrency=each) for each in dict.fromkeys(self.concurrency))
