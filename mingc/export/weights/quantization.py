"""Which weights an export stores in fewer bits, and how the module is told.

`fp8` stores every quantizable weight in FP8; `int4` the experts in INT4 and the other quantizable weights in FP8. The
formats stand in `mingc.kernels.quantized`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mingc.errors import ExportError
from mingc.export.recipe import Quantization
from mingc.export.stage import WeightSource
from mingc.kernels.quantized import FP8, INT4, quantize_fp8, quantize_int4

_SUFFIX = "_scale"
_QUANTIZERS = {FP8: quantize_fp8, INT4: quantize_int4}


def stored_names(source: WeightSource, quantization: Quantization | None) -> tuple[str, ...]:
    """Names under which a weight is stored: its own, and its scale's when it is quantized."""
    is_quantized = _format(source, quantization) is not None
    return (source.name, source.name + _SUFFIX) if is_quantized else (source.name,)


def stored_tensors(
    source: WeightSource,
    value: Tensor,
    quantization: Quantization | None,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """What is stored for a weight, by name: `value` in `dtype`, or the quantized weight and its scale.

    `device` quantizes, None for the one that `value` is on: INT4 keeps two CPU cores busy for more than a minute a
    gigabyte. All results are where `value` is.
    """
    stored = _format(source, quantization)
    if stored is None:
        return {source.name: value.to(dtype)}

    def quantized(matrix: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(value.device) for tensor in _QUANTIZERS[stored](matrix.to(device)))

    if value.dim() == 2:
        weight, scale = quantized(value)
    else:
        # One expert at a time: float32 copies of all of them would take many times the stored weight.
        pairs = [quantized(expert) for expert in value]
        weight, scale = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
    return dict(zip(stored_names(source, quantization), (weight, scale), strict=True))


def prepare(
    module: nn.Module, sources: Iterable[WeightSource], quantization: Quantization | None
) -> nn.Module:
    """`module` (on the meta device) with the parameters that `stored_tensors` of its sources fill.

    Raises: ExportError when the module has no place for a scale.
    """
    for source in sources:
        stored = _format(source, quantization)
        if stored is None:
            continue
        path, _, name = source.name.rpartition(".")
        owner = module.get_submodule(path)
        if not hasattr(owner, name + _SUFFIX):
            raise ExportError(f"the module has no place for {name + _SUFFIX}", where=source.name)
        weight, scale = _QUANTIZERS[stored](torch.empty_like(owner.get_parameter(name), device="meta"))
        owner.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        owner.register_parameter(name + _SUFFIX, nn.Parameter(scale, requires_grad=False))
    return module


def in_float32(module: nn.Module) -> nn.Module:
    """`module` computing in float32 with the values that its stored weights stand for; changed in place."""
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
    """The dtype that `source` is stored in, None when it is not quantized."""
    if quantization is None or source.quantizable is None:
        return None
    return INT4 if quantization == "int4" and source.quantizable == "experts" else FP8
