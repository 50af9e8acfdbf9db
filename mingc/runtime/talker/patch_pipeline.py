"""Patches of every batch size: made, heard and decoded.

Sampler and speech LLM need nothing of the decoder, so where a GPU has room for both the next patch begins while the
decoder works on this one. It starts when the sampler has ended, on a stream of its own. Patches are decoded one after
the other: the state that a slot keeps for the decoder passes from patch to patch, and from a segment to the next one in
its slot, without anyone having to wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.runtime.engines.cuda_graphs import AsyncHostCopy, GraphPool, Shapes, StagingBuffer

Values = Mapping[str, Tensor]

# Patches of more rows keep a GPU busy: a decoder beside the next one is in its way (benchmarks/NOTES.md).
_MAX_SPLIT = 1


class PatchWork(Protocol):
    """The networks of a patch over the state of all slots; all three take a patch's inputs, a row a request."""

    def sample(self, inputs: Values) -> Values:
        """One patch: latents (B, P, C), stop_probability (B,), next_embeds (B, D). Updates the latent history."""
        ...

    def advance(self, made: Values, inputs: Values) -> None:
        """Let the speech LLM hear what `sample` made."""
        ...

    def decode(self, latents: Tensor, slots: Tensor, patch_index: Tensor) -> Tensor:
        """Samples (B, n) of latents (B, P, C). Touches no state that the other two touch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchedPatch:
    """Results of one patch on their way to the host: samples (B, n) and stop probabilities (B,), both float32."""

    host_copy: AsyncHostCopy

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would not block."""
        return self.host_copy.is_ready

    def wait(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Samples and stop probabilities; blocks until the device has made them."""
        samples, stop = self.host_copy.wait()
        return samples.numpy(), stop.numpy()


class PatchPipeline:
    """Runs patches. On CUDA every size is captured when this is made, and replayed.

    Args:
        sizes: batch sizes.
        num_steps, patch: of the sampler; shape (P, C) of a patch's latents.
    """

    def __init__(
        self,
        work: PatchWork,
        sizes: Sequence[int],
        *,
        num_steps: int,
        patch: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._work = work
        self._sizes: dict[int, _SplitPatch | _WholePatch] = {}
        if device.type != "cuda":
            return
        decoder = _Decoder(device)
        # The largest first: the others then fit into the memory it has taken.
        for size in sorted(sizes, reverse=True):
            kind = _SplitPatch if size <= _MAX_SPLIT else _WholePatch
            self._sizes[size] = kind(
                work, _patch_shapes(size, num_steps, patch), decoder, f"a patch of batch {size}"
            )

    def launch(self, size: int, inputs: Values) -> LaunchedPatch:
        """Make, decode and let the speech LLM hear one patch of `size` rows; does not wait for a GPU.

        Inputs, a row each: slots, patch_index, guidance, sigma, temperature, noise (P, C), step_noise
        (steps, P, C); step_slots and lengths: where the speech LLM steps, slot 0 where it shall not.
        """
        if self._sizes:
            return LaunchedPatch(host_copy=self._sizes[size].launch(inputs))
        made = self._work.sample(inputs)
        samples = _decode(self._work, made["latents"], inputs)
        self._work.advance(made, inputs)
        return LaunchedPatch(host_copy=AsyncHostCopy(samples, made["stop_probability"]))


class _Decoder:
    """What all sizes share on a CUDA device: the decoder's stream, and memory for the graphs of either stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What runs at the same time must not share intermediates: two pools.
        self.main_pool, self.pool = GraphPool(device), GraphPool(device)
        self.has_taken, self.has_ended = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]


class _WholePatch:
    """One graph, in which the decoder works beside the speech LLM."""

    def __init__(self, work: PatchWork, shapes: Shapes, decoder: _Decoder, name: str) -> None:
        self._decoder = decoder
        self._inputs = StagingBuffer(shapes, decoder.device)

        def run() -> tuple[Tensor, ...]:
            inputs, main = self._inputs.tensors, torch.cuda.current_stream(decoder.device)
            made = work.sample(inputs)
            decoder.stream.wait_stream(main)
            with torch.cuda.stream(decoder.stream):
                samples = _decode(work, made["latents"], inputs)
            work.advance(made, inputs)
            main.wait_stream(decoder.stream)
            return samples, made["stop_probability"]

        self._graph, self._outputs = decoder.main_pool.capture(run, name)

    def launch(self, inputs: Values) -> AsyncHostCopy:
        self._inputs.write(inputs)
        # A smaller batch may have left its decoder running, which writes what the one in here reads.
        torch.cuda.current_stream(self._decoder.device).wait_event(self._decoder.has_ended)
        self._graph.replay()
        return AsyncHostCopy(*self._outputs)


class _SplitPatch:
    """A graph each for sampler, speech LLM and decoder, the last of which runs beside the next patch."""

    def __init__(self, work: PatchWork, shapes: Shapes, decoder: _Decoder, name: str) -> None:
        self._decoder = decoder
        self._inputs = StagingBuffer(shapes, decoder.device)
        # The decoder has its own: the next patch replaces the others meanwhile.
        own = {each: shapes[each] for each in ("slots", "patch_index")}
        self._decoder_inputs = StagingBuffer(own, decoder.device)
        made: dict[str, Tensor] = {}

        def sample() -> tuple[Tensor, ...]:
            made.update(work.sample(self._inputs.tensors))
            return made["latents"], made["stop_probability"]

        def advance() -> tuple[Tensor, ...]:
            work.advance(made, self._inputs.tensors)
            return ()

        def decode() -> tuple[Tensor, ...]:
            return (_decode(work, self._taken[0], self._decoder_inputs.tensors),)

        self._sample, self._made = decoder.main_pool.capture(sample, name)
        self._advance, _ = decoder.main_pool.capture(advance, name)
        self._taken = tuple(torch.zeros_like(each) for each in self._made)
        self._decode, (self._samples,) = decoder.pool.capture(decode, name)
        self._has_made = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def launch(self, inputs: Values) -> AsyncHostCopy:
        decoder, main = self._decoder, torch.cuda.current_stream(self._decoder.device)
        self._inputs.write(inputs)
        main.wait_event(decoder.has_taken)  # the patch before: its latents are where these are going to be
        self._sample.replay()
        self._has_made.record(main)
        self._advance.replay()
        with torch.cuda.stream(decoder.stream):
            self._decoder_inputs.write({name: inputs[name] for name in ("slots", "patch_index")})
            decoder.stream.wait_event(self._has_made)
            torch._foreach_copy_(self._taken, self._made)
            decoder.has_taken.record(decoder.stream)
            self._decode.replay()
            decoder.has_ended.record(decoder.stream)
            return AsyncHostCopy(self._samples, self._taken[1])


def _decode(work: PatchWork, latents: Tensor, inputs: Values) -> Tensor:
    return work.decode(latents, inputs["slots"], inputs["patch_index"])


def _patch_shapes(size: int, num_steps: int, patch: tuple[int, int]) -> Shapes:
    return {
        **{name: (torch.int64, (size,)) for name in ("slots", "step_slots", "lengths", "patch_index")},
        **{name: (torch.float32, (size,)) for name in ("guidance", "sigma", "temperature")},
        "noise": (torch.float32, (size, *patch)),
        "step_noise": (torch.float32, (size, num_steps, *patch)),
    }
