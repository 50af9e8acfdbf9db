"""The interface of a media decoder for prompts, and its tasks; `mingc.media` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.prompts.conversation import MediaKind, VideoParams
from mingc.prompts.features import AudioFeatures, Features
from mingc.prompts.picture_sizes import DEFAULT_RESOLUTION, Size

NO_SOUND = "no_audio_track"  # code of the error for a file without sound


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTask:
    """One medium to decode.

    Attributes:
        where: names the medium in errors.
        max_bytes: most host memory for decoding and for the result.
        kind: `voice` is the recording of a speaker, `reference` a picture to draw from.
        vision, audio: parameters of the encoder for `kind`; the other one is None.
        max_pixels: an image with more is scaled down to so many; None: only as the encoder requires it.
        max_tokens: most tokens of the medium; None: no limit.
        num_media: this medium and those that follow it, which share the tokens.
        is_stream: whether sound is returned in blocks of samples, not as features.
        asked, aspect, resolution: of the picture that is drawn from a reference: the size asked for, or else its
            width / height; None: those of the reference.
    """

    kind: MediaKind | Literal["voice", "reference"]
    where: str
    max_bytes: int
    vision: VisionParameters | None = None
    audio: AudioParameters | None = None
    video: VideoParams = field(default_factory=VideoParams)
    max_pixels: int | None = None
    max_tokens: int | None = None
    num_media: int = 1
    is_stream: bool = False
    asked: Size | None = None
    aspect: float | None = None
    resolution: int = DEFAULT_RESOLUTION


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRules:
    """When speech begins and ends, by the probability of speech of each 32 ms.

    Attributes:
        threshold: probability from which a frame is speech; below this − 0.15 it is silence.
        prefix_padding_ms: what belongs to a turn before its first speech.
        silence_ms: so much silence ends a turn.
        max_ms: a longer turn is cut where speech is least probable; None: no limit.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_ms: int = 500
    max_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechSegment:
    """Speech between silences. Times count from the beginning of the file.

    `features` also have the padding around it. `probability`: mean probability of speech.
    """

    start_ms: int
    end_ms: int
    probability: float
    features: AudioFeatures


class SpeechReader(Protocol):
    """Finds the segments of speech in one file, from its beginning to its end, in constant memory."""

    @property
    def duration_ms(self) -> int:
        """How much of the file was read."""
        ...

    def read(self) -> Sequence[SpeechSegment] | None:
        """Read on for some seconds of sound: the segments that ended there; None after the end. Blocks.

        Raises: see `MediaDecoder.run`.
        """
        ...

    def close(self) -> None:
        """Stop, also while another thread reads."""
        ...


class MediaDecoder(Protocol):
    """Decodes media for prompts, on several threads. The service that gets it starts and closes it."""

    @property
    def max_bytes(self) -> int:
        """Most host memory for the media of one prompt, including the medium that is being decoded."""
        ...

    @property
    def limits(self) -> Mapping[str, int]:
        """Limits of files, for clients, as docs/http-api.md names them."""
        ...

    def prepare(self) -> None:
        """Begin to prepare for the first medium; does not wait."""
        ...

    def start(self) -> None:
        """Wait until the first medium can be decoded. Raises: ConfigError when a library is missing."""
        ...

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        """Features of the encoded medium `data`.

        Raises: RequestError when it cannot be decoded or exceeds a limit, ConfigError when a library is missing.
        """
        ...

    def read_speech(self, task: MediaTask, data: bytes | memoryview, rules: TurnRules) -> SpeechReader:
        """Read the speech of a file, whose `task` has `audio`. Nothing is decoded before `SpeechReader.read`."""
        ...

    def close(self) -> None:
        """Free what decoding needs; running tasks fail."""
        ...
