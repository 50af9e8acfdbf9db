"""Copy the tokenizers of a checkpoint into the artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mingc.errors import CheckpointError
from mingc.export.assets.byte_tokenizer import byte_tokenizer
from mingc.export.checkpoint import Checkpoint, lfs_problem
from mingc.export.stage import Stage


def copy(
    checkpoint: Checkpoint,
    folder: Path,
    stages: Sequence[Stage],
    parameters: Mapping[str, Mapping[str, Any]],
    notes: list[str],
    *,
    is_synthetic: bool,
) -> dict[str, str]:
    """Write the tokenizer.json of each stage that declares one; returns paths relative to the artifact, by stage.

    An export of random weights may lack the file: stages with a byte fallback get a byte tokenizer of `vocab_size`
    ids; other stages can be probed but not served, which `notes` records.
    Raises: CheckpointError when a file is missing or is not a tokenizer. The released weights ship no thinker
    tokenizer (spec: checkpoint.md §1).
    """
    copied = {}
    for stage in stages:
        if stage.tokenizer is None:
            continue
        name, source = stage.name, checkpoint.root / stage.tokenizer.file
        if source.is_file():
            text = _read_tokenizer(source)
        elif is_synthetic and stage.tokenizer.byte_fallback:
            notes.append(f"no tokenizer of the {name}: the artifact has a byte tokenizer")
            text = byte_tokenizer(parameters[name]["vocab_size"], stage.tokenizer.byte_fallback)
        elif is_synthetic:
            notes.append(f"no tokenizer of the {name}: the artifact can be probed, not served")
            continue
        else:
            raise CheckpointError(
                f"the {name}'s tokenizer.json is missing",
                where=str(source),
                fix="take tokenizer.json, tokenizer_config.json and special_tokens_map.json from the model's code "
                "repository and put them there",
            )
        target = folder / "tokenizers" / name / "tokenizer.json"
        target.parent.mkdir(parents=True)
        target.write_text(text, encoding="utf-8")
        copied[name] = target.relative_to(folder).as_posix()
    return copied


def _read_tokenizer(file: Path) -> str:
    """The text of a tokenizer.json, after checking that it is one."""
    try:
        text = file.read_text(encoding="utf-8")
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(f"not a tokenizer: {lfs_problem(file) or error}", where=str(file)) from error
    return text
