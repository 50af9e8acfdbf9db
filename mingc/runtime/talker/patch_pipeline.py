"""Patch pipeline: samples, decodes and feeds back one speech patch at every batch size.

A patch is sampled by the flow-matching sampler, decoded to samples by the VAE decoder, and fed to the speech LLM, whose
hidden state conditions the next patch. Sampler and speech LLM do not depend on the decoder, so if the GPU has room, the
next patch starts while a second stream decodes this one. Patches are decoded in order, because the state of the decoder
passes from patch to patch, and from a segment to the next one in its slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.runtime.engines import stream_priority
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy, GraphPool, Shapes, StagingBuffer

Values = Mapping[str, Tensor]

# Larger batches keep a GPU busy; a concurrent decoder would slow them down (benchmarks/NOTES.md).
_MAX_SPLIT = 2


class PatchModel(Protocol):
    """The three networks of a patch. They keep state for all slots; their inputs have one row per request."""

    def sample(self, inputs: Values) -> Values:
        """Sample a patch: latents (B, P, C), stop_probability (B,), next_embeds (B, D). Updates the latent history."""
        ...

    def advance(self, sampled: Values, inputs: Values) -> None:
        """Run one step of the speech LLM on the outputs of `sample`."""
        ...

    def decode(self, latents: Tensor, slots: Tensor, patch_index: Tensor) -> Tensor:
        """Decode latents (B, P, C) to samples (B, n). Shares no state with the other two."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchedPatch:
    """The results of one patch on their way to the host."""

    host_copy: AsyncHostCopy

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would not block."""
        return self.host_copy.is_ready

    def wait(self) -> tuple[NDArray[np.float32], ...]:
        """Float32, blocks until they are on the host: samples (B, n), the sum of each row of them (B,), stop
        probabilities (B,), latents (B, P, C).

        A sum is finite only if all samples are.
        """
        return tuple(each.float().numpy() for each in self.host_copy.wait())


class PatchPipeline:
    """Runs patches. On CUDA the constructor captures every batch size, and `launch` replays it.

    Args:
        sizes: batch sizes.
        num_steps: steps of the sampler.
        patch: shape (P, C) of a patch's latents.
        is_captured: None: on CUDA.
    """

    def __init__(
        self,
        model: PatchModel,
        sizes: Sequence[int],
        *,
        num_steps: int,
        patch: tuple[int, int],
        device: torch.device,
        is_captured: bool | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._sizes: dict[int, _SplitPatch | _WholePatch] = {}
        if not (device.type == "cuda" if is_captured is None else is_captured):
            return
        decoder = _Decoder(device)
        # The largest size first, so that the others reuse its memory.
        for size in sorted(sizes, reverse=True):
            kind = _SplitPatch if size <= _MAX_SPLIT else _WholePatch
            self._sizes[size] = kind(
                model, patch_shapes(size, num_steps, patch), decoder, f"a patch of batch {size}"
            )

    def launch(self, size: int, inputs: Values) -> LaunchedPatch:
        """Sample and decode one patch of `size` rows and run the speech LLM on it. Does not wait for a GPU.

        Inputs, one row per request: slots, patch_index, guidance, sigma, temperature, noise (P, C), step_noise
        (steps, P, C); step_slots (slot of the speech LLM's step, 0 for none) and lengths (its tokens).
        """
        if self._sizes:
            return LaunchedPatch(host_copy=self._sizes[size].launch(inputs))
        inputs = {name: value.to(self._device) for name, value in inputs.items()}
        sampled = self._model.sample(inputs)
        decoded = _decode(self._model, sampled["latents"], inputs)
        self._model.advance(sampled, inputs)
        return LaunchedPatch(
            host_copy=AsyncHostCopy(*decoded, sampled["stop_probability"], sampled["latents"])
        )


class _Decoder:
    """Resources shared by all batch sizes on CUDA: the decoder's stream, and graph pools for both streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=stream_priority.DECODING)  # type: ignore[no-untyped-call]
        # Graphs that run concurrently must not share memory for intermediates.
        self.main_pool, self.pool = GraphPool(device), GraphPool(device)
        self.has_taken, self.has_ended = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]


