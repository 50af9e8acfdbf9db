"""`mingc draw`: one picture, without a server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import cloup

from mingc.console.command import PATH, TEXT, Command, common, option
from mingc.console.progress import step_logger
from mingc.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mingc.prompts.conversation import MediaPart
    from mingc.runtime.request import ImageDone, ImageRequest
    from mingc.server.picture_format import PictureFormat

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_ASPECT = re.compile(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})")
_PROMPT, _REFERENCE = "PROMPT", "--reference"
_FORMATS: dict[str, PictureFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawReport:
    """The file that was written. With the same options `seed` gives the same picture again."""

    file: str
    width: int
    height: int
    seed: int


@cloup.command(cls=Command)
@click.argument("artifact", type=PATH)
@click.argument("prompt", type=TEXT)
@option("--output", type=PATH, required=True, metavar="FILE", help="A .png, .jpg or .webp file to write.")
@option("--size", metavar="WIDTHxHEIGHT", show_default="1024x1024", help="Size in pixels.")
@option("--aspect", metavar="W:H", help="Shape, instead of a size. Default with a reference: its own.")
@option("--reference", type=PATH, metavar="FILE", help="A picture to change.")
@option("--negative-prompt", type=TEXT, help="What the picture shall not show.")
@option(
    "--seed",
    type=click.IntRange(0, (1 << 53) - 1),
    show_default="random",
    help="Equal seeds give equal pictures.",
)
@option("--steps", type=click.IntRange(1, 200), show_default="the model's", help="Steps of the sampler.")
@option(
    "--guidance",
    type=click.FloatRange(0, 100),
    show_default="the model's",
    help="How closely the picture follows the prompt; 1 or less: no guidance, in half the time.",
)
@common
def command(
    as_json: bool,
    artifact: Path,
    prompt: str,
    output: Path,
    size: str | None,
    aspect: str | None,
    reference: Path | None,
    negative_prompt: str | None,
    seed: int | None,
    steps: int | None,
    guidance: float | None,
) -> int:
    """Draw PROMPT with ARTIFACT.

    With a reference, PROMPT says what to change in it.
    """
    from mingc.console.report import show
    from mingc.console.report_page import check_output_path
    from mingc.prompts.conversation import Message, TextPart
    from mingc.prompts.picture_sizes import DEFAULT_RESOLUTION, MAX_ASPECT, nearest_size, resolution_of
    from mingc.runtime.request import ImageRequest
    from mingc.runtime.service.drawing import check_request
    from mingc.server.picture_format import PictureSpec, encode_picture

    suffix = output.suffix.lower()
    if suffix not in _FORMATS:
        raise ConfigError(
            f"{output} names no format of pictures",
            where="--output",
            fix=f"end it with {', '.join(_FORMATS)}",
        )
    check_output_path(output, "--output")
    if not prompt.strip():
        raise ConfigError("the prompt is empty", where=_PROMPT, fix="say what to draw")
    if size is not None and aspect is not None:
        raise ConfigError("--size and --aspect exclude each other", where="--aspect", fix="leave one out")
    asked = None if size is None else _numbers(_SIZE, size, "--size", "1024x1024")
    ratio = None if aspect is None else _numbers(_ASPECT, aspect, "--aspect", "16:9")
    if ratio is not None and max(ratio) > MAX_ASPECT * min(ratio):
        raise ConfigError(
            f"the model draws no pictures of {aspect}",
            where="--aspect",
            fix=f"pass a shape from 1:{MAX_ASPECT} to {MAX_ASPECT}:1",
        )
    resolution = DEFAULT_RESOLUTION
    if asked is not None:
        found = resolution_of((asked[1], asked[0]))
        if found is None:
            height, width = nearest_size((asked[1], asked[0]))
            raise ConfigError(
                f"the model draws no pictures of {size}",
                where="--size",
                fix=f"pass --size {width}x{height}, or --aspect",
            )
        resolution = found
    part = None if reference is None else _reference(reference)
    request = ImageRequest(
        request_id="draw",
        messages=(Message(role="user", parts=(*(() if part is None else (part,)), TextPart(text=prompt))),),
        width=None if asked is None else asked[0],
        height=None if asked is None else asked[1],
        aspect=None if ratio is None else ratio[0] / ratio[1],
        resolution=resolution,
        seed=seed,
        num_steps=steps,
        guidance=guidance,
        negative_prompt=negative_prompt,
        reference=part,
        where=_PROMPT,
    )
    log = step_logger("draw")
    try:
        check_request(request)
        picture = asyncio.run(_draw(artifact, request, log))
    except RequestError as error:
        param = error.param or ""
        raise ConfigError(
            error.message,
            where=param if param in (_PROMPT, _REFERENCE) else f"--{param.replace('_', '-')}",
            fix=error.fix or "see mingc draw --help",
        ) from error
    data = encode_picture(
        picture.pixels, (picture.height, picture.width), PictureSpec(format=_FORMATS[suffix])
    )
    try:
        output.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror}",
            where="--output",
            fix="name a file in a folder that exists",
        ) from error
    report = DrawReport(file=str(output), width=picture.width, height=picture.height, seed=picture.seed)
    show(report, as_json=as_json)
    return 0


async def _draw(artifact: Path, request: ImageRequest, log: Callable[[str], None]) -> ImageDone:
    from mingc.media.decoding import InProcessDecoder
    from mingc.runtime.request import ImageDone, ImageProgress
    from mingc.runtime.service.builder import open_service
    from mingc.runtime.service.options import EngineOptions

    service = open_service(artifact, EngineOptions(loads_speech=False), media=InProcessDecoder())
    pictures = []
    try:
        async for event in service.draw(request):
            if isinstance(event, ImageProgress):
                log(f"step {event.step} of {event.num_steps}")
            elif isinstance(event, ImageDone):
                pictures.append(event)
    finally:
        await service.close(shutdown_timeout_s=0.0)
    return pictures[0]


def _numbers(pattern: re.Pattern[str], text: str, where: str, example: str) -> tuple[int, int]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not like {example}", where=where, fix=f"pass {where} {example}")
    return int(found[1]), int(found[2])


def _reference(file: Path) -> MediaPart:
    from mingc.prompts.conversation import MediaPart

    try:
        return MediaPart(kind="image", data=file.read_bytes(), where=_REFERENCE)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}", where=_REFERENCE, fix="name a picture"
        ) from error
