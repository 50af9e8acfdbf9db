"""Recorded requests as the serving code takes them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.prompts.features import VideoFeatures, VisionFeatures
from mingc.runtime.request import SpeechParams
from mingc.verify.served.cases import RecordedPart, RecordedSpeech, ServedCase


def decoded_messages(case: ServedCase, tensors: Mapping[str, NDArray[np.generic]]) -> tuple[Message, ...]:
    """Return the messages of a case: images and clips as encoded bytes, videos as features."""
    return tuple(
        Message(
            role=message.role,
            parts=tuple(
                _part(part, tensors, f"messages[{index}].content[{place}]")
                for place, part in enumerate(message.parts)
            ),
        )
        for index, message in enumerate(case.messages)
    )


def speech_params(recorded: RecordedSpeech) -> SpeechParams:
    return SpeechParams(
        voice=recorded.voice,
        instructions=recorded.instructions,
        max_steps=recorded.max_steps,
        guidance=recorded.guidance,
        sigma=recorded.sigma,
        temperature=recorded.temperature,
    )


def _part(part: RecordedPart, tensors: Mapping[str, NDArray[np.generic]], where: str) -> TextPart | MediaPart:
    if part.kind == "text":
        return TextPart(text=part.text)
    value = tensors[part.tensor]
    if part.kind == "video":
        frames, height, width = part.grid
        features = VisionFeatures(patches=value.astype(np.float32), grid=(frames, height, width))
        video = VideoFeatures(vision=features, timestamps=part.timestamps)
        return MediaPart(kind="video", data=video, where=where)
    return MediaPart(kind=part.kind, data=value.tobytes(), where=where)
