"""What servers are asked, and what a right answer has: sentences, pictures, clips, published prompts."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Any

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mingc.text.error_rate import normalised

# No numerals, names or abbreviations: there is one way to write them down.
SENTENCES: Mapping[str, tuple[str, ...]] = {
    "en": (
        "The morning train was late again because of heavy snow in the mountains.",
        "Could you please close the window before the rain comes in?",
        "She bought fresh bread, green apples and a small piece of cheese.",
        "Nobody believed the old sailor until they saw the island themselves.",
    ),
    "zh": (
        "今天早上下了一场大雨，街上几乎没有行人。",
        "请把窗户关上，外面的风太大了。",
        "她买了新鲜的面包、青苹果和一小块奶酪。",
        "孩子们在公园里放风筝，笑声传得很远。",
    ),
}
LONG: Mapping[str, str] = {
    "en": " ".join(
        (
            "The library stands at the end of a quiet street.",
            "Every morning an old man opens its heavy doors and lights the lamps.",
            "Students come first, then mothers with small children, then people who only want a warm place to read.",
            "In the large hall one hears nothing but the turning of pages.",
            "On the upper floor there are maps of cities that no longer exist.",
            "A young woman has drawn all of them again, street by street, for many years.",
            "When somebody asks her why, she smiles and points at the window.",
            "Outside the river runs slowly past the gardens, as it did when the first stone was laid.",
            "In the evening the old man puts out the lamps, locks the doors and walks home along the water.",
        )
    ),
    "zh": "图书馆在一条安静的街道尽头。每天早上，一位老人打开沉重的大门，点亮所有的灯。"
    "先来的是学生，然后是带着孩子的母亲，最后是只想找个暖和地方看书的人。"
    "大厅里除了翻书的声音，什么也听不见。楼上挂着许多旧地图，画的是早已不存在的城市。"
    "一个年轻的女人花了很多年，把它们一条街一条街地重新画了出来。"
    "有人问她为什么，她只是笑一笑，指着窗外。窗外的河水慢慢地流过花园，就像很久以前一样。"
    "到了晚上，老人熄灭灯火，锁好大门，沿着河边走回家。",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Something to ask.

    Attributes:
        media: content parts of a chat.
        needs: input that the server must have, as `input_modalities` names it.
        keywords: groups of alternatives, of which a right answer has one each; beginnings of words as `normalised`
            writes them.
        least: so many groups are enough.
        digest: `digest_of` the published answer; empty: none is published.
        file: of `--media`, which is sent before the text; empty: none.
        source: where the answer is published.
    """

    name: str
    text: str
    keywords: tuple[tuple[str, ...], ...]
    media: tuple[Mapping[str, Any], ...] = ()
    needs: str = "text"
    least: int = 0
    max_tokens: int = 128
    digest: str = ""
    file: str = ""
    source: str = ""

    def missing(self, answer: str) -> list[str]:
        """The groups of keywords that `answer` lacks, by their first words; none if it has enough of them."""
        plain = normalised(answer)
        lacks = [
            group[0]
            for group in self.keywords
            if not any(re.search(rf"(?<![a-z0-9]){re.escape(each)}", plain) for each in group)
        ]
        return lacks if len(self.keywords) - len(lacks) < (self.least or len(self.keywords)) else []


def digest_of(answer: str) -> str:
    """Hash of an answer without case, punctuation and line breaks."""
    return hashlib.sha256(normalised(answer).encode()).hexdigest()[:16]


_SGLANG = "sglang-omni, docs/cookbook/ming_omni.md (bfloat16, four ranks, temperature 0)"
_OFFICIAL = "README of inclusionAI/Ming (Ming-flash-omni-Preview)"

