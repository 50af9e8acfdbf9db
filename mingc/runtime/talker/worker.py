"""Talker worker: the host side of speech segments that run in slots: prompts, noise, stop rule and caps.

The loop adds segments that the scheduler has admitted, launches patches and collects them; the engines
(`mingc.runtime.talker.engines`) run them. On a GPU patch k + 1 is launched before the stop flags of patch k are read,
so that the device never waits for the host. If a segment has ended with patch k, its surplus patch is discarded; the
patch has changed only the slot of the segment.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.runtime.engines.cuda_graphs import Shapes
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.noise import NoiseSource
from mingc.runtime.request import AudioDelta, Recorder
from mingc.runtime.talker.engines import TalkerEngines
from mingc.runtime.talker.launch_timing import PatchLatencyModel
from mingc.runtime.talker.patch_pipeline import LaunchedPatch

Inputs = Mapping[str, NDArray[Any]]
# Inputs of a patch with a number for each row.
_COLUMNS = ("slots", "patch_index", "step_slots", "lengths", "guidance", "sigma", "temperature")
_MAX_PREFIXES = 64  # cached prompt prefixes; at the released dims 12 KiB per token, about 50 tokens each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeechSegment:
    """One piece of text to speak, as inputs of the engines.

    Attributes:
        input_ids: (T,) int64, the prompt (spec: talker.md §4).
        embed_rows: (E,) int64, prompt rows that take `embeds` instead of word embeddings.
        embeds: (E, D) float32.
        num_prefix: length of the prompt prefix that all segments of this voice share.
        history: (H, latent) float32, latents before the first patch, newest last.
        noise: noise of the request.
        index: number of the segment in the request, from 0.
        max_patches: cap on the number of patches.
    """

    input_ids: NDArray[np.int64]
    embed_rows: NDArray[np.int64]
    embeds: NDArray[np.float32]
    num_prefix: int
    history: NDArray[np.float32]
    noise: NoiseSource
    index: int
    max_patches: int
    guidance: float
    sigma: float
    temperature: float


@dataclass(slots=True, eq=False)
class _Running:
    """Host state of a running segment."""

    segment: SpeechSegment
    recorder: Recorder | None
    num_tokens: int  # KV rows that are written, or will be by launched work
    launched: int = 0  # patches
    collected: int = 0  # patches
    is_last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _PromptPart:
    """Prompt tokens `start` to `end` of the segment in a slot, to prefill."""

    slot: int
    segment: SpeechSegment
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A launched patch that is not collected: slots, batch size, and time of the launch (`time.perf_counter`)."""

    rows: list[tuple[int, _Running]]
    size: int
    at: float
    patch: LaunchedPatch


