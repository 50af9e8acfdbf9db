"""Capacity plan: replicas and GPUs for a load, from measured figures and stated assumptions.

The figures are those of `benchmarks/results`; `tests/unit/test_plan.py` compares them with the files. The plan knows no
prices: it prints the number of GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mingc.errors import ConfigError

_BATCH = 32  # chats and segments of the largest measured step


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkerFigures:
    """Measured times of one text replica in ms: decode step of 32 requests, and a prompt of 1,024 tokens alone."""

    name: str
    gpus: int
    decode_step_ms: float
    prompt_ms: float
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechFigures:
    """Measured rates of one speech replica on one GPU: 32 streams through HTTP."""

    audio_s_per_s: float
    first_audio_p95_ms: float
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigures:
    """Figures measured on one kind of GPU."""

    thinkers: tuple[ThinkerFigures, ...]
    speech: SpeechFigures


FIGURES = {
    "h200": GpuFigures(
        thinkers=(
            ThinkerFigures(
                name="fp8",
                gpus=1,
                decode_step_ms=18.8681,
                prompt_ms=43.1335,
                file="thinker-fp8-h200-2026-11-22.json",
            ),
            ThinkerFigures(
                name="int4",
                gpus=1,
                decode_step_ms=16.9834,
                prompt_ms=47.5021,
                file="thinker-int4-h200-2026-11-21.json",
            ),
            ThinkerFigures(
                name="tp2",
                gpus=2,
                decode_step_ms=17.6184,
                prompt_ms=34.7552,
                file="thinker-tp2-h200x2-2026-11-21.json",
            ),
            ThinkerFigures(
                name="tp4",
                gpus=4,
                decode_step_ms=10.1354,
                prompt_ms=22.7407,
                file="thinker-tp4-h200x4-2026-11-21-gemv.json",
            ),
        ),
        speech=SpeechFigures(
            audio_s_per_s=710.4, first_audio_p95_ms=78.1159, file="speech-http-h200-2026-11-21-all.json"
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load to serve, validated on construction.

    Attributes:
        listeners: concurrent listeners of generated speech.
        chats: answers written concurrently.
        prompt_tokens, answer_tokens: means of a chat.
        token_rate: tokens per second that every answer must get.
        utilisation: share of the measured capacity that is planned for; the rest is for peaks and lost replicas.
        gpu: kind of GPU.
        thinker: how the thinker is exported.
    """

    listeners: int = 0
    chats: int = 0
    prompt_tokens: int = 1024
    answer_tokens: int = 300
    token_rate: float = 20.0
    utilisation: float = 0.7
    gpu: str = "h200"
    thinker: str = "fp8"

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}, which is below {least}"
            for name, least in (("listeners", 0), ("chats", 0), ("prompt_tokens", 1), ("answer_tokens", 1))
            if getattr(self, name) < least
        ]
        if not 0 < self.token_rate < math.inf:
            problems.append(f"--token-rate is {self.token_rate}, which is not above 0")
        if not 0 < self.utilisation <= 1:
            problems.append(f"--utilisation is {self.utilisation}, which is not above 0 and at most 1")
        if self.gpu not in FIGURES:
            problems.append(f"--gpu {self.gpu}: nothing was measured on it; measured: {', '.join(FIGURES)}")
        elif self.thinker not in {each.name for each in FIGURES[self.gpu].thinkers}:
            problems.append(f"--thinker {self.thinker} was not measured on {self.gpu}")
        if not problems and self.listeners == self.chats == 0:
            problems.append("nothing to plan: --listeners and --chats are 0")
        if problems:
            raise ConfigError("; ".join(problems), where="mingc plan", fix="see `mingc plan --help`")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentPlan:
    """Replicas of one deployment. `load` and `per_replica` are in `unit`; `each_gets` is the rate of one client."""

    deployment: str
    replicas: int
    gpus: int
    load: float
    per_replica: float
    unit: str
    each_gets: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    assumption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Deployments for a load, their GPUs, and the assumptions."""

    gpu: str
    gpus: int
    gpu_hours_per_1000_audio_hours: float | None
    gpu_hours_per_million_tokens: float | None
    deployments: tuple[DeploymentPlan, ...]
    assumptions: tuple[Assumption, ...]


def plan(load: Load) -> Plan:
    """The plan for `load`. Raises: ConfigError when no replica reaches the token rate."""
    figures = FIGURES[load.gpu]
    thinker = next(each for each in figures.thinkers if each.name == load.thinker)
    batch, token_ms = _largest_batch(thinker, load)
    deployments = []
    if load.chats:
        replicas = math.ceil(load.chats / (batch * load.utilisation))
        deployments.append(
            DeploymentPlan(
                deployment=f"text ({thinker.name})",
                replicas=replicas,
                gpus=replicas * thinker.gpus,
                load=load.chats,
                per_replica=batch,
                unit="answers",
                each_gets=f"{1000 / token_ms:.0f} tokens/s",
                source=thinker.file,
            )
        )
    if load.listeners:
        replicas = math.ceil(load.listeners / (figures.speech.audio_s_per_s * load.utilisation))
        deployments.append(
            DeploymentPlan(
                deployment="speech",
                replicas=replicas,
                gpus=replicas,
                load=load.listeners,
                per_replica=figures.speech.audio_s_per_s,
                unit="audio s/s",
                each_gets=f"first audio {figures.speech.first_audio_p95_ms:.0f} ms (p95)",
                source=figures.speech.file,
            )
        )
    speech_rate, token_rate = figures.speech.audio_s_per_s, 1000.0 * batch / token_ms
    return Plan(
        gpu=load.gpu,
        gpus=sum(each.gpus for each in deployments),
        gpu_hours_per_1000_audio_hours=round(1000 / (speech_rate * load.utilisation), 2)
        if load.listeners
        else None,
        gpu_hours_per_million_tokens=(
            round(1e6 * thinker.gpus / (token_rate * load.utilisation) / 3600, 3) if load.chats else None
        ),
        deployments=tuple(deployments),
        assumptions=_assumptions(load),
    )


def _largest_batch(thinker: ThinkerFigures, load: Load) -> tuple[int, float]:
    """Concurrent answers of one replica at the requested rate, and milliseconds between two tokens of each.

    The decode step of fewer than 32 requests is taken as that of 32, which is an upper bound. While one answer is
    written, every other answer of its batch starts once, which costs the prefill of its prompt.
    """
    prompt_ms = thinker.prompt_ms * load.prompt_tokens / 1024

    def token_ms(batch: int) -> float:
        return thinker.decode_step_ms + batch * prompt_ms / load.answer_tokens

    for batch in range(_BATCH, 0, -1):
        if 1000 / token_ms(batch) >= load.token_rate:
            return batch, token_ms(batch)
    raise ConfigError(
        f"one answer alone gets {1000 / token_ms(1):.0f} tokens/s with steps as measured at batch {_BATCH}",
        where=f"--token-rate {load.token_rate:g}",
        fix="request less, or choose another --thinker",
    )


def _assumptions(load: Load) -> tuple[Assumption, ...]:
    texts = (
        f"{load.utilisation:.0%} of the measured capacity is planned for",
        f"a chat has {load.prompt_tokens} prompt and {load.answer_tokens} answer tokens, all alike; the time "
        "of a prompt grows in proportion to its length",
        f"a replica writes at most {_BATCH} answers at once, the largest measured batch; KV pages for them fit",
        "a listener plays one second of speech per second; a replica generates ahead and pauses for slow readers",
        "text and speech run on GPUs of their own; requests are spread evenly over replicas",
        "random weights were measured, which read more experts per step than real text does",
        "images, sound and video as input, the network and the CPU side are not in the figures",
    )
    return tuple(Assumption(assumption=text) for text in texts)
