"""Which implementation a kernel function takes: Triton on CUDA, plain torch everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_is_plain = False
_MIN_HEAD_SIZE = 32  # the matrix units take 16 dims at least, and rope works on halves of a head


def use_triton(tensor: Tensor, head_size: int | None = None) -> bool:
    """Whether `tensor` is to be worked on by a Triton kernel: half precision on CUDA, heads of a size it takes.

    float32 stays with torch: on the matrix units it would be rounded to 10 bits.
    """
    if _is_plain or not tensor.is_cuda or tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    return head_size is None or (head_size >= _MIN_HEAD_SIZE and head_size & (head_size - 1) == 0)


def use_clusters(tensor: Tensor) -> bool:
    """Whether a kernel in CUDA C++ for Hopper's clusters and matrix units is to work on `tensor`."""
    if _is_plain or not tensor.is_cuda or tensor.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(tensor.device) == (9, 0)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, every kernel is its torch reference, on CUDA too: to compare with. Not for several threads."""
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before
