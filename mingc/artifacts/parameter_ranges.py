"""Valid ranges of model parameters: signs and order of numbers, token ids within the vocabulary. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from string import Formatter

# All other numbers are above 0.
_ANY_SIGN = {"image_mean"}
_FROM_ZERO = {
    "stop_token_ids",
    "image_patch_token",
    "frame_patch_token",
    "audio_patch_token",
    "image_start_token",
    "image_end_token",
    "video_start_token",
    "video_end_token",
    "audio_start_token",
    "audio_end_token",
    "min_stop_step",
    "stop_threshold",
    "guidance",
    "sigma",
    "temperature",
    "lookahead_frames",
    "tail_samples",
    "cap_min_seconds",
}
# The first is at most the second.
_ORDERED = (
    ("min_pixels", "max_pixels"),
    ("load_min_pixels", "load_max_pixels"),
    ("video_min_pixels", "video_total_pixels"),
    ("min_stop_step", "max_steps"),
)


def range_problems(parameters: object, where: str) -> Iterator[str]:
    """One line per field of a built-in stage's `parameters` that is out of range; all numbers are finite."""
    values = {field.name: getattr(parameters, field.name) for field in dataclasses.fields(parameters)}  # type: ignore[arg-type]
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if not isinstance(number, int | float) or isinstance(number, bool) or name in _ANY_SIGN:
                continue
            if number < 0 or (number == 0 and name not in _FROM_ZERO):
                yield f"{where}.{name} is {number}, expected {'0 or more' if name in _FROM_ZERO else 'more than 0'}"
            elif name == "stop_threshold" and number > 1:
                yield f"{where}.{name} is {number}, expected a probability"
            elif "token" in name and name in _FROM_ZERO and number >= values["vocab_size"]:
                yield f"{where}.{name} is {number}, beyond a vocabulary of {values['vocab_size']}"
    if "thinking_suffix" in values:
        # Parsed, not formatted: a width such as {state:9999999999} would allocate as many characters.
        try:
            fields = [
                tuple(part[1:])
                for part in Formatter().parse(values["thinking_suffix"])
                if part[1] is not None
            ]
        except ValueError as error:
            yield f"{where}.thinking_suffix is not a format string: {error}"
        else:
            if any(part != ("state", "", None) for part in fields):
                yield f"{where}.thinking_suffix has other placeholders than {{state}}"
    for least, most in _ORDERED:
        if least in values and values[least] > values[most]:
            yield f"{where}.{least} is {values[least]}, more than {most}, {values[most]}"
