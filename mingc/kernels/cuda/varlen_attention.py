"""Operator of `mingc.kernels.rotary_varlen_attention`: engines call it by name, with the machine code as an argument.

Importing this module registers it. It needs neither Triton nor a compiler.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.kernels.cuda.nvrtc import CudaModule, Launch, compile_source, pack, unpack

SIZE = 72  # dims of a head
HEADS = 16
_SOURCE = Path(__file__).with_suffix(".cu")
_ROTATE, _ATTEND = "mingc_rotate", "mingc_attend"
_GROUPS = 3  # warpgroups of a thread block that multiply
_KEYS = 96  # of a step
_STAGES = 2
_QUERIES = 64  # of a warpgroup
_CHUNK = 8  # dims
_ROWS = 32  # of a block of the rotation
_SPARE_BYTES = 1024  # alignment and barriers


def rotary_varlen_attention(qkv: Tensor, cos: Tensor, sin: Tensor, bounds: Tensor) -> Tensor:
    """See `mingc.kernels.rotary_varlen_attention`; `bounds` (1, S, 2) int32 in place of the segments."""
    out: Tensor = torch.ops.mingc.rotary_varlen_attention(
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), bounds, _code(qkv.device)
    )
    return out


def _code(device: torch.device) -> str:
    """Machine code compiled for the GPU, packed."""
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
    rows, _, heads, size = qkv.shape
    padded = -(-(rows + _KEYS) // _ROWS) * _ROWS
    q, out = _attend_fake(qkv), _attend_fake(qkv)
    chunks = qkv.new_empty(2, heads, size // _CHUNK, padded, _CHUNK)
    module = _module(code, qkv.device.index or 0)
    module.launch(_ROTATE, padded // _ROWS * 6, [qkv, cos, sin, q, chunks], [rows, padded])
    blocks = -(-rows // (_QUERIES * _GROUPS))
    step = 2 if bounds.shape[1] > 1 else 0
    module.launch(_ATTEND, heads * blocks, [q, chunks, bounds, out], [rows, padded, step, blocks])
    return out


def _attend_fake(qkv: Tensor, *_: object) -> Tensor:
    return torch.empty_like(qkv[:, 0], memory_format=torch.contiguous_format)


# Not `torch.library.custom_op`: its first call imports torch's compiler, which adds seconds to a server's start.
_OPS = torch.library.Library("mingc", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS.define(  # type: ignore[no-untyped-call]
    "rotary_varlen_attention" + torch.library.infer_schema(_attend, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_OPS.impl("rotary_varlen_attention", _attend, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("mingc::rotary_varlen_attention", _attend_fake, lib=_OPS)
