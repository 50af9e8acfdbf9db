"""Turns the output of one request into events, on the event loop: tokens → text → speech segments.

This is pure logic between a `RequestStream` and the client: it neither waits nor runs an engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from mingc.errors import WorkerError
from mingc.prompts.tokenizer import Detokenizer
from mingc.runtime.noise import NoiseSource
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    FinishReason,
    Recorder,
    SamplingParams,
    SpeechParams,
    TextDelta,
    TextDone,
    TextKind,
    TokenLogprobs,
    Usage,
)
from mingc.runtime.request_stream import FailedItem, Item, RequestStream, TextEndItem, TokenItem
from mingc.runtime.service.tool_calls import CallParser
from mingc.runtime.speech_starts import SpeechStarts
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.text.spoken import SpokenText
from mingc.text.spoken_piece import SpokenPiece
from mingc.text.stream_filters import SpaceAroundCalls, StopStrings, ThoughtSplitter


class Timings:
    """Milliseconds from arrival to named moments; the first occurrence of each name counts."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._moments: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.mark_at(name, time.perf_counter())

    def mark_at(self, name: str, at: float | None) -> None:
        """Mark a moment of `time.perf_counter`, which may be in the past; None is ignored."""
        if name not in self._moments and at is not None:
            self._moments[name] = round((at - self._start) * 1000, 3)

    def copy(self) -> Timings:
        """The same moments, for a further answer of the request."""
        copied = Timings()
        copied._start, copied._moments = self._start, dict(self._moments)
        return copied

    def to_dict(self) -> dict[str, float]:
        return dict(self._moments)


Entries = tuple[tuple[int, TokenLogprobs], ...]


class LogprobQueue:
    """Log probabilities of the tokens of one answer that wait for their text, which stop strings may hold back.

    A token goes with the first delta that has a part of its text. A half character, and a special token, which has no
    text, go with the next token.
    """

    def __init__(self) -> None:
        self._num_characters = 0  # of all tokens
        self._without_text: Entries = ()
        self._waiting: deque[tuple[int, Entries]] = deque()  # before them come so many characters

    def push(self, token: int, logprobs: TokenLogprobs, text: str) -> None:
        """Add a token, which completes `text`."""
        self._without_text += ((token, logprobs),)
        if text:
            self._waiting.append((self._num_characters, self._without_text))
            self._num_characters += len(text)
            self._without_text = ()

    def take(self, num_characters: int, *, is_complete: bool) -> Entries:
        """The tokens that go with the text that ends after `num_characters`.

        `is_complete`: all text is shown, so that no token waits any longer.
        """
        taken: Entries = ()
        while self._waiting and self._waiting[0][0] < num_characters:
            taken += self._waiting.popleft()[1]
        if is_complete:
            taken, self._without_text = taken + self._without_text, ()
        return taken


class SpeechStream:
    """Speech of one request: a stream of segments in the talker.

    Args:
        max_pending_patches: the talker pauses this request while so many patches are unread.
        is_live: whether the client plays the speech while it is generated; it is then paced.
        priority: streams with a lower one come first.
        recorder: gets the values of all patches.
        starts: of the thinker that writes the text on the same device; None: the text is there, or nobody listens.
    """

    def __init__(
        self,
        planner: SpeechPlanner,
        loop: TalkerLoop,
        params: SpeechParams,
        stream: RequestStream,
        *,
        noise: NoiseSource,
        max_pending_patches: int,
        is_live: bool = False,
        priority: int = 0,
        recorder: Recorder | None = None,
        starts: SpeechStarts | None = None,
    ) -> None:
        self._planner = planner
        self._loop = loop
        self._params = params
        self._noise = noise
        self._request_stream = stream
        self._limit = max_pending_patches
        self.num_segments = 0
        self._num_ended = 0
        self._pieces: deque[SpokenPiece] = deque()  # of the segments that have not begun
        self._has_begun = False  # whether some but not all patches of a segment are consumed
        self.num_patches = 0
        self.num_samples = 0
        self.prompt_tokens = 0
        self.was_capped = False
        self.first_segment_at: float | None = None  # `time.perf_counter`
        self._stream = loop.open(
            stream.put,
            partial(stream.is_behind, max_pending_patches),
            is_live=is_live,
            lead=params.speech_lead,
            priority=priority,
            recorder=recorder,
        )
        self._starts = starts
        if starts is not None:
            starts.expect(self)

    @property
    def is_finished(self) -> bool:
        """Whether all enqueued segments have been generated."""
        return self._num_ended == self.num_segments

    def enqueue(self, pieces: Iterable[SpokenPiece], *, until: float = math.inf, wakes: bool = True) -> bool:
        """Queue pieces of text after the segments already queued.

        Stops behind the first piece that is queued after `until` (`time.perf_counter`). Returns whether it got to the
        end. `wakes`: False: the caller calls `wake` when all streams that may share a patch have their segments.
        """
        for piece in pieces:
            if self._starts is not None and not self.num_segments:
                self._starts.begin(self)
            segment = self._planner.segment(piece.text, self.num_segments, self._params, self._noise)
            self.num_segments += 1
            self._pieces.append(piece)
            self.prompt_tokens += len(segment.input_ids)
            self.first_segment_at = self.first_segment_at or time.perf_counter()
            self._loop.add(self._stream, segment, wakes=wakes)
            if time.perf_counter() > until:
                return False
        return True

    def wake(self) -> None:
        """Wake the talker for the segments that are queued."""
        self._loop.wake()

    def consume(self, patch: AudioDelta, timings: Timings) -> AudioDelta:
        """Count a patch that was taken from the request's stream and is sent now. Returns it with its text."""
        if not self.num_patches:
            timings.mark_at("first_segment", self.first_segment_at)
            timings.mark("first_audio")
            self._loop.begin_playback(self._stream)
            self._end_start()
        self.num_patches += 1
        self.num_samples += len(patch.samples)
        self.was_capped |= patch.is_capped
        self._num_ended += patch.is_segment_end
        if self._request_stream.resumes_below(self._limit):
            self._loop.wake()
        has_begun, self._has_begun = self._has_begun, not patch.is_segment_end
        if has_begun:
            return patch
        piece = self._pieces.popleft()
        return replace(patch, segment_text=piece.text, text_end=piece.end)

    def close(self) -> None:
        self._end_start()
        self._loop.cancel(self._stream)

    def _end_start(self) -> None:
        if self._starts is not None:
            self._starts.end(self)


