"""Files of a golden set: tensors, and JSON documents that are validated against the form that replays read.

A form is a type, a text or a pattern for one, a list with one form, a tuple of alternative forms, or an object's forms
by key: optional keys end with `?`, and a key that ends with `*` matches all keys with that prefix. Keys that no replay
reads may have any value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mingc.errors import ConfigError


class _Ints:
    """Rectangular nested lists of integers >= 0; `depth` levels, the innermost of length `width` if given."""

    def __init__(self, depth: int, width: int | None = None) -> None:
        self.depth = depth
        self.width = width

    def holds(self, value: object) -> bool:
        try:
            found = np.asarray(value)
        except ValueError:  # ragged
            return False
        if found.ndim != self.depth or self.width not in (None, found.shape[-1]):
            return False
        return not found.size or (found.dtype == np.int64 and int(found.min()) >= 0)


_TEXTS = [str]
_OPTIONAL_TEXT = (str, type(None))
_COUNT = re.compile(r"\d+ \w+")  # of images or audio clips
_PART = (
    {"type": "text", "text": str},
    {"type": "image", "image": _COUNT},
    {"type": "audio", "audio": _COUNT},
    {"type": "video"},
)
_CHAT = {
    "kwargs": {"sys_prompt_exp?": str},
    "messages": [{"role": ("HUMAN", "ASSISTANT"), "content": [_PART]}],
    "input_ids": _Ints(1),
    "position_ids": _Ints(2),
    "rope_delta": int,
    "text_roundtrip": str,
    "image_grid_thw?": _Ints(2, 3),
    "audio_feats_lengths?": _Ints(2),
    "audio_placeholder_loc_lens?": _Ints(3),
}
_SIZE = {
    "h": int,
    "w": int,
    "min_pixels": int,
    "max_pixels": int,
    "image_processor": _Ints(1),
    "fetch_image": _Ints(1),
}
_SPEECH = {
    "text": str,
    "prompt": str,
    "decoded": str,
    "spk_emb?": (re.compile(r"list\[\d+\]"), type(None)),
    "prompt_text?": _OPTIONAL_TEXT,
    "instruction?": _OPTIONAL_TEXT,
}
_PICTURE = (
    {"user_text": str, "prompt": str, "glyph_text": str},
    {"rows": _TEXTS, "glyph_text": _TEXTS},  # a batch of other cases
)
_DRAWN = {"steps": int, "guidance": float, "seed": int}
_FORMS: Mapping[str, Any] = {
    "preprocess.json": {
        "video?": {
            "options?": {"min_pixels?": int, "total_pixels?": int},
            "timestamps_per_temporal_patch?": [[float]],
        },
        "smart_resize?": {"rows": [_SIZE], "image_processor_factor": int, "fetch_image_factor": int},
        "tokenizer?": {"*": {"ids": _Ints(1), "decoded": str, "decoded_skip_special": str}},
        "processor_template?": {"*": _CHAT},
        "tokenizer_jinja_template?": {
            "*": {"prompt": str, "input_ids": _Ints(1)},
        },
        "eos_token_id?": int,
    },
    "imagegen.json": {
        "condition": {"*": _PICTURE},
        "glyph_text?": [{"prompt": str, "text": str}],
        "byt5_tokenizer?": {"cases": [{"text": str, "ids": _Ints(1)}]},
        "loops": {
            "*": {
                **_DRAWN,
                "height": int,
                "width": int,
                "caption": str,
                "scheduler": ("shipped", {"use_dynamic_shifting": bool}),
            }
        },
        "e2e": {"*": {**_DRAWN, "diffusion_size": _Ints(1)}},
    },
    "talker.json": {"*": (_SPEECH, {"patches": int})},
    "text.json": {
        "cases?": [{"text": str, "pipeline": str, "talker_tn": str}],
        "segmentation?": [{"text": str, "max_semantic_length": int, "fragments": _TEXTS}],
        "end_to_end?": [
            {
                "chunks?": (_TEXTS, type(None)),
                "text": str,
                "max_length": int,
                "synthesis_calls": [{"text": str}],
            }
        ],
    },
}


def read_tensors(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read the golden tensors at `path`. Raises: ConfigError."""
    try:
        tensors: dict[str, NDArray[np.generic]] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    return tensors


def read_document(path: Path) -> dict[str, Any]:
    """Read the golden document at `path`. Raises: ConfigError with the path inside it of the first invalid value."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    problem = next(_problems(_FORMS.get(path.name, {}), document, "$"), None)
    if problem is not None:
        raise _unreadable(path, problem)
    return dict(document)


def _unreadable(path: Path, why: object) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {why}", where="--reference", fix="copy the golden set again")


def _problems(form: Any, value: Any, where: str) -> Iterator[str]:
    """Descriptions of all places where `value` does not match `form`."""
    is_right = False
    match form:
        case dict() if isinstance(value, dict):
            yield from _object_problems(form, value, where)
            return
        case list() if isinstance(value, list):
            for index, each in enumerate(value):
                yield from _problems(form[0], each, f"{where}[{index}]")
            return
        case tuple():
            is_right = any(next(_problems(each, value, where), None) is None for each in form)
        case _Ints():
            is_right = form.holds(value)
        case str():
            is_right = value == form
        case re.Pattern():
            is_right = isinstance(value, str) and form.fullmatch(value) is not None
        case type():
            kinds = (int, float) if form is float else form
            is_right = isinstance(value, kinds) and isinstance(value, bool) == (form is bool)
    if not is_right:
        yield f"{where} is {_name(value)}, expected {_name_form(form)}"


def _object_problems(forms: Mapping[str, Any], value: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, form in forms.items():
        name = key.removesuffix("?")
        if name in value:
            yield from _problems(form, value[name], f"{where}.{name}")
        elif key.endswith("*"):
            for each, found in value.items():
                if each.startswith(key[:-1]):
                    yield from _problems(form, found, f"{where}.{each}")
        elif name == key:
            yield f"{where}.{name} is missing"


def _name(value: object) -> str:
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(value), repr(value))[:80]


def _name_form(form: Any) -> str:
    match form:
        case tuple():
            return " or ".join(map(_name_form, form))
        case str():
            return repr(form)
        case dict():
            return "an object"
        case list():
            return "a list"
        case re.Pattern():
            return f"a text like {form.pattern}"
        case _Ints():
            return f"{'lists of ' * (form.depth - 1)}a list of integers, as many in each"
        case _:
            return str({dict: "an object", type(None): "null"}.get(form, form.__name__))
