"""Data sets of the user: items from files, and how their answers are scored.

| kind | file | scored by |
|---|---|---|
| (none) | JSONL of items: `messages`, `prompt` or `text` or `clip`; `id`, `path`, `expected`, `max_tokens` | words |
| `seedtts` | `meta.lst` of seed-tts-eval: `id|prompt text|prompt wav|text` | error rate of a transcript |
| `gsm8k` | JSONL with `question` and `answer` | the last number |
| `mmmu` | JSONL with the columns of the data set; `image_1` … as files or data URLs | letter, or open answer |

Names of files are relative to the file that has them. `answer` of GSM8K ends with `#### ` and the number.
"""

from __future__ import annotations

import ast
import base64
import json
import mimetypes
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mingc.bench.paths import PATHS
from mingc.bench.records import Item
from mingc.bench.scores import Judge, chosen_option, is_open_answer, last_number, same_words
from mingc.errors import ConfigError

_REASONING_TOKENS = 2048
_IMAGE = re.compile(r"<image (\d)>")
_OF_A_LINE = (
    ValueError, LookupError, TypeError, AttributeError, SyntaxError, OSError, RecursionError,
)  # fmt: skip
_FIELDS = {
    "id", "path", "messages", "prompt", "text", "clip", "clip_text", "expected", "max_tokens",
}  # fmt: skip
_NEEDED = {
    **dict.fromkeys(("speech", "speech-stream", "picture"), "text"),
    **dict.fromkeys(("transcription", "realtime"), "clip"),
}
_MEDIA = ("image_url", "audio_url", "video_url")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class DataSet:
    """Items of one file, whose ids are unique, and the judge of their answers."""

    name: str
    items: tuple[Item, ...]
    judge: Judge


def read_data_set(source: str) -> DataSet:
    """Read `KIND:FILE`, or `FILE` with items. Raises: ConfigError naming the line that is wrong."""
    kind, _, name = source.rpartition(":") if source.partition(":")[0] in _READERS else ("", "", source)
    path = Path(name)
    read, judge = _READERS[kind]
    items = list[Item]()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may have other separators inside
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", where="--data", fix="name a text file"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(read(line, number, path.parent))
        except _OF_A_LINE as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            fix = f"see what a data set is: {', '.join(filter(None, _READERS))}, or items (docs/bench.md)"
            raise ConfigError(f"--data {path}, line {number}: {why}", where=str(path), fix=fix) from error
    twice = [name for name, count in Counter(item.id for item in items).items() if count > 1]
    if not items or twice:
        why = f"it has {', '.join(twice[:4])} more than once" if twice else "it is empty"
        raise ConfigError(f"--data {path}: {why}", where=str(path), fix="give each item an id of its own")
    return DataSet(f"{kind}:{path.name}" if kind else path.name, tuple(items), judge)


def _item(line: str, number: int, folder: Path) -> Item:
    """Read an item of the user. Media of messages may be names of files."""
    fields = _object(line)
    if unknown := fields.keys() - _FIELDS:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    messages = fields.get("messages") or (
        [{"role": "user", "content": fields["prompt"]}] if "prompt" in fields else []
    )
    default = "text" if messages else "speech-stream" if "text" in fields else "transcription"
    path = fields.get("path", default)
    needed = _NEEDED.get(path)
    if path not in PATHS:
        raise ValueError(f"path {path!r}: there are {', '.join(PATHS)}")
    if not (messages if needed is None else fields.get(needed)):
        raise ValueError(f"an item of path {path} needs {needed or 'messages or prompt'}")
    expected = fields.get("expected")
    given = {
        "id": str(fields.get("id", number)),
        "path": path,
        "messages": tuple(_with_media(message, folder) for message in messages),
        "text": fields.get("text", ""),
        "clip": (folder / fields["clip"]).read_bytes() if "clip" in fields else b"",
        "clip_text": fields.get("clip_text", ""),
        "expected": None if expected is None else str(expected),
        "max_tokens": fields.get("max_tokens"),
    }
    found = msgspec.convert(given, Item)
    if found.max_tokens is not None and found.max_tokens < 1:
        raise ValueError(f"max_tokens {found.max_tokens}: must be at least 1")
    return found


