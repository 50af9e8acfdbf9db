"""Text, voice and style → the prompt of the talker (spec: talker.md §4, §12).

Each piece is tokenized separately and the ids are concatenated. The prompt names the rows of speaker vectors and
embedded prompt patches; the caller provides the vectors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mingc.errors import RequestError
from mingc.prompts.tokenizer import TextTokenizer

SPEECH_TASK = "Please generate speech based on the following description.\n"

_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
# A text with all of these describes music and gets no "Text input" header.
_MUSIC_MARKS = ("Genre: ", "Mood: ", "Instrument: ", "Theme: ", "Duration: ")

_BGM_KEYS = ("Genre", "Mood", "Instrument", "Theme", "ENV", "SNR")
_CAPTION_KEYS = ("序号", "说话人", "方言", "风格", "语速", "基频", "音量", "情感", "BGM", "IP")
_CAPTION_KEYS_WITH_SNR = ("序号", "说话人", "BGM", "情感", "方言", "风格", "语速", "基频", "音量", "IP")
_STYLE_KEY = "风格"
_MAX_CACHED_PIECES = 256  # token ids of templates and transcripts

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechPrompt:
    """The talker's prompt; T tokens.

    `token_ids` (T,) int64. `speaker_rows` (n,) int64: rows of the speaker vectors. `patch_rows` (N,) int64: rows of the
    embedded prompt patches, at the end of the prompt. The first `prefix_length` tokens depend on the voice but not on
    the text, so their keys and values can be cached; the prefix of a text that describes music is shorter.
    """

    token_ids: NDArray[np.int64]
    speaker_rows: NDArray[np.int64]
    patch_rows: NDArray[np.int64]
    prefix_length: int


class SpeechPromptBuilder:
    """Builds talker prompts with the talker's tokenizer. Thread-safe.

    With `parse_special_tokens` it recognises special tokens in texts, transcripts and instructions; otherwise they are
    plain text.
    """

    def __init__(self, tokenizer: TextTokenizer, *, parse_special_tokens: bool = False) -> None:
        self._encode_text = tokenizer.encode if parse_special_tokens else tokenizer.encode_plain
        # Templates and voice transcripts recur in every segment.
        self._encode_template = lru_cache(_MAX_CACHED_PIECES)(lambda text: tuple(tokenizer.encode(text)))
        self._encode_transcript = lru_cache(_MAX_CACHED_PIECES)(lambda text: tuple(self._encode_text(text)))
        self._speaker = [tokenizer.token_id(f"<|vision_{name}|>") for name in ("start", "pad")]
        self._audio = tokenizer.token_id("<audio>")
        self._audio_patch = tokenizer.token_id("<audioPatch>")

    def build(
        self,
        text: str,
        *,
        num_speakers: int = 0,
        transcript: str | None = None,
        num_prompt_patches: int = 0,
        instruction: str | None = None,
        task: str = SPEECH_TASK,
    ) -> SpeechPrompt:
        """Build the prompt of one segment of text.

        `transcript` and `num_prompt_patches` describe the recording of the voice and are used only together.
        `instruction` is inserted unchanged; see `caption_instruction`.

        Raises: RequestError for blank text.
        """
        if not text.strip():
            raise RequestError(
                "there is no text to speak", where="input", fix="send some text", param="input"
            )
        encode = self._encode_template
        has_recording = bool(transcript) and num_prompt_patches > 0
        ids = [*encode(_SYSTEM), *encode("<|im_start|>user\n"), *encode(task)]
        speaker_rows: list[int] = []
        for number in range(1, num_speakers + 1):
            ids += [*encode(f"  speaker_{number}:"), *self._speaker]
            speaker_rows.append(len(ids) - 1)
            ids += encode("<|vision_end|>\n")
        is_music = all(mark in text for mark in _MUSIC_MARKS)
        prefix_length = len(ids)
        if not is_music:
            ids += encode(" Text input:\n")
        if has_recording and transcript:
            ids += self._encode_transcript(transcript)
        if not is_music:
            prefix_length = len(ids)
        ids += [*self._encode_text(text), *encode("<|im_end|>\n"), *encode("<|im_start|>assistant\n")]
        if instruction:
            ids += [*self._encode_text(instruction), *encode("<|im_end|>")]
        ids.append(self._audio)
        num_patches = num_prompt_patches if has_recording else 0
        patch_rows = np.arange(len(ids), len(ids) + num_patches, dtype=np.int64)
        return SpeechPrompt(
            token_ids=np.asarray(ids + [self._audio_patch] * num_patches, dtype=np.int64),
            speaker_rows=np.asarray(speaker_rows, dtype=np.int64),
            patch_rows=patch_rows,
            prefix_length=prefix_length,
        )


def _caption(fields: dict[str, Json]) -> dict[str, Json]:
    """A complete caption with `fields` filled in; unknown names are dropped."""
    background = fields.get("BGM")
    sounds: dict[str, Json] = dict.fromkeys(_BGM_KEYS)
    if isinstance(background, dict):
        sounds |= {key: value for key, value in background.items() if key in sounds}
    values: dict[str, Json] = dict.fromkeys(_CAPTION_KEYS)
    values |= {"序号": 1, "说话人": "speaker_1"}
    values |= {key: value for key, value in fields.items() if key in values} | {"BGM": sounds}
    order = _CAPTION_KEYS if sounds["SNR"] is None else _CAPTION_KEYS_WITH_SNR
    return {key: values[key] for key in order}


def _known_fields(item: Json) -> Json:
    """An entry of a client's complete caption without unknown names, in the client's order."""
    if not isinstance(item, dict):
        return item
    known = {key: value for key, value in item.items() if key in _CAPTION_KEYS}
    background = known.get("BGM")
    if isinstance(background, dict):
        known["BGM"] = {key: value for key, value in background.items() if key in _BGM_KEYS}
    return known


def caption_instruction(instructions: str, where: str = "instructions") -> str | None:
    """Convert a client's instructions to the caption JSON that the talker was trained on; None if blank.

    Plain text becomes the style of a caption. A JSON object gives fields of a caption or, with `audio_sequence`, a
    complete caption. Unknown names are dropped.

    Raises: RequestError for text that starts like a JSON object but is not one, or whose strings are not text.
    """
    style = instructions.strip()
    if not style:
        return None
    caption: dict[str, Json]
    if style.startswith("{"):
        try:
            given: dict[str, Json] = json.loads(style)
        except ValueError as error:
            raise RequestError(
                f"the instructions start like a JSON object but are not valid JSON: {error}",
                where=where,
                fix='send plain text, or an object such as {"情感": "高兴"}',
                param=where,
            ) from error
        sequence = given.get("audio_sequence")
        items: Sequence[Json] = sequence if isinstance(sequence, list) else [dict(_caption(given))]
        caption = {"audio_sequence": [_known_fields(item) for item in items]}
    else:
        caption = {"audio_sequence": [dict(_caption({_STYLE_KEY: style}))]}
    text = json.dumps(caption, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "a string of the instructions holds half of a surrogate pair, which is not text",
            where=where,
            fix="escape both halves of the character, or send it as it is",
            param=where,
        ) from error
    return text