class TalkerWorker:
    """Runs segments in slots.

    Args:
        talker, cfm, audio_vae: stages with the graphs `prefill`/`step`, `sample`, `stream`.
        num_slots: slots to allocate, including slot 0 (padding).
        depth: most patches in flight; None: 2 on a GPU, 1 on the CPU.
        is_captured: whether prompts and patches run as captured CUDA graphs; None: on CUDA.
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
        depth: int | None = None,
        is_captured: bool | None = None,
    ) -> None:
        self.parameters = parameters
        self.flow = flow
        self.num_slots = num_slots
        self.device = device
        self.depth = depth or (2 if device.type == "cuda" else 1)
        self.samples_per_patch = flow.latents_per_patch * vae.samples_per_latent
        self.sample_rate = vae.sample_rate
        self._tail = vae.tail_samples
        with torch.inference_mode():
            self.engines = TalkerEngines(
                talker,
                cfm,
                audio_vae,
                hidden_size=parameters.hidden_size,
                flow=flow,
                num_slots=num_slots,
                device=device,
                is_captured=is_captured,
            )
        self.max_batch = self.engines.batch_sizes[-1]
        self._running: dict[int, _Running] = {}
        # Inputs of the engines by size, as arrays and as the same memory in tensors; every call overwrites them.
        self._patches = {
            size: _allocate(self.engines.patch_shapes(size)) for size in self.engines.batch_sizes
        }
        self._chunks = {
            size: _allocate(self.engines.prompt_shapes(size)) for size in self.engines.chunk_sizes
        }
        self._launched: deque[_Launched] = deque()
        self._prompts: list[_PromptPart] = []  # of added segments, not prefilled yet
        self._latency_model = PatchLatencyModel()
        self._prefixes: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all slots."""
        return self.engines.state_bytes

    @property
    def num_in_flight(self) -> int:
        """How many patches are launched and not yet collected."""
        return len(self._launched)

    @property
    def num_prefixes(self) -> int:
        """How many prompt prefixes have their KV rows kept."""
        return len(self._prefixes)

    @property
    def num_segments(self) -> int:
        """How many segments occupy a slot."""
        return len(self._running)

    @torch.inference_mode()
    def add(self, slot: int, segment: SpeechSegment, recorder: Recorder | None = None) -> None:
        """Start `segment` in `slot`, which is overwritten. Its prompt is prefilled before the next patch.

        The prefix is prefilled separately even if it is not cached, so that KV rows never depend on the cache.
        """
        if segment.num_prefix:
            self._write_prefix(slot, segment)
        self._prompts.append(_PromptPart(slot, segment, segment.num_prefix, len(segment.input_ids)))
        self._running[slot] = _Running(segment, recorder, num_tokens=len(segment.input_ids))

    @torch.inference_mode()
    def prefill(self) -> None:
        """Prefill the prompts of the segments that were added since the last call, as many in one chunk as it holds."""
        prompts, self._prompts = self._prompts, []
        self._run_prompts(prompts)

    def batch_size(self, rows: int) -> int:
        """Size of the smallest batch that has so many rows."""
        return next(size for size in self.engines.batch_sizes if size >= rows)

    def is_launchable(self, slot: int) -> bool:
        """Whether to launch a further patch for `slot`, as far as the host knows."""
        running = self._running[slot]
        return not running.is_last and running.launched < running.segment.max_patches

    @torch.inference_mode()
    def launch(self, slots: Sequence[int]) -> None:
        """Launch the next patch of each slot. All must be launchable, with fewer than `depth` patches in flight."""
        assert self.num_in_flight < self.depth, "a patch must be collected first"
        if self._prompts:
            self.prefill()
        rows = [(slot, self._running[slot]) for slot in slots]
        size = self.batch_size(len(rows))
        inputs, tensors = self._patches[size]
        self._write_patch(inputs, rows)
        patch = self.engines.launch(size, tensors)
        self._launched.append(_Launched(rows, size, time.perf_counter(), patch))
        for _, running in rows:
            running.launched += 1
            running.num_tokens += 1

    def collect(self) -> dict[int, AudioDelta | None]:
        """Wait for the oldest patch in flight. Returns it by slot, without segments that are removed or have ended.

        None stands for samples that are not finite.
        """
        launched = self._launched.popleft()
        samples, sums, stop, latents = launched.patch.wait()
        self._latency_model.observe(launched.size, launched.at, time.perf_counter())
        patches: dict[int, AudioDelta | None] = {}
        values = zip(launched.rows, samples, np.isfinite(sums).tolist(), stop.tolist(), latents, strict=False)
        for (slot, running), row, is_finite, probability, latent in values:
            if self._running.get(slot) is running and not running.is_last:
                patches[slot] = self._end_patch(running, row, is_finite, probability, latent)
        return patches

    @property
    def is_idle(self) -> bool:
        """Whether the device has finished every patch in flight."""
        return all(each.patch.is_ready for each in self._launched)

    def remaining_s(self) -> float:
        """Seconds until the device has finished all patches in flight: a lower bound; 0 if unknown."""
        return self._latency_model.remaining_s(
            [(each.size, each.at) for each in self._launched], time.perf_counter()
        )

    def drop(self) -> set[int]:
        """Discard every patch in flight after a device failure. Returns the slots that waited for one."""
        slots = {
            slot
            for launched in self._launched
            for slot, running in launched.rows
            if self._running.get(slot) is running
        }
        self._launched.clear()
        return slots

    def remove(self, slot: int) -> None:
        """Remove the segment in `slot`; does nothing if it is empty."""
        self._prompts = [each for each in self._prompts if each.slot != slot]
        self._running.pop(slot, None)

    def _write_patch(self, inputs: Inputs, rows: Sequence[tuple[int, _Running]]) -> None:
        """Write a row of `inputs` for each of `rows`. The others are padding, which uses slot 0."""
        noise, step_noise = inputs["noise"], inputs["step_noise"]
        step_noise[inputs["temperature"] > 0.0] = 0.0  # of the launch before
        columns: list[tuple[float, ...]] = []
        for row, (slot, running) in enumerate(rows):
            segment, patch = running.segment, running.launched
            # The patch at the cap needs no step of the speech LLM.
            step = (slot, running.num_tokens) if patch + 1 < segment.max_patches else (0, 0)
            columns.append((slot, patch, *step, segment.guidance, segment.sigma, segment.temperature))
            noise[row] = segment.noise.start(segment.index, patch, noise.shape[1:])
            if segment.temperature > 0.0:
                step_noise[row] = segment.noise.diffusion(segment.index, patch, step_noise.shape[1:])
        columns += [(0,) * len(_COLUMNS)] * (len(noise) - len(rows))
        for name, values in zip(_COLUMNS, zip(*columns, strict=True), strict=True):
            inputs[name][:] = values

    def _end_patch(
        self,
        running: _Running,
        samples: NDArray[np.float32],
        is_finite: bool,
        stop_probability: float,
        latents: NDArray[np.float32],
    ) -> AudioDelta | None:
        """Apply stop rule and cap (spec: talker.md §5), and cut out the samples that are final.

        A whole segment has patches × samples per patch. `is_finite`: whether all `samples` are finite. Returns None if
        one of the final ones is not.
        """
        step = running.collected
        has_stopped = (
            step > self.parameters.min_stop_step and stop_probability > self.parameters.stop_threshold
        )
        is_capped = not has_stopped and step + 1 >= running.segment.max_patches
        running.is_last = has_stopped or is_capped
        running.collected += 1
        # The first samples of a segment are discarded, as many as the last patch has more than the others.
        start = max(0, self._tail - step * self.samples_per_patch)
        end = self.samples_per_patch + (self._tail if running.is_last else 0)
        if not (is_finite or np.isfinite(samples[start:end]).all()):
            return None
        if running.recorder is not None:
            running.recorder.latents.append(latents.copy())
            running.recorder.stop_probabilities.append(stop_probability)
        return AudioDelta(
            samples=samples[start:end].copy(), is_segment_end=running.is_last, is_capped=is_capped
        )

    def _write_prefix(self, slot: int, segment: SpeechSegment) -> None:
        count = segment.num_prefix
        is_in_prefix = segment.embed_rows < count
        key = segment.input_ids[:count].tobytes() + segment.embeds[is_in_prefix].tobytes()
        rows = self._prefixes.get(key)
        if rows is None:
            self._run_prompts([_PromptPart(slot, segment, 0, count)])
            self._prefixes[key] = self.engines.read_rows(slot, count)
            if len(self._prefixes) > _MAX_PREFIXES:
                self._prefixes.popitem(last=False)
            return
        self._prefixes.move_to_end(key)
        self.engines.write_rows(slot, rows)

    def _run_prompts(self, prompts: Sequence[_PromptPart]) -> None:
        """Prefill `prompts` in as few chunks as hold them; only a prompt longer than a chunk is divided."""
        longest, chunk, num_rows = self.engines.chunk_sizes[-1], list[_PromptPart](), 0
        for each in prompts:
            for start in range(each.start, each.end, longest):
                part = replace(each, start=start, end=min(start + longest, each.end))
                first = self._aligned(num_rows)
                if chunk and (first + part.end - start > longest or len(chunk) == self.engines.max_prompts):
                    self._run_chunk(chunk)
                    chunk, first = [], 0
                chunk.append(part)
                num_rows = first + part.end - start
        if chunk:
            self._run_chunk(chunk)

    def _aligned(self, row: int) -> int:
        return -(-row // self.parameters.chunk_alignment) * self.parameters.chunk_alignment

    def _run_chunk(self, parts: Sequence[_PromptPart]) -> None:
        """Prefill `parts`, which fit into one call."""
        firsts, num_rows = list[int](), 0
        for part in parts:
            firsts.append(self._aligned(num_rows))
            num_rows = firsts[-1] + part.end - part.start
        width = next(size for size in self.engines.chunk_sizes if size >= num_rows)
        inputs, tensors = self._chunks[width]
        for name in ("input_ids", "use_embed", "slots"):
            inputs[name][:] = 0
        inputs["segment"][:] = -1
        for number, (first, part) in enumerate(zip(firsts, parts, strict=True)):
            segment, rows = part.segment, slice(first, first + part.end - part.start)
            inputs["input_ids"][rows] = segment.input_ids[part.start : part.end]
            inputs["segment"][rows] = number
            inputs["index"][rows] = np.arange(part.start, part.end)
            is_replaced = (segment.embed_rows >= part.start) & (segment.embed_rows < part.end)
            if is_replaced.any():
                places = first + segment.embed_rows[is_replaced] - part.start
                tensors["embeds"][torch.from_numpy(places)] = torch.from_numpy(
                    segment.embeds[is_replaced]
                ).to(self.engines.embed_dtype)
                inputs["use_embed"][places] = True
            inputs["slots"][number], inputs["last"][number] = part.slot, rows.stop - 1
            inputs["history"][number] = segment.history
        self.engines.run_prompts(width, tensors)


def _allocate(shapes: Shapes) -> tuple[Inputs, dict[str, Tensor]]:
    """Inputs as arrays, except of types that numpy lacks, and as tensors of the same memory."""
    tensors = {name: torch.zeros(*shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    return {name: each.numpy() for name, each in tensors.items() if name != "embeds"}, tensors
