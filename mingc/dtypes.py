"""Names of torch dtypes: `bfloat16` in specs and manifests, `BF16` in safetensors files."""

from __future__ import annotations

from typing import Final, get_args

import torch

from mingc.artifacts.spec import DType

_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in get_args(DType)}
_NAMES: Final[dict[torch.dtype, DType]] = {getattr(torch, name): name for name in get_args(DType)}
SAFETENSORS_NAMES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def torch_dtype(name: str) -> torch.dtype:
    """`float32` → `torch.float32`."""
    return _TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> DType:
    """`torch.float32` → `float32`."""
    return _NAMES[dtype]
