"""Image engines: the graphs of the stages that make a picture of hidden rows, on one device.

Shape letters: B pictures, Q queries, D the thinker's width, C the width of a row, K rows of a caption with padding,
N tokens of a picture with padding, h and w a picture's latents.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import ImageDitParameters, ImageVaeParameters
from mingc.dtypes import torch_dtype
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.images.tokens import TokenLayout, padded


class ImageSampler:
    """Calls the sampler's graphs on one device.

    Attributes:
        itemsize: bytes of a value of its networks.
    """

    def __init__(self, stage: LoadedStage, parameters: ImageDitParameters, device: torch.device) -> None:
        self.device = device
        self._token_multiple = parameters.token_multiple
        self._caption, self._velocity = stage["caption"], stage["velocity"]
        self.itemsize = torch_dtype(self._velocity.spec.input("caption").dtype).itemsize

    @property
    def max_batch(self) -> int:
        """Samples in a call of `velocity` at most; with guidance each picture has two."""
        return self._velocity.spec.dim("B").maximum

    def caption(self, rows: Tensor) -> Tensor:
        """Rows (n, C) float32 of one caption → its tokens (K, width), ready for all steps."""
        count, width = rows.shape
        length = padded(count, self._token_multiple)
        given = torch.zeros(1, length, width, device=self.device)
        given[0, :count] = rows
        is_pad = torch.arange(length, device=self.device) >= count
        return self._caption.run(rows=given, is_pad=is_pad)["caption"][0]

    def velocity(self, tokens: Tensor, caption: Tensor, layout: TokenLayout, time: float) -> Tensor:
        """The network's output (B, N, 64) float32 for tokens (B, N, 64) float32 and captions (B, K, width).

        All arguments are on the device.
        """
        with current_device(self.device):  # an engine runs on the current stream of the current device
            return self._velocity.run(
                latents=tokens,
                positions=layout.positions,
                is_pad=layout.is_pad,
                caption=caption,
                time=torch.full((len(tokens),), time, device=self.device),
            )["velocity"]


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