# Prompts whose answers were published, without the sentences of the answers.
COOKBOOK: Sequence[Question] = (
    Question(
        name="tensor parallelism",
        text="Explain what tensor parallelism is in one sentence.",
        keywords=(("tensor",), ("device", "gpu", "processor"), ("split", "divid", "distribut", "partition"),
                  ("comput",)),
        least=3, digest="a25f7d8d3a0f2bff", source=_SGLANG,
    ),
    Question(
        name="read aloud",
        text="Read this sentence aloud: This model understands text, images, audio, and video, and can reply with "
        "either text or speech.",
        keywords=(("understands text images audio and video",), ("text or speech",)),
        max_tokens=64, digest="78cc92fd6437af2b", source=_SGLANG,
    ),
    Question(
        name="friendly sentence",
        text="Say one friendly sentence.",
        keywords=(("hello", "have a", "hope", "smile", "wonderful", "great", "nice"),),
        max_tokens=64, digest="7b512a7c0694e119", source=_SGLANG,
    ),
    Question(
        name="beach",
        text="Describe this image in one sentence.",
        keywords=(("woman", "girl", "person"), ("dog",), ("beach", "sand"), ("highfive", "high five", "paw", "hand"),
                  ("sun",)),
        least=4, needs="image", max_tokens=64, digest="930d217942320e5b", source=_SGLANG, file="demo.jpeg",
    ),
    Question(
        name="space station",
        text="Describe the action in this video.",
        keywords=(("astronaut",), ("space",), ("two",), ("microphone", "speak", "talk")),
        least=3, needs="video", max_tokens=96, digest="b28e6a5bf626e553", source=_SGLANG, file="space_woaudio.mp4",
    ),
    Question(
        name="parrots",
        text="请详细介绍鹦鹉的生活习性。",
        keywords=(("鹦鹉",), ("热带",), ("种子", "坚果", "水果"), ("栖息", "森林"), ("社交", "群")),
        least=4, max_tokens=512, source=_OFFICIAL,
    ),
)  # fmt: skip


def made_questions() -> list[Question]:
    """Questions about pictures and clips that are made here, so that what they show is known."""
    red, blue, green = (214, 40, 40), (30, 80, 220), (20, 150, 60)
    return [
        Question(
            name="red circle", needs="image", media=(_picture(_shape("circle", red)),),
            text="Which shape is in the picture, and which colour is it? Answer in a few words.",
            keywords=(("red",), ("circle", "disc", "disk", "round", "dot", "ball")),
        ),
        Question(
            name="blue square", needs="image", media=(_picture(_shape("square", blue)),),
            text="图片里是什么颜色的什么形状？请简短回答。",
            keywords=(("蓝", "blue"), ("方", "square")),
        ),
        Question(
            name="number", needs="image", media=(_picture(_number("7392")),),
            text="Which number is in the picture? Answer with its digits only.",
            keywords=(("7392",),),
        ),
        Question(
            name="moving triangle", needs="video", media=(_video(green),),
            text="Which shape moves in this video, and which colour is it? Answer in a few words.",
            keywords=(("green",), ("triang",)),
        ),
        Question(
            name="spoken sentences", needs="audio", media=(_clip(),),
            text="Write down what the speaker says.",
            keywords=(("first sentence is short",), ("second one",), ("goodbye", "good bye")),
            least=2,
        ),
    ]  # fmt: skip


def _shape(kind: str, colour: tuple[int, int, int], shift: float = 0.0) -> Image.Image:
    """A filled shape on a light ground, 448 pixels wide; `shift` in widths of the picture."""
    picture = Image.new("RGB", (448, 448), (245, 243, 238))
    draw = ImageDraw.Draw(picture)
    left, top, right, bottom = 124 + 448 * shift, 124, 324 + 448 * shift, 324
    if kind == "circle":
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif kind == "square":
        draw.rectangle((left, top, right, bottom), fill=colour)
    else:
        draw.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=colour)
    return picture


def _number(digits: str) -> Image.Image:
    picture = Image.new("RGB", (448, 224), (245, 243, 238))
    font = ImageFont.load_default(size=120)
    ImageDraw.Draw(picture).text((224, 112), digits, fill=(20, 20, 20), font=font, anchor="mm")
    return picture


def _picture(picture: Image.Image) -> Mapping[str, Any]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return media_part("picture.png", file.getvalue())


def _video(colour: tuple[int, int, int]) -> Mapping[str, Any]:
    """Two seconds in which a triangle moves to the right."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=Fraction(10))
        stream.width, stream.height, stream.pix_fmt = 448, 448, "yuv420p"
        for step in range(20):
            picture = _shape("triangle", colour, 0.25 * math.sin(math.pi * (step / 19 - 0.5)))
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")):
                container.mux(packet)
        container.mux(stream.encode(None))
    return media_part("video.mp4", file.getvalue())


def _clip() -> Mapping[str, Any]:
    """Three sentences that espeak-ng spoke, so that the model's own speech has no part in what it hears."""
    return media_part("clip.ogg", (resources.files("mingc.bench") / "three-sentences.ogg").read_bytes())


def media_part(name: str, data: bytes) -> Mapping[str, Any]:
    """The content part of a chat with a file, by the ending of its name."""
    kind = name.rpartition(".")[2].lower()
    text = base64.b64encode(data).decode()
    if kind in ("png", "jpeg", "jpg"):
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/{kind.replace('jpg', 'jpeg')};base64,{text}"},
        }
    if kind == "mp4":
        return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{text}"}}
    return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}
