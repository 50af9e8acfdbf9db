"""Vision and audio encoders of a running server: host features in, embeddings out; calls are padded to buckets.

`mingc.media` computes the features. One thread at a time calls an encoder; in a server that is its `EncoderLoop`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.dtypes import torch_dtype
from mingc.errors import EngineSizeError, RequestError
from mingc.prompts.features import AudioFeatures, Grid, VisionFeatures
from mingc.runtime.encoders import host_tensors
from mingc.runtime.encoders.graph import EncoderGraph
from mingc.runtime.encoders.vision_grid import build_grid_arrays, group_pixels, pad_grid_arrays, pad_tokens
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage

# The largest calls that are captured on CUDA: 4,096 patches; 30 s of audio, or four clips of 8 s or sixteen of 2 s. In
# larger calls launch overhead is negligible.
_CAPTURED_VISION_TOKENS, _CAPTURED_AUDIO_TOKENS = 1024, 800
# Tokens of several clips in one call: a minute of audio on a CPU; on CUDA as many as the largest engine for several
# clips takes.
_SHARED_AUDIO_TOKENS, _SHARED_AUDIO_TOKENS_CUDA = 1500, 3200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """One temporal patch: rows [start, stop) of `feature`, and the grid of the patch."""

    feature: VisionFeatures
    start: int
    stop: int
    grid: Grid


class VisionEncoder:
    """Encoder of images and video frames: features → embeddings of merged tokens."""

    max_batch_tokens = 2048  # eight images of 1,024 patches (benchmarks/NOTES-encoders.md)

    def __init__(self, stage: LoadedStage, parameters: VisionParameters, device: torch.device) -> None:
        self._graph = stage["encode"]
        self._parameters = parameters
        sizes = [size for size in self._graph.spec.dim("M").buckets if size <= _CAPTURED_VISION_TOKENS]
        self._dtype = torch_dtype(self._graph.spec.input("pixels").dtype)
        examples = map(self._example, sorted(sizes, reverse=True))
        self._call = EncoderGraph(self._graph, device, examples, self._normalised)

    def padded_tokens(self, features: Sequence[VisionFeatures]) -> int:
        """Merged tokens that one call for all `features` computes. Raises: RequestError when no bucket holds them."""
        return _bucket(self._graph, "M", sum(map(self._num_tokens, features)))

    def _num_tokens(self, feature: VisionFeatures) -> int:
        return feature.num_tokens(self._parameters.merge_size)

    @torch.inference_mode()
    def encode(self, features: Sequence[VisionFeatures]) -> list[Tensor]:
        """Embeddings (tokens, D) of each image or video, on the host.

        A frame attends only to itself, so frames share calls of at most `max_batch_tokens`.
        Raises: RequestError when one frame alone exceeds the largest bucket.
        """
        frames = [frame for feature in features for frame in _frames(feature)]
        calls = [self._run(group) for group in self._groups(frames)]
        embeddings = host_tensors.concatenate(calls) if len(calls) > 1 else calls[0]
        counts = list(map(self._num_tokens, features))
        return list(embeddings.tensor_split(np.cumsum(counts)[:-1].tolist()))

    def _groups(self, frames: Sequence[_Frame]) -> Iterator[list[_Frame]]:
        limit = min(self.max_batch_tokens, max(self._graph.spec.dim("M").buckets))
        group: list[_Frame] = []
        held = 0
        for frame in frames:
            count = (frame.stop - frame.start) // self._parameters.merge_size**2
            if group and held + count > limit:
                yield group
                group, held = [], 0
            group.append(frame)
            held += count
        if group:
            yield group

    def _run(self, frames: Sequence[_Frame]) -> Tensor:
        count = sum(frame.stop - frame.start for frame in frames) // self._parameters.merge_size**2
        bucket = _bucket(self._graph, "M", count)
        return self._call(self._inputs(self._pixels(frames), [frame.grid for frame in frames], bucket), count)

    def _pixels(self, frames: Sequence[_Frame]) -> dict[str, NDArray[np.generic]]:
        """Rows of `frames`: `colours` (P, C, t, p·p) uint8, and the `levels` (C, 256) that normalise them.

        uint8 has a quarter of the bytes of float32: for long videos and large images, converting and copying float32
        would take milliseconds. `t` is 1 if all frames are images, which do not change in time. Features without
        levels, or with different tables, become `pixels` (P, n) float32.
        """
        levels = frames[0].feature.levels
        tables = [frame.feature.levels for frame in frames]
        if levels is None or not all(each is not None and np.array_equal(each, levels) for each in tables):
            rows = [frame.feature.rows(frame.start, frame.stop) for frame in frames]
            return {"pixels": np.concatenate(rows)}
        values = self._parameters.patch_size**2
        colours = []
        for frame in frames:
            part = frame.feature.colours(frame.start, frame.stop)
            colours.append(part.reshape(*part.shape[:2], -1, values))
        if len(colours) == 1:
            return {"colours": colours[0], "levels": levels}
        times = max(each.shape[2] for each in colours)
        repeated = [np.broadcast_to(each, (*each.shape[:2], times, values)) for each in colours]
        return {"colours": np.concatenate(repeated), "levels": levels}

    def _inputs(
        self, pixels: Mapping[str, NDArray[np.generic]], grids: Sequence[Grid], num_tokens: int
    ) -> dict[str, Tensor]:
        """Build encoder inputs from `_pixels` output, padded to the `num_tokens` bucket."""
        merge = self._parameters.merge_size
        unpadded = build_grid_arrays(
            grids, merge_size=merge, position_grid_size=self._parameters.position_grid_size
        )
        arrays = pad_grid_arrays(unpadded, num_tokens)
        inputs: dict[str, NDArray[np.generic]] = {
            "position_index": arrays.position_index,
            "position_weight": arrays.position_weight,
            "coordinates": arrays.coordinates,
            "segment": arrays.segment,
        }
        for name, value in pixels.items():
            is_table = name == "levels"
            inputs[name] = value if is_table else pad_tokens(group_pixels(value, merge), num_tokens)
        tensors = {
            name: torch.from_numpy(np.require(value, requirements=("C", "W")))
            for name, value in inputs.items()
        }
        if "colours" in tensors:
            # A view that repeats images in time: nothing is copied before the copy to the device.
            times = self._parameters.temporal_patch_size
            tensors["colours"] = tensors["colours"].expand(-1, -1, -1, times, -1)
        return tensors

    def _normalised(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Inputs of the graph: `pixels` from `colours` (M, m, C, time, p·p) and `levels` (C, 256) where they are given.

        The values equal `VisionFeatures.rows`, in the graph's dtype.
        """
        if "colours" not in inputs:
            return inputs
        given = dict(inputs)
        colours, levels = given.pop("colours"), given.pop("levels").to(self._dtype)
        pixels = torch.empty(colours.shape, dtype=self._dtype, device=colours.device)
        # One channel at a time: the indices of all channels would take twice the memory of the pixels.
        for channel, table in enumerate(levels):
            pixels[:, :, channel] = table[colours[:, :, channel].int()]
        return {**given, "pixels": pixels.flatten(2)}

    def _example(self, num_tokens: int) -> dict[str, Tensor]:
        """Inputs of one token, padded to `num_tokens`, so that no range of keys is empty."""
        merge, each = self._parameters.merge_size, self._parameters
        colours = np.zeros((merge**2, each.in_channels, 1, each.patch_size**2), np.uint8)
        levels = np.zeros((each.in_channels, 256), np.float32)
        return self._inputs({"colours": colours, "levels": levels}, [(1, merge, merge)], num_tokens)


