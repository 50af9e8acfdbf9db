"""Vision and audio encoders of a running server: host features in, embeddings out; calls are padded to buckets.

`mingc.runtime.preprocess` computes the features. An encoder is called by one thread at a time: in a server by its
`EncoderLoop`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.dtypes import torch_dtype
from mingc.errors import EngineSizeError, RequestError
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.preprocess.audio import AudioFeatures
from mingc.runtime.preprocess.image import Grid, VisionFeatures
from mingc.runtime.preprocess.vision_grid import build_grid_arrays, group_pixels, pad_grid_arrays, pad_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Rows [start, stop) of `feature`: one temporal patch, and its grid."""

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
        self._device = device
        self._dtype = torch_dtype(
            next(each for each in self._graph.spec.inputs if each.name == "pixels").dtype
        )

    def padded_tokens(self, features: Sequence[VisionFeatures]) -> int:
        """Merged tokens that one call for all of these computes. Raises: RequestError when no bucket holds them."""
        return _bucket(self._graph, "M", sum(map(self._num_tokens, features)))

    def num_bytes(self, features: VisionFeatures) -> int:
        return features.patches.nbytes

    def _num_tokens(self, feature: VisionFeatures) -> int:
        return feature.num_tokens(self._parameters.merge_size)

    @torch.inference_mode()
    def encode(self, features: Sequence[VisionFeatures]) -> list[Tensor]:
        """Embeddings (tokens, D) of each image or video, on the host.

        A frame attends only to itself, so frames share calls of at most `max_batch_tokens`.
        Raises: RequestError when one frame alone exceeds the largest bucket.
        """
        frames = [frame for feature in features for frame in _frames(feature)]
        embeddings = torch.cat([self._run(group) for group in self._groups(frames)])
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
        merge = self._parameters.merge_size
        # normalised here, a call at a time: as float32 a long video would take four times its memory
        rows = np.concatenate([frame.feature.rows(frame.start, frame.stop) for frame in frames])
        pixels = group_pixels(rows, merge)
        count = len(pixels)
        width = _bucket(self._graph, "M", count)
        grids = build_grid_arrays(
            [frame.grid for frame in frames],
            merge_size=merge,
            position_grid_size=self._parameters.position_grid_size,
        )
        arrays = pad_grid_arrays(grids, width)
        outputs = self._graph.run(
            pixels=self._put(pad_tokens(pixels, width)).to(self._dtype),
            position_index=self._put(arrays.position_index),
            position_weight=self._put(arrays.position_weight),
            coordinates=self._put(arrays.coordinates),
            segment=self._put(arrays.segment),
        )
        return _to_host(outputs["embeddings"][:count])

    def _put(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


class AudioEncoder:
    """Encoder of audio clips: features → embeddings."""

    max_batch_tokens = 1500  # a minute; only engines for a CPU take several clips

    def __init__(self, stage: LoadedStage, parameters: AudioParameters, device: torch.device) -> None:
        self._graph = stage["encode"]
        self._parameters = parameters
        self._device = device
        self._dtype = torch_dtype(next(each for each in self._graph.spec.inputs if each.name == "mel").dtype)

    def padded_tokens(self, features: Sequence[AudioFeatures]) -> int:
        """Tokens that one call for all of these computes. Raises: RequestError when no bucket holds them."""
        longest = max(feature.num_tokens for feature in features)
        return _bucket(self._graph, "N", len(features)) * _bucket(self._graph, "T4", longest)

    def num_bytes(self, features: AudioFeatures) -> int:
        return features.mel.nbytes

    @torch.inference_mode()
    def encode(self, features: Sequence[AudioFeatures]) -> list[Tensor]:
        """Embeddings (tokens, D) of each clip, on the host.

        Raises: RequestError when a clip exceeds the largest bucket.
        """
        most = max(self._graph.spec.dim("N").buckets)
        return [
            embeddings
            for start in range(0, len(features), most)
            for embeddings in self._run(features[start : start + most])
        ]

    def _run(self, features: Sequence[AudioFeatures]) -> list[Tensor]:
        per_token = self._parameters.frames_per_token
        counts = [feature.num_tokens for feature in features]
        clips = _bucket(self._graph, "N", len(features))
        tokens = _bucket(self._graph, "T4", max(counts))
        mel = torch.zeros(clips, tokens * per_token, self._parameters.num_mels, dtype=self._dtype)
        lengths = torch.ones(clips, dtype=torch.int64)  # padding clips have one frame: no empty softmax
        for row, feature in enumerate(features):
            mel[row, : len(feature.mel)] = torch.from_numpy(feature.mel).to(self._dtype)
            lengths[row] = len(feature.mel)
        outputs = self._graph.run(
            mel=mel.view(clips, tokens, per_token, -1).to(self._device), lengths=lengths.to(self._device)
        )
        embeddings = _to_host(outputs["embeddings"])
        return [embeddings[row, :count] for row, count in enumerate(counts)]


def _to_host(embeddings: Tensor) -> Tensor:
    return AsyncHostCopy(embeddings).wait()[0]


def _bucket(graph: Graph, dim: str, size: int) -> int:
    """The bucket for `size`. Raises: RequestError when none is large enough, as clients choose the size of media."""
    try:
        return graph.bucket(dim, size)
    except EngineSizeError as error:
        raise RequestError(error.message, fix=error.fix) from error


def _frames(feature: VisionFeatures) -> Iterator[_Frame]:
    """Split a feature into its temporal patches, each with its own grid."""
    frames, height, width = feature.grid
    for index in range(frames):
        start = index * height * width
        yield _Frame(feature=feature, start=start, stop=start + height * width, grid=(1, height, width))
