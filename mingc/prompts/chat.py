"""Messages of a conversation → the prompt of the thinker.

The format follows the reference's processor, not the tokenizer's jinja template (spec: thinker.md §6.1, D6).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mingc.artifacts.parameters import AudioParameters, ThinkerParameters, VisionParameters
from mingc.errors import RequestError
from mingc.prompts.conversation import (
    MediaKind,
    MediaPart,
    Message,
    Part,
    TextPart,
    ThoughtPart,
    TokensPart,
    ToolCall,
    VideoParams,
)
from mingc.prompts.features import AudioFeatures, Features, ReferencePicture, VideoFeatures, VoiceClip
from mingc.prompts.media_decoder import (
    NO_SOUND,
    MediaDecoder,
    MediaTask,
    SpeechReader,
    TurnRules,
)
from mingc.prompts.positions import compute_positions
from mingc.prompts.prompt_writer import MediaFeatures, PicturePrompt, PreparedPrompt, PromptWriter
from mingc.prompts.thinker_prompt import AUDIO, VISION, WORD, ThinkerPrompt
from mingc.prompts.tokenizer import TextTokenizer
from mingc.prompts.tools import Tool, ToolTokens, find_tool_tokens, tool_block

_ROLES = {"system": "SYSTEM", "user": "HUMAN", "assistant": "ASSISTANT", "tool": "OBSERVATION"}

# A client may keep the thought of an answer in its text.
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)

_BLOCK_TOKENS = 3  # start and end of an image or clip, and its newline

_Parameters = TypeVar("_Parameters", AudioParameters, VisionParameters)


@dataclass(kw_only=True, slots=True)
class _Left:
    """What the media of a prompt may still take, and how many share it."""

    num_bytes: int
    num_tokens: int
    num_media: int


class ChatProcessor:
    """Builds the prompts of one artifact. Thread-safe; what it remembers does not change a prompt.

    Args:
        vision, audio: None for an artifact without the encoder; media of this kind are then refused.
        max_tokens: most tokens of a prompt with its answer; None: as many as the model has positions.
        parse_special_tokens: whether special tokens in the text of messages are recognised, so that their author can
            write roles and turns; otherwise they are plain text. Media stay at the position of their parts.
        decoder: decodes media one by one; None: encoded media are refused.
        cached_characters: recent texts of so many characters keep their token ids.

    Attributes:
        tool_tokens: None if the tokenizer lacks one of them; tools are then refused.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        thinker: ThinkerParameters,
        *,
        vision: VisionParameters | None,
        audio: AudioParameters | None,
        max_tokens: int | None = None,
        parse_special_tokens: bool = False,
        decoder: MediaDecoder | None = None,
        cached_characters: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = tokenizer.cached_encoder(cached_characters, parse_special_tokens=parse_special_tokens)
        self._decoder = decoder
        self.tool_tokens = find_tool_tokens(tokenizer)
        self._role_start, self._role_end, self._turn_end = map(
            tokenizer.token_id, ("<role>", "</role>", "<|role_end|>")
        )
        self._max_tokens = thinker.max_positions if max_tokens is None else max_tokens
        self._max_characters = self._max_tokens * tokenizer.longest_token
        self._thinker = thinker
        self._vision = vision
        self._audio = audio

    @property
    def merge_size(self) -> int:
        """Patches along one side of a vision token."""
        return 1 if self._vision is None else self._vision.merge_size

    def forget_texts(self) -> None:
        """Tokenize every text of later prompts anew."""
        self._encode.clear()

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        video: VideoParams | None = None,
        thinking: bool = False,
        answer: str = "",
    ) -> PreparedPrompt:
        """Write the prompt of a conversation. Media are decoded one after another and share one memory limit.

        System messages at the beginning are joined by newlines. Later ones, tools, earlier calls and their results, and
        the thoughts of answers after the last user message stand as the released template writes them; earlier thoughts
        are left out. Media stand where their parts stand, whatever the text says; the reference drops one medium for
        each literal tag of its kind (`<image>`). The answer begins with `answer`, which the model continues.

        Raises: RequestError naming the message or its part, or when the prompt leaves no room for an answer.
        """
        writer = self._write_with_media(messages, tools, video or VideoParams(), thinking)
        writer.text(answer)
        writer.close()
        return self._finish(writer)

    def prepare_picture(
        self, messages: Sequence[Message], *, num_queries: Sequence[int], param: str = "messages"
    ) -> PicturePrompt:
        """Write the prompt of a picture: as of an answer, then a block of so many learned rows for each scale.

        The hidden rows of the last block are the answer (`ThinkerPrompt.queries`). `media_embeds` of the prompt end
        with the learned rows of all blocks; `text` is what `glyph_text` reads (spec: imagegen.md §1, §2.1).
        `param`: what errors call the messages.

        Raises: as `prepare`.
        """
        num_tokens = sum(count + 2 for count in num_queries)
        writer = self._write_with_media(messages, (), VideoParams(), False, num_tokens, param)
        for count in num_queries:
            writer.query_block(count)
        said = (
            each if isinstance(each, str) else self._tokenizer.decode(each, skip_special_tokens=False)
            for each in writer.said
        )
        return PicturePrompt(self._finish(writer, param), "".join(said))

    def _write_with_media(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        video: VideoParams,
        thinking: bool,
        num_reserved: int = 0,
        param: str = "messages",
    ) -> PromptWriter:
        """Write a conversation with its media, so that `num_reserved` tokens may follow. Raises: as `prepare` does."""
        check_messages(messages)
        self._check_length(messages, tools, param)
        left = _Left(
            num_bytes=0 if self._decoder is None else self._decoder.max_bytes,
            num_tokens=0,
            num_media=sum(
                len(_kinds(part, video))
                for message in messages
                for part in message.parts
                if isinstance(part, MediaPart)
            ),
        )
        if left.num_media:
            num_text = len(self._write(messages, tools, thinking, lambda part: ()).ids)
            left.num_tokens = self._max_tokens - 1 - num_text - num_reserved - _BLOCK_TOKENS * left.num_media
        return self._write(messages, tools, thinking, lambda part: self._features(part, video, left))

    def prepare_text(self, prompt: str | Sequence[int]) -> PreparedPrompt:
        """Write a prompt without the chat template, from a text or from token ids.

        Raises: RequestError naming the token that is unknown or that stands for a medium, and as `prepare` does.
        """
        if not prompt:
            raise RequestError("the prompt is empty", fix="send a text or token ids", param="prompt")
        writer = PromptWriter(self._encode, self._thinker, merge_size=self.merge_size)
        if not isinstance(prompt, str):
            self._check_tokens(prompt)
        writer.ids += self.tokenize(prompt) if isinstance(prompt, str) else prompt
        return self._finish(writer, "prompt")

    def decode(self, part: MediaPart) -> MediaPart:
        """The part with its features, of a video without its sound. Raises: as `prepare` does."""
        check_messages([Message(role="user", parts=(part,))])
        features = self._decode(part, part.kind, VideoParams(), self._one_medium())
        assert features is not None, "only the sound of a video may be missing"
        return replace(
            part, data=features, is_base64=False, num_tokens=_num_tokens(features, self.merge_size)
        )

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        video: VideoParams | None = None,
        thinking: bool = False,
    ) -> Sequence[int]:
        """How many tokens of the prompt that `prepare` writes belong to each message, also if they exceed the context.

        The first number is of the rest: the system block, to which system messages at the beginning belong, and the
        role of the answer. A message that cannot fit is not tokenized; it has at least as many as returned.
        """
        check_messages(messages)
        self._check_characters(sum(len(tool.definition) for tool in tools), "tools")
        lengths = [_num_characters(message) for message in messages]
        texts = [
            replace(message, parts=()) if length > self._max_characters else message
            for message, length in zip(messages, lengths, strict=True)
        ]
        video = video or VideoParams()
        writer = self._write(
            texts, tools, thinking, lambda part: self._features(part, video, self._one_medium())
        )
        sizes = [end - start for start, end in itertools.pairwise(writer.ends)]
        sizes = [len(writer.ids) - sum(sizes), *[0] * (len(messages) - len(sizes)), *sizes]
        for index, length in enumerate(lengths, 1):
            if length > self._max_characters:
                sizes[index] += length * self._max_tokens // self._max_characters
        return sizes

    def _one_medium(self) -> _Left:
        """What a medium may take in a prompt without text."""
        num_bytes = 0 if self._decoder is None else self._decoder.max_bytes
        return _Left(num_bytes=num_bytes, num_tokens=self._max_tokens - 1 - _BLOCK_TOKENS, num_media=1)

    def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of a text, also of one that exceeds the context. Raises: RequestError when it is far longer."""
        self._check_characters(len(text), "prompt")
        return self._encode(text)

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        thinker = self._thinker
        media = {thinker.image_patch_token, thinker.frame_patch_token, thinker.audio_patch_token}
        for index, token in enumerate(prompt):
            where = f"prompt[{index}]"
            if not 0 <= token < thinker.vocab_size:
                what = f"token {token} is not one of the model's {thinker.vocab_size}"
                raise RequestError(what, where=where, fix="leave it out", param=where, code="invalid_value")
            if token in media:
                what = f"token {token} stands for a part of an image, video or clip"
                raise RequestError(
                    what, where=where, fix="send media in a chat", param=where, code="invalid_value"
                )

    def read_speech(self, audio: bytes | memoryview, where: str, rules: TurnRules) -> SpeechReader:
        """Find the speech in an encoded file. Raises: RequestError without an encoder of sound or a decoder."""
        task = MediaTask(
            kind="audio", where=where, max_bytes=0, audio=_require_encoder(self._audio, "audio", where)
        )
        if self._decoder is None:
            raise _no_decoder(where)
        return self._decoder.read_speech(task, audio, rules)

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        thinking: bool,
        decode: Callable[[MediaPart], Iterable[Features]],
    ) -> PromptWriter:
        """Write all texts, and the media that `decode` gives."""
        turns = list(itertools.dropwhile(lambda message: message.role == "system", messages))
        system = [message.text for message in messages[: len(messages) - len(turns)]]
        writer = PromptWriter(self._encode, self._thinker, merge_size=self.merge_size)
        self._write_role(writer, "SYSTEM")
        writer.text("\n".join(system) if system else self._thinker.default_system_text)
        suffix = self._thinker.thinking_suffix.format(state="on" if thinking else "off")
        if tools:
            line = suffix.lstrip("\n")
            writer.text(suffix.removesuffix(line))  # what separates the system text from what follows it
            for piece in tool_block(tools, self._require_tool_tokens("tools")):
                writer.text(piece) if isinstance(piece, str) else writer.token(piece)
            suffix = "\n" + line
        writer.text(suffix)
        writer.token(self._turn_end)
        writer.mark()
        last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=len(turns))
        for index, message in enumerate(turns):
            is_result = message.role == "tool"
            if not (is_result and index and turns[index - 1].role == "tool"):
                self._write_role(writer, _ROLES[message.role])
            if is_result:
                self._write_result(writer, message.text)
            else:
                thought, parts = _split_thought(message)
                if thought and index > last_user:
                    writer.text(f"\n<think>\n{thought}\n</think>\n\n")
                self._write_parts(writer, parts, decode)
            if not (is_result and index + 1 < len(turns) and turns[index + 1].role == "tool"):
                writer.token(self._turn_end)
            writer.mark()
        self._write_role(writer, "ASSISTANT")
        writer.close()
        return writer

    def _write_role(self, writer: PromptWriter, role: str) -> None:
        writer.token(self._role_start)
        writer.text(role)
        writer.token(self._role_end)

    def _write_parts(
        self,
        writer: PromptWriter,
        parts: Sequence[Part],
        decode: Callable[[MediaPart], Iterable[Features]],
    ) -> None:
        for place, part in enumerate(parts):
            if isinstance(part, ToolCall):
                tokens = self._require_tool_tokens("messages")
                writer.text("\n" if place else "")
                writer.token(tokens.call_start)
                name = json.dumps(part.name, ensure_ascii=False)
                writer.text(f'\n{{"name": {name}, "arguments": {part.arguments}}}\n')
                writer.token(tokens.call_end)
            elif isinstance(part, MediaPart):
                for features in decode(part):
                    writer.media(features)
            elif isinstance(part, TokensPart):
                writer.tokens(part.ids)
            else:
                writer.text(part.text)

    def _write_result(self, writer: PromptWriter, text: str) -> None:
        """Write the result of a call."""
        tokens = self._require_tool_tokens("messages")
        writer.text("\n")
        writer.token(tokens.response_start)
        writer.text(f"\n{text}\n")
        writer.token(tokens.response_end)

    def _require_tool_tokens(self, param: str) -> ToolTokens:
        if self.tool_tokens is None:
            raise RequestError(
                "the tokenizer of this model has no tokens for calls of tools",
                where=param,
                fix="leave out 'tools', and messages with calls and results",
                param=param,
                code="unsupported_parameter",
            )
        return self.tool_tokens

    def _features(self, part: MediaPart, video: VideoParams, left: _Left) -> Iterator[Features]:
        for kind in _kinds(part, video):
            features = self._decode(part, kind, video, left)
            left.num_media -= 1
            if features is not None:
                left.num_bytes -= features.num_bytes
                left.num_tokens -= _num_tokens(features, self.merge_size)
                yield features

    def _decode(self, part: MediaPart, kind: MediaKind, video: VideoParams, left: _Left) -> Features | None:
        """Decode a part; None for the sound of a silent video."""
        if not isinstance(part.data, str | bytes | memoryview):
            return part.data
        assert not isinstance(part.data, str), "the server loads references"
        is_audio = kind == "audio"
        task = MediaTask(
            kind=kind,
            where=part.where,
            vision=None if is_audio else _require_encoder(self._vision, kind, part.where),
            audio=_require_encoder(self._audio, kind, part.where) if is_audio else None,
            video=video,
            max_pixels=part.max_pixels,
            max_bytes=left.num_bytes,
            max_tokens=left.num_tokens,
            num_media=left.num_media,
        )
        if self._decoder is None:
            raise _no_decoder(part.where)
        try:
            return self._decoder.run(task, part.data)
        except RequestError as error:
            if error.code == NO_SOUND and part.kind == "video":
                return None
            raise

    def _check_length(
        self, messages: Sequence[Message], tools: Sequence[Tool], param: str = "messages"
    ) -> None:
        """Refuse texts that cannot fit before tokenizing: 100 MB take minutes and gigabytes of memory."""
        num_characters = sum(map(_num_characters, messages)) + sum(len(tool.definition) for tool in tools)
        self._check_characters(num_characters, param)

    def _check_characters(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_characters:
            raise _too_long(f"far too many tokens in {num_characters} characters", self._max_tokens, param)

    def _finish(self, writer: PromptWriter, param: str = "messages") -> PreparedPrompt:
        num_tokens = len(writer.ids)
        if num_tokens >= self._max_tokens:
            raise _too_long(f"{num_tokens} tokens", self._max_tokens, param)
        positions, delta = compute_positions(
            num_tokens,
            writer.grids,
            merge_size=self.merge_size,
            temporal_scale=self._thinker.temporal_position_scale,
        )
        embed_kind = np.full(num_tokens, WORD, dtype=np.int64)
        for span in writer.spans:
            embed_kind[span.start : span.start + span.length] = AUDIO if span.kind == "audio" else VISION
        prompt = ThinkerPrompt(
            input_ids=np.asarray(writer.ids, dtype=np.int64),
            positions=positions,
            rope_delta=delta,
            embed_kind=embed_kind,
            queries=writer.queries,
        )
        media = MediaFeatures(
            spans=tuple(writer.spans), vision=tuple(writer.vision), audio=tuple(writer.audio)
        )
        return PreparedPrompt(tokens=prompt, media=media)


def _split_thought(message: Message) -> tuple[str, Sequence[Part]]:
    """The thought of an answer without line breaks around it, and its other parts."""
    thought = "".join(part.text for part in message.parts if isinstance(part, ThoughtPart))
    parts = [part for part in message.parts if not isinstance(part, ThoughtPart)]
    first = parts[0] if parts and message.role == "assistant" else None
    found = _THOUGHT.match(first.text) if isinstance(first, TextPart) else None
    if found is not None:
        rest = found.string[found.end() :]
        parts[:1] = [TextPart(text=rest)] if rest else []
        thought = thought or found[1]
    return thought.strip("\n"), parts


def _num_characters(message: Message) -> int:
    """Of what is written of a message besides its media."""
    return sum(part.size for part in message.parts if not isinstance(part, MediaPart))


def _num_tokens(features: Features, merge_size: int) -> int:
    if isinstance(features, AudioFeatures):
        return features.num_tokens
    assert not isinstance(features, VoiceClip | ReferencePicture), "no part of a prompt"
    vision = features.vision if isinstance(features, VideoFeatures) else features
    return vision.num_tokens(merge_size)


def _too_long(found: str, max_tokens: int, param: str) -> RequestError:
    return RequestError(
        f"the prompt has {found}, the context holds {max_tokens} with the answer",
        where=param,
        fix="send fewer or shorter messages, or smaller media"
        if param == "messages"
        else "send a shorter one",
        param=param,
        code="context_length_exceeded",
    )


def _kinds(part: MediaPart, video: VideoParams) -> Sequence[MediaKind]:
    """What is decoded from a part, in the order of the prompt; the official code has no rule for sound of videos."""
    has_sound = part.kind == "video" and video.use_audio and isinstance(part.data, bytes | memoryview)
    return ("video", "audio") if has_sound else (part.kind,)


def _no_decoder(where: str) -> RequestError:
    return RequestError("this service decodes no media", where=where, fix="send text only", param=where)


def _require_encoder(parameters: _Parameters | None, kind: MediaKind, where: str) -> _Parameters:
    if parameters is None:
        raise RequestError(
            f"this model was exported without an encoder for {kind} input",
            where=where,
            fix=f"leave the {kind} out, or serve an artifact that has the encoder",
            param=where,
            code="unsupported_modality",
        )
    return parameters


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse conversations that the chat format cannot express. Raises: RequestError for the first problem."""

    def refuse(what: str, where: str, fix: str) -> RequestError:
        return RequestError(what, where=where, fix=fix, param=where)

    if not messages:
        raise refuse("the conversation has no message", "messages", "send at least one")
    for message in messages:
        is_answer = message.role == "assistant"
        assert is_answer or not any(isinstance(part, TokensPart) for part in message.parts), (
            "ids of an answer"
        )
        media = [part for part in message.parts if isinstance(part, MediaPart)]
        if media and message.role != "user":
            what = f"{message.role} messages are text only, this one has {media[0].kind} input"
            raise refuse(what, media[0].where, "put the media into a user message")
        videos = [part for part in media if part.kind == "video"]
        if len(videos) > 1:
            what = f"one message has {len(videos)} videos"
            raise refuse(what, videos[1].where, "send one video per message")
