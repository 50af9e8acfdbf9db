"""Image worker: draws batches of pictures, one block of a step of the sampler at a time.

A batch has pictures of one request: they share size, steps, guidance and caption, and each has its own noise. What
runs beside a batch decides nothing in it, so a seed gives the same pictures at any load. With guidance, a second device
may compute the negative samples of every step.

Copies between two devices are ordered with the current streams of both, so a caller may set those as it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.errors import WorkerError
from mingc.prompts.picture_sizes import Size
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.images.engines import ImageEngines, ImageSampler
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


class _Part:
    """The samples of a batch that one sampler computes.

    Args:
        captions: (samples of a picture, K, width).
        tokens: (B, n, 64) of the pictures.
    """

    def __init__(
        self, sampler: ImageSampler, prepared: PreparedDrawing, captions: Tensor, tokens: Tensor
    ) -> None:
        self._sampler, device = sampler, sampler.device
        self._layout = prepared.layout.to(device)
        self._captions = captions.to(device).repeat_interleave(len(tokens), 0)
        self._inputs = torch.zeros(
            len(captions), len(tokens), len(self._layout.is_pad), tokens.shape[2], device=device
        )
        if prepared.reference is not None:
            first = self._layout.num_noisy
            self._inputs[:, :, first : first + len(prepared.reference)].copy_(prepared.reference)

    def blocks(self, tokens: Tensor, time: float) -> Iterator[Tensor]:
        """Begin a step of `tokens`: see `ImageSampler.blocks`."""
        self._inputs[:, :, : self._layout.num_noisy].copy_(tokens)
        return self._sampler.blocks(self._inputs.flatten(0, 1), self._captions, self._layout, time)

    def samples(self, velocity: Tensor) -> Tensor:
        """The last item of `blocks` → (samples, B, n, 64), on the part's device."""
        return velocity.view(self._inputs.shape)[:, :, : self._layout.num_noisy]


class Batch:
    """Pictures that are drawn together.

    Attributes:
        step, num_done: steps that are launched, and that are known to be done.
        tokens: (B, n, 64) float32, the noisy pictures after `step` steps.
        velocity: (B, n, 64), guided, of the last step.
        parts: each computes as many samples of a picture.
        blocks: of the step that is being launched, an item of each part, the last part first.
        num_blocks: of them, so many are launched.
        checks: whether the tokens after each step that is not known to be done are finite.
    """

    def __init__(self, prepared: PreparedDrawing, tokens: Tensor, samplers: Sequence[ImageSampler]) -> None:
        self.prepared = prepared
        self.tokens = tokens
        self.velocity = torch.zeros_like(tokens)
        self.step = 0
        captions = prepared.captions.chunk(len(samplers))
        self.parts = [_Part(*each, tokens) for each in zip(samplers, repeat(prepared), captions)]
        self.blocks: Iterator[tuple[Tensor, ...]] = iter(())
        self.num_blocks = 0
        self.checks: deque[AsyncHostCopy] = deque()

    @property
    def num_done(self) -> int:
        return self.step - len(self.checks)

    @property
    def is_finished(self) -> bool:
        """Whether no step is left to launch."""
        return self.step == self.prepared.num_steps


class ImageWorker:
    """Prepares drawings, begins batches, runs their steps and decodes their pictures; the caller decides when.

    Args:
        second: computes the negative samples, on a device of its own; None: `engines` compute all.

    Attributes:
        device: all but negative samples are computed there.
        samplers: of `engines`, and `second`.
    """

    def __init__(self, engines: ImageEngines, second: ImageSampler | None = None) -> None:
        self.engines = engines
        self.device = engines.device
        self.samplers = (engines.sampler,) if second is None else (engines.sampler, second)

    @torch.inference_mode()
    def prepare(self, drawing: Drawing) -> PreparedDrawing:
        """Encode the prompt, the negative and the reference."""
        captions = [self._caption_rows(drawing.prompt)]
        if drawing.num_samples == 2:
            negative = drawing.negative
            captions.append(
                torch.zeros_like(captions[0]) if negative is None else self._caption_rows(negative)
            )
        embedded = torch.stack([self.engines.sampler.caption(rows) for rows in captions])
        parameters, scale = self.engines.parameters, self.engines.vae.scale
        latents = (drawing.size[0] // scale, drawing.size[1] // scale)
        layout = token_layout(parameters, latents, drawing.num_frames, embedded.shape[1])
        return PreparedDrawing(
            drawing=drawing,
            captions=embedded,
            reference=None if drawing.reference is None else self._encode(drawing.reference),
            layout=layout.to(self.device),
            levels=noise_levels(parameters, drawing.num_steps, layout.num_noisy),
        )

    @torch.inference_mode()
    def begin(self, prepared: PreparedDrawing, seeds: Sequence[int]) -> Batch:
        """A batch of a picture for each of `seeds`, before its first step."""
        parameters = self.engines.parameters
        shape = (parameters.latent_channels, *self._latent_size(prepared.drawing))
        noise = torch.stack([start_noise(seed, shape) for seed in seeds])
        tokens = to_tokens(noise, parameters.patch_size).to(self.device)
        return Batch(prepared, tokens, self.samplers[: prepared.drawing.num_samples])

    def step(self, batch: Batch) -> None:
        """Launch the rest of a step. Raises: as of `advance`."""
        while not self.advance(batch):
            pass

    @torch.inference_mode()
    def advance(self, batch: Batch) -> bool:
        """Launch a block on each device. Returns whether it was the last of a step; then waits for the step before.

        Raises: WorkerError when the result of a step that is done is not finite.
        """
        prepared, guidance = batch.prepared, batch.prepared.drawing.guidance
        level, after = prepared.levels[batch.step : batch.step + 2]
        steps = np.float32(self.engines.parameters.num_train_steps)
        time = float((steps - steps * level) / steps)  # rounded as in the reference
        # The second device first: copies between both wait for what this device has been given before them.
        parts = batch.parts[::-1]
        if not batch.num_blocks:
            batch.blocks = zip(*[part.blocks(batch.tokens, time) for part in parts], strict=True)
        made = next(batch.blocks)
        batch.num_blocks += 1
        if batch.num_blocks < self.engines.sampler.num_blocks:
            return False
        batch.blocks, batch.num_blocks = iter(()), 0  # drops what the last block made
        found = [part.samples(each) for part, each in zip(parts, made, strict=True)]
        samples = torch.cat([each.to(self.device) for each in reversed(found)])
        velocity = samples[0]
        if len(samples) == 2:
            positive, negative = samples
            velocity = positive + guidance * (positive - negative)
        batch.velocity = velocity
        batch.tokens = batch.tokens - float(after - level) * velocity
        batch.step += 1
        batch.checks.append(AsyncHostCopy(batch.tokens.isfinite().all()))
        self._check(batch, num_left=1)
        return True

    def record_end(self) -> Callable[[], None]:
        """Returns a function that waits until the devices have run all that is launched by now."""
        events = []
        for sampler in self.samplers:
            if sampler.device.type == "cuda":
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(sampler.device))
                events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def wait(self, batch: Batch) -> None:
        """Wait for all launched steps. Raises: as of `advance`."""
        self._check(batch, num_left=0)

    def _check(self, batch: Batch, *, num_left: int) -> None:
        """Check the steps that are done, of which at most `num_left` launched ones may be none."""
        while batch.checks and (len(batch.checks) > num_left or batch.checks[0].is_ready):
            if not batch.checks.popleft().wait()[0]:
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
