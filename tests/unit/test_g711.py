"""G.711 compared with FFmpeg: every code, and every sample."""

from __future__ import annotations

from typing import Any, get_args

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from mingc.server import g711
from mingc.server.g711 import Law

EVERY_CODE = bytes(range(256))
EVERY_SAMPLE = np.arange(-32768, 32768).astype(np.int16)


def codec(law: Law, mode: Any) -> Any:
    context: Any = av.CodecContext.create("pcm_mulaw" if law == "pcmu" else "pcm_alaw", mode)
    context.sample_rate, context.layout, context.format = 8000, "mono", "s16"
    return context


def decoded(data: bytes, law: Law) -> NDArray[np.int16]:
    (frame,) = codec(law, "r").decode(av.Packet(data))
    samples: NDArray[np.int16] = frame.to_ndarray()[0]
    return samples


@pytest.mark.parametrize("law", get_args(Law))
def test_every_code_has_the_value_that_ffmpeg_gives_it(law: Law) -> None:
    np.testing.assert_array_equal(g711.decode(EVERY_CODE, law), decoded(EVERY_CODE, law))


@pytest.mark.parametrize("law", get_args(Law))
def test_every_sample_has_the_code_of_ffmpeg_or_one_as_near(law: Law) -> None:
    frame = av.AudioFrame.from_ndarray(EVERY_SAMPLE[None], format="s16", layout="mono")
    frame.sample_rate = 8000
    theirs = bytes(codec(law, "w").encode(frame)[0])
    ours = g711.encode(EVERY_SAMPLE, law)
    far, near = (np.abs(decoded(each, law).astype(int) - EVERY_SAMPLE.astype(int)) for each in (theirs, ours))
    assert (near <= far).all()
    differ = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
    assert differ.mean() < 0.02  # FFmpeg looks at 14 bits
    assert g711.encode(np.zeros(1, np.int16), law) == theirs[32768:32769]


@pytest.mark.parametrize("law", get_args(Law))
def test_codes_survive(law: Law) -> None:
    """But one: of the two zeros of µ-law the encoder writes the positive one."""
    found = g711.encode(g711.decode(EVERY_CODE, law), law)
    assert {mine: code for mine, code in zip(found, EVERY_CODE, strict=True) if mine != code} == (
        {0xFF: 0x7F} if law == "pcmu" else {}
    )
