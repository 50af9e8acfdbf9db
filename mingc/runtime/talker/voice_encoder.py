"""A recording of a speaker → the tensors of a voice, by graphs of cfm and audio_vae (spec: talker.md §4.1-§4.3).

An export and a server register voices with this code and the same engines, so that the same clip gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from mingc.artifacts.parameters import CfmParameters, VaeParameters
from mingc.artifacts.spec import GraphSpec
from mingc.errors import RequestError
from mingc.media.dsp.resample import resample
from mingc.media.dsp.speaker_features import to_float32
from mingc.runtime.voices import VoicePack


class VoiceGraph(Protocol):
    """A graph that runs at the sizes of its buckets: engines, or the eager module."""

    @property
    def spec(self) -> GraphSpec: ...

    def run(self, **tensors: Tensor) -> Mapping[str, Tensor]: ...


class GraphsByName(Protocol):
    """A loaded stage, or a mapping."""

    def __getitem__(self, name: str, /) -> VoiceGraph: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClipFrames:
    """Input of `encode` for one clip: `frames` (latents, samples per latent) and `noise` (latents, channels)."""

    frames: NDArray[np.float32]
    noise: NDArray[np.float32]


def posterior_noise(clip: NDArray[np.int16], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Standard normal noise of a clip's latents, seeded by its samples: every server that has the clip agrees."""
    seed = int.from_bytes(hashlib.sha256(clip.astype("<i2").tobytes()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=seed)).standard_normal(shape, dtype=np.float32)


class VoiceEncoder:
    """Registers voices. `prepare` runs on any thread; `encode` runs the graphs, on the thread that owns the device.

    Args:
        encode: graph of audio_vae; aggregate, speaker: graphs of cfm.
        noise: maps a clip and a shape (latents, channels) to the noise of its posterior.
    """

    def __init__(
        self,
        *,
        encode: VoiceGraph,
        aggregate: VoiceGraph,
        speaker: VoiceGraph,
        flow: CfmParameters,
        vae: VaeParameters,
        device: torch.device,
        noise: Callable[[NDArray[np.int16], tuple[int, int]], NDArray[np.float32]] = posterior_noise,
    ) -> None:
        self._encode, self._aggregate, self._speaker = encode, aggregate, speaker
        self._flow, self._vae, self._device, self._noise = flow, vae, device, noise
        self._patch_samples = flow.latents_per_patch * vae.samples_per_latent
        patches = min(_largest(encode, "T") // flow.latents_per_patch, _largest(aggregate, "N"))
        self.max_seconds = patches * self._patch_samples / vae.sample_rate

    def prepare(self, clip: NDArray[np.int16], sample_rate: int) -> ClipFrames:
        """Resample a clip (n,) and put silence before it, up to whole patches (§4.2).

        Raises: RequestError when it is longer than the engines.
        """
        wave = resample(to_float32(clip), sample_rate, self._vae.sample_rate)
        if len(wave) > self.max_seconds * self._vae.sample_rate:
            raise RequestError(
                f"the recording of the voice has {len(wave) / self._vae.sample_rate:.1f} seconds; "
                f"this model takes {self.max_seconds:.1f}",
                where="ref_audio",
                fix="send a shorter one",
                param="ref_audio",
            )
        padded = np.concatenate([np.zeros(-len(wave) % self._patch_samples, np.float32), wave])
        frames = padded.reshape(-1, self._vae.samples_per_latent)
        return ClipFrames(frames=frames, noise=self._noise(clip, (len(frames), self._vae.latent_dim)))

    @torch.inference_mode()
    def encode(
        self, clip: ClipFrames | None, vector: NDArray[np.float32], *, name: str = "", transcript: str = ""
    ) -> VoicePack:
        """The voice of a clip and its speaker vector (D,); None: of the vector alone."""
        speaker = self._run(self._speaker, 1, vectors=torch.from_numpy(vector)[None])["embeds"][0]
        latents = torch.zeros(0, self._flow.latent_dim)
        embeds = torch.zeros(0, len(speaker))
        if clip is not None:
            latents = self._run(
                self._encode,
                len(clip.frames),
                waveform=torch.from_numpy(clip.frames),
                num_frames=torch.tensor([len(clip.frames) * self._vae.frames_per_latent]),
                noise=torch.from_numpy(clip.noise),
            )["latents"]
            patches = latents.view(-1, self._flow.latents_per_patch, self._flow.latent_dim)
            embeds = self._run(self._aggregate, len(patches), latents=patches)["embeds"]
        return VoicePack(
            name=name,
            transcript=transcript if clip is not None else "",
            latents=_array(latents),
            embeds=_array(embeds),
            speaker=_array(speaker),
        )

    def _run(self, graph: VoiceGraph, size: int, **given: Tensor) -> dict[str, Tensor]:
        """Run a graph on `size` rows, padded to a bucket of its first dim. Returns as many rows of each output."""
        (dim,) = graph.spec.dims
        bucket = next(each for each in dim.buckets if each >= size)
        inputs = {
            each.name: given[each.name]
            if each.shape[0] != dim.name
            else pad(given[each.name], (0, 0) * (given[each.name].dim() - 1) + (0, bucket - size))
            for each in graph.spec.inputs
        }
        outputs = graph.run(**{name: value.contiguous().to(self._device) for name, value in inputs.items()})
        return {name: value[:size].cpu() for name, value in outputs.items()}


def _largest(graph: VoiceGraph, dim: str) -> int:
    return graph.spec.dim(dim).buckets[-1]


def _array(value: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = value.float().contiguous().numpy()
    return array.copy()  # inference tensors share no memory with what lives longer
