"""A conversation: parsing a request gives its messages, and a prompt is written from them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mingc.prompts.features import Features

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    text: str

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """One image, audio clip or video, by reference.

    Attributes:
        data: a client's URL, path or base64 string, which `mingc.server` loads; then encoded bytes, which a
            `MediaDecoder` decodes; or features.
        where: names the part in error messages (`messages[0].content[1].image_url.url`).
        is_base64: whether a string is the data itself, with or without a `data:` prefix.
        max_pixels: an image with more is scaled down to so many; None: only as the model requires it.
        num_tokens: how many tokens of a prompt its features are; None: they are not known yet.
    """

    kind: MediaKind
    data: str | bytes | memoryview | Features
    where: str
    is_base64: bool = False
    max_pixels: int | None = None
    num_tokens: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the data; characters if it is a string."""
        return len(self.data) if isinstance(self.data, str | bytes | memoryview) else self.data.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that an earlier answer made. `arguments`: JSON, as the model wrote it."""

    name: str
    arguments: str

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.name) + len(self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThoughtPart:
    """What the model thought before an earlier answer. The prompt has it while the answer's turn lasts."""

    text: str

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensPart:
    """Text of an earlier answer by the token ids that the model wrote, without special tokens.

    The prompt has them as they are, so that the prefix cache serves it: tokenizing their text may give other ids.
    """

    ids: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of tokens: each has a character or, of a long one, a part of it."""
        return len(self.ids)


Part = TextPart | MediaPart | ToolCall | ThoughtPart | TokensPart


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation. A message with empty content has no parts. A `tool` message is a call's result."""

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """All text of the message, joined; without `TokensPart`s."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def prompt_text(self) -> str:
        """All that the prompt may say of the message besides its media: its text, thoughts and calls of tools."""
        calls = (part.name + part.arguments for part in self.parts if isinstance(part, ToolCall))
        thoughts = (part.text for part in self.parts if isinstance(part, ThoughtPart))
        return "".join((self.text, *calls, *thoughts))

    @property
    def has_tools(self) -> bool:
        """Whether it has calls of tools, or is the result of one."""
        return self.role == "tool" or any(isinstance(part, ToolCall) for part in self.parts)

    @property
    def size(self) -> int:
        """Characters of its text and bytes of its media."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoParams:
    """Frame sampling and size limits of videos. None selects the artifact's default.

    `use_audio`: whether the sound of a video follows it in the prompt, as if it were a clip after the video.
    """

    fps: float | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    use_audio: bool = False
