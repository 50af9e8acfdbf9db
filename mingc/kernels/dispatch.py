"""Which implementation a kernel function takes: Triton on CUDA, plain torch everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_is_plain = False


def use_triton(tensor: Tensor) -> bool:
    """Whether `tensor` is to be worked on by a Triton kernel."""
    return tensor.is_cuda and not _is_plain


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, every kernel is its torch reference, on CUDA too: to compare with. Not for several threads."""
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before
