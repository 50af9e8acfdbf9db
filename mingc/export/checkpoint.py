"""The released checkpoint on disk: per-part configs and tensor indexes; weights are read on demand.

A checkpoint has parts, each with its own config and files (`_LAYOUTS`): `main` (thinker, vision, audio, projectors),
`talker` and `vae` for speech, and those of image generation. Nothing is loaded at open: headers only. Source of the
layout: spec checkpoint.md §1-§5, imagegen.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingc.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit; a larger number means a truncated or foreign file


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: file, dtype as safetensors spells it, shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the files of a part are: its folder, the name of its config, and the stem of its weights files.

    A part without a stem has no safetensors. `pickles`: weights files that the release has as pickles.
    """

    folder: str
    config: str = "config.json"
    weights: str | None = "model"
    pickles: tuple[str, ...] = ()


_LAYOUTS = {
    "main": Layout(""),
    "talker": Layout("talker"),
    "vae": Layout("talker/vae"),
    # Image generation.
    "mlp": Layout("mlp"),
    "connector": Layout("connector"),
    "byt5": Layout("byt5", "byt5.json", None, ("byt5_model/byt5_model.pt", "byt5_mapper/byt5_mapper.pt")),
    "transformer": Layout("transformer", weights="diffusion_pytorch_model"),
    "scheduler": Layout("scheduler", "scheduler_config.json", None),
    "image_vae": Layout("vae", weights="diffusion_pytorch_model"),
}


FIX = "download the file again from the model's repository"
_PICTURES = ("mlp", "connector", "transformer", "scheduler", "image_vae")  # `byt5` is optional


@dataclass(frozen=True)
class Part:
    """One part of a checkpoint: its config and the index of its tensors."""

    name: str
    root: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorEntry]
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, memory-mapped from its shard in its stored dtype, on the CPU.

        Raises: CheckpointError when the part has no such tensor.
        """
        from safetensors import safe_open

        from mingc.export.pickled_weights import load_pickled

        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"tensor {name} is missing", where=f"{self.name}: {self.root}")
        handle = self._open.get(entry.file)
        if handle is None:
            is_pickle = entry.file.suffix == ".pt"
            handle = load_pickled(entry.file) if is_pickle else safe_open(entry.file, framework="pt")
            self._open[entry.file] = handle
        tensor: torch.Tensor = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        return tensor

    def close(self) -> None:
        """Close the shards that `read` opened; a tensor that was read keeps its own mapping. `read` reopens them."""
        self._open.clear()

    @property
    def layout(self) -> Layout:
        """Where its files are."""
        return _LAYOUTS[self.name]

    @property
    def config_file(self) -> Path:
        """The file that `config` was read from."""
        return self.root / self.layout.config

    def size(self, key: str, *path: str) -> int:
        """The config value at `path` + `key`, a whole number above 0. Raises: CheckpointError."""
        return check_size(self.require(key, *path), ".".join((*path, key)), str(self.config_file))

    def sizes(self, key: str) -> tuple[int, ...]:
        """The config value at `key`, a list of one or more whole numbers above 0. Raises: CheckpointError."""
        found, where = self.require(key), str(self.config_file)
        if not isinstance(found, list) or not found or not all(map(_is_size, found)):
            raise CheckpointError(
                f"{key} is {found!r}, expected a list of whole numbers above 0", where=where, fix=FIX
            )
        return tuple(found)

    def number(self, key: str, *, is_signed: bool = False) -> float:
        """The config value at `key`, a finite number, above 0 unless `is_signed`. Raises: CheckpointError."""
        return check_number(self.require(key), key, str(self.config_file), is_signed=is_signed)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The config value at `key`; one without a default is required. Raises: CheckpointError."""
        found = self.require(key) if default is None else self.config.get(key, default)
        if not isinstance(found, bool):
            raise CheckpointError(
                f"{key} is {found!r}, expected true or false", where=str(self.config_file), fix=FIX
            )
        return found

    def require(self, key: str, *path: str) -> Any:
        """The config value at `path` + `key`; CheckpointError names the file when it is absent."""
        value: Any = self.config
        for step in (*path, key):
            if not isinstance(value, dict) or step not in value:
                dotted = ".".join((*path, key))
                raise CheckpointError(f"config key {dotted} is missing", where=str(self.config_file), fix=FIX)
            value = value[step]
        return value


