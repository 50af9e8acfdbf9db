"""The requests that every export records: all kinds of input, conversations, voices and speech parameters."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import VisionParameters
from mingc.verify.served.cases import (
    RecordedDrawing,
    RecordedMessage,
    RecordedPart,
    RecordedSpeech,
    ServedCase,
)

_LONG = (
    "Please read this carefully: a prompt that is longer than one chunk of prefill is computed in several steps, "
    "and every step must find the keys and values of the earlier ones. 请用一句话回答：这段文字说了什么？"
)
_CLIP_HZ = 16_000
_VIDEO_GRID = (2, 4, 4)
PIXEL_STRIDE = 8  # rows and columns of a picture between those that are recorded


@dataclass(slots=True)
class Media:
    """Generated media of the requests: encoded bytes and features by tensor name."""

    tensors: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def image(self, name: str, height: int, width: int) -> RecordedPart:
        """Make a PNG with a different colour at every pixel."""
        from PIL import Image

        y, x = np.mgrid[:height, :width]
        pixels = np.stack([7 * y % 256, 5 * x % 256, 3 * (x + y) % 256], axis=-1).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return self._put(name, "image", np.frombuffer(file.getvalue(), np.uint8))

    def clip(self, name: str, seconds: float) -> RecordedPart:
        """Make a WAV with a rising tone."""
        import soundfile

        time = np.arange(int(seconds * _CLIP_HZ)) / _CLIP_HZ
        wave = 0.3 * np.sin(2 * np.pi * (200 + 400 * time) * time)
        file = io.BytesIO()
        soundfile.write(file, wave.astype(np.float32), _CLIP_HZ, format="WAV", subtype="PCM_16")
        return self._put(name, "audio", np.frombuffer(file.getvalue(), np.uint8))

    def video(self, name: str, vision: VisionParameters) -> RecordedPart:
        """Two temporal patches, already as features: other encodings of a video give other frames."""
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        rows = int(np.prod(_VIDEO_GRID))
        pixels = np.random.default_rng(3).standard_normal((rows, values)).astype(np.float32)
        part = self._put(name, "video", pixels)
        return RecordedPart(kind="video", tensor=part.tensor, grid=_VIDEO_GRID, timestamps=(0.25, 1.25))

    def _put(
        self, name: str, kind: Literal["image", "audio", "video"], value: NDArray[np.generic]
    ) -> RecordedPart:
        self.tensors[name] = value
        return RecordedPart(kind=kind, tensor=name)


def chat_cases(
    media: Media, *, max_tokens: int, vision: VisionParameters | None, has_audio: bool, has_speech: bool
) -> list[ServedCase]:
    """Chats for the inputs that the artifact takes."""

    def case(name: str, *messages: RecordedMessage, speech: RecordedSpeech | None = None) -> ServedCase:
        return ServedCase(name=name, messages=messages, max_tokens=max_tokens, speech=speech)

    cases = [
        case("text", _says("user", "What is this?")),
        case("long text", _says("user", _LONG)),
        case(
            "second turn",
            _says("system", "Answer in one word."),
            _says("user", "Which colour has the sky?"),
            _says("assistant", "Blue."),
            _says("user", "And the grass, 为什么?"),
        ),
    ]
    if vision is not None:
        image = media.image("image.media.0", 80, 96)
        two = [media.image(f"two images.media.{index}", 64, 64 + 32 * index) for index in range(2)]
        cases += [
            case("image", _says("user", image, "What do you see?")),
            case("two images", _says("user", "Compare ", two[0], " with ", two[1])),
            case("video", _says("user", media.video("video.media.0", vision), "What happens?")),
        ]
    if has_audio:
        clip = media.clip("audio.media.0", 1.3)
        cases.append(case("audio", _says("user", clip, "What does the voice say?")))
    if vision is not None and has_audio:
        for order in ("image, audio", "audio, image"):
            parts = {
                "image": media.image(f"{order}.media.image", 64, 64),
                "audio": media.clip(f"{order}.media.audio", 0.7),
            }
            given = [parts[kind] for kind in order.split(", ")]
            cases.append(case(order, _says("user", *given, "What belongs together?")))
    if has_speech:
        spoken = RecordedSpeech(max_steps=2)
        cases.append(case("spoken chat", _says("user", "Describe a story."), speech=spoken))
    return cases


def picture_cases(media: Media, *, takes_image: bool) -> list[ServedCase]:
    """A picture with a text on it, and a picture that is changed; of the sizes with the fewest pixels."""
    cases = [
        ServedCase(
            name="picture",
            messages=(_says("user", 'A sign that says "OPEN 24h", 照片.'),),
            drawing=RecordedDrawing(aspect=2.0, resolution=512, num_steps=3, guidance=2.0, seed=7),
        )
    ]
    if takes_image:
        image = media.image("changed picture.media.0", 80, 96)
        drawing = RecordedDrawing(
            aspect=0.5, resolution=512, num_steps=3, guidance=1.0, seed=8, has_reference=True
        )
        message = _says("user", image, "Make it a winter day.")
        cases.append(ServedCase(name="changed picture", messages=(message,), drawing=drawing))
    return cases


def speech_cases(voices: Sequence[str], *, min_stop_step: int) -> list[ServedCase]:
    """Texts to speak: voices, instructions, all parameters of sampling, several segments, the stop rule."""
    other = voices[-1] if voices else None
    return [
        ServedCase(name="speech", text="Good morning, how are you?", speech=RecordedSpeech(max_steps=3)),
        ServedCase(
            name="speech with settings",
            text="感谢你的认可。",
            speech=RecordedSpeech(
                voice=other,
                instructions="speak slowly",
                max_steps=3,
                guidance=1.2,
                sigma=0.6,
                temperature=0.5,
            ),
        ),
        ServedCase(
            name="speech in segments",
            text="This is the first sentence, and it is rather long. 这是第二句话，它也不短。Here comes the third one!",
            speech=RecordedSpeech(max_steps=2, temperature=1.0),
        ),
        ServedCase(
            name="speech until it stops",
            text="Now listen until the end of this sentence.",
            speech=RecordedSpeech(max_steps=min_stop_step + 6),
        ),
    ]


def _says(role: Literal["system", "user", "assistant"], *parts: str | RecordedPart) -> RecordedMessage:
    return RecordedMessage(
        role=role,
        parts=tuple(
            RecordedPart(kind="text", text=part) if isinstance(part, str) else part for part in parts
        ),
    )