class _WholePatch:
    """A patch in one graph, in which decoder and speech LLM run concurrently."""

    def __init__(self, model: PatchModel, shapes: Shapes, decoder: _Decoder, name: str) -> None:
        self._decoder = decoder
        self._inputs = StagingBuffer(shapes, decoder.device)

        def run() -> tuple[Tensor, ...]:
            inputs, main = self._inputs.tensors, torch.cuda.current_stream(decoder.device)
            sampled = model.sample(inputs)
            decoder.stream.wait_stream(main)
            with torch.cuda.stream(decoder.stream):
                decoded = _decode(model, sampled["latents"], inputs)
            model.advance(sampled, inputs)
            main.wait_stream(decoder.stream)
            return *decoded, sampled["stop_probability"], sampled["latents"]

        self._graph, self._outputs = decoder.main_pool.capture(run, name)

    def launch(self, inputs: Values) -> AsyncHostCopy:
        self._inputs.write(inputs)
        # The decoder of a smaller batch may still be running, and writes state that this one reads.
        torch.cuda.current_stream(self._decoder.device).wait_event(self._decoder.has_ended)
        self._graph.replay()
        return AsyncHostCopy(*self._outputs)


class _SplitPatch:
    """A patch in three graphs: sampler, speech LLM, and the decoder, which runs concurrently with the next patch."""

    def __init__(self, model: PatchModel, shapes: Shapes, decoder: _Decoder, name: str) -> None:
        self._decoder = decoder
        self._inputs = StagingBuffer(shapes, decoder.device)
        # The decoder reads copies: the next patch overwrites the inputs while it runs.
        decoder_shapes = {each: shapes[each] for each in ("slots", "patch_index")}
        self._decoder_inputs = StagingBuffer(decoder_shapes, decoder.device)
        sampled: dict[str, Tensor] = {}

        def sample() -> tuple[Tensor, ...]:
            sampled.update(model.sample(self._inputs.tensors))
            return sampled["latents"], sampled["stop_probability"]

        def advance() -> tuple[Tensor, ...]:
            model.advance(sampled, self._inputs.tensors)
            return ()

        def decode() -> tuple[Tensor, ...]:
            return _decode(model, self._taken[0], self._decoder_inputs.tensors)

        self._sample, self._sampled = decoder.main_pool.capture(sample, name)
        self._advance, _ = decoder.main_pool.capture(advance, name)
        self._taken = tuple(torch.zeros_like(each) for each in self._sampled)
        self._decode, self._decoded = decoder.pool.capture(decode, name)
        self._has_sampled = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def launch(self, inputs: Values) -> AsyncHostCopy:
        decoder, main = self._decoder, torch.cuda.current_stream(self._decoder.device)
        self._inputs.write(inputs)
        # The decoder of the previous patch has copied the sampler's outputs.
        main.wait_event(decoder.has_taken)
        self._sample.replay()
        self._has_sampled.record(main)
        self._advance.replay()
        with torch.cuda.stream(decoder.stream):
            self._decoder_inputs.write({name: inputs[name] for name in ("slots", "patch_index")})
            decoder.stream.wait_event(self._has_sampled)
            torch._foreach_copy_(self._taken, self._sampled)
            decoder.has_taken.record(decoder.stream)
            self._decode.replay()
            decoder.has_ended.record(decoder.stream)
            return AsyncHostCopy(*self._decoded, self._taken[1], self._taken[0])


def _decode(model: PatchModel, latents: Tensor, inputs: Values) -> tuple[Tensor, Tensor]:
    """Samples, and the sum of each row."""
    samples = model.decode(latents, inputs["slots"], inputs["patch_index"])
    return samples, samples.sum(1)


def patch_shapes(size: int, num_steps: int, patch: tuple[int, int]) -> Shapes:
    """Inputs of `PatchPipeline.launch`."""
    return {
        **{name: (torch.int64, (size,)) for name in ("slots", "step_slots", "lengths", "patch_index")},
        **{name: (torch.float32, (size,)) for name in ("guidance", "sigma", "temperature")},
        "noise": (torch.float32, (size, *patch)),
        "step_noise": (torch.float32, (size, num_steps, *patch)),
    }
