"""Recorded requests as the serving code takes them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.prompts.features import VideoFeatures, VisionFeatures
from mingc.runtime.request import ImageRequest, SpeechParams
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


def image_request(case: ServedCase, tensors: Mapping[str, NDArray[np.generic]]) -> ImageRequest:
    """The request of a case with a `drawing`."""
    drawing, messages = case.drawing, decoded_messages(case, tensors)
    assert drawing is not None, "the case draws"
    images = [part for message in messages for part in message.parts if isinstance(part, MediaPart)]
    return ImageRequest(
        request_id=f"served-{case.name}",
        messages=messages,
        aspect=drawing.aspect,
        resolution=drawing.resolution,
        seed=drawing.seed,
        num_steps=drawing.num_steps,
        guidance=drawing.guidance,
        reference=images[0] if drawing.has_reference else None,
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
