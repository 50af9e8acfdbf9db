"""A conversation: its messages with text and media. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Role = Literal["system", "user", "assistant"]
MediaKind = Literal["image", "audio", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """One encoded image, audio clip or video. `where` names it in error messages (`messages[0].content[1]`)."""

    kind: MediaKind
    data: bytes | memoryview
    where: str


_Media = TypeVar("_Media", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message(Generic[_Media]):
    """One message of a conversation, in the client's order. No parts: empty content.

    `_Media` is the form that its media have: a source (URL, path or base64 string) after parsing, encoded bytes
    (`MediaPart`) in a request, decoded features in preprocessing.
    """

    role: Role
    parts: tuple[TextPart | _Media, ...]

    @property
    def text(self) -> str:
        """All text of the message, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoParams:
    """Frame sampling and size limits of videos. None selects the artifact's default."""

    fps: float | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
