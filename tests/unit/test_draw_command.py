"""`mingc draw`: what its options ask of the service, the file that it writes, and what it says of wrong options."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_service import FakeService
from mingc_command import mingc_here
from PIL import Image

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaPart, TextPart
from mingc.runtime.request import ImageEvent, ImageRequest


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    service = FakeService()
    monkeypatch.setattr("mingc.runtime.service.builder.open_service", lambda *_, **__: service)
    return service


def test_every_option_reaches_the_service(service: FakeService, tmp_path: Path) -> None:
    picture, file = tmp_path / "cat.png", tmp_path / "out.webp"
    picture.write_bytes(b"a picture")
    options = ("--output", file, "--reference", picture, "--negative-prompt", "dogs", "--json")
    numbers = ("--size", "704x352", "--seed", 200, "--steps", 12, "--guidance", 3.5)
    done = mingc_here("draw", tmp_path, "in blue", *options, *numbers)
    assert done.document == {"file": str(file), "width": 704, "height": 352, "seed": 200}, done.stderr
    (request,) = service.drawings
    ((seen, said),) = [message.parts for message in request.messages]
    assert isinstance(seen, MediaPart) and seen == request.reference and seen.data == b"a picture"
    assert isinstance(said, TextPart) and said.text == "in blue"
    assert (request.height, request.width, request.resolution, request.aspect) == (352, 704, 512, None)
    assert (request.num_steps, request.guidance, request.negative_prompt) == (12, 3.5, "dogs")
    with Image.open(file) as image:
        assert (image.format, image.size) == ("WEBP", (704, 352))
        assert abs(image.convert("RGB").getpixel((9, 9))[0] - 200) <= 3  # type: ignore[index]
    assert service.shutdown_timeouts


@pytest.mark.parametrize(("aspect", "ratio"), [("16:9", 16 / 9), ("4:1", 4.0), ("1:4", 0.25)])
def test_without_options_the_model_decides(
    service: FakeService, tmp_path: Path, aspect: str, ratio: float
) -> None:
    file = tmp_path / "out.jpg"
    done = mingc_here("draw", tmp_path, "wide", "--output", file, "--aspect", aspect)
    (request,) = service.drawings
    assert done.code == 0, done.stderr
    assert (request.aspect, request.resolution) == (ratio, 1024)
    assert {request.seed, request.height, request.num_steps, request.guidance, request.reference} == {None}
    assert request.negative_prompt is None and request.num_pictures == 1
    with Image.open(file) as image:
        assert image.format == "JPEG" and (image.size[0] > image.size[1]) == (ratio > 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--size", "1536x1024"), "pass --size 1248x832"),  # as the server says
        (("--size", "large"), "pass --size 1024x1024"),
        (("--aspect", "1.5"), "pass --aspect 16:9"),
        (("--aspect", "17:4"), "from 1:4 to 4:1"),
        (("--aspect", "4:17"), "from 1:4 to 4:1"),
        (("--size", "512x512", "--aspect", "1:1"), "exclude each other"),
        (("--output", "sheet.gif"), "end it with .png"),
        (("--reference", "missing.png"), "missing.png cannot be read"),
        (("--output", "missing/x.png"), "missing/x.png cannot be written"),
    ],
)
def test_a_wrong_option_is_named(service: FakeService, words: tuple[str, ...], says: str) -> None:
    done = mingc_here("draw", "artifact", "a cat", "--output", "x.png", *words)
    assert done.code and words[0] in done.stderr and says in done.stderr
    assert not service.drawings and not Path("x.png").exists()


@pytest.mark.parametrize(
    ("param", "where"),
    [
        ("PROMPT", "PROMPT"),
        ("negative_prompt", "--negative-prompt"),
        ("size", "--size"),
        ("--reference",) * 2,
    ],
)
def test_what_the_service_refuses_is_named_as_the_option(
    service: FakeService, param: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def draw(request: ImageRequest) -> AsyncIterator[ImageEvent]:
        assert request.where == "PROMPT"
        raise RequestError("too long", param=param)
        yield

    monkeypatch.setattr(service, "draw", draw)
    done = mingc_here("draw", "artifact", "a cat", "--output", "x.png")
    assert done.code == 2 and f"where: {where}\n" in done.stderr
