"""What the model is asked for a transcript, and what of its answer is the transcript."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.prompts.features import AudioFeatures

_REQUEST = "Please recognize the language of this speech and transcribe it. Format: oral."
_TOPIC = "This is an audio about {}."
_KEYWORDS = "This audio may contains the following words or phrases:{}."
_MAX_LANGUAGE = 32  # characters before the tab; an answer without a tab there states no language
MAX_TRANSCRIPT_TOKENS = 512  # of one segment
SEGMENTS_AHEAD = 4  # of one file, that are answered or wait for their turn

LANGUAGES = {"en": "English", "zh": "Chinese"}
"""What the model calls a language, by its ISO 639-1 code. It has more; their names are not documented."""


def transcription_message(
    features: AudioFeatures, where: str, *, topic: str = "", keywords: Sequence[str] = ()
) -> Message:
    """The user's message: text, then sound. The parts of the text follow each other without a space, as released."""
    text = _REQUEST
    if topic:
        text += _TOPIC.format(topic)
    if keywords:
        text += _KEYWORDS.format(",".join(keywords))
    return Message(
        role="user", parts=(TextPart(text=text), MediaPart(kind="audio", data=features, where=where))
    )


def answer_start(language: str | None) -> str:
    """How an answer begins that is in `language`, by the model's name for it; the model continues it."""
    return f"{language}\t" if language else ""


class Transcript:
    """The text of one answer while it is written: `English⇥hello` is `hello`, without white space at its ends.

    `begin`: characters of the answer before the text, as far as they are known.
    """

    def __init__(self, language: str | None) -> None:
        """`language`: the one that the prompt states; None: the answer begins with it."""
        self.language = language
        self.text = ""
        self.begin = 0
        self._pending = ""  # what may be the name of the language, then white space that text may follow
        self._is_begun = language is not None

    def push(self, text: str) -> str:
        """What can be shown of the transcript now."""
        self._pending += text
        if not self._is_begun:
            name, tab, rest = self._pending.partition("\t")
            if not tab and len(name) <= _MAX_LANGUAGE:
                return ""
            self._is_begun = True
            if tab and len(name) <= _MAX_LANGUAGE:
                self.language, self._pending = name.strip() or None, rest
                self.begin = len(name) + 1
        return self._take()

    def finish(self) -> str:
        """The rest: all of an answer that states no language."""
        self._is_begun = True
        return self._take()

    def _take(self) -> str:
        whole = self._pending if self.text else self._pending.lstrip()
        self.begin += len(self._pending) - len(whole)
        shown = whole.rstrip()
        self._pending = whole[len(shown) :]
        self.text += shown
        return shown


def separator(before: str, after: str) -> str:
    """What stands between two texts: nothing beside a character of a language that writes no spaces."""
    return "" if not before or not after or _is_dense(before[-1]) or _is_dense(after[0]) else " "


def _is_dense(character: str) -> bool:
    is_hangul = "\uac00" <= character <= "\ud7a3"
    return unicodedata.east_asian_width(character) in ("W", "F") and not is_hangul
