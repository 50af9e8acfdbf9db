"""Transcribes a file: finds its segments of speech, has some of them answered at a time, returns them in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

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
    reader: SpeechReader, read: Read, answer: Answer, language: str | None
) -> AsyncGenerator[TranscriptEvent]:
    """Events of a transcript. Closing the iterator cancels all answers.

    Args:
        reader: finds the segments; closed at the end.
        read: calls `reader.read` on another thread.
        answer: events of the model's answer to one segment.
        language: the one that all answers are in; None: each begins with its own.
    """
    segments: asyncio.Queue[_Queue | Exception | None] = asyncio.Queue()
    places = asyncio.Semaphore(SEGMENTS_AHEAD)
    tasks: list[asyncio.Task[None]] = []

    async def find() -> None:
        try:
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
                shown = (separator(text, item.text) if len(text) == begin else "") + item.text
                text += shown
                yield TranscriptDelta(text=shown)
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
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    if event.token is not None:
                        tokens.append(event.token)
                    _put(queue, transcript.push(event.text))
                elif isinstance(event, Done):
                    _put(queue, transcript.finish())
                    queue.put_nowait(
                        TranscriptSegment(
                            start_ms=segment.start_ms,
                            end_ms=segment.end_ms,
                            text=transcript.text,
                            language=transcript.language,
                            speech_probability=segment.probability,
                            tokens=tuple(tokens),
                            usage=event.usage,
                            audio_tokens=segment.features.num_tokens,
                        )
                    )
    except Exception as error:
        queue.put_nowait(error)


def _put(queue: _Queue, text: str) -> None:
    if text:
        queue.put_nowait(TranscriptDelta(text=text))
