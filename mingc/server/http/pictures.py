"""Pictures: the bodies of `/v1/images/…`, and answers as OpenAI's objects and events or in a chat."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.runtime.request import (
    Done,
    ImageDone,
    ImageEvent,
    ImageProgress,
    ImageRequest,
    PartialImage,
    ServiceInfo,
    Usage,
)
from mingc.server.http.body import decode_body, media_type
from mingc.server.http.clips import EncoderThread
from mingc.server.http.drawing import cannot_draw, read_drawing
from mingc.server.http.field_errors import as_integer, invalid, missing
from mingc.server.http.forms import FORM, decode_form
from mingc.server.http.messages import media_part
from mingc.server.http.parsing import check_model, refuse_all
from mingc.server.http.request_schemas import (
    IMAGE_BODY,
    IMAGE_EDIT_BODY,
    IMAGE_EDIT_JSON_BODY,
    IMAGE_EDIT_REFUSED,
    IMAGE_REFERENCE_REFUSED,
    IMAGE_REFUSED,
    ImageBody,
    ImageEditBody,
    ImageEditJsonBody,
)
from mingc.server.http.response_schemas import (
    SSE_DONE,
    ChatResponseBuilder,
    Delta,
    PicturePart,
    PictureUrl,
    sse,
)
from mingc.server.http.streaming import until_done
from mingc.server.options import ServeOptions
from mingc.server.picture_format import PictureSpec, encode_picture

PICTURE_BYTES = 4 << 20  # of one that is kept until it is sent: its pixels, and the file in base64
_PNG = PictureSpec()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedPictures:
    """A parsed request. `kind`: how its events begin."""

    request: ImageRequest
    spec: PictureSpec
    stream: bool
    kind: Literal["image_generation", "image_edit"]


def parse_generation(raw: memoryview, info: ServiceInfo, options: ServeOptions) -> ParsedPictures:
    """Decode and check the body of `POST /v1/images/generations`.

    Raises:
        RequestError: with `param` naming the first field that is wrong.
    """
    _check_draws(info)
    body = decode_body(raw, IMAGE_BODY)
    check_model(body.model, info)
    refuse_all(body, IMAGE_REFUSED)
    return _parsed(body, (), "image_generation")


def parse_edit(
    raw: memoryview, info: ServiceInfo, options: ServeOptions, *, content_type: str
) -> ParsedPictures:
    """Decode and check the body of `POST /v1/images/edits`.

    Pictures of a form are views of it; those of JSON are still to be loaded. Raises: as `parse_generation`.
    """
    _check_draws(info)
    body: ImageEditBody | ImageEditJsonBody
    if media_type(content_type) == FORM:
        body = decode_form(raw, content_type, IMAGE_EDIT_BODY)
    else:
        body = decode_body(raw, IMAGE_EDIT_JSON_BODY)
    check_model(body.model, info)
    refuse_all(body, IMAGE_EDIT_REFUSED)
    found = (
        _sent_pictures(body, info, options)
        if isinstance(body, ImageEditBody)
        else _named_pictures(body, info)
    )
    pictures = tuple(replace(each, max_pixels=options.max_image_pixels) for each in found)
    return _parsed(body, pictures, "image_edit")


def _sent_pictures(body: ImageEditBody, info: ServiceInfo, options: ServeOptions) -> Iterator[MediaPart]:
    if not body.image:
        raise missing("image")
    if sum(len(file.data) for file in body.image) > options.max_media_bytes:
        raise RequestError(
            f"The pictures are larger than {options.max_media_bytes} bytes.",
            status=413,
            param="image",
            code="media_too_large",
        )
    names = ["image"] if len(body.image) == 1 else [f"image[{i}]" for i in range(len(body.image))]
    for file, name in zip(body.image, names, strict=True):
        if not len(file.data):
            raise RequestError("The picture holds no bytes.", param=name, code="empty_media")
        yield replace(media_part("image", "", name, info), data=file.data)


def _named_pictures(body: ImageEditJsonBody, info: ServiceInfo) -> Iterator[MediaPart]:
    if not body.images:
        raise missing("images")
    for index, reference in enumerate(body.images):
        refuse_all(reference, IMAGE_REFERENCE_REFUSED, f"images[{index}].")
        name = f"images[{index}].image_url"
        if reference.image_url is None:
            raise missing(name)
        yield media_part("image", reference.image_url, name, info)


def _check_draws(info: ServiceInfo) -> None:
    if not info.has_image_output:
        raise cannot_draw(info, "model", "unsupported_model")


def _parsed(
    body: ImageBody, pictures: tuple[MediaPart, ...], kind: Literal["image_generation", "image_edit"]
) -> ParsedPictures:
    if body.prompt is None:
        raise missing("prompt")
    if not body.prompt.strip():
        raise invalid("prompt", "is empty: there is nothing to draw")
    picture_format, quality = (
        body.output_format or "png",
        as_integer(body.output_compression, "output_compression"),
    )
    if picture_format == "png" and quality not in (None, 100):
        raise invalid("output_compression", "is for 'output_format' 'jpeg' and 'webp'; a PNG is lossless")
    num_partials = as_integer(body.partial_images, "partial_images") or 0
    if num_partials and not body.stream:
        raise invalid("partial_images", "is only allowed with 'stream': true")
    message = Message(role="user", parts=(*pictures, TextPart(text=body.prompt)))
    request = ImageRequest(
        request_id=f"img-{uuid.uuid4().hex[:24]}",
        messages=(message,),
        num_pictures=as_integer(body.n, "n") or 1,
        num_partials=num_partials,
        where="prompt",
        priority=as_integer(body.priority, "priority") or 0,
        **read_drawing(("", body)),
    )
    spec = PictureSpec(format=picture_format, quality=100 if quality is None else quality)
    return ParsedPictures(request=request, spec=spec, stream=body.stream or False, kind=kind)


def most_tokens(request: ImageRequest) -> int:
    """About how many tokens the pictures of a request have."""
    return request.num_pictures * request.resolution**2 // 256


class ImageTokens(Struct, kw_only=True, forbid_unknown_fields=True):
    image_tokens: int
    text_tokens: int


class ImageUsage(Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's usage of pictures; a picture has a token for 16 × 16 pixels."""

    input_tokens: int
    input_tokens_details: ImageTokens
    output_tokens: int
    output_tokens_details: ImageTokens
    total_tokens: int


