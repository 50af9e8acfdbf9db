"""Compares the residual updates of a quantized thinker's layers with the quantization error in its manifest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conformance.reference_log import ReferenceLog
from conformance.sublayer_fit import worst_scale
from mingc.artifacts.manifest import QuantizationError
from mingc.verify.scale import Scale

Floats = NDArray[np.float32]

_FACTOR = 2.0  # allowance over the manifest's mean, which is of random tokens
_ROUNDING = 1e-3  # loss of cosine by low precision
# Fraction of tokens within the limit; the cosine of a token that quantization routes to other experts is arbitrary.
# Layers of the tiny thinker in FP8 have at least 0.89 of their tokens within.
_MIN_KEPT = 0.75
# Allowed distance of a layer's scale from the manifest's, in addition to standard errors (both are medians over tokens)
# and to the cosine's loss, as tokens differ. Layers of the tiny thinker are within 0.009 in FP8, 0.022 in INT4.
_SCALE = 0.015
_ERRORS = 3.0
# Standard error of the median of normal values, divided by their median absolute deviation and multiplied by √n.
_SPREAD = 1.25 * 1.48


def check_layer_quantization(
    case: str, given: Floats, layers: Floats, quantization_error: QuantizationError, log: ReferenceLog
) -> None:
    """Compare the residual update of each layer, computed from the recorded residual before it.

    Args:
        given: outputs (L, T, D) of each layer, run on the recorded residual.
        layers: recorded outputs (L, T, D).
    """
    first = log.references.get(f"{case}.inputs_embeds")
    if first is None:
        log.skip(f"{case}.layer_out", "the residual before the first layer is not recorded")
        return
    before = np.concatenate([first.astype(np.float32), layers[:-1]])
    added, recorded = given - before, layers - before
    scale = np.linalg.norm(added, axis=-1) * np.linalg.norm(recorded, axis=-1)
    cosine = (added * recorded).sum(axis=-1) / np.maximum(scale, np.finfo(np.float32).tiny)
    limits = 1 - (_FACTOR * (1 - np.array(quantization_error.layer_cosine)) + _ROUNDING)
    num_kept = (cosine >= limits[:, None]).sum(axis=1)
    worst = int(num_kept.argmin())
    log.share(
        f"{case}.layer_out (teacher-forced layers: tokens of layer {worst})",
        same=int(num_kept[worst]),
        total=cosine.shape[1],
        minimum=_MIN_KEPT,
        note=f"the worst layer; smallest cosine {limits[worst]:.4f}, from the manifest's quantization error",
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
        f"layer {layer}": Scale(factor=float(median / recorded_scale), allowed=float(limit))
        for layer, (median, recorded_scale, limit) in enumerate(
            zip(medians, quantization_error.layer_scale, allowed, strict=True)
        )
    }
    name, scale = worst_scale(found)
    log.scale(f"{case}.layer_out", scale, how=f"teacher-forced layers: scale of {name}, the worst of all")