def _with_media(message: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    return {**message, "content": [_part(part, folder) for part in content]}


def _part(part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    kind = part["type"]
    if kind not in _MEDIA:
        return dict(part)
    return {**part, kind: {**part[kind], "url": _url(part[kind]["url"], folder)}}


def _url(name: str, folder: Path) -> str:
    """A data URL of the file `name`; other URLs as they are."""
    if re.match(r"(data|https?):", name):
        return name
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode((folder / name).read_bytes()).decode()}"


def _seedtts(line: str, number: int, folder: Path) -> Item:
    """To be spoken with the voice of the prompt; a fifth column, the recording of the same text, is not used."""
    columns = line.strip().split("|")
    if len(columns) not in (4, 5):
        raise ValueError(f"{len(columns)} columns, wanted id|prompt text|prompt wav|text")
    name, words, clip, text = columns[:4]
    return Item(
        id=name,
        path="speech-stream",
        text=text,
        clip=(folder / clip).read_bytes(),
        clip_text=words,
        expected=text,
    )


def _gsm8k(line: str, number: int, folder: Path) -> Item:
    fields = _object(line)
    _, mark, answer = fields["answer"].rpartition("####")
    if not mark or not re.search(r"\d", answer):
        raise ValueError("the answer does not end with #### and a number")
    question = f"{fields['question']}\nThink step by step, and end with the answer as a number."
    return Item(
        id=str(fields.get("id", number)), path="text", messages=({"role": "user", "content": question},),
        expected=answer.strip(), max_tokens=_REASONING_TOKENS,
    )  # fmt: skip


def _mmmu(line: str, number: int, folder: Path) -> Item:
    """Pictures stand where `<image 1>` does. The expected answer is a JSON object: options by letter, answers."""
    fields = _object(line)
    raw = fields.get("options") or []
    options = dict(zip(_LETTERS, ast.literal_eval(raw) if isinstance(raw, str) else raw, strict=False))
    listed = "".join(f"\n({letter}) {option}" for letter, option in options.items())
    how = "the option's letter from the given choices directly" if options else "a single word or phrase"
    verb = "Answer with" if options else "Answer the question using"
    pieces = _IMAGE.split(f"{fields['question']}{listed}\n\n{verb} {how}.")
    content = [
        {"type": "image_url", "image_url": {"url": _url(_picture(fields, piece), folder)}}
        if at % 2
        else {"type": "text", "text": piece}
        for at, piece in enumerate(pieces)
        if piece.strip()
    ]
    answer = fields["answer"]
    answers = ast.literal_eval(answer) if isinstance(answer, str) and answer.startswith("[") else [answer]
    if options and not (len(answers) == 1 and answers[0] in options):
        raise ValueError(f"the answer {answer!r} is no letter of an option")
    return Item(
        id=str(fields.get("id", number)),
        path="image" if len(pieces) > 1 else "text",
        messages=({"role": "user", "content": content},),
        expected=json.dumps(
            {"options": options, "answers": [str(each) for each in answers]}, ensure_ascii=False
        ),
        max_tokens=_REASONING_TOKENS,
    )


def _picture(fields: Mapping[str, Any], number: str) -> str:
    """A name or URL; `datasets` writes a picture that is not decoded as an object with its `path`."""
    value = fields[f"image_{number}"]
    name = value.get("path") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise ValueError(f"image_{number} is no name of a file and no data URL")
    return name


def _judge_mmmu(item: Item, answer: str) -> float:
    wanted = json.loads(item.expected or "")
    if wanted["options"]:
        return float(chosen_option(answer, wanted["options"], item.id) == wanted["answers"][0])
    return float(is_open_answer(answer, wanted["answers"]))


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


_READERS: dict[str, tuple[Callable[[str, int, Path], Item], Judge]] = {
    "": (_item, same_words),
    "seedtts": (_seedtts, same_words),
    "gsm8k": (_gsm8k, last_number),
    "mmmu": (_mmmu, _judge_mmmu),
}
