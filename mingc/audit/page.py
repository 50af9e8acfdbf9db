"""The report as one HTML file, with spectrograms side by side and the sounds to listen to."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from mingc.audit.measures import Measured
from mingc.audit.report import AuditReport
from mingc.audit.sounds import encode_mp3
from mingc.console.report_page import fill, write_text
from mingc.media.dsp.audio_comparison import RANGE_DB

MOST_UTTERANCES = 24  # the page stays below about 10 MB
_MOST_COLUMNS = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A sound in the page; `image` and `sound` are data URLs."""

    group: str
    name: str
    utterance: str
    text: str
    transcript: str | None
    duration_s: float
    image: str
    sound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    report: AuditReport
    pictures: tuple[Picture, ...]


def write_page(report: AuditReport, groups: Mapping[str, Sequence[Measured]], path: Path) -> None:
    """Write the page of `report` with the first repetition of each utterance of every group."""
    first: dict[str, dict[str, Measured]] = {}
    for group, sounds in groups.items():
        for each in sounds:
            first.setdefault(each.sound.utterance, {}).setdefault(group, each)
    shown = sorted(first.items(), key=lambda item: -len(item[1]))[:MOST_UTTERANCES]
    pictures = tuple(_picture(each, group) for _, own in shown for group, each in own.items())
    template = resources.files("mingc.audit").joinpath("report.html").read_text(encoding="utf-8")
    write_text(fill(template, _Page(report=report, pictures=pictures)), path)


def _picture(each: Measured, group: str) -> Picture:
    sound = each.sound
    return Picture(
        group=group,
        name=sound.name,
        utterance=sound.utterance,
        text=sound.text,
        transcript=each.transcript,
        duration_s=sound.duration_s,
        image="data:image/png;base64," + base64.b64encode(_spectrogram(each)).decode(),
        sound="data:audio/mpeg;base64," + base64.b64encode(encode_mp3(sound)).decode(),
    )


def _spectrogram(each: Measured) -> bytes:
    """PNG of mel levels, low bands at the bottom."""
    levels = each.levels_db
    stride = -(-len(levels) // _MOST_COLUMNS)
    grey = (255 * (1 + levels[::stride].T[::-1] / RANGE_DB)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grey).resize((grey.shape[1], 4 * grey.shape[0]), Image.Resampling.BILINEAR).save(
        file, "PNG"
    )
    return file.getvalue()
