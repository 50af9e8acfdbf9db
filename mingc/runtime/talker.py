"""The speech path on one device: speech LLM, flow matching and streaming VAE over shared slots.

A slot holds all that a running segment keeps on the device: KV rows, the hidden state that conditions its next
patch, the latents before it, and the VAE's rings. Which segments run is the scheduler's.

The device work of a patch is in `_sample_and_decode` and `_advance`: fixed tensors in, no host synchronisation
inside, so that a bucket can be captured once and replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.model import CfmParameters, TalkerParameters, VaeParameters
from mingc.runtime.noise import diffusion_noise, start_noise
from mingc.runtime.stages import LoadedStage, torch_dtype

_MAX_PREFIXES = 64  # cached prompt beginnings: at the released dims 12 KiB a token, about 50 tokens each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeechSegment:
    """One stretch of text to be spoken, as the engines take it.

    Attributes:
        input_ids: (T,) int64, the prompt (spec: talker.md §4).
        embed_rows: (E,) int64, prompt rows that take a vector in place of the word embedding.
        embeds: (E, D) float32, these vectors.
        num_prefix: tokens at the beginning that every segment of this voice shares; 0 when there are none.
        history: (H, latent) float32, latents before the first patch, newest last.
        seed, index: what the noise is made from; `index` counts the segments of a request.
        max_patches: the segment ends here at the latest.
    """

    input_ids: NDArray[np.int64]
    embed_rows: NDArray[np.int64]
    embeds: NDArray[np.float32]
    num_prefix: int
    history: NDArray[np.float32]
    seed: int
    index: int
    max_patches: int
    guidance: float
    sigma: float
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patch:
    """What one step gives one segment.

    Attributes:
        samples: (n,) float32 mono; over a whole segment patches × samples of a patch.
        is_last: the segment ends with this patch.
        is_capped: it ends because of its cap, not because the model stopped.
        is_finite: False when the samples hold a NaN or an infinity.
    """

    samples: NDArray[np.float32]
    is_last: bool
    is_capped: bool
    is_finite: bool


@dataclass(slots=True)
class _Speaking:
    """Host side of a running segment."""

    segment: SpeechSegment
    num_tokens: int  # KV rows written
    patch: int = 0
    is_last: bool = False


class _Buffers:
    """The inputs of one bucket: the same tensors at every step. On the CPU host and device share them."""

    def __init__(
        self, size: int, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        self.size = size
        is_cuda = device.type == "cuda"
        self._staged = {
            name: torch.zeros((size, *shape), dtype=dtype, pin_memory=is_cuda)
            for name, (dtype, shape) in shapes.items()
        }
        self.host = {name: tensor.numpy() for name, tensor in self._staged.items()}
        self.on_device = (
            {name: tensor.to(device) for name, tensor in self._staged.items()} if is_cuda else self._staged
        )
        self.next_embeds: Tensor | None = None

    def upload(self, *names: str) -> None:
        for name in names:
            if self.on_device[name] is not self._staged[name]:
                self.on_device[name].copy_(self._staged[name], non_blocking=True)


class TalkerWorker:
    """Runs segments in slots, many at a time.

    Args:
        talker, cfm, audio_vae: stages with the graphs `prefill`/`step`, `sample`, `stream`.
        num_slots: slots to allocate, slot 0 (padding) included.
    """

    def __init__(
        self,
        talker: LoadedStage,
        cfm: LoadedStage,
        audio_vae: LoadedStage,
        *,
        parameters: TalkerParameters,
        flow: CfmParameters,
        vae: VaeParameters,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.flow = flow
        self.num_slots = num_slots
        self.device = device
        self.samples_per_patch = flow.latents_per_patch * vae.samples_per_latent
        self._tail = vae.tail_samples
        self._prefill, self._step = talker["prefill"], talker["step"]
        self._sample, self._stream = cfm["sample"], audio_vae["stream"]
        self._talker_state = talker.allocate_state({"S": num_slots}, device)
        self._vae_state = audio_vae.allocate_state({"S": num_slots}, device)
        hidden = next(each for each in self._sample.spec.inputs if each.name == "hidden")
        embeds = next(each for each in self._prefill.spec.inputs if each.name == "embeds")
        self._embed_dtype = torch_dtype(embeds.dtype)
        self._hidden = torch.zeros(
            num_slots, parameters.hidden_size, dtype=torch_dtype(hidden.dtype), device=device
        )
        self._history = torch.zeros(num_slots, flow.history_latents, flow.latent_dim, device=device)
        self._speaking: dict[int, _Speaking] = {}
        self._buffers: dict[int, _Buffers] = {}
        self._prefixes: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()
        graphs = (self._sample, self._step, self._stream)
        # One size serves the whole patch, so every graph must have it.
        self._sizes = sorted(set.intersection(*(set(graph.spec.dim("B").buckets) for graph in graphs)))
        self.max_batch = self._sizes[-1]
        self._max_chunk = max(self._prefill.spec.dim("T").buckets)

    @torch.inference_mode()
    def join(self, slot: int, segment: SpeechSegment) -> None:
        """Prefill the prompt of `segment` into `slot`, whose earlier contents are forgotten.

        The prefix runs on its own, also when it is not cached yet, so that its rows never depend on who came first.
        """
        done = segment.num_prefix
        if done:
            self._place_prefix(slot, segment)
        hidden = self._run_prompt(slot, segment, done, len(segment.input_ids))
        self._hidden[slot] = hidden[0]
        self._history[slot] = torch.from_numpy(segment.history)
        self._speaking[slot] = _Speaking(segment, num_tokens=len(segment.input_ids))

    @torch.inference_mode()
    def sample(self, slots: Sequence[int]) -> list[Patch]:
        """Make and decode the next patch of each slot, in order. `advance` of the same slots must follow."""
        buffers = self._fill(slots)
        samples, stop = self._sample_and_decode(buffers)
        waves = samples.cpu().numpy()
        return [
            self._end_patch(slot, waves[row], probability)
            for row, (slot, probability) in enumerate(zip(slots, stop.tolist(), strict=False))
        ]

    @torch.inference_mode()
    def advance(self, slots: Sequence[int]) -> None:
        """Let the speech LLM hear the patches just made; segments that have ended are left out."""
        buffers = self._buffers[self._bucket(len(slots))]
        going = [self._speaking[slot] for slot in slots]
        if all(speaking.is_last for speaking in going):
            return
        buffers.host["step_slots"][:] = 0
        buffers.host["lengths"][:] = 0
        for row, (slot, speaking) in enumerate(zip(slots, going, strict=True)):
            if not speaking.is_last:
                buffers.host["step_slots"][row] = slot
                buffers.host["lengths"][row] = speaking.num_tokens
                speaking.num_tokens += 1
        buffers.upload("step_slots", "lengths")
        self._advance(buffers)

    def leave(self, slot: int) -> None:
        """Forget what runs in `slot`; nothing happens when it is empty."""
        self._speaking.pop(slot, None)

    def _sample_and_decode(self, buffers: _Buffers) -> tuple[Tensor, Tensor]:
        """Device work: samples (B, n) float32 and stop probabilities (B,) float32; keeps the next embeddings."""
        inputs = buffers.on_device
        slots = inputs["slots"]
        made = self._sample.run(
            hidden=self._hidden.index_select(0, slots),
            history=self._history.index_select(0, slots),
            noise=inputs["noise"],
            step_noise=inputs["step_noise"],
            guidance=inputs["guidance"],
            sigma=inputs["sigma"],
            temperature=inputs["temperature"],
        )
        self._history.index_copy_(0, slots, made["next_history"])
        decoded = self._stream.run(
            latents=made["latents"], slots=slots, patch_index=inputs["patch_index"], **self._vae_state
        )
        buffers.next_embeds = made["next_embeds"]
        return decoded["samples"], made["stop_probability"]

    def _advance(self, buffers: _Buffers) -> None:
        """Device work: one step of the speech LLM, its hidden states kept by slot."""
        assert buffers.next_embeds is not None
        slots = buffers.on_device["step_slots"]
        stepped = self._step.run(
            embeds=buffers.next_embeds,
            slots=slots,
            lengths=buffers.on_device["lengths"],
            **self._talker_state,
        )
        self._hidden.index_copy_(0, slots, stepped["hidden"])

    def _bucket(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _fill(self, slots: Sequence[int]) -> _Buffers:
        """Write the inputs of the next patch into the buffers of the bucket that holds `slots`."""
        size = self._bucket(len(slots))
        if size not in self._buffers:
            self._buffers[size] = _Buffers(size, self._shapes(), self.device)
        buffers = self._buffers[size]
        host = buffers.host
        patch_shape = (self.flow.latents_per_patch, self.flow.latent_dim)
        for values in host.values():
            values[len(slots) :] = 0  # padding rows work in slot 0
        for row, slot in enumerate(slots):
            speaking = self._speaking[slot]
            segment = speaking.segment
            host["slots"][row] = slot
            host["patch_index"][row] = speaking.patch
            host["guidance"][row] = segment.guidance
            host["sigma"][row] = segment.sigma
            host["temperature"][row] = segment.temperature
            host["noise"][row] = start_noise(segment.seed, segment.index, speaking.patch, patch_shape)
            host["step_noise"][row] = (
                diffusion_noise(
                    segment.seed, segment.index, speaking.patch, (self.flow.num_steps, *patch_shape)
                )
                if segment.temperature > 0.0
                else 0.0
            )
        buffers.upload("slots", "patch_index", "guidance", "sigma", "temperature", "noise", "step_noise")
        return buffers

    def _end_patch(self, slot: int, wave: NDArray[np.float32], stop_probability: float) -> Patch:
        """Stop rule and caps (spec: talker.md §5), and the part of the decoded wave that is final."""
        speaking = self._speaking[slot]
        step = speaking.patch
        has_stopped = (
            step > self.parameters.min_stop_step and stop_probability > self.parameters.stop_threshold
        )
        is_capped = not has_stopped and step + 1 >= speaking.segment.max_patches
        speaking.is_last = has_stopped or is_capped
        speaking.patch += 1
        start = max(0, self._tail - step * self.samples_per_patch)  # before that nothing exists
        end = self.samples_per_patch + (self._tail if speaking.is_last else 0)
        samples = wave[start:end].copy()
        return Patch(
            samples=samples,
            is_last=speaking.is_last,
            is_capped=is_capped,
            is_finite=bool(np.isfinite(samples).all()),
        )

    def _place_prefix(self, slot: int, segment: SpeechSegment) -> None:
        count = segment.num_prefix
        is_inside = segment.embed_rows < count
        key = segment.input_ids[:count].tobytes() + segment.embeds[is_inside].tobytes()
        rows = self._prefixes.get(key)
        if rows is None:
            self._run_prompt(slot, segment, 0, count)
            self._prefixes[key] = {
                name: state[slot, :count].clone() for name, state in self._talker_state.items()
            }
            if len(self._prefixes) > _MAX_PREFIXES:
                self._prefixes.popitem(last=False)
            return
        self._prefixes.move_to_end(key)
        for name, state in self._talker_state.items():
            state[slot, :count] = rows[name]

    def _run_prompt(self, slot: int, segment: SpeechSegment, start: int, end: int) -> Tensor:
        """Prompt tokens `start` to `end` in chunks; hidden (1, D) of the last one."""
        hidden = None
        while start < end:
            count = min(self._max_chunk, end - start)
            width = self._prefill.bucket("T", count)
            input_ids = torch.zeros(width, dtype=torch.int64)
            input_ids[:count] = torch.from_numpy(segment.input_ids[start : start + count])
            embeds = torch.zeros(width, self.parameters.hidden_size, dtype=self._embed_dtype)
            use_embed = torch.zeros(width, dtype=torch.bool)
            chosen = (segment.embed_rows >= start) & (segment.embed_rows < start + count)
            if chosen.any():
                places = torch.from_numpy(segment.embed_rows[chosen] - start)
                embeds[places] = torch.from_numpy(segment.embeds[chosen]).to(self._embed_dtype)
                use_embed[places] = True
            hidden = self._prefill.run(
                input_ids=input_ids.to(self.device),
                embeds=embeds.to(self.device),
                use_embed=use_embed.to(self.device),
                slot=torch.tensor([slot], device=self.device),
                start=torch.tensor([start], device=self.device),
                last=torch.tensor([count - 1], device=self.device),
                **self._talker_state,
            )["hidden"]
            start += count
        assert hidden is not None, "a prompt has at least one token behind its prefix"
        return hidden

    def _shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        patch = (self.flow.latents_per_patch, self.flow.latent_dim)
        return {
            "slots": (torch.int64, ()),
            "step_slots": (torch.int64, ()),
            "lengths": (torch.int64, ()),
            "patch_index": (torch.int64, ()),
            "guidance": (torch.float32, ()),
            "sigma": (torch.float32, ()),
            "temperature": (torch.float32, ()),
            "noise": (torch.float32, patch),
            "step_noise": (torch.float32, (self.flow.num_steps, *patch)),
        }
