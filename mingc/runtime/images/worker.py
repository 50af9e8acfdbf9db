"""Image worker: draws batches of pictures on one device, one step of the sampler at a time.

A batch has pictures of one request: they share size, steps, guidance and caption, and each has its own noise. What
runs beside a batch decides nothing in it, so a seed gives the same pictures at any load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.errors import WorkerError
from mingc.prompts.picture_sizes import Size
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.images.engines import ImageEngines
from mingc.runtime.images.schedule import noise_levels, num_evaluations
from mingc.runtime.images.tokens import TokenLayout, start_noise, to_latents, to_tokens, token_layout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PicturePrompt:
    """What the thinker and the prompt give for a picture.

    Attributes:
        residual, delta: (Q, D) of the queries, on the host.
        glyph_ids: of the text that the picture is to show; None: it has no rows of glyphs.
    """

    residual: Tensor
    delta: Tensor
    glyph_ids: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawing:
    """What all pictures of a request share.

    Attributes:
        size: (H, W) pixels.
        guidance: at most 1: none.
        negative: None: zeros take its place.
        reference: (H, W, 3) uint8.
    """

    size: Size
    num_steps: int
    guidance: float
    prompt: PicturePrompt
    negative: PicturePrompt | None = None
    reference: NDArray[np.uint8] | None = None

    @property
    def num_samples(self) -> int:
        """Samples in a batch for each picture."""
        return 2 if self.guidance > 1 else 1

    @property
    def num_frames(self) -> int:
        return 1 if self.reference is None else 2


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDrawing:
    """A drawing whose prompt and reference are encoded, once for all its pictures.

    Attributes:
        captions: (samples, K, width): the prompt and, with guidance, the negative.
        reference: (tokens, 64) float32.
        levels: see `noise_levels`.
    """

    drawing: Drawing
    captions: Tensor
    reference: Tensor | None
    layout: TokenLayout
    levels: NDArray[np.float32]

    @property
    def num_steps(self) -> int:
        """Steps that are evaluated."""
        return num_evaluations(self.levels)


class Batch:
    """Pictures that are drawn together.

    Attributes:
        step: steps that are done.
        tokens: (B, n, 64) float32, the noisy pictures.
        velocity: (B, n, 64), guided, of the last step.
    """

    def __init__(self, prepared: PreparedDrawing, tokens: Tensor) -> None:
        self.prepared = prepared
        self.tokens = tokens
        self.velocity = torch.zeros_like(tokens)
        self.step = 0
        samples, num_noisy = prepared.drawing.num_samples, tokens.shape[1]
        self.captions = prepared.captions.repeat_interleave(len(tokens), 0)
        self.inputs = tokens.new_zeros(samples * len(tokens), len(prepared.layout.is_pad), tokens.shape[2])
        if prepared.reference is not None:
            self.inputs[:, num_noisy : num_noisy + len(prepared.reference)] = prepared.reference

    @property
    def is_finished(self) -> bool:
        return self.step == self.prepared.num_steps


class ImageWorker:
    """Prepares drawings, begins batches, runs their steps and decodes their pictures; the caller decides when."""

    def __init__(self, engines: ImageEngines) -> None:
        self.engines = engines
        self.device = engines.device

    @torch.inference_mode()
    def prepare(self, drawing: Drawing) -> PreparedDrawing:
        """Encode the prompt, the negative and the reference."""
        captions = [self._caption_rows(drawing.prompt)]
        if drawing.num_samples == 2:
            negative = drawing.negative
            captions.append(
                torch.zeros_like(captions[0]) if negative is None else self._caption_rows(negative)
            )
        embedded = torch.stack([self.engines.caption(rows) for rows in captions])
        parameters, scale = self.engines.parameters, self.engines.vae.scale
        latents = (drawing.size[0] // scale, drawing.size[1] // scale)
        layout = token_layout(parameters, latents, drawing.num_frames, embedded.shape[1])
        return PreparedDrawing(
            drawing=drawing,
            captions=embedded,
            reference=None if drawing.reference is None else self._encode(drawing.reference),
            layout=replace(
                layout, positions=layout.positions.to(self.device), is_pad=layout.is_pad.to(self.device)
            ),
            levels=noise_levels(parameters, drawing.num_steps, layout.num_noisy),
        )

    @torch.inference_mode()
    def begin(self, prepared: PreparedDrawing, seeds: Sequence[int]) -> Batch:
        """A batch of a picture for each of `seeds`, before its first step."""
        parameters = self.engines.parameters
        shape = (parameters.latent_channels, *self._latent_size(prepared.drawing))
        noise = torch.stack([start_noise(seed, shape) for seed in seeds])
        return Batch(prepared, to_tokens(noise, parameters.patch_size).to(self.device))

    @torch.inference_mode()
    def step(self, batch: Batch) -> None:
        """Run the next step and wait for it. Raises: WorkerError when its result is not finite."""
        prepared, guidance = batch.prepared, batch.prepared.drawing.guidance
        level, after = prepared.levels[batch.step : batch.step + 2]
        num_noisy = batch.tokens.shape[1]
        samples = batch.inputs.view(-1, *batch.tokens.shape[:1], *batch.inputs.shape[1:])
        samples[:, :, :num_noisy] = batch.tokens
        steps = np.float32(self.engines.parameters.num_train_steps)
        time = (steps - steps * level) / steps  # rounded as in the reference
        found = self.engines.velocity(batch.inputs, batch.captions, prepared.layout, float(time))
        velocity = found[:, :num_noisy]
        if prepared.drawing.num_samples == 2:
            positive, negative = velocity.view(2, *batch.tokens.shape).unbind()
            velocity = positive + guidance * (positive - negative)
        batch.velocity = velocity
        batch.tokens = batch.tokens - float(after - level) * velocity
        batch.step += 1
        if not AsyncHostCopy(batch.tokens.isfinite().all()).wait()[0]:
            raise WorkerError("the model's latents are not finite", where="image_dit")

    @torch.inference_mode()
    def latents(self, batch: Batch, index: int) -> NDArray[np.float32]:
        """Latents (channels, h, w) of a picture, as they are now."""
        found: NDArray[np.float32] = self._latents(batch, batch.tokens[index]).cpu().numpy()
        return found

    @torch.inference_mode()
    def decode(self, batch: Batch, index: int) -> NDArray[np.uint8]:
        """Pixels (H, W, 3) of a picture: before the last step, of what the model expects it to become.

        Raises: WorkerError when they are not finite.
        """
        left = float(batch.prepared.levels[batch.step])
        tokens = batch.tokens[index] + left * batch.velocity[index]
        values = self.engines.decode(self._latents(batch, tokens))
        pixels = ((values * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
        is_finite, found = AsyncHostCopy(values.isfinite().all(), pixels.contiguous()).wait()
        if not is_finite:
            raise WorkerError("the model's pixels are not finite", where="image_vae")
        array: NDArray[np.uint8] = found.numpy()
        return array

    def _caption_rows(self, prompt: PicturePrompt) -> Tensor:
        rows = self.engines.condition(prompt.residual, prompt.delta)
        return rows if prompt.glyph_ids is None else torch.cat([rows, self.engines.glyph(prompt.glyph_ids)])

    def _encode(self, reference: NDArray[np.uint8]) -> Tensor:
        pixels = torch.from_numpy(reference.copy()).to(self.device).permute(2, 0, 1)
        latents = self.engines.encode((pixels.float() / 255 - 0.5) * 2)
        return to_tokens(latents[None], self.engines.parameters.patch_size)[0]

    def _latents(self, batch: Batch, tokens: Tensor) -> Tensor:
        size = self._latent_size(batch.prepared.drawing)
        return to_latents(tokens[None], self.engines.parameters.patch_size, size)[0]

    def _latent_size(self, drawing: Drawing) -> Size:
        scale = self.engines.vae.scale
        return drawing.size[0] // scale, drawing.size[1] // scale
