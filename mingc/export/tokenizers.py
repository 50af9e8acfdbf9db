"""Copies the tokenizers of a checkpoint into the bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint


def copy(
    checkpoint: Checkpoint, folder: Path, stages: set[str], notes: list[str], *, is_synthetic: bool
) -> dict[str, str]:
    """Copy the tokenizer.json of the thinker and of the talker; their paths relative to the bundle.

    Random weights may do without: engines can be timed, and `notes` tell that nothing more can be done with them.
    Raises: CheckpointError. The released weights ship no thinker tokenizer (spec: checkpoint.md §1).
    """
    sources = {
        "thinker": (checkpoint.root / "tokenizer.json", "thinker" in stages),
        "talker": (checkpoint.root / "talker" / "llm" / "tokenizer.json", "talker" in stages),
    }
    copied = {}
    for name, (source, is_needed) in sources.items():
        if not is_needed:
            continue
        if not source.is_file() and is_synthetic:
            notes.append(f"no tokenizer of the {name}: the bundle can be probed, not served")
            continue
        if not source.is_file():
            raise CheckpointError(
                f"the {name}'s tokenizer.json is missing",
                where=str(source),
                fix="take tokenizer.json, tokenizer_config.json and special_tokens_map.json from the model's code "
                "repository and put them there",
            )
        target = folder / "tokenizers" / name / "tokenizer.json"
        target.parent.mkdir(parents=True)
        shutil.copyfile(source, target)
        copied[name] = target.relative_to(folder).as_posix()
    return copied


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The jinja template of the thinker's tokenizer_config.json, when there is one."""
    path = checkpoint.root / "tokenizer_config.json"
    if not path.is_file():
        return None
    template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    return template if isinstance(template, str) else None
