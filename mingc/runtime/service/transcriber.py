"""Transcribes a file: finds its segments of speech, has some of them answered at a time, returns them in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from mingc.prompts.media_decoder import SpeechReader, SpeechSegment
from mingc.prompts.transcription import SEGMENTS_AHEAD, Transcript, separator
from mingc.runtime.request import (
    Done,
    Event,
    TextDelta,
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptSegment,
    Usage,
)

_Item = TranscriptDelta | TranscriptSegment | Exception
_Queue = asyncio.Queue[_Item]
Read = Callable[[], Awaitable[Sequence[SpeechSegment] | None]]
Answer = Callable[[SpeechSegment], AsyncGenerator[Event]]


async def transcribe(
    reader: SpeechReader, read: Read, answer: Answer, language: str | None, files: asyncio.Semaphore
) -> AsyncGenerator[TranscriptEvent]:
    """Events of a transcript. Closing the iterator cancels all answers.

    Args:
        reader: finds the segments; closed at the end.
        read: calls `reader.read` on another thread.
        answer: events of the model's answer to one segment.
        language: the one that all answers are in; None: each begins with its own.
        files: held while the file is read, and no longer: most of the time it waits for the last answers.
    """
    segments: asyncio.Queue[_Queue | Exception | None] = asyncio.Queue()
    places = asyncio.Semaphore(SEGMENTS_AHEAD)
    tasks: list[asyncio.Task[None]] = []

    async def find() -> None:
        try:
            async with files:
                while (found := await read()) is not None:
                    for segment in found:
                        await places.acquire()
                        queue: _Queue = asyncio.Queue()
                        tasks.append(asyncio.create_task(_answer(answer(segment), segment, language, queue)))
                        segments.put_nowait(queue)
            segments.put_nowait(None)
        except Exception as error:
            segments.put_nowait(error)

    tasks.append(asyncio.create_task(find()))
    text, usage, audio_tokens = "", Usage(), 0
    try:
        while isinstance(queue := await segments.get(), asyncio.Queue):
            begin = len(text)
            while isinstance(item := await queue.get(), TranscriptDelta):
                if len(text) == begin:
                    item = replace(item, text=separator(text, item.text) + item.text)
                text += item.text
                yield item
            if isinstance(item, Exception):
                raise item
            usage += item.usage
            audio_tokens += item.audio_tokens
            yield item
            places.release()
        if queue is not None:
            raise queue
        yield TranscriptDone(duration_ms=reader.duration_ms, usage=usage, audio_tokens=audio_tokens)
    finally:
        reader.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    events: AsyncGenerator[Event], segment: SpeechSegment, language: str | None, queue: _Queue
) -> None:
    """Put the deltas of one answer into `queue`, then the segment, or the error that ended it."""
    transcript = Transcript(language)
    tokens: list[int] = []
    logprobs: list[float] = []
    waiting: deque[tuple[int, TextDelta]] = deque()  # with the characters of the answer before them
    end = 0  # of the answer

    def put(text: str) -> None:
        if not text:
            return
        made = TranscriptDelta(text=text)
        while waiting and waiting[0][0] < transcript.begin + len(transcript.text):
            begin, delta = waiting.popleft()
            if begin + len(delta.text) > transcript.begin:
                made = replace(made, logprobs=made.logprobs + delta.logprobs)
        queue.put_nowait(made)

    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    if event.token is not None:
                        tokens.append(event.token)
                    logprobs += (each.logprob for _, each in event.logprobs)
                    waiting.append((end, event))
                    end += len(event.text)
                    put(transcript.push(event.text))
                elif isinstance(event, Done):
                    put(transcript.finish())
                    queue.put_nowait(
                        TranscriptSegment(
                            start_ms=segment.start_ms,
                            end_ms=segment.end_ms,
                            text=transcript.text,
                            language=transcript.language,
                            speech_probability=segment.probability,
                            tokens=tuple(tokens),
                            avg_logprob=sum(logprobs) / max(len(logprobs), 1),
                            usage=event.usage,
                            audio_tokens=segment.features.num_tokens,
                        )
                    )
    except Exception as error:
        queue.put_nowait(error)
