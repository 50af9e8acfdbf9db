"""Served goldens on disk: one safetensors file, whose metadata hold the requests.

Tensors of case N, by name: `N.input_ids` (T,), `N.positions` (3, T), `N.embed_kind` (T,), `N.vision.I` and `N.audio.I`
(features), `N.tokens` (n,) without a stop token, `N.logits` (n, V'), `N.columns` (V',): the ids of these logits. Of
speech, over all segments: `N.patches` (segments,), `N.noise` (n, P, C), `N.step_noise` (n, steps, P, C), `N.latents`
(n, P, C), `N.stop` (n,), `N.samples` (m,). Of a picture: `N.latents` (channels, h, w) and every eighth pixel,
`N.pixels` (H / 8, W / 8, 3). `N.media.I`: encoded bytes of message media, or the features of a video.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mingc.artifacts.codec import decode, encode
from mingc.artifacts.manifest import Manifest
from mingc.errors import ArtifactError, ManifestError

Array = NDArray[np.generic]

_DOCUMENT = "cases"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedPart:
    """A text, or media: the name of its tensor. `grid` and `timestamps` belong to a video."""

    kind: Literal["text", "image", "audio", "video"]
    text: str = ""
    tensor: str = ""
    grid: tuple[int, ...] = ()
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedMessage:
    role: Literal["system", "user", "assistant"]
    parts: tuple[RecordedPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSpeech:
    """Parameters of speech; None selects the artifact's default."""

    voice: str | None = None
    instructions: str | None = None
    max_steps: int | None = None
    guidance: float | None = None
    sigma: float | None = None
    temperature: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedDrawing:
    """Parameters of a picture. `has_reference`: it changes the first image of the messages."""

    aspect: float
    resolution: int
    num_steps: int
    guidance: float
    seed: int
    has_reference: bool = False


# Recorded requests are read by the rules that never change, so that artifacts of earlier versions still agree.
SPEECH_TEXT: Final = "reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCase:
    """One request: a chat (`messages`), with speech or without, a text to speak, or a conversation to draw."""

    name: str
    messages: tuple[RecordedMessage, ...] = ()
    max_tokens: int = 0
    rope_delta: int = 0
    finish: Literal["stop", "length"] = "length"
    text: str = ""
    speech: RecordedSpeech | None = None
    drawing: RecordedDrawing | None = None

    @property
    def is_chat(self) -> bool:
        return bool(self.messages) and self.drawing is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedDocument:
    """The metadata.

    Attributes:
        sample_rate: of the recorded samples in Hz; 0 without speech.
        parameters: of every stage, as the manifest had them when the answers were recorded.
        assets: tokenizers, voices, model and dtype that the answers were recorded with, see `asset_records`; empty in
            artifacts of older exports.
    """

    cases: tuple[ServedCase, ...]
    sample_rate: int
    parameters: Mapping[str, Any]
    assets: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedGoldens(ServedDocument):
    """The document of the metadata, and all tensors by name."""

    tensors: Mapping[str, Array]

    def has(self, case: ServedCase, name: str) -> bool:
        return f"{case.name}.{name}" in self.tensors

    def get(self, case: ServedCase, name: str) -> Array:
        """Return a tensor of a case. Raises: ArtifactError when the file lacks it."""
        try:
            return self.tensors[f"{case.name}.{name}"]
        except KeyError:
            raise ArtifactError(
                f"tensor {case.name}.{name} is missing", where="served goldens", fix="export again"
            ) from None


def write_goldens(path: Path, goldens: ServedGoldens) -> None:
    content = {each.name: encode(getattr(goldens, each.name)) for each in fields(ServedDocument)}
    document = json.dumps(content, ensure_ascii=False, sort_keys=True)
    tensors = {name: np.ascontiguousarray(value) for name, value in goldens.tensors.items()}
    save_file(tensors, path, metadata={_DOCUMENT: document})


def read_goldens(path: Path) -> ServedGoldens:
    """Raises: ArtifactError when the file is damaged or of another form."""
    try:
        with safe_open(path, framework="np") as file:
            document = json.loads((file.metadata() or {}).get(_DOCUMENT, ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        content = decode(ServedDocument, document)
        if not content.cases:
            raise ValueError("no request is recorded")
    except (OSError, ValueError, TypeError, SafetensorError, ManifestError) as error:
        raise ArtifactError(
            f"the served goldens cannot be read: {error}", where=str(path), fix="export again"
        ) from error
    return ServedGoldens(
        tensors=tensors, **{each.name: getattr(content, each.name) for each in fields(content)}
    )


def asset_records(manifest: Manifest, sha256: Callable[[str], str]) -> dict[str, str]:
    """Identify each tokenizer and voice by name, the model, and its dtype, which decides the tolerances.

    Recorded requests use two voices and a few words: they do not show another voice or an entry of a vocabulary.
    `sha256` returns the hash of a file of the artifact.
    """
    records = {"model": manifest.model, "dtype": manifest.fingerprint.dtype}
    records |= {f"tokenizers.{stage}": sha256(file) for stage, file in manifest.tokenizers.items()}
    for voice in manifest.voices:
        records[f"voices.{voice.name}"] = f"{sha256(voice.file)} {voice.num_patches} {voice.transcript}"
    return records
