"""Voices: what the talker needs of one, what clients send for a new one, and what they are told. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mingc.errors import RequestError

_MAX_NAMES = 20  # in an error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VoicePack:
    """A registered voice.

    Attributes:
        transcript: of the recording; empty without one.
        latents: (N·p, latent) float32, latents of the recording.
        embeds: (N, D) float32, one row per patch.
        speaker: (D,) float32.
    """

    name: str
    transcript: str
    latents: NDArray[np.float32]
    embeds: NDArray[np.float32]
    speaker: NDArray[np.float32]

    @property
    def num_bytes(self) -> int:
        """Host memory of the tensors."""
        return self.latents.nbytes + self.embeds.nbytes + self.speaker.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class VoiceSample:
    """A speaker as a client describes one: an encoded recording and what it says, or the speaker vector alone.

    Attributes:
        recording: what a client sent (a URL or base64), which `mingc.server` loads; then the encoded bytes.
        transcript: None: the model transcribes the recording.
        where: what errors call the recording.
    """

    recording: bytes | str = field(default=b"", repr=False)
    transcript: str | None = None
    vector: tuple[float, ...] = field(default=(), repr=False)
    where: str = "ref_audio"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewVoice:
    """A voice to be kept. `consent`: what the speaker has agreed to, or where that is recorded."""

    name: str
    consent: str
    sample: VoiceSample
    description: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VoiceInfo:
    """What clients are told about a voice.

    Attributes:
        id: of an uploaded voice; the name of one of the artifact's.
        created_at: Unix time in seconds; 0 for the artifact's.
        seconds: length of the recording; None without one.
    """

    id: str
    name: str
    kind: Literal["built_in", "audio_sample", "speaker_embedding"]
    transcript: str | None = None
    created_at: int = 0
    consent: str | None = None
    description: str | None = None
    seconds: float | None = None


def voice_not_found(name: str, names: Sequence[str], param: str = "voice") -> RequestError:
    """The error for a voice that is none of `names`. `param`: the field that names it."""
    known = ", ".join(names[:_MAX_NAMES]) or "none"
    if len(names) > _MAX_NAMES:
        known += f" and {len(names) - _MAX_NAMES} more"
    return RequestError(
        f"there is no voice {name[:100]!r}; there are: {known}",
        status=404,
        param=param,
        code="voice_not_found",
    )
