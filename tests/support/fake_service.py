"""A `Service` without a model: answers at once; words in the request text make it slow or make it fail.

The words are `fail first`, `fail midway`, `crash midway`, `overloaded`, `endless`, `wait`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from preprocess_data import audio_parameters

from mingc.errors import CapacityError, RequestError, ServeError, WorkerError
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.conversation import MediaPart, TextPart
from mingc.prompts.media_decoder import MediaTask, SpeechSegment
from mingc.prompts.picture_sizes import bucket, drawn_size, size_of_aspect
from mingc.prompts.tokenizer import TextTokenizer
from mingc.prompts.transcription import answer_start
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    CompletionRequest,
    Done,
    Event,
    ImageDone,
    ImageEvent,
    ImageProgress,
    ImageRequest,
    PartialImage,
    ServiceInfo,
    ServiceLoad,
    SpeechParams,
    SpeechRequest,
    TextDelta,
    TextDone,
    TextRequest,
    TokenLogprobs,
    TranscriptEvent,
    TranscriptionRequest,
    Usage,
)
from mingc.runtime.service.transcriber import transcribe
from mingc.runtime.voices import NewVoice, VoiceInfo

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
SAMPLE_RATE = 44100
PATCH_SAMPLES = 14112
NUM_PATCHES = 3

INFO = ServiceInfo(
    model="ming-omni",
    sample_rate=SAMPLE_RATE,
    voices=("DB30", "Lina"),
    default_voice="DB30",
    has_text=True,
    has_image=True,
    has_video=True,
    has_audio_input=True,
    has_speech=True,
    has_image_output=True,
    has_tools=True,
)
SPEECH_ONLY = replace(
    INFO, has_text=False, has_image=False, has_video=False, has_audio_input=False, has_image_output=False
)
TEXT_ONLY = replace(SPEECH_ONLY, has_text=True, has_speech=False, voices=())


def patch(index: int) -> AudioDelta:
    """A tone whose pitch depends on the index; a segment."""
    time = np.arange(PATCH_SAMPLES, dtype=np.float32) / SAMPLE_RATE
    samples = (0.3 * np.sin(2 * math.pi * (220 * (index + 1)) * time)).astype(np.float32)
    return AudioDelta(samples=samples, is_segment_end=True, segment_text=f"Tone {index}.")


@cache
def _tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(TINY / "tokenizer.json")


_Each = TypeVar("_Each", bound=Event | ImageEvent)


class FakeService:
    """Records its requests and how each ended: `done`, `cancelled` or `failed`."""

    def __init__(self, info: ServiceInfo = INFO, *, ready: bool = True) -> None:
        self._info = info
        self._ready = ready
        self.chats: list[ChatRequest] = []
        self.completions: list[CompletionRequest] = []
        self.speeches: list[SpeechRequest] = []
        self.drawings: list[ImageRequest] = []
        self.voices: list[VoiceInfo] = []
        self.transcriptions: list[TranscriptionRequest] = []
        self.transcripts = ["English\thello world"]
        self.ends: dict[str, str] = {}
        self.running: set[str] = set()
        self.shutdown_timeouts: list[float] = []
        self._closed = asyncio.Event()

    @property
    def info(self) -> ServiceInfo:
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._ready and not self.shutdown_timeouts

    @property
    def load(self) -> ServiceLoad:
        return ServiceLoad(
            kv_pages_used=3,
            kv_pages_total=12,
            num_waiting={"thinker": 2, "talker": 0},
            listeners={"starting": 1, "playing": 5},
            num_underruns=4,
        )

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        self.report_failure = report

    async def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        async for _, event in self.answers(request):
            yield event

    async def answers(self, request: TextRequest) -> AsyncIterator[tuple[int, Event]]:
        """Answers in turn, event by event; each says its seed if it is drawn."""
        text, media, is_spoken = "", [], False
        if isinstance(request, ChatRequest):
            self.chats.append(request)
            if request.speech is not None:
                self._check_voice(request.speech, "audio.")
            parts = [part for message in request.messages if message.role == "user" for part in message.parts]
            text = " ".join(part.text for part in parts if isinstance(part, TextPart))
            media = [f"{part.kind} of {part.size} bytes" for part in parts if isinstance(part, MediaPart)]
            is_spoken = request.speech is not None
        else:
            self.completions.append(request)
            prompt = request.prompt
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        words = ["You", *(f" {word}" for word in ["said:", *text.split(), *media])]
        limit = request.sampling.max_tokens

        def events(answer: int) -> AsyncIterator[Event]:
            seed = request.sampling.seed if request.sampling.draws else None
            own = words if seed is None else [*words[:1], f" {seed + answer}", *words[1:]]
            made: list[Event] = [self._delta(word, request.sampling.num_logprobs) for word in own[:limit]]
            made.append(TextDone(finish_reason="length" if len(own) > limit else "stop"))
            name = request.request_id + (f"-{answer}" if answer else "")
            return self._run(name, text, made, spoken=is_spoken, prompt_tokens=0 if answer else 7)

        left = {answer: events(answer) for answer in range(request.num_answers)}
        try:
            while left:
                for answer in list(left):
                    try:
                        yield answer, await anext(left[answer])
                    except StopAsyncIteration:
                        del left[answer]
        finally:
            for each in left.values():
                await each.aclose()  # type: ignore[attr-defined]

    def _delta(self, word: str, num_logprobs: int | None) -> TextDelta:
        """A word, whose tokens have log probabilities by their ids; the alternatives are the tokens after them."""
        if num_logprobs is None:
            return TextDelta(text=word)
        ids = self.tokenizer.encode_plain(word)
        found = (
            (
                each,
                TokenLogprobs(
                    logprob=-each / 100, top=tuple((each + k, -k / 10) for k in range(1, num_logprobs + 1))
                ),
            )
            for each in ids
        )
        return TextDelta(text=word, token=ids[-1], logprobs=tuple(found))

    @property
    def tokenizer(self) -> TextTokenizer:
        return _tokenizer()

    async def tokenize(self, prompt: str | ChatRequest) -> Sequence[int]:
        if not isinstance(prompt, str):
            self.chats.append(prompt)
            prompt = " ".join(message.text for message in prompt.messages)
        return self.tokenizer.encode_plain(prompt)

    async def count_tokens(self, request: ChatRequest) -> Sequence[int]:
        return [7, *(len(message.prompt_text) + len(message.parts) for message in request.messages)]

    async def decode_media(self, part: MediaPart) -> MediaPart:
        """Decodes sound, as the real service does; the rest stays as it is."""
        if part.kind != "audio":
            return part
        assert isinstance(part.data, bytes | memoryview)
        task = MediaTask(kind="audio", where=part.where, max_bytes=1 << 30, audio=audio_parameters())
        features = await asyncio.to_thread(InProcessDecoder().run, task, part.data)
        return replace(part, data=features, num_tokens=getattr(features, "num_tokens", None))

    async def speech(self, request: SpeechRequest) -> AsyncIterator[Event]:
        self.speeches.append(request)
        self._check_voice(request.speech, "")
        async for event in self._run(request.request_id, request.text, [], spoken=True):
            yield event

    async def draw(self, request: ImageRequest) -> AsyncIterator[ImageEvent]:
        """Pictures of one colour each, (seed, index, 0); an unfinished state is black."""
        self.drawings.append(request)
        text = " ".join(message.text for message in request.messages)
        if request.height is None or request.width is None:
            asked = size_of_aspect(request.aspect)
        else:
            asked = request.height, request.width
        inner = bucket(asked, request.resolution)
        height, width = drawn_size(asked, inner)
        made: list[ImageEvent] = []
        for index in range(request.num_pictures):
            seed = (41 if request.seed is None else request.seed) + index
            made.append(ImageProgress(index=index, step=1, num_steps=2))
            black = np.zeros((*inner, 3), np.uint8)
            made += [
                PartialImage(index=index, number=number, pixels=black, height=height, width=width)
                for number in range(request.num_partials)
            ]
            pixels = np.full((*inner, 3), (seed % 256, index, 0), np.uint8)
            made.append(ImageDone(index=index, pixels=pixels, height=height, width=width, seed=seed))
        tokens = request.num_pictures * math.prod(inner) // 256
        async for event in self._run(request.request_id, text, made, spoken=False):
            yield (
                replace(event, usage=replace(event.usage, image_tokens=tokens))
                if isinstance(event, Done)
                else event
            )

    def _check_voice(self, speech: SpeechParams, prefix: str) -> None:
        names = {each.name for each in self.voices} | {*self._info.voices}
        if speech.reference is None and speech.voice is not None and speech.voice not in names:
            raise RequestError(
                f"no such voice; there are {names}",
                status=404,
                param=f"{prefix}voice",
                code="voice_not_found",
            )

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        own = [VoiceInfo(id=name, name=name, kind="built_in") for name in self._info.voices]
        return (*own, *self.voices)

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        kind: Literal["speaker_embedding", "audio_sample"]
        kind = "speaker_embedding" if voice.sample.vector else "audio_sample"
        added = VoiceInfo(id=f"voice_{len(self.voices)}", name=voice.name, kind=kind, consent=voice.consent)
        self.voices.append(added)
        return added

    async def remove_voice(self, name: str) -> VoiceInfo:
        found = next((each for each in self.voices if name in (each.id, each.name)), None)
        if found is None:
            raise RequestError("unknown", status=404, param="voice", code="voice_not_found")
        self.voices.remove(found)
        return found

    async def stream_speech(
        self, request: SpeechRequest, deltas: AsyncIterator[str], *, starts_early: bool = True
    ) -> AsyncIterator[Event]:
        request = replace(request, text="".join([delta async for delta in deltas]))
        async for event in self.speech(request):
            yield event

    def transcribe(self, request: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]:
        """Real segments; `transcripts` in turn are their answers, of which earlier ones take longer."""
        self.transcriptions.append(request)
        task = MediaTask(kind="audio", where=request.where, max_bytes=0, audio=audio_parameters())
        reader = InProcessDecoder().read_speech(task, request.audio, request.rules)
        numbers = itertools.count()

        def answer(segment: SpeechSegment) -> AsyncGenerator[Event]:
            number = next(numbers)
            text = self.transcripts[number % len(self.transcripts)]
            start = answer_start(request.language)
            words = re.findall(r"\S+|\s", text.removeprefix(start) if start else text)
            return self._transcript(f"{request.request_id}-{number}", request, words, number)

        return transcribe(
            reader, lambda: asyncio.to_thread(reader.read), answer, request.language, asyncio.Semaphore(4)
        )

    async def _transcript(
        self, name: str, request: TranscriptionRequest, words: list[str], number: int
    ) -> AsyncGenerator[Event]:
        await asyncio.sleep(0.02 * (3 - number % 4))
        logprobs = request.sampling.num_logprobs
        events: list[Event] = [
            TextDelta(text=word, token=index) if logprobs is None else self._delta(word, logprobs)
            for index, word in enumerate(words)
        ]
        async for event in self._run(name, request.topic, events, spoken=False):
            yield event

    async def close(self, *, shutdown_timeout_s: float) -> None:
        self.shutdown_timeouts.append(shutdown_timeout_s)
        loop = asyncio.get_running_loop()
        end = loop.time() + shutdown_timeout_s
        while self.running and loop.time() < end:
            await asyncio.sleep(0.02)
        self._closed.set()

    async def _run(
        self,
        name: str,
        text: str,
        events: Sequence[_Each],
        *,
        spoken: bool,
        prompt_tokens: int = 7,
    ) -> AsyncIterator[_Each | Done]:
        if self.shutdown_timeouts:
            raise CapacityError("stopping")
        if "overloaded" in text:
            raise CapacityError("no free slot")
        if "too long" in text:
            raise RequestError("the prompt has 99999 tokens, the context 32768", param="messages")
        if "fail first" in text:
            raise WorkerError("rank 1 died")
        self.running.add(name)
        self.ends[name] = "cancelled"
        try:
            num_text = sum(isinstance(event, TextDelta) for event in events)
            length = sum(len(event.text) for event in events if isinstance(event, TextDelta))
            ends = [length * (i + 1) // NUM_PATCHES for i in range(NUM_PATCHES)]
            patches: list[Any] = (
                [replace(patch(i), text_end=ends[i]) for i in range(NUM_PATCHES)] if spoken else []
            )
            for index, event in enumerate([*events, *patches]):
                if index == 2 and "fail midway" in text:
                    raise WorkerError("rank 1 died midway")
                if index == 2 and "crash midway" in text:
                    raise ZeroDivisionError("a bug")
                yield event
                await asyncio.sleep(0)
            while "endless" in text:
                await self._sleep(0.01)
                if spoken:
                    more: Any = replace(patch(0), text_end=length)
                else:
                    more = events[0] if isinstance(events[0], ImageProgress) else TextDelta(text=" more")
                yield more
            if "wait" in text:
                await self._sleep(60.0)
            self.ends[name] = "done"
            yield Done(
                finish_reason="length" if TextDone(finish_reason="length") in events else "stop",
                usage=Usage(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=num_text,
                    audio_patches=len(patches),
                    audio_seconds=len(patches) * PATCH_SAMPLES / SAMPLE_RATE,
                ),
                timings_ms={"first_token": 1.5},
            )
        except (WorkerError, ZeroDivisionError):
            self.ends[name] = "failed"
            raise
        finally:
            self.running.discard(name)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, unless the service is closed meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return
        raise WorkerError("the server stopped while the request was running")
