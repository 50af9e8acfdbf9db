"""Types of the scripts' arguments: numbers within a range, with an error message otherwise. Torch is not needed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`, both included."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{value} is not {limit}")
        return value

    return read


def wholes(least: int, most: int | None = None) -> Callable[[str], tuple[int, ...]]:
    """Comma-separated whole numbers in a range, at least one."""
    each = whole(least, most)
    return lambda text: tuple(each(part.strip()) for part in text.split(","))


def seconds(text: str) -> float:
    """A finite time above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value
