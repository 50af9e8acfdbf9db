"""Puts the tokenizers of a checkpoint into the artifact."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from mingc.artifacts.manifest import ModelParameters
from mingc.errors import CheckpointError
from mingc.export.assets.byte_tokenizer import byte_tokenizer
from mingc.export.checkpoint import Checkpoint


def copy(
    checkpoint: Checkpoint, folder: Path, parameters: ModelParameters, notes: list[str], *, is_synthetic: bool
) -> dict[str, str]:
    """Write the tokenizer.json of the thinker and of the talker; their paths relative to the artifact.

    Random weights may do without: the thinker gets one of bytes; of the talker engines can be timed, and `notes` tell
    that nothing more can be done with them.
    Raises: CheckpointError when one is missing or is none. The released weights ship no thinker tokenizer (spec:
    checkpoint.md §1).
    """
    sources = {}
    if parameters.thinker is not None:
        sources["thinker"] = checkpoint.root / "tokenizer.json"
    if parameters.talker is not None:
        sources["talker"] = checkpoint.root / "talker" / "llm" / "tokenizer.json"
    copied = {}
    for name, source in sources.items():
        if source.is_file():
            text = _read_tokenizer(source)
        elif is_synthetic and name == "thinker" and parameters.thinker is not None:
            notes.append("no tokenizer of the thinker: the artifact has one of bytes")
            text = byte_tokenizer(parameters.thinker.vocab_size)
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
    except Exception as error:  # the library has no type of its own
        raise CheckpointError(f"not a tokenizer: {error}", where=str(file)) from error
    return text
