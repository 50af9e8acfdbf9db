"""Packing of compiled CUDA code into an operator argument."""

from __future__ import annotations

import re

from mingc.kernels.cuda.nvrtc import pack, unpack


def test_packed_code_needs_no_escape_and_comes_back() -> None:
    numbers, code = {"up": (128, 4, 4)}, bytes(range(256)) + b'\n"\\'
    text = pack(numbers, code)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert unpack(text) == ({"up": [128, 4, 4]}, code)