class ImageObject(Struct, kw_only=True, forbid_unknown_fields=True):
    """A picture; `seed`: draws it again."""

    b64_json: bytes
    seed: int


class ImagesResponse(Struct, kw_only=True, forbid_unknown_fields=True):
    created: int
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png", "jpeg", "webp"]
    size: str
    data: list[ImageObject]
    usage: ImageUsage
    timings_ms: dict[str, float]


class ImageStreamEvent(Struct, kw_only=True):
    """An unfinished or a complete picture of a stream. `image_index`: of a request for several."""

    type: str
    b64_json: bytes
    created_at: int
    size: str
    output_format: Literal["png", "jpeg", "webp"]
    quality: Literal["auto"] = "auto"
    background: Literal["opaque"] = "opaque"
    image_index: int | UnsetType = UNSET
    partial_image_index: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    usage: ImageUsage | UnsetType = UNSET


Events = AsyncIterator[ImageEvent]


def _encode(picture: PartialImage | ImageDone, spec: PictureSpec) -> bytes:
    return encode_picture(picture.pixels, (picture.height, picture.width), spec)


def _size(picture: PartialImage | ImageDone) -> str:
    return f"{picture.width}x{picture.height}"


def _usage(usage: Usage) -> ImageUsage:
    return ImageUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=ImageTokens(
            image_tokens=usage.prompt_image_tokens,
            text_tokens=usage.prompt_tokens - usage.prompt_image_tokens,
        ),
        output_tokens=usage.image_tokens,
        output_tokens_details=ImageTokens(image_tokens=usage.image_tokens, text_tokens=0),
        total_tokens=usage.prompt_tokens + usage.image_tokens,
    )


