"""Replays served goldens through a running service, by the same path as a client's requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mingc.errors import MingcError, WorkerError
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.request import (
    MAX_IMAGE_STEPS,
    MAX_PICTURES,
    Event,
    ImageEvent,
    Recorder,
    SamplingParams,
    SpeechParams,
    SpeechRequest,
)
from mingc.runtime.service.omni import OmniService
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.recorded_noise import RecordedNoise
from mingc.verify.served.cases import SPEECH_TEXT, ServedCase, ServedGoldens
from mingc.verify.served.comparison import Served, ServedComparison
from mingc.verify.served.conversion import decoded_messages, image_request, speech_params

Floats = NDArray[np.float32]

_JOIN_AFTER = 2  # events of the requests before, when a group of the mixed batch joins
_GROUP = 4  # requests that join together
_LIMIT_S = 300.0  # of one request
# Requests that leave early would go on for much longer than `_FREED_S`: to the end of the context, and many segments.
_ENDLESS_TOKENS = 1 << 20
_ENDLESS_SENTENCES = 100
_FREED_S = 5.0  # the step that a cancelled request has begun ends much earlier, also on a busy machine


class ServedReplay:
    """All cases of an artifact on one service, alone and together.

    Args:
        log: its references are the tensors of `goldens`.
    """

    def __init__(self, service: OmniService, goldens: ServedGoldens, log: ComparisonLog) -> None:
        self._service = service
        self._goldens = goldens
        self._log = log
        self._comparison = ServedComparison(goldens, log, service.info.sample_rate)

    async def run(self) -> None:
        """Replay each case alone, then all of them together, with requests that join and one that leaves.

        In both, the prefix cache has no prompts of earlier cases; chats that use it are replayed afterwards.
        """
        for case in self._goldens.cases:
            if case.is_chat:
                with self._log.case(f"{case.name}.prompt"):
                    self._comparison.check_prompt(case, self._prepare(case))
        before = self.held()
        self._service.forget_caches()
        for case in self._goldens.cases:
            self._comparison.compare(case, await self.serve(case, Served()), "alone")
        await self.check_freed(before, "all requests, alone")
        self._service.forget_caches()
        mixed = await self.serve_mixed()
        for case, served in zip(self._goldens.cases, mixed, strict=True):
            self._comparison.compare(case, served, "in a mixed batch")
        await self.check_freed(before, "all requests, in a mixed batch")
        if self._service.has_prefix_cache:
            for case in self._goldens.cases:
                if case.messages:
                    self._comparison.compare(case, await self.serve(case, Served()), "from the prefix cache")
            await self.check_freed(before, "chats from the prefix cache")
        await self.check_leaving(before)
        self._comparison.end()

    async def serve_mixed(self) -> list[Served]:
        """Serve all cases, joining the running ones in groups, while another request leaves early."""
        cases, served = self._goldens.cases, [Served() for _ in self._goldens.cases]
        tasks = []
        leaving = asyncio.create_task(self._leave(cases[-1]))
        for start in range(0, len(cases), _GROUP):
            group = range(start, min(start + _GROUP, len(cases)))
            tasks += [asyncio.create_task(self.serve(cases[index], served[index])) for index in group]
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

    async def check_leaving(self, before: Mapping[str, int]) -> None:
        """Check that long requests of every kind end when their client leaves, and free their resources."""
        with self._log.case("requests that leave"):
            chat = next((case for case in self._goldens.cases if case.is_chat and case.speech is None), None)
            if chat is not None:
                endless = SamplingParams(max_tokens=_ENDLESS_TOKENS, ignore_eos=True)
                await _first_event(self._service.answer(lambda: self._prepare(chat), endless))
                await self.check_freed(before, "a chat that leaves")
            speech = next((case for case in self._goldens.cases if not case.messages), None)
            if speech is not None:
                request = SpeechRequest(
                    request_id="served-leaving", text=_ENDLESS_SENTENCES * speech.text, speech=SpeechParams()
                )
                await _first_event(self._service.speech(request, noise=PhiloxNoise(0)))
                await self.check_freed(before, "a speech that leaves")
            picture = next((case for case in self._goldens.cases if case.drawing is not None), None)
            if picture is not None:
                drawing = image_request(picture, self._goldens.tensors)
                drawing = replace(drawing, num_steps=MAX_IMAGE_STEPS, num_pictures=MAX_PICTURES)
                await _first_event(self._service.draw(drawing))
                await self.check_freed(before, "a picture that leaves")

    async def serve(self, case: ServedCase, served: Served) -> Served:
        try:
            async with _limited():
                async for event in self._events(case, served.recorder):
                    served.accept(event)
        except MingcError as error:
            served.error = error
        return served

    def _events(self, case: ServedCase, recorder: Recorder | None) -> AsyncIterator[Event | ImageEvent]:
        if case.drawing is not None:
            return self._service.draw(image_request(case, self._goldens.tensors), recorder=recorder)
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
            return self._service.speech(request, noise=noise, recorder=recorder, speech_text=SPEECH_TEXT)
        return self._service.answer(
            lambda: self._prepare(case),
            SamplingParams(max_tokens=case.max_tokens),
            speech,
            noise=noise or PhiloxNoise(0),
            recorder=recorder,
            speech_text=SPEECH_TEXT,
        )

    def _prepare(self, case: ServedCase) -> PreparedPrompt:
        return self._service.prepare(decoded_messages(case, self._goldens.tensors))

    def held(self) -> dict[str, int]:
        """Resources that requests hold at present, by kind, including tasks of the event loop."""
        return {**self._service.held, "tasks": len(asyncio.all_tasks())}

    async def check_freed(self, before: Mapping[str, int], how: str) -> None:
        """After requests have ended, no more resources are held than `before`.

        Cancelled requests end with the next step.
        """
        end = asyncio.get_running_loop().time() + _FREED_S
        while (more := _more_than(before, self.held())) and asyncio.get_running_loop().time() < end:
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


async def _first_event(events: AsyncIterator[Event | ImageEvent]) -> None:
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
