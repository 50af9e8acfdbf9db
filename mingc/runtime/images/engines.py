"""Image engines: the graphs of the stages that make a picture of hidden rows, on one device.

Shape letters: B pictures, Q queries, D the thinker's width, C the width of a row, K rows of a caption with padding,
N tokens of a picture with padding, T both, h and w a picture's latents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import ImageDitParameters, ImageVaeParameters
from mingc.dtypes import torch_dtype
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.images.tokens import TokenLayout, padded


class ImageSampler:
    """Calls the sampler's graphs on one device.

    Attributes:
        num_blocks: of a step.
        itemsize: bytes of a value of its networks.
    """

    def __init__(self, stage: LoadedStage, parameters: ImageDitParameters, device: torch.device) -> None:
        self.device = device
        self._token_multiple = parameters.token_multiple
        self._caption, self._begin, self._end = (stage[name] for name in ("caption", "begin", "end"))
        blocks = stage.layer_instances("block")
        self._blocks = (*blocks.values(),)
        self._num_refiners = sum(name.startswith("noise_refiner.") for name in blocks)
        self.num_blocks = len(blocks)
        self.itemsize = torch_dtype(self._end.spec.input("x").dtype).itemsize

    @property
    def max_batch(self) -> int:
        """Samples in a step at most; with guidance each picture has two."""
        return self._begin.spec.dim("B").maximum

    def caption(self, rows: Tensor) -> Tensor:
        """Rows (n, C) float32 of one caption → its tokens (K, width), ready for all steps."""
        count, width = rows.shape
        length = padded(count, self._token_multiple)
        given = torch.zeros(1, length, width, device=self.device)
        given[0, :count] = rows
        is_pad = torch.arange(length, device=self.device) >= count
        return self._caption.run(rows=given, is_pad=is_pad)["caption"][0]

    def velocity(self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float) -> Tensor:
        """The network's output (B, N, 64) float32. Arguments: as of `blocks`."""
        return deque(self.blocks(tokens, caption, layout, time), maxlen=1).pop()

    def blocks(self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float) -> Iterator[Tensor]:
        """Launch a step block by block: `num_blocks` items, each after a block, of which the last is the velocity.

        `tokens` (B, N, 64) float32, `caption` (B, K, width), all on the device. Set the same streams for every block.
        """
        count = tokens.shape[1]
        times = torch.full((len(tokens),), time, device=self.device)
        given = self._run(
            self._begin, latents=tokens, positions=layout.positions, is_pad=layout.is_pad, time=times
        )
        x, cos, sin, embedded = (given[name] for name in ("x", "cos", "sin", "embedded"))
        del given
        for index, block in enumerate(self._blocks):
            is_refiner = index < self._num_refiners
            if index == self._num_refiners:
                x = torch.cat((x, caption), dim=1)
            rope = {"cos": cos[:count], "sin": sin[:count]} if is_refiner else {"cos": cos, "sin": sin}
            x = self._run(block, x=x, **rope, embedded=embedded)["x"]
            if index + 1 < self.num_blocks:
                yield x
        yield self._run(self._end, x=x, embedded=embedded)["velocity"][:, :count]

    def _run(self, graph: Graph, **tensors: Tensor) -> dict[str, Tensor]:
        with current_device(self.device):  # an engine runs on the current stream of the current device
            return graph.run(**tensors)


class ImageEngines:
    """Calls the graphs.

    Args:
        condition, glyph, sampler, decoder: the stages (`StageGraph.image_path`).
    """

    def __init__(
        self,
        condition: LoadedStage,
        glyph: LoadedStage | None,
        sampler: LoadedStage,
        decoder: LoadedStage,
        *,
        parameters: ImageDitParameters,
        vae: ImageVaeParameters,
        device: torch.device,
    ) -> None:
        self.parameters, self.vae, self.device = parameters, vae, device
        self._condition = condition["condition"]
        self._rows_dtype = torch_dtype(self._condition.spec.input("residual").dtype)
        self._glyph = None if glyph is None else glyph["encode"]
        self.sampler = ImageSampler(sampler, parameters, device)
        self._decode, self._encode = decoder["decode"], decoder["encode"]

    def condition(self, residual: Tensor, delta: Tensor) -> Tensor:
        """Hidden rows of the queries (Q, D) → rows (Q, C) float32."""
        given = (each.to(self.device, self._rows_dtype) for each in (residual, delta))
        return self._condition.run(**dict(zip(("residual", "delta"), given, strict=True)))["rows"]

    def glyph(self, ids: NDArray[np.int64]) -> Tensor:
        """Ids of a text, padded with 0 to the model's length L → rows (L, C) float32."""
        assert self._glyph is not None, "the artifact has the stage"
        batch = torch.zeros(self._glyph.bucket("B", 1), len(ids), dtype=torch.int64)
        batch[0] = torch.from_numpy(ids)
        return self._glyph.run(ids=batch.to(self.device))["rows"][0]

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (channels, h, w) float32 → (3, 8h, 8w) float32, about -1 to 1."""
        pixels = self._decode.run(latents=latents[None])["pixels"]  # (1, 3, h, 8, w, 8)
        return pixels[0].flatten(3, 4).flatten(1, 2)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels (3, H, W) float32 from -1 to 1 → latents (channels, H / 8, W / 8) float32."""
        channels, height, width = pixels.shape
        scale = self.vae.scale
        cells = pixels.reshape(1, channels, height // scale, scale, width // scale, scale)
        return self._encode.run(pixels=cells.contiguous())["latents"][0]
