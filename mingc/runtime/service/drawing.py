"""From a request for pictures to the job of the image loop: limits, sizes, batches and what their prompts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mingc.errors import RequestError
from mingc.prompts.conversation import Message, TextPart
from mingc.prompts.features import ReferencePicture
from mingc.prompts.glyph import GlyphTokenizer, glyph_text
from mingc.prompts.media_decoder import MediaDecoder, MediaTask
from mingc.prompts.picture_sizes import RESOLUTIONS, Size, bucket, drawn_size, size_of_aspect
from mingc.runtime.images.loop import ImageLoop
from mingc.runtime.images.memory import ImageMemory
from mingc.runtime.images.tokens import padded
from mingc.runtime.images.worker import Drawing, PicturePrompt
from mingc.runtime.request import (
    MAX_GUIDANCE,
    MAX_IMAGE_SIDE,
    MAX_IMAGE_STEPS,
    MAX_PARTIAL_IMAGES,
    MAX_PICTURES,
    MAX_SEED,
    ImageRequest,
)
from mingc.runtime.request_stream import HiddenRowsItem

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagePipeline:
    """The parts that draw behind the thinker.

    Attributes:
        num_bytes: what a batch may take of each device.
        num_queries, queries: of each scale, and the learned rows (Q, D) of all, on the thinker's device.
        glyphs: None: the artifact encodes no text that a picture is to show.
    """

    loop: ImageLoop
    memory: ImageMemory
    num_bytes: int
    num_queries: tuple[int, ...]
    queries: Tensor
    glyphs: GlyphTokenizer | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSizes:
    """`inner` is the bucket that is drawn, `drawn` the size that the client gets; (height, width)."""

    inner: Size
    drawn: Size


def check_request(request: ImageRequest) -> None:
    """Raises: RequestError for a value out of range, in the name of the field of `ImageRequest`."""
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("num_pictures", request.num_pictures, 1, MAX_PICTURES),
        ("num_steps", request.num_steps, 1, MAX_IMAGE_STEPS),
        ("guidance", request.guidance, 0, MAX_GUIDANCE),
        ("height", request.height, 1, MAX_IMAGE_SIDE),
        ("width", request.width, 1, MAX_IMAGE_SIDE),
        ("num_partials", request.num_partials, 0, MAX_PARTIAL_IMAGES),
        ("aspect", request.aspect, 1 / MAX_IMAGE_SIDE, MAX_IMAGE_SIDE),
        ("seed", request.seed, 0, MAX_SEED + 1 - request.num_pictures),  # of the last one at most MAX_SEED
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:  # refuses NaN, too
            raise RequestError(f"{name} is {value}, expected {least} to {most}", param=name)
    if (request.height is None) != (request.width is None):
        raise RequestError("height and width must be given together", param="height")
    if request.negative_prompt is not None and request.guidance is not None and request.guidance <= 1:
        raise RequestError(
            "negative_prompt needs a guidance above 1", fix="leave one of them out", param="negative_prompt"
        )
    if request.resolution not in RESOLUTIONS:
        raise RequestError(
            f"resolution is {request.resolution}, expected one of {', '.join(map(str, RESOLUTIONS))}",
            param="resolution",
        )


def decode_reference(request: ImageRequest, media: MediaDecoder | None) -> ReferencePicture | None:
    """The pixels of the reference, in the bucket. Blocks. Raises: RequestError when it cannot be decoded."""
    part = request.reference
    if part is None:
        return None
    if media is None:
        raise RequestError("this server decodes no pictures", where=part.where, param=part.where)
    assert isinstance(part.data, bytes | memoryview), "the server loads references"
    found = media.run(
        MediaTask(
            kind="reference",
            where=part.where,
            max_bytes=media.max_bytes,
            asked=_asked(request),
            aspect=request.aspect,
            resolution=request.resolution,
        ),
        part.data,
    )
    assert isinstance(found, ReferencePicture), "the kind of the task"
    return found


def picture_sizes(request: ImageRequest, reference: ReferencePicture | None) -> PictureSizes:
    """The sizes of the request's pictures."""
    if reference is not None:
        height, width, _ = reference.pixels.shape
        return PictureSizes(inner=(height, width), drawn=drawn_size(reference.asked, (height, width)))
    asked = _asked(request) or size_of_aspect(request.aspect)
    inner = bucket(asked, request.resolution)
    return PictureSizes(inner=inner, drawn=drawn_size(asked, inner))


def _asked(request: ImageRequest) -> Size | None:
    return None if request.height is None or request.width is None else (request.height, request.width)


def negative_messages(request: ImageRequest) -> tuple[Message, ...]:
    """The conversation of the negative prompt: the system messages, and it alone as what the user says."""
    system = (message for message in request.messages if message.role == "system")
    said = Message(role="user", parts=(TextPart(text=request.negative_prompt or ""),))
    return (*system, said)


def picture_prompts(
    pipeline: ImagePipeline, hidden: Sequence[HiddenRowsItem], texts: Sequence[str]
) -> list[PicturePrompt]:
    """The prompt, and the negative one behind it. If one shows a text, both have rows of glyphs.

    `texts`: of the whole prompts.
    """
    shown = ["" if pipeline.glyphs is None else glyph_text(text) for text in texts]
    encode = None if pipeline.glyphs is None or not any(shown) else pipeline.glyphs.encode
    return [
        PicturePrompt(
            residual=rows.residual, delta=rows.delta, glyph_ids=None if encode is None else encode(text)
        )
        for rows, text in zip(hidden, shown, strict=True)
    ]


def plan_batch(pipeline: ImagePipeline, drawing: Drawing) -> int:
    """Pictures that may share a batch. Raises: RequestError (507) when the memory does not suffice for one."""
    glyphs = drawing.prompt.glyph_ids
    rows = pipeline.num_queries[-1] + (0 if glyphs is None else len(glyphs))
    needs = partial(
        pipeline.memory.batch_bytes,
        drawing.size,
        num_caption=padded(rows, pipeline.memory.sampler.token_multiple),
        num_samples=drawing.num_samples,
        num_frames=drawing.num_frames,
    )
    fit, most = 0, pipeline.memory.max_pictures(drawing.num_samples)
    while fit < most and needs(fit + 1) <= pipeline.num_bytes:
        fit += 1
    if fit:
        return fit
    height, width = drawing.size
    raise RequestError(
        f"a picture of {width}×{height} needs {needs(1) / _MIB:,.0f} MiB, and this server has "
        f"{pipeline.num_bytes / _MIB:,.0f} MiB for a batch",
        fix="ask for a smaller resolution, or for no guidance",
        status=507,
        param="size",
        code="insufficient_memory",
    )
