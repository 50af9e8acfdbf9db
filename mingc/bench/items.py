"""The built-in data set: texts in English and Chinese, pictures and clips, no two of which are equal."""

from __future__ import annotations

import base64
import functools
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mingc.bench.paths import PATHS
from mingc.bench.records import Item
from mingc.bench.sound import read, wav

CLIP_RATE = 16_000
_SPEECH_SENTENCES = 2
_SENTENCE_WORDS = 11
_STEP = 618_033  # has no divisor with 10^6 in common: every number comes once
_PAUSE_S = 0.1  # shorter than what ends a turn
# Sentences of three-sentences.ogg, which espeak-ng spoke: seconds, and their words.
_SPOKEN = (
    (0.3, 2.2, "The first sentence is short."),
    (3.05, 4.7, "And this is the second one."),
    (5.4, 6.1, "Goodbye."),
)
_ENGLISH = (
    ("The old", "A young", "Our", "Their quiet", "The second", "Another", "The tired", "Some", "Every", "The"),
    ("gardener", "captain", "teacher", "baker", "engineer", "neighbour", "doctor", "painter", "farmer", "pilot"),
    ("carried", "repaired", "described", "painted", "found", "sold", "measured", "cleaned", "lost", "moved"),
    ("a wooden boat", "the green door", "two heavy boxes", "an empty bottle", "the long letter", "a silver clock"),
    ("behind the station", "near the harbour", "before the rain", "in the early light", "after dinner", "by the river"),
)  # fmt: skip
_CHINESE = (
    ("年轻的", "安静的", "邻居家的", "城里的", "热心的", "新来的", "疲倦的", "勤劳的"),
    ("老师", "医生", "农夫", "画家", "船长", "学生", "厨师", "司机"),
    ("在清晨", "在雨后", "在河边", "在车站旁", "在晚饭以前", "在图书馆里"),
    ("修好了", "找到了", "搬走了", "画下了", "卖掉了", "描述了"),
    ("一只木船", "一扇绿门", "两个箱子", "一封长信", "一座旧钟", "一张地图"),
)
_QUESTIONS = ("Continue this story in detail.", "请详细地续写这个故事。")


class Source(Protocol):
    """Where requests come from."""

    def item(self, path: str, index: int, /) -> Item: ...


@dataclass(frozen=True, slots=True)
class Listed:
    """The items of a data set, again from the beginning after the last."""

    items: Sequence[Item]

    def item(self, path: str, index: int, /) -> Item:
        return self.items[index % len(self.items)]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Items without an end. The same seed, path and index are the same item; others differ from their first word on.

    Attributes:
        words: of a prompt, about.
        picture_pixels: width and height.
        clip_s: seconds of a spoken clip, at least.
    """

    seed: int
    words: int
    picture_pixels: int
    clip_s: float

    def item(self, path: str, index: int, /) -> Item:
        draw = random.Random(f"{self.seed} {path} {index}")
        name = f"{path}-{index}"
        # No two items of any path have the same, before a path has had 500,000.
        number = f"{[*PATHS].index(path)}{(self.seed + index // 2 * _STEP) % 10**6:06d}"
        if path in ("speech", "speech-stream", "picture"):
            sentences = 1 if path == "picture" else min(_SPEECH_SENTENCES, self._sentences)
            return Item(id=name, path=path, text=_text(draw, index, number, sentences))
        if path in ("realtime", "transcription"):
            clip, words = _clip(draw, self.clip_s)
            return Item(id=name, path=path, clip=clip, expected=words)
        text, parts = self._prompt(draw, index, number), list[dict[str, Any]]()
        if path == "image":
            url = "data:image/jpeg;base64," + base64.b64encode(_picture(draw, self.picture_pixels)).decode()
            parts.append({"type": "image_url", "image_url": {"url": url}})
        if path == "clip":
            data = base64.b64encode(_clip(draw, self.clip_s)[0]).decode()
            parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
        parts.append({"type": "text", "text": text})
        return Item(id=name, path=path, messages=({"role": "user", "content": parts if parts[1:] else text},))

    def _prompt(self, draw: random.Random, index: int, number: str) -> str:
        return f"{_text(draw, index, number, self._sentences)} {_QUESTIONS[index % 2]}"

    @property
    def _sentences(self) -> int:
        return max(1, round(self.words / _SENTENCE_WORDS))


def _text(draw: random.Random, index: int, number: str, sentences: int) -> str:
    """Sentences in English for even indices, in Chinese for odd ones; a number near the beginning makes them unique."""
    if index % 2:
        return f"第{number}号" + "".join("".join(map(draw.choice, _CHINESE)) + "。" for _ in range(sentences))
    return " ".join(
        [f"Number {number}:", *(" ".join(map(draw.choice, _ENGLISH)) + "." for _ in range(sentences))]
    )


def _picture(draw: random.Random, pixels: int) -> bytes:
    """Soft blocks of random colours as a JPEG."""
    blocks = np.random.default_rng(draw.getrandbits(64)).integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((pixels, pixels), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


@functools.cache
def _sentences() -> tuple[NDArray[np.float32], ...]:
    samples, rate = read((resources.files("mingc.bench") / "three-sentences.ogg").read_bytes())
    assert rate == CLIP_RATE, f"three-sentences.ogg has {rate} Hz"
    return tuple(samples[int(begin * rate) : int(end * rate)] for begin, end, _ in _SPOKEN)


def _clip(draw: random.Random, seconds: float) -> tuple[bytes, str]:
    """Spoken sentences in random order with a little noise, and their words."""
    generator = np.random.default_rng(draw.getrandbits(64))
    pause, parts, words = np.zeros(int(_PAUSE_S * CLIP_RATE), np.float32), list[NDArray[np.float32]](), []
    while sum(map(len, parts)) < seconds * CLIP_RATE:
        chosen = draw.randrange(len(_SPOKEN))
        parts += [_sentences()[chosen], pause]
        words.append(_SPOKEN[chosen][2])
    joined = np.concatenate(parts[:-1])
    noisy = draw.uniform(0.6, 0.9) * joined + 0.0005 * generator.standard_normal(len(joined), np.float32)
    return wav(noisy, CLIP_RATE), " ".join(words)