def check_size(value: Any, key: str, where: str) -> int:
    """`value`. Raises: CheckpointError unless it is a whole number above 0."""
    if not _is_size(value):
        raise CheckpointError(f"{key} is {value!r}, expected a whole number above 0", where=where, fix=FIX)
    size: int = value
    return size


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_number(value: Any, key: str, where: str, *, is_signed: bool = False) -> float:
    """`value`. Raises: CheckpointError unless it is a finite number, above 0 unless `is_signed`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (value <= 0 and not is_signed):
        kind = "a number" if is_signed else "a number above 0"
        raise CheckpointError(f"{key} is {value!r}, expected {kind}", where=where, fix=FIX)
    return float(value)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: the parts whose folders are present, by name, in the order of `_LAYOUTS`."""

    root: Path
    parts: Mapping[str, Part]
    notes: tuple[str, ...]  # fix-ups applied while opening, one line each

    @property
    def main(self) -> Part:
        """The part in the checkpoint's own folder, which every checkpoint has."""
        return self.parts["main"]

    @property
    def talker(self) -> Part | None:
        return self.parts.get("talker")

    @property
    def vae(self) -> Part | None:
        """The VAE of speech; the one of pictures is the part `image_vae`."""
        return self.parts.get("vae")

    def part(self, name: str) -> Part:
        """The part `name`. Raises: CheckpointError when its folder is absent."""
        found = self.parts.get(name)
        if found is None:
            raise CheckpointError(
                f"the checkpoint has no {_LAYOUTS[name].folder}/ folder",
                where=str(self.root),
                fix="download it from the model's repository, or leave its stages out",
            )
        return found

    def check_pictures(self) -> None:
        """Raises: CheckpointError when only some folders of image generation are there: it would draw nothing."""
        absent = [_LAYOUTS[name].folder for name in _PICTURES if name not in self.parts]
        found = [part.layout.folder for name, part in self.parts.items() if name in (*_PICTURES, "byt5")]
        if absent and found:
            raise CheckpointError(
                f"image generation needs {'/, '.join(absent)}/ beside {'/, '.join(found)}/",
                where=str(self.root),
                fix="download the folders from the model's repository, or name --stages without image_condition, "
                "glyph, image_dit and image_vae",
            )

    def with_part(self, part: Part) -> Checkpoint:
        """This checkpoint with `part` in place of the one of its name."""
        return replace(self, parts={**self.parts, part.name: part})

    def fingerprint(self) -> str:
        """sha256 over the configs and over every tensor's name, dtype, shape and file size."""
        digest = hashlib.sha256()
        for part in self.parts.values():
            digest.update(json.dumps(part.config, sort_keys=True).encode())
            for name in sorted(part.tensors):
                entry = part.tensors[name]
                digest.update(f"{name}|{entry.dtype}|{entry.shape}".encode())
            for file in sorted({entry.file for entry in part.tensors.values()}):
                digest.update(f"{file.name}|{file.stat().st_size}".encode())
        return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint folder `path`; every missing file and broken shard is reported at once.

    Raises: CheckpointError.
    """
    return _open(path, has_tensors=True)


def open_configs(path: Path) -> Checkpoint:
    """Like `open_checkpoint` for a folder that holds the config files alone: no part has a tensor."""
    return _open(path, has_tensors=False)


def _open(path: Path, *, has_tensors: bool) -> Checkpoint:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder", where="CHECKPOINT", fix="pass the folder that holds config.json"
        )
    problems: list[str] = []
    notes: list[str] = []
    parts: dict[str, Part] = {}
    for name, layout in _LAYOUTS.items():
        if not (path / layout.folder).is_dir():
            continue
        part = _open_part(name, layout, path / layout.folder, problems, has_tensors)
        if part is not None:
            parts[name] = part
    if not (path / "talker").is_dir():
        notes.append("no talker/ folder: the artifact will have no speech")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(
            f"the checkpoint cannot be read, {len(problems)} problem(s):\n{listed}",
            where=str(path),
            fix="download the missing or broken files again and check their sizes",
        )
    return Checkpoint(root=path, parts=parts, notes=tuple(notes))


def _open_part(name: str, layout: Layout, root: Path, problems: list[str], has_tensors: bool) -> Part | None:
    config = _read_json(root / layout.config, problems)
    weights = layout.weights
    weight_map: dict[str, str] = {}
    files: list[Path] = []
    if has_tensors and weights is not None:
        weight_map = _read_index(root / f"{weights}.safetensors.index.json", problems)
        files = sorted({root / file for file in weight_map.values()})
        files = files or _files_without_index(root, weights, problems)
    if has_tensors:
        files += [root / file for file in layout.pickles]
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        shown = file.relative_to(root.parent)
        if not file.is_file():
            problems.append(f"{shown}: file is missing")
            continue
        try:
            for key, entry in _read_pickle(file) if file.suffix == ".pt" else _read_header(file):
                # Of a tensor in several shards the index selects one, as the reference reads it.
                if key in weight_map and root / weight_map[key] != file:
                    continue
                if key in tensors:
                    problems.append(
                        f"{shown}: tensor {key} is in {tensors[key].file.name} too, and not in the index"
                    )
                tensors[key] = entry
        except CheckpointError as error:
            problems.append(f"{shown}: {error.message}")
    if not problems:
        absent = sorted(set(weight_map) - set(tensors))
        problems.extend(
            f"{weight_map[tensor]}: tensor {tensor} of the index is not in the file" for tensor in absent
        )
    if config is None:
        return None
    return Part(name=name, root=root, config=config, tensors=tensors)


def _read_index(file: Path, problems: list[str]) -> dict[str, str]:
    """File name of each tensor by the index; empty without one."""
    if not file.is_file():
        return {}
    weight_map = (_read_json(file, problems) or {}).get("weight_map")
    if (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(each, str) for each in weight_map.values())
    ):
        return weight_map
    problems.append(f"{file.name}: has no `weight_map` from tensors to files")
    return {}


def _files_without_index(root: Path, weights: str, problems: list[str]) -> list[Path]:
    """The only weights file of a part without an index."""
    file, index = root / f"{weights}.safetensors", root / f"{weights}.safetensors.index.json"
    shards = sorted(root.glob("*.safetensors"))
    others = [path.name for pattern in _OTHER_FORMATS for path in sorted(root.glob(pattern))]
    if file.is_file() or index.is_file():
        return [file] if file.is_file() else []
    if shards:
        problems.append(
            f"{root.name}: {len(shards)} shards, such as {shards[0].name}, but no {index.name}: "
            "copy it from the model's repository"
        )
        return []
    if others:
        problems.append(f"{root.name}: {others[0]} is not read: pass the checkpoint as safetensors")
        return []
    return [file]


def lfs_problem(file: Path) -> str | None:
    """What is wrong with a file that Git LFS has not downloaded; None for another or no file."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return None
    return (
        "is a Git LFS pointer, not the file: run `git lfs pull` in the checkpoint's folder"
        if is_pointer
        else None
    )


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    if pointer := lfs_problem(file):
        problems.append(f"{file}: {pointer}")
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{file.name}: file is missing in {file.parent}")
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{file}: not readable as JSON ({error})")
        return None
    if not isinstance(value, dict):
        problems.append(f"{file}: holds {type(value).__name__}, expected a JSON object")
        return None
    return value


def _read_pickle(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of a pickle, which are memory-mapped for that."""
    from mingc.dtypes import SAFETENSORS_NAMES
    from mingc.export.pickled_weights import load_pickled

    if pointer := lfs_problem(file):
        raise CheckpointError(pointer)
    for name, tensor in load_pickled(file).items():
        dtype = SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype))
        yield name, TensorEntry(file, dtype, tuple(tensor.shape))


def _read_header(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors a safetensors file announces, after checking that their bytes are all there."""
    if pointer := lfs_problem(file):
        raise CheckpointError(pointer)
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER_BYTES + 1
        if length > _MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError("not a safetensors file, or cut off in its header")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise CheckpointError("the safetensors header is not JSON") from None
    try:
        entries = {
            key: TensorEntry(file, entry["dtype"], tuple(entry["shape"]))
            for key, entry in header.items()
            if key != "__metadata__"
        }
        end = max((header[key]["data_offsets"][1] for key in entries), default=0)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise CheckpointError("the safetensors header is not one of tensors") from None
    if 8 + length + end != size:
        raise CheckpointError(f"truncated: {size} bytes on disk, {8 + length + end} announced")
    yield from entries.items()
