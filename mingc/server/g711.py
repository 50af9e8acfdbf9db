"""G.711: 8-bit samples of telephony, µ-law (`pcmu`) and A-law (`pcma`), by the rules of ITU-T G.711 in 16 bits."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Law = Literal["pcmu", "pcma"]
RATE_HZ = 8000


def decode(data: bytes, law: Law) -> NDArray[np.int16]:
    """(n,) int16 samples of n bytes."""
    return _levels(law)[np.frombuffer(data, np.uint8)]


def encode(samples: NDArray[np.int16], law: Law) -> bytes:
    """The nearest code of each of the (n,) int16 samples."""
    codes, bounds = _bounds(law)
    return codes[np.searchsorted(bounds, samples, side="right")].tobytes()


@functools.cache
def _levels(law: Law) -> NDArray[np.int16]:
    """(256,) int16: the value of each code."""
    code = np.arange(256) ^ (0xFF if law == "pcmu" else 0x55)  # the bits that a line has inverted
    segment, step = code >> 4 & 7, code & 15
    if law == "pcmu":
        value = ((2 * step + 33 << segment) - 33) << 2
        is_negative = code >= 128
    else:
        value = np.where(segment == 0, 2 * step + 1, 2 * step + 33 << np.maximum(segment - 1, 0)) << 3
        is_negative = code < 128
    return np.where(is_negative, -value, value).astype(np.int16)


@functools.cache
def _bounds(law: Law) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """(256,) codes in the order of their values, and (255,) what lies half-way between two."""
    levels = _levels(law)
    codes = np.argsort(levels, kind="stable").astype(np.uint8)  # of two zeros, the positive one is later
    ordered = levels[codes].astype(np.float64)
    return codes, (ordered[1:] + ordered[:-1]) / 2
