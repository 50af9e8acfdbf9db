"""Runs segments of speech, many at a time: prompts, noise, stop rule and caps. Which run is the scheduler's.

On a GPU patches are launched one ahead: patch k + 1 is on its way before the stop flags of patch k are read, so the
device never waits for the host. A segment that turns out to have ended with patch k has then made one patch in
vain, which is dropped; it touched nothing but its own slot.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.noise import diffusion_noise, start_noise
from mingc.runtime.talker.engines import TalkerEngines
from mingc.runtime.talker.launch_timing import PatchLatencyModel
from mingc.runtime.talker.patch_pipeline import LaunchedPatch

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


@dataclass(slots=True, eq=False)
class _Speaking:
    """Host side of a running segment."""

    segment: SpeechSegment
    num_tokens: int  # KV rows written, or on their way
    launched: int = 0
    patch: int = 0  # patches collected
    is_last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A patch under way: its slots, batch size, and when it was launched (`time.perf_counter`)."""

    rows: list[tuple[int, _Speaking]]
    size: int
    at: float
    patch: LaunchedPatch


class TalkerWorker:
    """Runs segments in slots.

    Args:
        talker, cfm, audio_vae: stages with the graphs `prefill`/`step`, `sample`, `stream`.
        num_slots: slots to allocate, slot 0 (padding) included.
        depth: patches that may be under way at once; None is 2 on a GPU, 1 where the host does the work itself.
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
    ) -> None:
        self.parameters = parameters
        self.flow = flow
        self.num_slots = num_slots
        self.device = device
        self.depth = depth or (2 if device.type == "cuda" else 1)
        self.samples_per_patch = flow.latents_per_patch * vae.samples_per_latent
        self._tail = vae.tail_samples
        with torch.inference_mode():
            self._engines = TalkerEngines(
                talker,
                cfm,
                audio_vae,
                hidden_size=parameters.hidden_size,
                flow=flow,
                num_slots=num_slots,
                device=device,
            )
        self.max_batch = self._engines.batch_sizes[-1]
        self._speaking: dict[int, _Speaking] = {}
        self._launched: deque[_Launched] = deque()
        self._latency_model = PatchLatencyModel()
        self._prefixes: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def num_in_flight(self) -> int:
        """Patches launched and not collected."""
        return len(self._launched)

    @torch.inference_mode()
    def add(self, slot: int, segment: SpeechSegment) -> None:
        """Prefill the prompt of `segment` into `slot`, whose earlier contents are forgotten.

        The prefix runs on its own, also when it is not cached yet, so that its rows never depend on who came first.
        """
        done = segment.num_prefix
        if done:
            self._place_prefix(slot, segment)
        self._run_prompt(slot, segment, done, len(segment.input_ids))
        self._speaking[slot] = _Speaking(segment, num_tokens=len(segment.input_ids))

    def is_launchable(self, slot: int) -> bool:
        """Whether the segment in `slot` has a further patch to make, as far as is known."""
        speaking = self._speaking[slot]
        return not speaking.is_last and speaking.launched < speaking.segment.max_patches

    @torch.inference_mode()
    def launch(self, slots: Sequence[int]) -> None:
        """Begin the next patch of each slot. All must be launchable, and fewer than `depth` patches in flight."""
        assert self.num_in_flight < self.depth, "a patch must be collected first"
        rows = [(slot, self._speaking[slot]) for slot in slots]
        size = next(size for size in self._engines.batch_sizes if size >= len(rows))
        patch = self._engines.launch(size, self._inputs(size, rows))
        self._launched.append(_Launched(rows, size, time.perf_counter(), patch))
        for _, speaking in rows:
            speaking.launched += 1
            speaking.num_tokens += 1

    def collect(self) -> dict[int, Patch]:
        """Wait for the oldest patch in flight. By slot; segments that have left or ended before are not in it."""
        launched = self._launched.popleft()
        waves, stop = launched.patch.wait()
        self._latency_model.observe(launched.size, launched.at, time.perf_counter())
        return {
            slot: self._end_patch(speaking, waves[row], float(stop[row]))
            for row, (slot, speaking) in enumerate(launched.rows)
            if self._speaking.get(slot) is speaking and not speaking.is_last
        }

    @property
    def is_idle(self) -> bool:
        """Whether the device has made every patch in flight."""
        return all(each.patch.is_ready for each in self._launched)

    def remaining_s(self) -> float:
        """Seconds until the device has made all patches in flight, rather too few; 0 when that cannot be told."""
        return self._latency_model.remaining_s(
            [(each.size, each.at) for each in self._launched], time.perf_counter()
        )

    def drop(self) -> set[int]:
        """Forget every patch in flight, because the device has failed. Returns the slots that waited for one."""
        slots = {
            slot
            for launched in self._launched
            for slot, speaking in launched.rows
            if self._speaking.get(slot) is speaking
        }
        self._launched.clear()
        return slots

    def remove(self, slot: int) -> None:
        """Forget what runs in `slot`; nothing happens when it is empty."""
        self._speaking.pop(slot, None)

    def _inputs(self, size: int, rows: Sequence[tuple[int, _Speaking]]) -> Mapping[str, Tensor]:
        """The inputs of `TalkerEngines.launch`; rows beyond `rows` work in slot 0."""
        patch_shape = (self.flow.latents_per_patch, self.flow.latent_dim)
        noise = np.zeros((size, *patch_shape), np.float32)
        step_noise = np.zeros((size, self.flow.num_steps, *patch_shape), np.float32)
        numbers = {name: np.zeros(size, np.float32) for name in ("guidance", "sigma", "temperature")}
        counts = {
            name: np.zeros(size, np.int64) for name in ("slots", "patch_index", "step_slots", "lengths")
        }
        for row, (slot, speaking) in enumerate(rows):
            segment, patch = speaking.segment, speaking.launched
            counts["slots"][row] = slot
            counts["patch_index"][row] = patch
            if patch + 1 < segment.max_patches:  # nothing follows the last patch that its cap allows
                counts["step_slots"][row] = slot
                counts["lengths"][row] = speaking.num_tokens
            for name, values in numbers.items():
                values[row] = getattr(segment, name)
            noise[row] = start_noise(segment.seed, segment.index, patch, patch_shape)
            if segment.temperature > 0.0:
                shape = (self.flow.num_steps, *patch_shape)
                step_noise[row] = diffusion_noise(segment.seed, segment.index, patch, shape)
        inputs = {**counts, **numbers, "noise": noise, "step_noise": step_noise}
        return {name: torch.from_numpy(values) for name, values in inputs.items()}

    def _end_patch(self, speaking: _Speaking, wave: NDArray[np.float32], stop_probability: float) -> Patch:
        """Stop rule and caps (spec: talker.md §5), and the part of the decoded wave that is final."""
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
            self._prefixes[key] = self._engines.read_rows(slot, count)
            if len(self._prefixes) > _MAX_PREFIXES:
                self._prefixes.popitem(last=False)  # nothing reads it any more: see `write_rows`
            return
        self._prefixes.move_to_end(key)
        self._engines.write_rows(slot, rows)

    def _run_prompt(self, slot: int, segment: SpeechSegment, start: int, end: int) -> None:
        """Prompt tokens `start` to `end` in chunks."""
        sizes = self._engines.chunk_sizes
        history = torch.from_numpy(segment.history).unsqueeze(0)
        while start < end:
            count = min(sizes[-1], end - start)
            width = next(size for size in sizes if size >= count)
            input_ids = torch.zeros(width, dtype=torch.int64)
            input_ids[:count] = torch.from_numpy(segment.input_ids[start : start + count])
            embeds = torch.zeros(width, self.parameters.hidden_size, dtype=self._engines.embed_dtype)
            use_embed = torch.zeros(width, dtype=torch.bool)
            chosen = (segment.embed_rows >= start) & (segment.embed_rows < start + count)
            if chosen.any():
                places = torch.from_numpy(segment.embed_rows[chosen] - start)
                embeds[places] = torch.from_numpy(segment.embeds[chosen]).to(embeds.dtype)
                use_embed[places] = True
            self._engines.run_prompt(
                width,
                {
                    "input_ids": input_ids,
                    "embeds": embeds,
                    "use_embed": use_embed,
                    "slot": torch.tensor([slot]),
                    "start": torch.tensor([start]),
                    "last": torch.tensor([count - 1]),
                    "history": history,
                },
            )
            start += count
