"""Replays served goldens through a running service, by the same path as a client's requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mingc.errors import MingcError, WorkerError
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.recorder import Recorder
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    SamplingParams,
    SpeechParams,
    SpeechRequest,
    TextDelta,
)
from mingc.runtime.service.omni import OmniService
from mingc.verify.audio_comparison import LIMITS, LOW_PRECISION_LIMITS, Figure, compare_audio
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.recorded_noise import RecordedNoise
from mingc.verify.served.cases import ServedCase, ServedGoldens
from mingc.verify.served.conversion import decoded_messages, speech_params

Floats = NDArray[np.float32]

FEATURE_TOLERANCE = 1e-5
_JOIN_AFTER = 2  # events of the requests before, when a group of the mixed batch joins
_GROUP = 4  # requests that join together
_LIMIT_S = 300.0  # of one request
# Requests that leave early would go on for much longer than `_FREED_S`: to the end of the context, and many segments.
_ENDLESS_TOKENS = 1 << 20
_ENDLESS_SENTENCES = 100
_FREED_S = 5.0  # the step that a cancelled request has begun ends much earlier, also on a busy machine
# In low precision rounding routes tokens to other experts, and then the answer is another one. Shares of the recorded
# tokens and patches that must be found within the tolerance, before the first difference of a request.
MIN_SHARE_LOW_PRECISION = 0.5


@dataclass(slots=True)
class Served:
    """What a client received for one case, and what the engines recorded for it."""

    tokens: list[int] = field(default_factory=list)
    samples: list[Floats] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    done: Done | None = None
    error: MingcError | None = None
    num_events: int = 0

    def accept(self, event: Event) -> None:
        self.num_events += 1
        match event:
            case TextDelta():
                if event.token is not None:
                    self.tokens.append(event.token)
            case AudioDelta():
                self.samples.append(event.samples)
            case Done():
                self.done = event


class ServedReplay:
    """All cases of an artifact on one service, alone and together.

    Args:
        log: its references are the tensors of `goldens`.
    """

    def __init__(self, service: OmniService, goldens: ServedGoldens, log: ComparisonLog) -> None:
        self._service = service
        self._goldens = goldens
        self._log = log
        self._text, self._speech = _Share(), _Share()

    async def run(self) -> None:
        """Replay each case alone, then all of them together, with requests that join and one that leaves.

        In both, the prefix cache has no prompts of earlier cases; chats that use it are replayed afterwards.
        """
        for case in self._goldens.cases:
            if case.messages:
                self._check_prompt(case)
        before = self._held()
        self._service.forget_caches()
        for case in self._goldens.cases:
            self._compare(case, await self._serve(case, Served()), "alone")
        await self._check_freed(before, "all requests, alone")
        self._service.forget_caches()
        mixed = await self._serve_mixed()
        for case, served in zip(self._goldens.cases, mixed, strict=True):
            self._compare(case, served, "in a mixed batch")
        await self._check_freed(before, "all requests, in a mixed batch")
        if self._service.has_prefix_cache:
            for case in self._goldens.cases:
                if case.messages:
                    self._compare(case, await self._serve(case, Served()), "from the prefix cache")
            await self._check_freed(before, "chats from the prefix cache")
        await self._check_leaving(before)
        for name, share in (("tokens", self._text), ("patches", self._speech)):
            if share.total:
                self._log.share(
                    f"{name} before the first difference of each request",
                    same=share.near,
                    total=share.total,
                    minimum=MIN_SHARE_LOW_PRECISION,
                    note="after it, rounding has routed a token to other experts, or another word is spoken",
                )

    def _check_prompt(self, case: ServedCase) -> None:
        """The prompt that the service prepares equals the recorded one."""
        with self._log.case(f"{case.name}.prompt"):
            prepared = self._prepare(case)
            for key in ("input_ids", "positions", "embed_kind"):
                recorded = self._goldens.get(case, key)
                self._log.ids(f"{case.name}.{key}", getattr(prepared.tokens, key), reference=recorded)
            self._log.ids(
                f"{case.name}.rope_delta", prepared.tokens.rope_delta, reference=np.array(case.rope_delta)
            )
            for index, image in enumerate(prepared.media.vision):
                self._compare_features(case, f"vision.{index}", image.pixels)
            for index, clip in enumerate(prepared.media.audio):
                self._compare_features(case, f"audio.{index}", clip.mel)

    def _compare_features(self, case: ServedCase, name: str, value: Floats) -> None:
        recorded = self._goldens.get(case, name)
        self._log.tensor(f"{case.name}.{name}", value, reference=recorded, tolerance=FEATURE_TOLERANCE)

    async def _serve_mixed(self) -> list[Served]:
        """All cases, joining the running ones in groups, while another request leaves early."""
        cases, served = self._goldens.cases, [Served() for _ in self._goldens.cases]
        tasks = []
        leaving = asyncio.create_task(self._leave(cases[-1]))
        for start in range(0, len(cases), _GROUP):
            group = range(start, min(start + _GROUP, len(cases)))
            tasks += [asyncio.create_task(self._serve(cases[index], served[index])) for index in group]
            while not any(served[index].num_events >= _JOIN_AFTER or served[index].done for index in group):
                if all(task.done() for task in tasks):
                    break
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        await leaving
        return served

    async def _leave(self, case: ServedCase) -> None:
        """Request a case and leave after its first event."""
        with contextlib.suppress(MingcError):  # also fails in the mixed batch, which reports it
            await _first_event(self._events(case, None))

    async def _check_leaving(self, before: Mapping[str, int]) -> None:
        """A long chat and a long speech request end when their client leaves, and free their resources."""
        with self._log.case("requests that leave"):
            chat = next((case for case in self._goldens.cases if case.messages and case.speech is None), None)
            if chat is not None:
                endless = SamplingParams(max_tokens=_ENDLESS_TOKENS, ignore_eos=True)
                await _first_event(self._service.answer(lambda: self._prepare(chat), endless))
                await self._check_freed(before, "a chat that leaves")
            speech = next((case for case in self._goldens.cases if not case.messages), None)
            if speech is not None:
                request = SpeechRequest(
                    request_id="served-leaving", text=_ENDLESS_SENTENCES * speech.text, speech=SpeechParams()
                )
                await _first_event(self._service.speech(request, noise=PhiloxNoise(0)))
                await self._check_freed(before, "a speech that leaves")

    async def _serve(self, case: ServedCase, served: Served) -> Served:
        try:
            async with _limited():
                async for event in self._events(case, served.recorder):
                    served.accept(event)
        except MingcError as error:
            served.error = error
        return served

    def _events(self, case: ServedCase, recorder: Recorder | None) -> AsyncIterator[Event]:
        speech = None if case.speech is None else speech_params(case.speech)
        noise = None
        if case.speech is not None and self._goldens.has(case, "noise"):
            patches = self._goldens.get(case, "patches").tolist()
            noise = RecordedNoise(
                patches,
                self._goldens.get(case, "noise").astype(np.float32),
                self._goldens.get(case, "step_noise").astype(np.float32),
            )
        if not case.messages:
            request = SpeechRequest(
                request_id=f"served-{case.name}", text=case.text, speech=speech or SpeechParams()
            )
            return self._service.speech(request, noise=noise, recorder=recorder)
        return self._service.answer(
            lambda: self._prepare(case),
            SamplingParams(max_tokens=case.max_tokens),
            speech,
            noise=noise or PhiloxNoise(0),
            recorder=recorder,
        )

    def _prepare(self, case: ServedCase) -> PreparedPrompt:
        return self._service.prepare(decoded_messages(case, self._goldens.tensors))

    def _compare(self, case: ServedCase, served: Served, how: str) -> None:
        with self._log.case(f"{case.name} ({how})"):
            if served.error is not None:
                raise served.error
            if case.messages:
                self._compare_text(case, served, how)
            if case.speech is not None:
                self._compare_speech(case, served, how)

    def _compare_text(self, case: ServedCase, served: Served, how: str) -> None:
        log, name = self._log, case.name
        tokens, columns = self._goldens.get(case, "tokens"), self._goldens.get(case, "columns")
        recorded = self._goldens.get(case, "logits")
        given = np.array(served.tokens, np.int64)
        # Without a row when the first token ends the answer.
        logits = np.array([each[columns] for each in served.recorder.logits]).reshape(-1, len(columns))
        log.rule(
            f"{name}.usage",
            served.done is not None
            and served.done.usage.completion_tokens == len(given)
            and served.done.usage.prompt_tokens == len(self._goldens.get(case, "input_ids")),
            f"{how}: the usage counts the prompt's and the answer's tokens",
        )
        if log.is_exact:
            log.ids(f"{name}.tokens", given, how=how)
            log.tensor(f"{name}.logits", logits, reference=recorded[: len(tokens)], how=how)
            finish = served.done.finish_reason if served.done is not None else "none"
            log.rule(f"{name}.finish", finish == case.finish, f"{how}: the answer ends by {case.finish}")
            return
        same = _common_length(given, tokens)
        count = min(same + 1, len(logits), len(recorded))  # the first other token has the same past
        self._text.add(log.is_near(logits[:count], recorded[:count]), len(recorded))

    def _compare_speech(self, case: ServedCase, served: Served, how: str) -> None:
        log, name, recorded = self._log, case.name, served.recorder
        if case.messages and not log.is_exact:
            tokens = self._goldens.get(case, "tokens")
            if served.tokens != tokens.tolist():
                return  # other words are spoken
        count = int(self._goldens.get(case, "patches").sum())
        usage = None if served.done is None else served.done.usage
        if count == 0:
            log.rule(f"{name}.patches", not served.samples, f"{how}: nothing is spoken")
            return
        if log.is_exact:
            log.rule(
                f"{name}.patches",
                usage is not None
                and usage.audio_patches == len(served.samples) == len(recorded.latents) == count,
                f"{how}: {count} patches, {len(served.samples)} made; the usage counts them",
            )
        if not served.samples or not recorded.latents:
            log.rule(f"{name}.speech", False, f"{how}: no patch was made")
            return
        values = {
            "latents": np.stack(recorded.latents),
            "stop": np.array(recorded.stop_probabilities, np.float32),
            "samples": np.concatenate(served.samples),
        }
        if log.is_exact:
            for key, value in values.items():
                log.tensor(f"{name}.{key}", value, reference=self._goldens.get(case, key), how=how)
            self._compare_audio(case, values["samples"], LIMITS, how)
            return
        found, expected = values["latents"], self._goldens.get(case, "latents")
        length = min(len(expected), len(found))
        near = log.is_near(found[:length].reshape(length, -1), expected[:length].reshape(length, -1))
        self._speech.add(near, len(expected))
        if length == len(expected) == len(found) and near.all():
            self._compare_audio(case, values["samples"], LOW_PRECISION_LIMITS, how)

    def _compare_audio(
        self, case: ServedCase, samples: Floats, limits: Mapping[Figure, float], how: str
    ) -> None:
        """Rate, length, loudness and timbre of all samples of a request."""
        differences = compare_audio(
            samples,
            self._goldens.get(case, "samples").astype(np.float32),
            found_hz=self._service.info.sample_rate,
            recorded_hz=self._goldens.sample_rate,
            limits=limits,
        )
        self._log.audio(f"{case.name}.speech", differences, how=how)

    def _held(self) -> dict[str, int]:
        """Resources that requests hold at present, by kind, including tasks of the event loop."""
        return {**self._service.held, "tasks": len(asyncio.all_tasks())}

    async def _check_freed(self, before: Mapping[str, int], how: str) -> None:
        """After requests have ended, no more resources are held than `before`.

        Cancelled requests end with the next step.
        """
        end = asyncio.get_running_loop().time() + _FREED_S
        while (more := _more_than(before, self._held())) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        note = ", ".join(f"{count} {name}" for name, count in more.items()) or "nothing more than before"
        self._log.rule(f"held after {how}", not more, note)


@contextlib.asynccontextmanager
async def _limited() -> AsyncIterator[None]:
    """Bound the time that a request may take. Raises: WorkerError."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            yield
    except TimeoutError as error:
        raise WorkerError(f"the request has not ended after {_LIMIT_S:.0f} s", where="service") from error


async def _first_event(events: AsyncIterator[Event]) -> None:
    """Wait for the first event and leave. Raises: WorkerError when there is none."""
    try:
        async with _limited():
            async for _ in events:
                break
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def _more_than(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Resources held in excess of the counts `before`."""
    return {name: now[name] - before[name] for name in before if now[name] > before[name]}


@dataclass(slots=True)
class _Share:
    """Counts of recorded steps in low precision, and of those found within the tolerance."""

    near: int = 0
    total: int = 0

    def add(self, is_near: NDArray[np.bool_], total: int) -> None:
        first = int(np.argmin(is_near)) if not is_near.all() else len(is_near)
        self.near += first
        self.total += total


def _common_length(one: NDArray[np.int64], other: NDArray[np.generic]) -> int:
    """Number of equal values at the start of both."""
    count = min(len(one), len(other))
    is_other = one[:count] != other[:count]
    return int(np.argmax(is_other)) if is_other.any() else count