async def whole_pictures(events: Events, parsed: ParsedPictures) -> bytes:
    """The answer as one object, with the pictures in their order."""
    made: dict[int, ImageObject] = {}
    size = ""
    async for event in until_done(events):
        if isinstance(event, ImageDone):
            data = await EncoderThread().run(partial(_encode, event, parsed.spec))
            made[event.index] = ImageObject(b64_json=data, seed=event.seed)
            size = _size(event)
        elif isinstance(event, Done):
            response = ImagesResponse(
                created=int(time.time()),
                output_format=parsed.spec.format,
                size=size,
                data=[made[index] for index in sorted(made)],
                usage=_usage(event.usage),
                timings_ms=event.timings_ms,
            )
    return await EncoderThread().run(partial(msgspec.json.encode, response))


async def picture_events(events: Events, parsed: ParsedPictures) -> AsyncIterator[bytes]:
    """`….partial_image` and `….completed` events, as they are drawn.

    The usage of a picture is its own tokens. The last one, which is sent when all are done, has those of the prompt.
    """
    held: ImageStreamEvent | None = None
    held_tokens = sent_tokens = 0
    async for event in until_done(events):
        if isinstance(event, ImageProgress):
            continue
        if held is not None and not isinstance(event, PartialImage):
            usage = Usage(image_tokens=held_tokens)
            if isinstance(event, Done):
                usage = replace(event.usage, image_tokens=event.usage.image_tokens - sent_tokens)
            held.usage = _usage(usage)
            sent_tokens += held_tokens
            yield sse(held)
        if isinstance(event, Done):
            return
        made = ImageStreamEvent(
            type=f"{parsed.kind}.partial_image",
            b64_json=await EncoderThread().run(partial(_encode, event, parsed.spec)),
            created_at=int(time.time()),
            size=_size(event),
            output_format=parsed.spec.format,
            image_index=event.index if parsed.request.num_pictures > 1 else UNSET,
        )
        if isinstance(event, PartialImage):
            made.partial_image_index = event.number
            yield sse(made)
        else:
            made.type, made.seed = f"{parsed.kind}.completed", event.seed
            held, held_tokens = made, event.pixels.shape[0] * event.pixels.shape[1] // 256


async def chat_pictures(events: Events, builder: ChatResponseBuilder) -> bytes:
    """One `chat.completion` object: each picture is the content of a choice."""
    made: dict[int, PicturePart] = {}
    async for event in until_done(events):
        if isinstance(event, ImageDone):
            made[event.index] = await EncoderThread().run(partial(_part, event))
        elif isinstance(event, Done):
            completion = builder.pictures([made[index] for index in sorted(made)], event)
    return await EncoderThread().run(partial(msgspec.json.encode, completion))


async def chat_picture_chunks(events: Events, builder: ChatResponseBuilder) -> AsyncIterator[bytes]:
    """Chunks of a streamed chat: of each choice the role, its picture as a part of the content, the finish reason."""
    indices: list[int] = []
    async for event in until_done(events):
        if isinstance(event, ImageDone):
            own = replace(builder, index=event.index)
            indices.append(event.index)
            yield sse(own.role_chunk(has_text=False))
            part = await EncoderThread().run(partial(_part, event))
            yield sse(own.chunk(Delta(content=[part])))
        elif isinstance(event, Done):
            for index in indices:
                yield sse(replace(builder, index=index).end_chunk(event))
            if builder.include_usage:
                yield sse(builder.usage_chunk(event.usage))
    yield SSE_DONE


def _part(picture: ImageDone) -> PicturePart:
    data = _encode(picture, _PNG)
    return PicturePart(image_url=PictureUrl(url="data:image/png;base64," + base64.b64encode(data).decode()))
