"""Operator of `mingc.kernels.rotary_varlen_attention`: engines call it by name, with the machine code as an argument.

Importing this module registers it. It needs neither Triton nor a compiler.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.kernels.cuda.nvrtc import CudaModule, Launch, compile_source, pack, register_operator, unpack

# Constants of the source: heads of the released model, and what the launches depend on.
HEADS = 16
SIZE = 72  # dims of a head
_SOURCE = Path(__file__).with_suffix(".cu")
_ROTATE, _ATTEND = "mingc_rotate", "mingc_attend"
_GROUPS = 3  # warpgroups of a thread block that multiply; one more loads
_KEYS = 96  # of a tile
_STAGES = 2  # tiles of keys and values in shared memory
_QUERIES = 64  # of a warpgroup
_CHUNK = 8  # dims that are contiguous in the arranged keys and values
_ROWS, _PARTS = 32, 6  # of the rotation: rows of a block, blocks for the same rows
_SPARE_BYTES = 1024  # shared memory for alignment and barriers


def rotary_varlen_attention(qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor) -> Tensor:
    """See `mingc.kernels.rotary_varlen_attention`; `bounds` (1, S, 2) int32 in place of the segments.

    qkv is bfloat16 (P, 3, HEADS, SIZE). Raises: KernelError if NVRTC is missing or cannot compile the source.
    """
    out: Tensor = torch.ops.mingc.rotary_varlen_attention(
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), bounds, _code(qkv.device)
    )
    return out


def _code(device: torch.device) -> str:
    """Packed machine code for the GPU, compiled once a process."""
    defines = (("GROUPS", _GROUPS), ("KEYS", _KEYS), ("STAGES", _STAGES))
    return pack({}, compile_source(_SOURCE, defines, gpu_target(device).architecture))


@functools.cache
def _module(code: str, device: int) -> CudaModule:
    shared_bytes = _STAGES * _KEYS * (2 * SIZE + _CHUNK) * 2 + _SPARE_BYTES
    launches = {
        _ROTATE: Launch(threads=256),
        _ATTEND: Launch(threads=128 * (1 + _GROUPS), shared_bytes=shared_bytes),
    }
    with torch.cuda.device(device):
        return CudaModule(unpack(code)[1], launches)


def _attend(qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor, code: str) -> Tensor:
    """The operator: rotates and arranges, then attends. `code` is from `_code`."""
    rows, _, heads, size = qkv.shape
    # A block's first tile starts at any key, so its last one may end up to a tile beyond the keys.
    padded = -(-(rows + _KEYS) // _ROWS) * _ROWS
    q, out = _attend_fake(qkv), _attend_fake(qkv)
    chunks = qkv.new_empty(2, heads, size // _CHUNK, padded, _CHUNK)  # keys, then values
    module = _module(code, qkv.device.index or 0)
    module.launch(_ROTATE, padded // _ROWS * _PARTS, [qkv, cos, sin, q, chunks], [rows, padded])
    blocks = -(-rows // (_QUERIES * _GROUPS))
    step = 2 if bounds.shape[1] > 1 else 0
    module.launch(_ATTEND, heads * blocks, [q, chunks, bounds, out], [rows, padded, step, blocks])
    return out


def _attend_fake(qkv: Tensor, *_: object) -> Tensor:
    return torch.empty_like(qkv[:, 0], memory_format=torch.contiguous_format)


register_operator("rotary_varlen_attention", _attend, _attend_fake)
