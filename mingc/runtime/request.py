"""What a client asks and what it gets: plain data between the HTTP layer and the service.

Media are encoded bytes here (a PNG, a WAV, an MP4); they become tensors in `mingc.runtime.preprocess`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mingc.errors import ServeError

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """One encoded image, audio clip or video. `where` names it in error messages (`messages[0].content[1]`)."""

    kind: Literal["image", "audio", "video"]
    data: bytes
    where: str


_Media = TypeVar("_Media")


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


# Below, no token but the likeliest has a chance, and differences of logits divided by it leave what float32 holds.
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when no other is. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0
    are off. With `ignore_eos` a token that ends answers is one like others.
    """

    max_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; else each is the likeliest."""
        return self.temperature >= LEAST_TEMPERATURE and self.top_k != 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechParams:
    """How speech is made. None means the default of the artifact."""

    voice: str | None = None
    instructions: str | None = None
    seed: int | None = None
    max_steps: int | None = None
    guidance: float | None = None
    sigma: float | None = None
    temperature: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoParams:
    """Sampling overrides of videos; None keeps the artifact's."""

    fps: float | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A conversation to answer. The answer always has text; it has speech if `speech` is given."""

    request_id: str
    messages: tuple[Message[MediaPart], ...]
    sampling: SamplingParams
    speech: SpeechParams | None = None
    video: VideoParams = field(default_factory=VideoParams)
    thinking: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechRequest:
    """Text to be spoken."""

    request_id: str
    text: str
    speech: SpeechParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_patches: int = 0
    audio_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """The text that one new token makes visible (may be empty while a character is incomplete)."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioDelta:
    """Samples of one patch: (n,) float32 mono in [-1, 1] at the artifact's sample rate."""

    samples: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDone:
    """The text is whole; speech may still be coming."""

    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Last event of a request. `timings_ms`: milliseconds since arrival of named moments (first_token, first_audio)."""

    finish_reason: FinishReason
    usage: Usage
    timings_ms: dict[str, float] = field(default_factory=dict)


Event = TextDelta | AudioDelta | TextDone | Done


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceInfo:
    """What the HTTP layer may promise."""

    model: str
    sample_rate: int
    voices: tuple[str, ...]
    default_voice: str | None
    has_text: bool  # thinker present: chat works
    has_image: bool
    has_video: bool
    has_audio_input: bool
    has_speech: bool
    max_model_len: int | None = None  # of one prompt and its answer; None without a thinker
    max_total_tokens: int | None = None  # of all prompts and answers together; None without a thinker
    all_reduce: str | None = None  # how the thinker's ranks sum up, and why; None for one rank


class Service(Protocol):
    """The running model behind the HTTP layer.

    `chat` and `speech` yield events until `Done`; closing the iterator cancels the request, which frees its pages
    and slots at the next step. They raise RequestError before the first event when the request cannot be served,
    CapacityError when queues are full, WorkerError when an engine fails.
    """

    @property
    def info(self) -> ServiceInfo: ...

    @property
    def is_ready(self) -> bool: ...

    def on_end(self, told: Callable[[ServeError], None]) -> None:
        """Have `told` called once when the service has ended by itself and the process should, too.

        It may be called on any thread, and is called at once when that has happened already.
        """
        ...

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]: ...

    def speech(self, request: SpeechRequest) -> AsyncIterator[Event]: ...

    async def close(self, *, shutdown_timeout_s: float) -> None:
        """Stop: refuse new requests, let running ones go on for `shutdown_timeout_s`, then fail the rest with
        WorkerError."""
        ...
