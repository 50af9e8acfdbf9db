"""Copies weights from files to a GPU: threads read pieces into pinned memory, from which the device copies them.

One copy of a memory-mapped tensor at a time takes several times as long: one thread handles the page faults, and the
driver copies pageable memory through a small buffer of its own.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mingc.runtime.engines.packed_weights import PackedWeights

_PIECE_BYTES = 16 << 20
_THREADS = 8
_BUFFERS = 2  # of a thread: it fills one while the device copies from the other


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a file, and the bytes on the device that they are copied to."""

    path: Path
    offset: int
    target: Tensor


def copy_to_device(files: Mapping[str, PackedWeights], device: torch.device) -> dict[str, Tensor]:
    """Copy each tensor of `files`, which maps its name to its file, to a CUDA device.

    Raises: OSError when a file cannot be read, or is shorter than its header says.
    """
    copies, pieces = dict[str, Tensor](), deque[_Piece]()
    for name, file in files.items():
        mapped = file.get_tensor(name)  # its bytes are not read
        copies[name] = torch.empty(mapped.shape, dtype=mapped.dtype, device=device)
        path, offset = file.location(name)
        content = copies[name].view(-1).view(torch.uint8)
        for target in torch.split(content, _PIECE_BYTES) if mapped.numel() else ():
            pieces.append(_Piece(path, offset, target))
            offset += target.numel()
    torch.cuda.synchronize(device)  # the copies may be in memory that earlier work still uses
    num_threads = max(1, min(_THREADS, os.cpu_count() or 1, len(pieces)))
    with ThreadPoolExecutor(num_threads) as pool:
        for each in [pool.submit(_copy, pieces, device) for _ in range(num_threads)]:
            each.result()
    return copies


@torch.inference_mode()  # the caller may be in this mode, which each thread enters for itself
def _copy(pieces: deque[_Piece], device: torch.device) -> None:
    """Copy pieces until none is left."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        buffers = [
            (torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            for _ in range(_BUFFERS)
        ]
        try:
            for buffer, copied in itertools.cycle(buffers):
                try:
                    piece = pieces.popleft()
                except IndexError:
                    break
                copied.synchronize()
                source = buffer[: piece.target.numel()]
                _read(piece.path, piece.offset, source.numpy().data)
                piece.target.copy_(source, non_blocking=True)
                copied.record()
        finally:
            stream.synchronize()


def _read(path: Path, offset: int, content: memoryview) -> None:
    """Fill `content` with the bytes of a file from `offset` on."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while content:
            count = file.readinto(content)
            if not count:
                raise OSError(None, "the file is too short", str(path))
            content = content[count:]
