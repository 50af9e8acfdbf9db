"""The running model: what the HTTP layer calls. Implements `Service` over the engines' threads.

A request goes: preprocessing and encoders in a small pool of threads, then the thinker's thread, the talker's thread,
and back through a channel into the caller's event loop. Errors of one request stay with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.errors import CapacityError, RequestError, ServeError, WorkerError
from mingc.runtime.noise import random_seed
from mingc.runtime.preprocess.chat import ChatProcessor
from mingc.runtime.preprocess.prompt import MediaFeatures
from mingc.runtime.preprocess.tokenizer import TextTokenizer
from mingc.runtime.prompt import AUDIO, VISION, ThinkerPrompt
from mingc.runtime.request import ChatRequest, Event, ServiceInfo, SpeechParams, SpeechRequest
from mingc.runtime.request_stream import EventQueue, FailedItem, RequestStream
from mingc.runtime.service.encoders import AudioEncoder, VisionEncoder
from mingc.runtime.service.output_processor import (
    ChatOutputProcessor,
    SpeechOutputProcessor,
    SpeechStream,
    Timings,
)
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.text.segment import iter_speech_segments
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.ranks.rank_group import RankGroup

_JOIN_S, _FAILED_JOIN_S = 10.0, 1.0

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatPipeline:
    """What answers chat: everything up to the thinker."""

    processor: ChatProcessor
    tokenizer: TextTokenizer
    vision: VisionEncoder | None
    audio: AudioEncoder | None
    loop: ThinkerLoop


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeechPipeline:
    """What speaks."""

    planner: SpeechPlanner
    loop: TalkerLoop
    max_segment_length: int


class OmniService:
    """Serves one artifact. `chat` and `speech` belong to one event loop; `mingc.runtime.service.builder` makes the
    parts.

    Args:
        chat: None when the artifact has no thinker.
        speech: None when it has no talker.
        ranks: the thinker's other processes, closed with the service.
        num_threads: threads of preprocessing and encoders.
        max_pending_patches: see `SpeechStream`.
    """

    def __init__(
        self,
        info: ServiceInfo,
        *,
        chat: ChatPipeline | None,
        speech: SpeechPipeline | None,
        ranks: RankGroup | None = None,
        num_threads: int = 2,
        max_pending_patches: int = 128,
    ) -> None:
        self._info = info
        self._chat = chat
        self._speech = speech
        self._ranks = ranks
        self._max_pending_patches = max_pending_patches
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="mingc-preprocess")
        self._loops = [part.loop for part in (chat, speech) if part is not None]
        self._mailbox: EventQueue | None = None
        self._running: set[RequestStream] = set()
        self._chatting: set[RequestStream] = set()
        self._is_closing = False
        self._end: ServeError | None = None
        self._told: Callable[[ServeError], None] = lambda error: None
        self._end_lock = threading.Lock()
        for loop in self._loops:
            loop.start()

    @property
    def info(self) -> ServiceInfo:
        return self._info

    @property
    def is_ready(self) -> bool:
        """Every thread and every rank lives and requests are taken."""
        is_whole = self._ranks is None or self._ranks.is_alive
        return not self._is_closing and is_whole and all(loop.is_healthy for loop in self._loops)

    async def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Events of one answer. See `Service`."""
        timings = Timings()
        parts = self._chat
        if parts is None:
            raise RequestError("this model has no thinker: it cannot answer chat", param="messages")
        speech = self._speech_parts() if request.speech is not None else None
        sampling_seed = request.sampling.seed if request.sampling.seed is not None else random_seed()
        with self._begin(is_chat=True) as channel:
            speaker: SpeechStream | None = None
            job: int | None = None
            try:
                if speech is not None and request.speech is not None:
                    wished = request.speech.seed if request.speech.seed is not None else request.sampling.seed
                    speaker = self._open_speaker(speech, request.speech, channel, wished)
                prompt = await self._offload(lambda: self._prepare(parts, request, timings))
                run = ChatOutputProcessor(
                    parts.tokenizer.detokenizer(),
                    request.sampling,
                    prompt_tokens=len(prompt.input_ids),
                    speaker=speaker,
                    is_reproducible=speaker is not None and wished is not None,
                    max_segment_length=0 if speech is None else speech.max_segment_length,
                    sample_rate=self._info.sample_rate,
                    timings=timings,
                )
                job = parts.loop.submit(prompt, request.sampling, sampling_seed, channel.put)
                while not run.is_done:
                    for event in run.accept(await channel.get(run.wait_s)):
                        yield event
                    if run.is_text_done and job is not None:
                        parts.loop.cancel(job)  # a stop string ends the answer before the thinker knows
                        job = None
            finally:
                if job is not None:
                    parts.loop.cancel(job)
                if speaker is not None:
                    speaker.close()

    async def speech(self, request: SpeechRequest) -> AsyncIterator[Event]:
        """Events of one text's speech. See `Service`."""
        timings = Timings()
        speech = self._speech_parts()
        with self._begin(is_chat=False) as channel:
            speaker = self._open_speaker(speech, request.speech, channel, request.speech.seed)
            try:
                # In one go: between two the requests of a crowd would all have to be read before any is spoken.
                await self._offload(
                    lambda: speaker.say(iter_speech_segments(request.text, speech.max_segment_length))
                )
                if speaker.is_silent:
                    raise RequestError("the text has nothing that can be spoken", param="input")
                timings.mark("prepared")
                run = SpeechOutputProcessor(speaker, sample_rate=self._info.sample_rate, timings=timings)
                while not run.is_done:
                    item = await channel.get()
                    assert item is not None
                    for event in run.accept(item):
                        yield event
            finally:
                speaker.close()

    async def close(self, *, shutdown_timeout_s: float) -> None:
        """See `Service`. Calling it again does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        deadline = asyncio.get_running_loop().time() + shutdown_timeout_s
        while self._running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for channel in list(self._running):
            channel.put(FailedItem(error=WorkerError("the server is stopping", status=503)))
        await asyncio.get_running_loop().run_in_executor(None, self._stop)

    def on_end(self, told: Callable[[ServeError], None]) -> None:
        """See `Service`."""
        with self._end_lock:
            self._told = told
            error = self._end
        if error is not None:
            told(error)

    def end(self, error: ServeError) -> None:
        """A rank of the thinker is gone: nobody is to wait for it. Callable from any thread.

        Speech goes on for as long as the process grants.
        """
        if self._chat is not None:
            self._chat.loop.fail(error)
        for channel in list(self._chatting):
            channel.put(FailedItem(error=error))
        with self._end_lock:
            self._end = self._end or error
            told = self._told
        told(error)

    def _stop(self) -> None:
        for loop in self._loops:
            # A thread whose ranks are gone may be inside a call that never returns.
            loop.stop(_JOIN_S if loop.is_healthy else _FAILED_JOIN_S)
        if self._ranks is not None:
            self._ranks.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _speech_parts(self) -> SpeechPipeline:
        if self._speech is None:
            raise RequestError("this model has no talker: it cannot speak", param="modalities")
        return self._speech

    def _open_speaker(
        self, parts: SpeechPipeline, params: SpeechParams, channel: RequestStream, seed: int | None
    ) -> SpeechStream:
        parts.planner.check(params)
        return SpeechStream(
            parts.planner,
            parts.loop,
            params,
            channel,
            seed=random_seed() if seed is None else seed,
            max_pending_patches=self._max_pending_patches,
        )

    @contextmanager
    def _begin(self, *, is_chat: bool) -> Iterator[RequestStream]:
        if self._is_closing:
            raise CapacityError("the server is stopping", code="stopping")
        if self._mailbox is None:  # an event loop runs only from the first request on
            self._mailbox = EventQueue(asyncio.get_running_loop())
        channel = RequestStream(self._mailbox)
        self._running.add(channel)
        if is_chat:
            self._chatting.add(channel)
        try:
            yield channel
        finally:
            channel.close()
            self._running.discard(channel)
            self._chatting.discard(channel)

    async def _offload(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the pool of preprocessing threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _prepare(self, parts: ChatPipeline, request: ChatRequest, timings: Timings) -> ThinkerPrompt:
        """Decode media, build the prompt, run the encoders."""
        prompt, media = parts.processor.prepare(
            request.messages, video=request.video, thinking=request.thinking
        )
        # Too long a prompt fails here, before the encoders run.
        parts.loop.scheduler.max_new_tokens(prompt.num_tokens, 1)
        timings.mark("prepared")
        embeds = _encode_media(parts, prompt.embed_kind, media)
        timings.mark("encoded")
        return replace(prompt, media_embeds=embeds)


def _encode_media(parts: ChatPipeline, embed_kind: NDArray[np.int64], media: MediaFeatures) -> Tensor | None:
    """Embeddings (M, D) of all media tokens of a prompt, in token order; None without media."""
    kinds = torch.from_numpy(embed_kind[embed_kind > 0])
    if not len(kinds):
        return None
    # The processor refuses media without an encoder, so the parts are there when a kind occurs.
    made: list[tuple[int, Tensor]] = []
    if media.vision and parts.vision is not None:
        made.append((VISION, parts.vision.encode(media.vision)))
    if media.audio and parts.audio is not None:
        made.append((AUDIO, torch.cat(parts.audio.encode(media.audio))))
    first = made[0][1]
    embeds = first.new_empty(len(kinds), first.shape[1])
    with torch.inference_mode():
        for kind, values in made:
            embeds[(kinds == kind).to(values.device)] = values
    return embeds
