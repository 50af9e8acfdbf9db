"""What was heard of an answer: the part of its text whose sound was played, and its token ids for the next prompt."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from dataclasses import dataclass

from mingc.prompts.conversation import TextPart, TokensPart
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.request import AudioDelta, TextDelta

# How fast the first segment is spoken, in characters a second, until its length is known.
_IDEOGRAPHS_S, _LETTERS_S = 6, 15
_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_IDEOGRAPH = re.compile("[぀-ヿ㐀-䶿一-鿿가-힯豈-﫿]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What was heard of an answer. `parts`: for the next prompt; their text is the transcript, empty if nothing was."""

    transcript: str
    parts: tuple[TokensPart | TextPart, ...]


@dataclass(slots=True)
class _Segment:
    """A segment of speech: where its text ends, and its written samples."""

    text_end: int
    num_samples: int = 0
    last_patch: int = 0  # samples
    is_complete: bool = False


class Answer:
    """The text of an answer and its sound, while and after they are sent.

    Args:
        tokenizer: of the model that answers.
        sample_rate: of the sound that is sent.
        is_spoken: whether the answer has sound; all text of another one counts as heard.

    Attributes:
        text: of all events so far.
        num_samples: that were written to the socket.
    """

    def __init__(self, tokenizer: TextTokenizer, *, sample_rate: int = 24000, is_spoken: bool = True) -> None:
        self._tokenizer = tokenizer
        self._decoder = _utf8_decoder("replace")
        self._sample_rate = sample_rate
        self._is_spoken = is_spoken
        self.text = ""
        self.num_samples = 0
        self._ids: list[int] = []
        self._written = ""  # the text of `_ids`
        self._start = 0  # of the text, in `_written`
        self._places: list[tuple[int, int]] = []  # where tokens end: characters of `_written`, ids
        self._segments: list[_Segment] = []
        self._is_complete = False
        self._cut: int | None = None  # samples

    @property
    def duration_ms(self) -> int:
        """Length of the sound that was written."""
        return self.num_samples * 1000 // self._sample_rate

    def add_text(self, delta: TextDelta) -> None:
        """Add what was generated. Thoughts and tokens of calls count for nothing."""
        if delta.kind != "text":
            return
        added = None if delta.token is None else self._tokenizer.token_bytes(delta.token)
        if added is not None and delta.token is not None:  # special tokens have no text
            self._ids.append(delta.token)
            self._written += self._decoder.decode(added)
            if not self._decoder.getstate()[0]:  # else the token ends within a character
                self._places.append((len(self._written), len(self._ids)))
        if not self.text:  # tokens before it ended a thought, or are white space that follows one
            self._start = max(self._written.rfind(delta.text), 0)
        self.text += delta.text

    def add_sound(self, num_samples: int, patch: AudioDelta | None = None) -> None:
        """Count samples that were written to the socket: of a patch, or the rest that a resampler held back."""
        self.num_samples += num_samples
        if patch is not None and patch.segment_text is not None:
            assert patch.text_end is not None, "the speech of an answer says where its segments end"
            self._segments.append(_Segment(patch.text_end))
        if not self._segments:
            assert not num_samples, "sound belongs to a segment"
            return
        segment = self._segments[-1]
        segment.num_samples += num_samples
        if patch is not None:
            segment.last_patch, segment.is_complete = num_samples, patch.is_segment_end

    def finish(self) -> None:
        """All of the answer was generated and written."""
        self._is_complete = True

    def truncate(self, audio_end_ms: int) -> int:
        """Cut what was heard after so many milliseconds. Returns them, limited by the length and by earlier cuts."""
        samples = self.num_samples
        if audio_end_ms < self.duration_ms:
            samples = audio_end_ms * self._sample_rate // 1000
        self._cut = samples if self._cut is None else min(self._cut, samples)
        return self._cut * 1000 // self._sample_rate

    def heard(self, ms: int | None = None) -> Heard:
        """What is heard in so many milliseconds, by default in all that were written, up to the cut."""
        samples = self.num_samples if self._cut is None else self._cut
        if ms is not None and ms < self.duration_ms:
            samples = min(samples, ms * self._sample_rate // 1000)
        is_whole = samples == self.num_samples and (samples > 0 or (self._cut is None and ms != 0))
        if not self._is_spoken or (self._is_complete and is_whole):
            return self._part(len(self.text))
        return self._part(self._heard_characters(samples))

    def _token_places(self) -> list[tuple[int, int]]:
        """Where the text may be cut between tokens: characters, and ids up to there; the first place is its start.

        The text may lack white space of the tokens, such as before a call; what follows has no places.
        """
        found: list[tuple[int, int]] = []
        for end, num_ids in ((0, 0), *self._places):
            place = end - self._start
            if place >= 0 and not found:
                if place:
                    break  # the text begins within a token
                found.append((0, num_ids))
            elif place > 0:
                before = found[-1][0]
                if not self.text.startswith(self._written[self._start + before : end], before):
                    break
                found.append((place, num_ids))
        return found or [(0, 0)]

    def _part(self, num_characters: int) -> Heard:
        """The beginning of the text, by ids as far as they go."""
        places = self._token_places()
        end, num_ids = places[bisect_right(places, num_characters, key=_end) - 1]
        ids, rest = tuple(self._ids[places[0][1] : num_ids]), self.text[end:num_characters]
        parts = (*((TokensPart(ids=ids),) if ids else ()), *((TextPart(text=rest),) if rest else ()))
        return Heard(transcript=self.text[:num_characters], parts=parts)

    def _heard_characters(self, samples: int) -> int:
        """How much of the text is said in so many samples: segments that ended, and whole tokens of the one after."""
        ends = [end for end, _ in self._token_places()]
        ends += range(ends[-1] + 1, len(self.text) + 1)
        start = place = 0
        for segment in self._segments:
            end = self._place(ends, segment.text_end)
            if not segment.is_complete or samples < place + segment.num_samples:
                length = self._length(segment, self.text[start:end], characters=start, samples=place)
                said = ends[bisect_right(ends, start) : bisect_right(ends, end)]
                count = int(len(said) * (samples - place) / length)
                return said[count - 1] if count else start
            start, place = end, place + segment.num_samples
        return start

    def _place(self, ends: list[int], text_end: int) -> int:
        """The last of `ends` in a segment. A token that is part of it ends there if the rest of it is white space."""
        after = bisect_right(ends, text_end)
        if ends[after - 1] < text_end and after < len(ends) and not self.text[text_end : ends[after]].strip():
            return ends[after]
        return ends[after - 1]

    def _length(self, segment: _Segment, text: str, *, characters: int, samples: int) -> float:
        """Samples of a segment, estimated while it is not complete, by the `characters` in `samples` before it."""
        if segment.is_complete:
            return segment.num_samples
        if characters:
            estimate = len(text) * samples / characters
        else:
            ideographs = len(_IDEOGRAPH.findall(text))
            seconds = ideographs / _IDEOGRAPHS_S + (len(text) - ideographs) / _LETTERS_S
            estimate = seconds * self._sample_rate
        return max(estimate, segment.num_samples + segment.last_patch, 1)


def _end(place: tuple[int, int]) -> int:
    return place[0]
