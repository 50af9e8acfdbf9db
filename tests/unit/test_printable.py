"""Text of clients in logs: no controls, no lines of its own."""

from __future__ import annotations

import io
import logging

import pytest

from mingc.errors import printable
from mingc.server.logs import JsonFormatter, TextFormatter


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 你好, é 😀", "plain, 你好, é 😀"),
        ("a\nb", "a\nb"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\r\t\x00\x7f\x9b", r"\r\t\x00\x7f\x9b"),
        ("\u202e\u2066\u200f\u061c\u2028", r"\u202e\u2066\u200f\u061c\u2028"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_characters_that_do_not_print_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_an_exception_cannot_forge_a_line(formatter: logging.Formatter) -> None:
    forged = "2026-01-01 00:00:00,000 INFO mingc.access GET / 200"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError(f"unknown voice \x1b[2J\n{forged}")
    except ValueError:
        logger.exception("failed with %s", f"x\n{forged}")
    lines = stream.getvalue().splitlines()
    assert not any(line.startswith("2026-01-01") for line in lines)
    assert "\x1b" not in stream.getvalue() and forged in stream.getvalue()
