"""Dispatch of an operation to its kernel: Triton or CUDA C++ on GPUs of the table, plain torch everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mingc.artifacts.target import KernelFamily
from mingc.host.machine import gpu_target

_is_plain = False
# Tensor cores take at least 16 dims, and rotary embedding works on halves of a head. The blocks of larger heads do not
# fit into registers and shared memory.
_HEAD_SIZES = (32, 64, 128)


def use_triton(tensor: Tensor, head_size: int | None = None) -> bool:
    """Whether a Triton kernel runs on `tensor`: half precision, a GPU with such kernels, a head size they support.

    float32 stays with torch: tensor cores would round it to 10 bits.
    """
    if _is_plain or not tensor.is_cuda or tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_size is not None and head_size not in _HEAD_SIZES:
        return False
    return _has_kernels(tensor.device.index, "triton")


def use_triton_float32(tensor: Tensor) -> bool:
    """As `use_triton`, for a kernel that takes float32 and has no GEMM for tensor cores."""
    if _is_plain or not tensor.is_cuda or tensor.dtype != torch.float32:
        return False
    return _has_kernels(tensor.device.index, "triton")


def use_clusters(tensor: Tensor) -> bool:
    """Whether a CUDA C++ kernel with thread block clusters runs on `tensor`: bfloat16, a GPU with such kernels."""
    if _is_plain or not tensor.is_cuda or tensor.dtype != torch.bfloat16:
        return False
    return _has_kernels(tensor.device.index, "clusters")


def _has_kernels(index: int | None, family: KernelFamily) -> bool:
    return family in gpu_target(index).kernels


# As `torch.compiler.assume_constant_result` does, which would import the compiler: Dynamo cannot trace the lookup.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the torch reference of every operation inside the context, also on CUDA. Not thread-safe."""
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before