class ChatOutputProcessor:
    """Events of one chat answer: thought, text and calls, and the speech of its text if a speech stream is given.

    Args:
        spoken_text: gives the pieces for `speech_stream`; either both are None or neither.
        calls: finds calls of tools; None: tokens of calls are as any special tokens.
        thinking: whether a thought at the beginning is separated from the text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: SamplingParams,
        *,
        prompt_tokens: int,
        speech_stream: SpeechStream | None,
        spoken_text: SpokenText | None,
        sample_rate: int,
        timings: Timings,
        calls: CallParser | None = None,
        thinking: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._calls = calls
        self._space = None if calls is None else SpaceAroundCalls()
        self._thoughts = ThoughtSplitter() if thinking else None
        self._stops = StopStrings(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = self._reused_tokens = 0
        self._speech_stream = speech_stream
        self._spoken_text = spoken_text
        self._sample_rate = sample_rate
        self._timings = timings
        self._logprobs = None if sampling.num_logprobs is None else LogprobQueue()
        self._num_shown = 0  # characters
        self._finish: FinishReason | None = None
        self.is_done = False

    @property
    def is_text_done(self) -> bool:
        return self._finish is not None

    def accept(self, item: Item) -> list[Event]:
        """The events that an item causes. Raises: the error of a failed request."""
        events: list[Event] = []
        match item:
            case FailedItem():
                raise item.error
            case TokenItem() if not self.is_text_done:  # tokens after a stop string may still arrive
                events += self._accept_token(item)
            case AudioDelta() if self._speech_stream is not None:
                events.append(self._speech_stream.consume(item, self._timings))
        is_complete = self._speech_stream is None or self._speech_stream.is_finished
        if self.is_text_done and is_complete and not self.is_done:  # other answers of the request may go on
            events.append(self._done())
        return events

    def _accept_token(self, item: TokenItem) -> list[Event]:
        self._reused_tokens = item.reused_tokens
        if item.token is not None:
            self._completion_tokens += 1
            self._timings.mark_at("prefill", item.begun_at)
            self._timings.mark("first_token")
        was_open = self._calls is not None and self._calls.is_open
        text, calls, is_stopped = self._read(item)
        is_end = item.finish is not None or is_stopped
        is_call = self._calls is not None and item.token is not None and (was_open or self._calls.is_open)
        self._num_shown += len(text)
        logprobs: Entries = ()
        if self._logprobs is not None:
            is_complete = is_call or (item.finish is not None and not is_stopped)
            logprobs = self._logprobs.take(self._num_shown, is_complete=is_complete)
        deltas = self._text_events(
            text, item.token, logprobs, is_call=is_call, ends_text=is_end or is_call, is_end=is_end
        )
        events: list[Event] = [*deltas, *calls]
        if is_end:
            finish = "stop" if is_stopped else item.finish or "stop"
            has_calls = self._calls is not None and self._calls.is_successful
            self._finish = "tool_calls" if finish == "stop" and has_calls else finish
            self._timings.mark("text_done")
            events.append(TextDone(finish_reason=self._finish))
        return events

    def _read(self, item: TokenItem) -> tuple[str, list[Event], bool]:
        """Returns the text that a token completes, the events of its call, and whether the answer ends with it."""
        text, is_stopped = "", False
        events: list[Event] = []
        calls = self._calls
        if item.token is not None and calls is not None and calls.takes(item.token):
            if not calls.is_open:
                text, is_stopped = self._end_text()
            if not is_stopped:
                self._add_logprobs(item, "")
                events += calls.push(item.token)
                is_stopped = calls.ends_answer
        elif item.token is not None:
            piece = self._detokenizer.push(item.token)
            self._add_logprobs(item, piece)
            text, is_stopped = self._find_stop(piece)
        if item.finish is not None and not is_stopped:
            if calls is not None and calls.is_open:
                events += calls.finish()
            else:
                rest, is_stopped = self._end_text()
                text += rest
        return text, events, is_stopped

    def _add_logprobs(self, item: TokenItem, piece: str) -> None:
        if self._logprobs is not None and item.token is not None and item.logprobs is not None:
            self._logprobs.push(item.token, item.logprobs, piece)

    def _end_text(self) -> tuple[str, bool]:
        """The text that is held back before a call or the end. See `_find_stop`."""
        text, is_stopped = self._find_stop(self._detokenizer.flush())
        return text + ("" if is_stopped else self._stops.flush()), is_stopped

    def _text_events(
        self,
        text: str,
        token: int | None,
        logprobs: Entries,
        *,
        is_call: bool,
        ends_text: bool,
        is_end: bool,
    ) -> list[Event]:
        """Separate thought and text, and speak the text. The first event has the token."""
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.push(text)
            if ends_text:
                rest = self._thoughts.flush()
                thought, text = thought + rest[0], text + rest[1]
        if self._space is not None:
            text = self._space.push(text)
            if is_call:
                self._space.add_call()
            if is_end:
                text += self._space.flush()
        if self._spoken_text is not None:
            self._speak(self._spoken_text.push(text))
            if ends_text:  # what is said before a call is spoken while the call is written
                self._speak(self._spoken_text.finish())
        events: list[Event] = []
        is_thinking = self._thoughts is not None and self._thoughts.is_thinking and not is_call
        if thought or (token is not None and is_thinking and not text):
            events.append(TextDelta(text=thought, token=token, kind="thought", logprobs=logprobs))
            token, logprobs = None, ()
        if text or logprobs or token is not None:
            kind: TextKind = "call" if is_call and not text else "text"
            events.append(TextDelta(text=text, token=token, kind=kind, logprobs=logprobs))
        return events

    def _find_stop(self, text: str) -> tuple[str, bool]:
        """See `StopStrings.push`. Does not search the text of the first `min_tokens` tokens."""
        return (text, False) if self._completion_tokens <= self._min_tokens else self._stops.push(text)

    def _speak(self, pieces: Iterable[SpokenPiece]) -> None:
        assert self._speech_stream is not None, "text is spoken into a stream"
        self._speech_stream.enqueue(pieces)

    def _done(self) -> Done:
        self.is_done = True
        self._timings.mark("done")
        return Done(
            finish_reason=self._finish or "stop",
            usage=replace(
                _usage(self._speech_stream, self._sample_rate, self._prompt_tokens, self._completion_tokens),
                cached_tokens=self._reused_tokens,
            ),
            timings_ms=self._timings.to_dict(),
            has_nothing_to_speak=self._speech_stream is not None
            and not self._speech_stream.num_patches
            and self._finish != "tool_calls",
        )


class SpeechOutputProcessor:
    """Events of one speech request. Its segments are all queued at the start, or until a `TextEndItem`."""

    def __init__(
        self, speech_stream: SpeechStream, *, sample_rate: int, timings: Timings, is_text_done: bool = True
    ) -> None:
        self._speech_stream = speech_stream
        self._sample_rate = sample_rate
        self._timings = timings
        self._is_text_done = is_text_done
        self.is_done = False

    def accept(self, item: Item) -> list[Event]:
        """See `ChatOutputProcessor.accept`."""
        events: list[Event] = []
        match item:
            case AudioDelta():
                events.append(self._speech_stream.consume(item, self._timings))
            case FailedItem():
                raise item.error
            case TextEndItem():
                self._is_text_done = True
                self._timings.mark("text_done")
            case _:
                raise WorkerError(f"a speech request received {type(item).__name__}")
        if self._is_text_done and self._speech_stream.is_finished:
            self.is_done = True
            self._timings.mark("done")
            events.append(
                Done(
                    finish_reason="length" if self._speech_stream.was_capped else "stop",
                    usage=_usage(
                        self._speech_stream, self._sample_rate, self._speech_stream.prompt_tokens, 0
                    ),
                    timings_ms=self._timings.to_dict(),
                )
            )
        return events


def _usage(
    speech_stream: SpeechStream | None, sample_rate: int, prompt_tokens: int, completion_tokens: int
) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        audio_patches=0 if speech_stream is None else speech_stream.num_patches,
        audio_seconds=0.0 if speech_stream is None else speech_stream.num_samples / sample_rate,
    )
