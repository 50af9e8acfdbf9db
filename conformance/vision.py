"""vision.safetensors: embeddings of images and video frames from recorded pixel rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from mingc.artifacts.parameters import VisionParameters
from mingc.prompts.features import VisionFeatures
from mingc.runtime.encoders.encoder import VisionEncoder
from mingc.verify.engine_run import to_numpy


def replay_images(engines: Engines, log: ReferenceLog, _: Mapping[str, Any]) -> None:
    """Compare every case encoded alone, then all cases encoded in one call."""
    parameters = engines.parameters_of("vision_encoder", VisionParameters)
    encoder = VisionEncoder(engines.stage("vision_encoder"), parameters, engines.device)
    together: list[VisionFeatures] = []
    sizes: list[tuple[str, int]] = []
    for case in log.cases("embeds"):
        pixels_name = _pixels_of(case, log)
        if pixels_name is None:
            log.skip(f"{case}.embeds", "the file has no pixels for it")
            continue
        grids = [tuple(int(side) for side in row) for row in log.input(f"{case}.grid_thw")]
        pixels = log.input(pixels_name).astype(np.float32)
        features = []
        start = 0
        for grid in grids:
            end = start + math.prod(grid)
            features.append(VisionFeatures(patches=pixels[start:end], grid=(grid[0], grid[1], grid[2])))
            start = end
        with log.case(f"{case}.embeds"):
            log.tensor(f"{case}.embeds", to_numpy(torch.cat(encoder.encode(features))))
            together += features
            sizes.append((case, sum(each.num_tokens(parameters.merge_size) for each in features)))
    if len(sizes) < 2:
        return
    with log.case("all cases in one call"):
        embeddings = to_numpy(torch.cat(encoder.encode(together)))
        start = 0
        for case, size in sizes:
            log.tensor(f"{case}.embeds", embeddings[start : start + size], how="in one call with the others")
            start += size


def _pixels_of(case: str, log: ReferenceLog) -> str | None:
    """Name the pixel rows of a case; a case without any uses the pixels of the same video under another grid."""
    name = f"{case}.pixel_values"
    if name in log:
        return name
    rows = int(log.references[f"{case}.grid_thw"].astype(np.int64).prod(axis=1).sum())
    family = case.split("_")[0]
    others = [
        f"{other}.pixel_values"
        for other in log.cases("pixel_values")
        if other.split("_")[0] == family and len(log.references[f"{other}.pixel_values"]) == rows
    ]
    return others[0] if len(others) == 1 else None
