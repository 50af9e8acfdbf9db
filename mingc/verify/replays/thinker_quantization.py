"""What layers of a quantized thinker add to recorded streams, held against what its manifest says that they lose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.manifest import QuantizationError
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.scale import Scale, worst_scale

Floats = NDArray[np.float32]

_FACTOR = 2.0  # of the manifest's mean over random tokens: others are further off
_ROUNDING = 1e-3  # what half precision takes from a cosine
# Share of tokens; where lost bits send one to other experts, its cosine is anything. Of the tiny thinker's layers at
# least 0.89 of the tokens are within in FP8.
_LEAST_KEPT = 0.75
# How far the scale of what a layer adds may be from the manifest's, and how many standard errors further (both are
# medians over tokens), besides what its cosine lacks: other tokens lose otherwise. The tiny thinker's layers are within
# 0.009 in FP8, 0.022 in INT4.
_SCALE = 0.015
_ERRORS = 3.0
# Standard error of a median of normal values by their median absolute deviation, times √n.
_SPREAD = 1.25 * 1.48


def measure_quantization_error(
    case: str, given: Floats, layers: Floats, quantization_error: QuantizationError, ledger: ComparisonLog
) -> None:
    """Compare what each layer adds to the stream that was recorded before it.

    Args:
        given: (L, T, D) rows behind each layer, run on the recorded stream.
        layers: the recorded ones.
    """
    first = ledger.references.get(f"{case}.inputs_embeds")
    if first is None:
        ledger.skip(f"{case}.layer_out", "the stream before the first layer is not recorded")
        return
    before = np.concatenate([first.astype(np.float32), layers[:-1]])
    added, recorded = given - before, layers - before
    scale = np.linalg.norm(added, axis=-1) * np.linalg.norm(recorded, axis=-1)
    cosine = (added * recorded).sum(axis=-1) / np.maximum(scale, np.finfo(np.float32).tiny)
    limits = 1 - (_FACTOR * (1 - np.array(quantization_error.layer_cosine)) + _ROUNDING)
    num_kept = (cosine >= limits[:, None]).sum(axis=1)
    worst = int(num_kept.argmin())
    ledger.share(
        f"{case}.layer_out (after recorded layers: tokens of layer {worst})",
        same=int(num_kept[worst]),
        total=cosine.shape[1],
        minimum=_LEAST_KEPT,
        note=f"the worst layer; a cosine of {limits[worst]:.4f} counts, by the manifest's quantization_error",
    )
    if not quantization_error.layer_scale:
        return
    size = np.maximum(np.square(recorded).sum(axis=-1), np.finfo(np.float32).tiny)
    scales = (added * recorded).sum(axis=-1) / size
    medians = np.median(scales, axis=1)
    spread = np.median(np.abs(scales - medians[:, None]), axis=1)
    allowed = (
        _SCALE
        + _ERRORS * _SPREAD * spread / scales.shape[1] ** 0.5
        + 1
        - np.array(quantization_error.layer_cosine)
    )
    found = {
        f"layer {layer}": Scale(factor=float(median / told), allowed=float(limit))
        for layer, (median, told, limit) in enumerate(
            zip(medians, quantization_error.layer_scale, allowed, strict=True)
        )
    }
    name, scale = worst_scale(found)
    ledger.scale(f"{case}.layer_out", scale, how=f"after recorded layers: scale of {name}, the worst")
