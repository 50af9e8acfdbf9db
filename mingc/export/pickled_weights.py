"""Weights that the release has as pickles: torch's restricted unpickler reads them, which runs no code of the file."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from mingc.errors import CheckpointError

_FORBIDDEN = re.compile(r"GLOBAL (\S+)")
_FIX = "download the file again from the model's repository, and check its size and hash"


def load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a flat dict, memory-mapped, as `{stem of the file}.{name}`. Raises: CheckpointError."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # the library raises many kinds
        call = _FORBIDDEN.search(str(error))
        message = (
            f"the file is more than weights: it would call {call[1]}, which is not done"
            if call is not None
            else f"the file has no weights that torch can read ({type(error).__name__})"
        )
        raise CheckpointError(message, where=str(file), fix=_FIX) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"the file has {type(found).__name__}, expected tensors by name", where=str(file), fix=_FIX
        )
    odd = [
        name for name, value in found.items() if not isinstance(name, str) or not isinstance(value, Tensor)
    ]
    if odd:
        raise CheckpointError(f"{odd[0]!r} is not a tensor in a flat dict", where=str(file), fix=_FIX)
    return {f"{file.stem}.{name}": value for name, value in found.items()}


def save_pickled(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a flat dict of tensors as the release has it."""
    torch.save(tensors, file)
