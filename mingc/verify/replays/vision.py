"""vision.safetensors: embeddings of images and video frames, from recorded pixel rows."""

from __future__ import annotations

import math

import numpy as np

from mingc.runtime.preprocess.image import VisionFeatures
from mingc.runtime.service.encoders import VisionEncoder
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.stages import Engines, to_numpy


def replay(engines: Engines, ledger: ComparisonLog) -> None:
    """Encode every case alone, then all cases in one call."""
    parameters = engines.parameters.vision_encoder
    assert parameters is not None
    encoder = VisionEncoder(engines.stage("vision_encoder"), parameters, engines.device)
    together: list[VisionFeatures] = []
    sizes: list[tuple[str, int]] = []
    for case in ledger.cases("embeds"):
        pixels_name = _pixels_of(case, ledger)
        if pixels_name is None:
            ledger.skip(f"{case}.embeds", "the file has no pixels for it")
            continue
        grids = [tuple(int(side) for side in row) for row in ledger.input(f"{case}.grid_thw")]
        pixels = ledger.input(pixels_name).astype(np.float32)
        features = []
        start = 0
        for grid in grids:
            end = start + math.prod(grid)
            features.append(VisionFeatures(pixels=pixels[start:end], grid=(grid[0], grid[1], grid[2])))
            start = end
        with ledger.case(f"{case}.embeds"):
            ledger.tensor(f"{case}.embeds", to_numpy(encoder.encode(features)))
            together += features
            sizes.append((case, sum(each.num_tokens(parameters.merge_size) for each in features)))
    if len(sizes) < 2:
        return
    with ledger.case("all cases in one call"):
        embeddings = to_numpy(encoder.encode(together))
        start = 0
        for case, size in sizes:
            ledger.tensor(
                f"{case}.embeds", embeddings[start : start + size], how="in one call with the others"
            )
            start += size


def _pixels_of(case: str, ledger: ComparisonLog) -> str | None:
    """The pixel rows of a case; one that has none of its own is another case's video under another grid."""
    own = f"{case}.pixel_values"
    if own in ledger:
        return own
    rows = int(ledger.references[f"{case}.grid_thw"].astype(np.int64).prod(axis=1).sum())
    family = case.split("_")[0]
    others = [
        f"{other}.pixel_values"
        for other in ledger.cases("pixel_values")
        if other.split("_")[0] == family and len(ledger.references[f"{other}.pixel_values"]) == rows
    ]
    return others[0] if len(others) == 1 else None
