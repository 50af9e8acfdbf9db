"""`mingc synth`: a random checkpoint on disk in the released layout, of any size, to try an export with."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mingc.artifacts.artifact import folder_beside, write_failure
from mingc.errors import CheckpointError, ConfigError
from mingc.export.assets.byte_tokenizer import byte_tokenizer
from mingc.export.checkpoint import Checkpoint, Part
from mingc.export.pickled_weights import save_pickled
from mingc.export.stage import StageOptions
from mingc.export.stages import discover
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.weights.loading import safetensors_header

_CHECKOUT = Path(__file__).parents[3]
BUILT_IN = {
    "released": _CHECKOUT / "benchmarks" / "released",
    "tiny": _CHECKOUT / "tests" / "data" / "tiny-ming",
}
_SHARD_BYTES = 4 << 30
_FLOAT32 = ("talker", "vae", "byt5")  # parts that the release stores in float32
_WEIGHTS = (".safetensors", ".index.json", ".pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthReport:
    """The written checkpoint. An export should need little more memory than `largest_shard_bytes`."""

    folder: Path
    files: int
    tensors: int
    size_bytes: int
    largest_shard_bytes: int
    seconds: float


def synthesize(
    config: str,
    output: Path,
    *,
    layers: int | None = None,
    seed: int = 0,
    log: Callable[[str], None] = lambda step: None,
) -> SynthReport:
    """Write a random checkpoint to the new folder `output`; one tensor is in memory at a time.

    Configs without a tokenizer for thinker or talker, such as the released ones, get a byte tokenizer.

    Args:
        config: `released`, `tiny` (both in a checkout only), or a folder of configs in the released layout, or its
            config.json.
        layers: layers of the thinker; None keeps the config's number.
        seed: equal seeds give equal files.

    Raises: ConfigError, CheckpointError.
    """
    started = time.perf_counter()
    source = _configs(config)
    _read_config(source / "config.json")
    if output.exists():
        raise ConfigError(f"{output} exists", where="OUTPUT", fix="pass another folder")
    if layers is not None and layers < 1:
        raise ConfigError(f"--layers {layers}: must be at least 1", where="mingc synth", fix="leave it out")
    try:
        with folder_beside(output, option="OUTPUT") as work:
            shutil.copytree(
                source,
                work,
                dirs_exist_ok=True,
                ignore=lambda _, names: [name for name in names if name.endswith(_WEIGHTS)],
            )
            if layers is not None:
                _set_layers(work / "config.json", layers)
            checkpoint = open_synthetic(work, seed=seed)
            _write_tokenizers(checkpoint, work, log)
            sizes: list[int] = []
            tensors = 0
            for part in checkpoint.parts.values():
                if part.tensors:
                    dtype = torch.float32 if part.name in _FLOAT32 else torch.bfloat16
                    sizes += _write_part(part, dtype, log)
                    tensors += len(part.tensors)
            work.rename(output)
    except OSError as error:
        reason = write_failure(error)
        if reason is None:
            raise
        raise CheckpointError(
            f"the checkpoint cannot be written: {reason}",
            where=str(output),
            fix="free some space there, pass another path, or fewer --layers",
        ) from error
    return SynthReport(
        folder=output,
        files=len(sizes),
        tensors=tensors,
        size_bytes=sum(sizes),
        largest_shard_bytes=max(sizes),
        seconds=time.perf_counter() - started,
    )


def _write_tokenizers(checkpoint: Checkpoint, folder: Path, log: Callable[[str], None]) -> None:
    """Write a byte tokenizer for each stage whose tokenizer is not among the configs."""
    for stage in discover().values():
        if stage.tokenizer is None or not stage.tokenizer.byte_fallback or not stage.is_present(checkpoint):
            continue
        file = folder / stage.tokenizer.file
        if not file.exists():
            log(f"{stage.tokenizer.file} of bytes")
            options = StageOptions()
            vocab_size = stage.parameters(stage.config(checkpoint), options).vocab_size
            text = byte_tokenizer(vocab_size, stage.tokenizer.byte_fallback)
            file.write_text(text, encoding="utf-8")


def _configs(config: str) -> Path:
    if not config:
        raise ConfigError("--config: the path is empty", where="mingc synth", fix="name a folder of configs")
    path = BUILT_IN.get(config, Path(config))
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds no config.json",
            where=f"--config {config}",
            fix="pass a folder of configs in the released layout; released and tiny are in a checkout only",
        )
    return folder


def _read_config(file: Path) -> dict[str, Any]:
    """Raises: CheckpointError unless it is JSON with an `llm_config`."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # or the bytes are not UTF-8
        raise CheckpointError(
            f"the config is not readable: {error}", where=str(file), fix="copy the config again"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("llm_config"), dict):
        raise CheckpointError("the config has no llm_config", where=str(file), fix="copy the config again")
    return document


def _set_layers(file: Path, layers: int) -> None:
    document = _read_config(file)
    document["llm_config"]["num_hidden_layers"] = layers
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _write_part(part: Part, dtype: torch.dtype, log: Callable[[str], None]) -> list[int]:
    """Write the shards of one part, and an index when there are several. Returns the bytes of each shard."""
    if part.layout.pickles:
        return [_write_pickle(part, file, dtype, log) for file in part.layout.pickles]
    shards: list[list[str]] = [[]]
    filled = 0
    for name, entry in part.tensors.items():
        size = torch.Size(entry.shape).numel() * dtype.itemsize
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    total, sizes, index = len(shards), [], {}
    is_single = total == 1 and part.name != "main"
    for number, names in enumerate(shards, 1):
        stem = part.layout.weights
        file = f"{stem}.safetensors" if is_single else f"{stem}-{number:05}-of-{total:05}.safetensors"
        log(f"{part.name}: {file}")
        sizes.append(_write_shard(part, names, dtype, part.root / file))
        index.update(dict.fromkeys(names, file))
    if not is_single:
        document = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
        (part.root / f"{part.layout.weights}.safetensors.index.json").write_text(
            json.dumps(document, indent=1) + "\n"
        )
    return sizes


def _write_pickle(part: Part, file: str, dtype: torch.dtype, log: Callable[[str], None]) -> int:
    """Write a flat dict of the tensors whose names begin with the stem of `file`."""
    path = part.root / file
    start = f"{path.stem}."
    log(f"{part.name}: {file}")
    path.parent.mkdir(exist_ok=True)
    names = [name for name in part.tensors if name.startswith(start)]
    save_pickled(path, {name.removeprefix(start): part.read(name).to(dtype) for name in names})
    return path.stat().st_size


def _write_shard(part: Part, names: Sequence[str], dtype: torch.dtype, path: Path) -> int:
    with path.open("wb") as stream:
        stream.write(safetensors_header({name: (dtype, part.tensors[name].shape) for name in names}))
        for name in names:
            stream.write(part.read(name).to(dtype).view(-1).view(torch.uint8).numpy().data)
    return path.stat().st_size
