"""The life of one answer on the asyncio side: tokens become text, text becomes speech, both become events.

Plain logic between a channel and the client; it waits for nothing and runs no engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from mingc.errors import WorkerError
from mingc.runtime.preprocess.tokenizer import Detokenizer
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    FinishReason,
    SamplingParams,
    SpeechParams,
    TextDelta,
    TextDone,
    Usage,
)
from mingc.runtime.request_stream import FailedItem, Item, PatchItem, RequestStream, TokenItem
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.text.live import LiveSegmenter
from mingc.runtime.text.segment import speech_segments
from mingc.runtime.text.stream_filters import StopStrings, ThoughtFilter

_TICK_S = 0.05  # how often the wait of the first speech segment is looked at


class Timings:
    """Milliseconds since arrival of named moments; the first time of each name counts."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._moments: dict[str, float] = {}

    def mark(self, name: str) -> None:
        if name not in self._moments:
            self._moments[name] = round((time.perf_counter() - self._start) * 1000, 3)

    def to_dict(self) -> dict[str, float]:
        return dict(self._moments)


class SpeechStream:
    """One request's stream in the talker.

    Args:
        max_pending_patches: patches the client may leave unread before the talker leaves the request out.
    """

    def __init__(
        self,
        planner: SpeechPlanner,
        loop: TalkerLoop,
        params: SpeechParams,
        channel: RequestStream,
        *,
        seed: int,
        max_pending_patches: int,
    ) -> None:
        self._planner = planner
        self._loop = loop
        self._params = params
        self._seed = seed
        self._channel = channel
        self._limit = max_pending_patches
        self._num_segments = 0
        self._num_ended = 0
        self.num_patches = 0
        self.num_samples = 0
        self.prompt_tokens = 0
        self.was_capped = False
        self._stream = loop.open(channel.put, lambda: channel.num_pending_patches >= max_pending_patches)

    @property
    def is_silent(self) -> bool:
        """Everything that was to be said has been said."""
        return self._num_ended == self._num_segments

    def say(self, texts: Iterable[str]) -> None:
        """Speak normalised pieces of text after what is being spoken."""
        for text in texts:
            segment = self._planner.segment(text, self._num_segments, self._params, self._seed)
            self._num_segments += 1
            self.prompt_tokens += len(segment.input_ids)
            self._loop.add(self._stream, segment)

    def accept(self, item: PatchItem) -> AudioDelta:
        self.num_patches += 1
        self.num_samples += len(item.samples)
        self.was_capped |= item.is_capped
        self._num_ended += item.is_segment_end
        if self._channel.num_pending_patches == self._limit - 1:
            self._loop.wake()
        return AudioDelta(samples=item.samples)

    def close(self) -> None:
        self._loop.cancel(self._stream)


class ChatOutputProcessor:
    """Text of one chat answer, and its speech when a speaker is given.

    The first segment of speech leaves after a wait at the latest; where it ends then depends on how fast tokens
    came. With `is_reproducible` segments depend on the text alone.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: SamplingParams,
        *,
        prompt_tokens: int,
        speaker: SpeechStream | None,
        is_reproducible: bool,
        max_segment_length: int,
        sample_rate: int,
        timings: Timings,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop)
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._speaker = speaker
        self._segmenter = LiveSegmenter(first_wait_ms=math.inf) if is_reproducible else LiveSegmenter()
        self._thoughts = ThoughtFilter()
        self._is_timed = speaker is not None and not is_reproducible
        self._max_segment_length = max_segment_length
        self._sample_rate = sample_rate
        self._timings = timings
        self._finish: FinishReason | None = None
        self._is_done = False

    @property
    def is_text_done(self) -> bool:
        return self._finish is not None

    @property
    def is_done(self) -> bool:
        return self._is_done

    @property
    def wait_s(self) -> float | None:
        """How long to wait for the next item before passing None to `accept`."""
        return _TICK_S if self._is_timed and not self.is_text_done else None

    def accept(self, item: Item | None) -> list[Event]:
        """The events that an item causes; None is a tick. Raises: the error of a failed request."""
        events: list[Event] = []
        match item:
            case FailedItem():
                raise item.error
            case TokenItem() if not self.is_text_done:  # tokens behind a stop string are still on their way
                events += self._accept_token(item)
            case PatchItem() if self._speaker is not None:
                self._timings.mark("first_audio")
                events.append(self._speaker.accept(item))
            case None:
                self._say(self._segmenter.tick())
        if self.is_text_done and (self._speaker is None or self._speaker.is_silent):
            events.append(self._done())
        return events

    def _accept_token(self, item: TokenItem) -> list[Event]:
        text, is_stopped = "", False
        if item.token is not None:
            self._completion_tokens += 1
            self._timings.mark("first_token")
            text, is_stopped = self._stops.push(self._detokenizer.push(item.token))
        if item.finish is not None and not is_stopped:
            rest, is_stopped = self._stops.push(self._detokenizer.flush())
            text += rest + ("" if is_stopped else self._stops.flush())
        if self._speaker is not None:
            self._say(self._segmenter.push(self._thoughts.push(text)))
        events: list[Event] = [TextDelta(text=text)] if text or item.token is not None else []
        if item.finish is not None or is_stopped:
            self._finish = "stop" if is_stopped else item.finish
            self._say([*self._segmenter.push(self._thoughts.flush()), *self._segmenter.flush()])
            self._timings.mark("text_done")
            events.append(TextDone(finish_reason=self._finish or "stop"))
        return events

    def _say(self, segments: Iterable[str]) -> None:
        if self._speaker is not None:
            for segment in segments:
                self._speaker.say(speech_segments(segment, self._max_segment_length))

    def _done(self) -> Done:
        self._is_done = True
        self._timings.mark("done")
        return Done(
            finish_reason=self._finish or "stop",
            usage=_usage(self._speaker, self._sample_rate, self._prompt_tokens, self._completion_tokens),
            timings_ms=self._timings.to_dict(),
        )


class SpeechOutputProcessor:
    """Speech of one text; all its segments are known at the start."""

    def __init__(self, speaker: SpeechStream, *, sample_rate: int, timings: Timings) -> None:
        self._speaker = speaker
        self._sample_rate = sample_rate
        self._timings = timings
        self.is_done = False

    def accept(self, item: Item) -> list[Event]:
        """As `ChatOutputProcessor.accept`."""
        if isinstance(item, FailedItem):
            raise item.error
        if not isinstance(item, PatchItem):
            raise WorkerError(f"speech received {type(item).__name__}")
        self._timings.mark("first_audio")
        events: list[Event] = [self._speaker.accept(item)]
        if self._speaker.is_silent:
            self.is_done = True
            self._timings.mark("done")
            events.append(
                Done(
                    finish_reason="length" if self._speaker.was_capped else "stop",
                    usage=_usage(self._speaker, self._sample_rate, self._speaker.prompt_tokens, 0),
                    timings_ms=self._timings.to_dict(),
                )
            )
        return events


def _usage(
    speaker: SpeechStream | None, sample_rate: int, prompt_tokens: int, completion_tokens: int
) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        audio_patches=0 if speaker is None else speaker.num_patches,
        audio_seconds=0.0 if speaker is None else speaker.num_samples / sample_rate,
    )