class AudioEncoder:
    """Encoder of audio clips: features → embeddings."""

    def __init__(self, stage: LoadedStage, parameters: AudioParameters, device: torch.device) -> None:
        self._graph = stage["encode"]
        self._parameters = parameters
        self._dtype = torch_dtype(self._graph.spec.input("mel").dtype)
        self.max_batch_tokens = _SHARED_AUDIO_TOKENS_CUDA if device.type == "cuda" else _SHARED_AUDIO_TOKENS
        # The calls that engines exist for: (clips, tokens of the longest clip).
        self._sizes = [(size["N"], size["T4"]) for size in self._graph.sizes]
        captured = sorted(
            (size for size in self._sizes if math.prod(size) <= _CAPTURED_AUDIO_TOKENS), key=math.prod
        )
        examples = (self._inputs((), clips, tokens) for clips, tokens in reversed(captured))
        self._call = EncoderGraph(self._graph, device, examples)

    def padded_tokens(self, features: Sequence[AudioFeatures]) -> int:
        """Tokens that one call for all `features` computes. Raises: RequestError when no engine holds them."""
        return math.prod(self._size(features))

    @torch.inference_mode()
    def encode(self, features: Sequence[AudioFeatures]) -> list[Tensor]:
        """Embeddings (tokens, D) of each clip, on the host.

        Raises: RequestError when a clip exceeds the largest bucket.
        """
        found: list[Tensor] = []
        while len(found) < len(features):
            rest = features[len(found) :]
            most = next((count for count in range(len(rest), 1, -1) if self._fitting(rest[:count])), 1)
            found += self._run(rest[:most])
        return found

    def _fitting(self, features: Sequence[AudioFeatures]) -> list[tuple[int, int]]:
        """The sizes of calls that hold all `features`."""
        longest = max(feature.num_tokens for feature in features)
        return [size for size in self._sizes if size[0] >= len(features) and size[1] >= longest]

    def _size(self, features: Sequence[AudioFeatures]) -> tuple[int, int]:
        """The size of the call that holds all `features` and computes the fewest tokens. Raises: RequestError."""
        fitting = self._fitting(features)
        if not fitting:
            longest = max(feature.num_tokens for feature in features)
            _bucket(self._graph, "T4", longest)
            _bucket(self._graph, "N", len(features))
            raise RequestError(f"no engine takes {len(features)} clips of {longest} tokens", fix="send fewer")
        return min(fitting, key=math.prod)

    def _run(self, features: Sequence[AudioFeatures]) -> list[Tensor]:
        counts = [feature.num_tokens for feature in features]
        clips, tokens = self._size(features)
        embeddings = self._call(self._inputs(features, clips, tokens), len(features))
        return [embeddings[row, :count] for row, count in enumerate(counts)]

    def _inputs(self, features: Sequence[AudioFeatures], clips: int, tokens: int) -> dict[str, Tensor]:
        """Inputs of the graph for `features`, padded to buckets."""
        per_token = self._parameters.frames_per_token
        mel = torch.zeros(clips, tokens * per_token, self._parameters.num_mels, dtype=self._dtype)
        lengths = torch.ones(clips, dtype=torch.int64)  # padding clips have one frame: no empty softmax
        for row, feature in enumerate(features):
            mel[row, : len(feature.mel)] = torch.from_numpy(feature.mel).to(self._dtype)
            lengths[row] = len(feature.mel)
        return {"mel": mel.view(clips, tokens, per_token, -1), "lengths": lengths}


def _bucket(graph: Graph, dim: str, size: int) -> int:
    """The bucket for `size`. Raises: RequestError when none is large enough: clients choose the size of media."""
    try:
        return graph.bucket(dim, size)
    except EngineSizeError as error:
        raise RequestError(error.message, fix=error.fix) from error


def _frames(feature: VisionFeatures) -> Iterator[_Frame]:
    """Split a feature into its temporal patches."""
    frames, height, width = feature.grid
    for index in range(frames):
        start = index * height * width
        yield _Frame(feature=feature, start=start, stop=start + height * width, grid=(1, height, width))
