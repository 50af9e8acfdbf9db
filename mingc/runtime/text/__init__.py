"""Text for the talker: segmentation and normalisation of what is spoken, live segments, silence between chunks."""

from __future__ import annotations

from mingc.runtime.text.live import LiveSegmenter
from mingc.runtime.text.normalize import has_chinese, normalize_fragment, normalize_text
from mingc.runtime.text.segment import cut_by_length, iter_fragments, iter_speech_segments, speech_segments
from mingc.runtime.text.silence import SilenceHolder, trim_trailing_silence

__all__ = [
    "LiveSegmenter",
    "SilenceHolder",
    "cut_by_length",
    "has_chinese",
    "iter_fragments",
    "iter_speech_segments",
    "normalize_fragment",
    "normalize_text",
    "speech_segments",
    "trim_trailing_silence",
]
