"""Weight quantization at export.

`fp8` stores every quantizable weight in FP8; `int4` stores experts in INT4 and the other quantizable weights in FP8.
`mingc.kernels.quantized` defines the formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from mingc.artifacts.spec import Quantization
from mingc.errors import ExportError
from mingc.export.stage import WeightSource
from mingc.kernels.quantized import FP8, INT4, quantize_fp8, quantize_int4

_SUFFIX = "_scale"
_QUANTIZERS = {FP8: quantize_fp8, INT4: quantize_int4}


def stored_names(source: WeightSource, quantization: Quantization | None) -> tuple[str, ...]:
    """Names of a weight's stored tensors: the weight, and its scale when it is quantized."""
    is_quantized = _format(source, quantization) is not None
    return (source.name, source.name + _SUFFIX) if is_quantized else (source.name,)


def stored_tensors(
    source: WeightSource,
    value: Tensor,
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Tensors to store for a weight, by name: `value` in `dtype`, or the quantized weight and its scale.

    Quantization runs on `device`, or on the device of `value` when it is None: INT4 takes two CPU cores more than a
    minute per gigabyte. The results are on the device of `value`.
    """
    stored = _format(source, quantization)
    if stored is None:
        return {source.name: value.to(dtype)}

    def quantized(matrix: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(value.device) for tensor in _QUANTIZERS[stored](matrix.to(device)))

    if value.dim() == 2:
        weight, scale = quantized(value)
    else:
        # One expert at a time: float32 copies of all experts would take many times the memory of the stored weight.
        pairs = [quantized(expert) for expert in value]
        weight, scale = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    return dict(zip(stored_names(source, quantization), (weight, scale), strict=True))


def prepare(
    module: nn.Module, sources: Iterable[WeightSource], quantization: Quantization | None
) -> nn.Module:
    """Give `module` (on the meta device) the quantized parameters and scales that `stored_tensors` produces.

    Raises: ExportError when the module registers no scale for a quantizable weight.
    """
    for source in sources:
        stored = _format(source, quantization)
        if stored is None:
            continue
        path, _, name = source.name.rpartition(".")
        owner = module.get_submodule(path)
        if not hasattr(owner, name + _SUFFIX):
            raise ExportError(f"the module has no parameter {name + _SUFFIX}", where=source.name)
        for own, tensor in zip(
            (name, name + _SUFFIX), _on_meta(stored, owner.get_parameter(name).shape), strict=True
        ):
            owner.register_parameter(own, nn.Parameter(torch.empty_like(tensor), requires_grad=False))
    return module


@cache
def _on_meta(stored: torch.dtype, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Quantized weight and scale as meta tensors.

    Cached: meta operations take milliseconds, and the layers of a stage have few different shapes.
    """
    return _QUANTIZERS[stored](torch.empty(shape, device="meta"))


def in_float32(module: nn.Module) -> nn.Module:
    """Convert `module` in place to compute in float32; quantized weights keep their format and are dequantized."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            is_stored = name.endswith(_SUFFIX) or getattr(owner, name + _SUFFIX, None) is not None
            if weight.is_floating_point() and not is_stored:
                owner.register_parameter(name, nn.Parameter(weight.float(), requires_grad=False))
        for name, value in list(owner.named_buffers(recurse=False)):
            if value.is_floating_point():
                owner.register_buffer(name, value.float())
    return module


def _format(source: WeightSource, quantization: Quantization | None) -> torch.dtype | None:
    """The quantized dtype of `source`; None when it is not quantized."""
    if quantization is None or source.quantizable is None:
        return None
    return INT4 if quantization == "int4" and source.quantizable == "experts" else FP8
