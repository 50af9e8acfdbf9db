"""How a picture is to be drawn: the fields that image requests and chats share, read into an `ImageRequest`."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from mingc.errors import RequestError
from mingc.prompts.picture_sizes import DEFAULT_RESOLUTION, MAX_ASPECT, Size, nearest_size, resolution_of
from mingc.runtime.request import MAX_SEED, ServiceInfo
from mingc.server.http.field_errors import as_integer, invalid, shorten
from mingc.server.http.request_schemas import DrawingFields

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_INTEGERS = ("width", "height", "num_inference_steps", "seed")
_RATIO = re.compile(r"([1-9]\d{0,4}):([1-9]\d{0,4})")


def cannot_draw(info: ServiceInfo, param: str, code: str) -> RequestError:
    serves = "chats and completions" if info.has_text else "/v1/audio/speech"
    return RequestError(
        f"Model '{info.model}' was exported without the stages that draw pictures. It serves {serves}.",
        param=param,
        code=code,
    )


def read_drawing(*sources: tuple[str, Struct]) -> dict[str, Any]:
    """Arguments of an `ImageRequest` from the fields of one or several objects, each with the path of its fields.

    Raises: RequestError for a size that cannot be drawn, and for fields that contradict each other.
    """
    fields = _Fields(sources)
    asked, aspect = _size(fields), _aspect(fields)
    if asked is not None and aspect is not None:
        raise invalid(fields.param("aspect_ratio"), "is given beside a size; send one of them")
    guidance, negative = fields.get("guidance_scale"), fields.get("negative_prompt") or None
    if negative is not None and guidance is not None and guidance <= 1:
        raise invalid(fields.param("negative_prompt"), "needs a 'guidance_scale' above 1")
    height, width = asked or (None, None)
    return {
        "height": height,
        "width": width,
        "resolution": (asked and resolution_of(asked)) or DEFAULT_RESOLUTION,
        "aspect": aspect,
        "seed": _seed(fields),
        "num_steps": fields.get("num_inference_steps"),
        "guidance": guidance,
        "negative_prompt": negative,
    }


class _Fields:
    """The fields of `DrawingFields` that were given, each with its path."""

    def __init__(self, sources: tuple[tuple[str, Struct], ...]) -> None:
        self._given: dict[str, tuple[str, Any]] = {}
        for prefix, source in sources:
            for name in DrawingFields.__struct_fields__:
                if (value := getattr(source, name, None)) is None:
                    continue
                if name in _INTEGERS:
                    value = as_integer(value, prefix + name)
                param, earlier = self._given.setdefault(name, (prefix + name, value))
                if value != earlier:
                    raise invalid(prefix + name, f"contradicts '{param}'; they mean the same, send one")

    def get(self, name: str) -> Any:
        return self._given.get(name, (name, None))[1]

    def param(self, name: str) -> str:
        return self._given.get(name, (name, None))[0]


def _size(fields: _Fields) -> Size | None:
    """(height, width) of `size`, or of `width` and `height`."""
    text, width, height = fields.get("size"), fields.get("width"), fields.get("height")
    if text in (None, "", "auto"):
        if width is None and height is None:
            return None
        if width is None or height is None:
            param = fields.param("height" if width is None else "width")
            raise invalid(param, "is given alone; send 'width' and 'height', or 'size'")
        size, param = (height, width), fields.param("width")
    else:
        param = fields.param("size")
        if (match := _SIZE.fullmatch(text)) is None:
            raise invalid(param, f"is {shorten(text)}; send 'auto' or 'WIDTHxHEIGHT' such as '1024x1024'")
        size = int(match[2]), int(match[1])
        if (height, width) not in ((None, None), size):
            raise invalid(param, "contradicts 'width' and 'height'; they mean the same, send one")
    if resolution_of(size) is None:
        near_height, near_width = nearest_size(size)
        raise RequestError(
            f"The model does not draw pictures of {size[1]}x{size[0]}: the nearest size is "
            f"'{near_width}x{near_height}'.",
            param=param,
            code="unsupported_size",
        )
    return size


def _aspect(fields: _Fields) -> float | None:
    """Width / height."""
    text = fields.get("aspect_ratio")
    if text in (None, "", "auto"):
        return None
    match = _RATIO.fullmatch(text)
    aspect = int(match[1]) / int(match[2]) if match else 0.0
    if not 1 / MAX_ASPECT <= aspect <= MAX_ASPECT:
        why = f"is {shorten(text)}; send 'WIDTH:HEIGHT' such as '16:9', from '1:{MAX_ASPECT}' to '{MAX_ASPECT}:1'"
        raise invalid(fields.param("aspect_ratio"), why)
    return aspect


def _seed(fields: _Fields) -> int | None:
    """As in the official code, a negative seed requests a random one."""
    seed: int | None = fields.get("seed")
    if seed is None or seed < 0:
        return None
    if seed > MAX_SEED:
        raise invalid(fields.param("seed"), f"must be at most {MAX_SEED}; it is {shorten(seed)}")
    return seed
