"""Encoder wrappers over fake engines: padding, packing into calls, order."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from fake_engines import CPU, make_graph
from torch import Tensor

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.errors import RequestError
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.runtime.encoders import graph as encoder_graph
from mingc.runtime.encoders.encoder import AudioEncoder, VisionEncoder
from mingc.runtime.engines import cuda_graphs
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage

PIXELS, MELS, PER_TOKEN = 3, 5, 4

VISION = VisionParameters(
    patch_size=1,
    temporal_patch_size=1,
    merge_size=2,
    in_channels=PIXELS,
    min_pixels=1,
    max_pixels=1000,
    image_mean=(0.0, 0.0, 0.0),
    image_std=(1.0, 1.0, 1.0),
    position_grid_size=4,
    hidden_size=2,
    video_min_pixels=1,
    video_total_pixels=1000,
    video_fps=1.0,
    video_max_frames=8,
    max_patches=4096,
)
AUDIO = AudioParameters(
    sample_rate=16000,
    num_mels=MELS,
    fft_size=400,
    hop_samples=160,
    max_frames=64,
    frames_per_token=PER_TOKEN,
    hidden_size=2,
)


class Replayed:
    """A CUDA graph on the CPU: a replay runs the function again and overwrites the outputs of the capture."""

    def __init__(self, run: Callable[[], tuple[Tensor, ...]]) -> None:
        self.run, self.outputs = run, tuple(value.clone() for value in run())

    def replay(self) -> None:
        for output, value in zip(self.outputs, self.run(), strict=True):
            output.copy_(value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Stands for a CUDA device in `EncoderGraph`, for calls of captured sizes."""

    class Pool:
        def __init__(self, _: object, priority: int) -> None:
            assert priority == 0, "the lowest, so that thinker and talker overtake"

        def capture(
            self, run: Callable[[], tuple[Tensor, ...]], _: str
        ) -> tuple[Replayed, tuple[Tensor, ...]]:
            graph = Replayed(run)
            return graph, graph.outputs

    class HostCopy:
        def __init__(self, *values: Tensor) -> None:
            self.values = tuple(value.clone() for value in values)

        def wait(self) -> tuple[Tensor, ...]:
            return self.values

    stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    staging = cuda_graphs.StagingBuffer
    monkeypatch.setattr(torch.cuda, "Stream", lambda _, priority: stream if priority == 0 else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(cuda_graphs, "StagingBuffer", lambda shapes, _: staging(shapes, CPU))
    monkeypatch.setattr(encoder_graph, "GraphPool", Pool)
    monkeypatch.setattr(encoder_graph, "AsyncHostCopy", HostCopy)
    return cast(torch.device, SimpleNamespace(type="cuda"))


def make_vision(
    calls: list[int], places: list[Tensor], device: torch.device = CPU, parameters: VisionParameters = VISION
) -> VisionEncoder:
    """Fake embeddings: the sum of the token's pixels, and the sum over the keys of its first patch.

    The values of a patch have weights, so that their order matters.
    """
    values = PIXELS * parameters.temporal_patch_size * parameters.patch_size**2
    weights = torch.ones(values) if values == PIXELS else torch.arange(1.0, 1.0 + values)

    def encode(
        pixels: Tensor, position_index: Tensor, position_weight: Tensor, coordinates: Tensor, segment: Tensor
    ) -> tuple[Tensor, ...]:
        calls.append(len(pixels))
        assert (segment[..., 1] > segment[..., 0]).all(), "an empty softmax"
        given = (pixels, position_index, position_weight, coordinates, segment)
        declared = [torch.float32, torch.int64, torch.bfloat16, torch.int64, torch.int32]
        assert [each.dtype for each in given] == declared
        places.append(coordinates)
        pixels = pixels * weights
        flat = pixels.reshape(-1, values)
        seen = torch.stack([flat[start:end].sum() for start, end in segment[:, 0].tolist()])
        return (torch.stack([pixels.sum((1, 2)), seen], dim=1),)

    graph = make_graph(
        "encode",
        encode,
        inputs={
            "pixels": ("float32", ("M", 4, values)),
            "position_index": ("int64", ("M", 4, 4)),
            "position_weight": ("bfloat16", ("M", 4, 4)),
            "coordinates": ("int64", ("M", 4, 2)),
            "segment": ("int32", ("M", 4, 2)),
        },
        outputs=["embeddings"],
        state={},
        dims={"M": (4, 8)},
    )
    return VisionEncoder(LoadedStage("vision_encoder", {"encode": graph}), parameters, device)


LEVELS = np.random.default_rng(1).standard_normal((PIXELS, 256)).astype(np.float32)


def picture(frames: int, height: int, width: int) -> VisionFeatures:
    count = frames * height * width
    colours = np.random.default_rng(count).integers(0, 256, (count, PIXELS)).astype(np.uint8)
    return VisionFeatures(patches=colours, grid=(frames, height, width), levels=LEVELS)


def without_levels(features: VisionFeatures) -> VisionFeatures:
    """The same, normalised."""
    return VisionFeatures(patches=features.pixels, grid=features.grid)


def test_frames_share_calls_and_attend_only_to_themselves() -> None:
    calls: list[int] = []
    places: list[Tensor] = []
    pictures = [picture(1, 2, 4), picture(3, 2, 6), picture(1, 4, 4)]  # 2, 3 × 3, 4 tokens
    found = make_vision(calls, places).encode(pictures)
    assert [len(each) for each in found] == [2, 9, 4]
    embeddings = torch.cat(found).numpy()
    assert calls == [8, 8], "2+3+3 and 3+4 tokens, padded to buckets"
    frames = [frame for each in pictures for frame in np.split(each.pixels, each.grid[0])]
    own = np.concatenate([frame.reshape(-1, 4 * PIXELS).sum(1) for frame in frames])
    seen = np.concatenate([np.full(len(frame) // 4, frame.sum()) for frame in frames])
    np.testing.assert_allclose(embeddings, np.stack([own, seen], axis=1), atol=1e-5)
    sizes = [(places[0][first:end] + 1).amax((0, 1)).tolist() for first, end in ((0, 2), (2, 5), (5, 8))]
    assert sizes == [[2, 4], [2, 6], [2, 6]], "rows and columns of the first frames"


def test_colours_are_normalised_as_by_the_table() -> None:
    """On the device; features with other tables, or none, are normalised on the host."""
    pictures = [picture(1, 2, 4), picture(1, 4, 4)]
    other = replace(picture(1, 2, 2), levels=2 * LEVELS)
    for together in (pictures, [without_levels(pictures[0]), pictures[1]], [*pictures, other]):
        found = make_vision([], []).encode(together)
        wanted = make_vision([], []).encode(list(map(without_levels, together)))
        assert all(map(torch.equal, found, wanted))


def test_an_image_is_repeated_in_time(cuda: torch.device) -> None:
    """Alone, with padding, and in a call with a video, whose values are (channel, time, y, x) as well."""
    parameters = replace(VISION, temporal_patch_size=3, patch_size=2)
    generator = np.random.default_rng(3)

    def features(grid: tuple[int, int, int], repeats: int) -> VisionFeatures:
        values = PIXELS * 3 * 4 // repeats
        colours = generator.integers(0, 256, (math.prod(grid), values)).astype(np.uint8)
        return VisionFeatures(patches=colours, grid=grid, levels=LEVELS, repeats=repeats)

    image, wide, video = features((1, 4, 4), 3), features((1, 2, 6), 3), features((2, 2, 2), 1)
    time = image.patches.reshape(16, PIXELS, 1, 4).repeat(3, axis=2)
    by_table = np.stack([LEVELS[channel][time[:, channel]] for channel in range(PIXELS)], axis=1)
    np.testing.assert_array_equal(image.pixels, by_table.reshape(16, -1))
    for device in (CPU, cuda):
        for together in ([image], [wide], [image, wide], [video], [wide, video], [video, image]):
            found = make_vision([], [], device, parameters).encode(together)
            wanted = make_vision([], [], CPU, parameters).encode(list(map(without_levels, together)))
            assert all(map(torch.equal, found, wanted))


def test_frames_of_a_long_video_share_calls_of_a_limited_size() -> None:
    calls: list[int] = []
    encoder = make_vision(calls, [])
    encoder.max_batch_tokens = 4
    (embeddings,) = encoder.encode([picture(5, 2, 4)])  # 5 × 2 tokens
    assert calls == [4, 4, 4] and len(embeddings) == 10
    encoder.encode([picture(2, 2, 12)])  # of 6 tokens each, more than the limit
    assert calls == [4, 4, 4, 8, 8]


def test_sizes_of_calls_with_padding() -> None:
    vision = make_vision([], [])
    assert [vision.padded_tokens([picture(1, 2, 4)] * count) for count in (1, 2, 3, 4)] == [4, 4, 8, 8]
    assert picture(1, 2, 4).num_bytes == 2 * 4 * PIXELS
    with pytest.raises(RequestError, match="largest M bucket"):
        vision.padded_tokens([picture(1, 2, 4)] * 5)
    audio = make_audio([])
    clips = [clip(frames) for frames in (5, 16)]
    assert [audio.padded_tokens(each) for each in ([clips[0]], [clips[1]], clips)] == [2, 4, 8]
    assert clips[0].num_bytes == 5 * MELS * 4
    with pytest.raises(RequestError, match="largest N bucket"):
        audio.padded_tokens([clips[0]] * 3)


def test_a_frame_beyond_the_largest_bucket_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="largest M bucket"):
        make_vision([], []).encode([picture(1, 6, 6)])


def clip(frames: int) -> AudioFeatures:
    return AudioFeatures(mel=np.full((frames, MELS), 0.5, np.float32), num_tokens=-(-frames // PER_TOKEN))


def make_audio(
    shapes: list[tuple[int, ...]], device: torch.device = CPU, clips: tuple[int, ...] = (1, 2)
) -> AudioEncoder:
    """Fake embeddings: the sum of the clip's features, and its length."""

    def encode(mel: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        shapes.append(tuple(mel.shape[:2]))
        assert (lengths > 0).all()
        assert (mel.dtype, lengths.dtype) == (torch.bfloat16, torch.int64), "as the graph declares them"
        total = mel.float().sum((1, 2, 3))
        return (torch.stack([total, lengths.float()], dim=1)[:, None].expand(-1, mel.shape[1], -1),)

    graph = make_graph(
        "encode",
        encode,
        inputs={"mel": ("bfloat16", ("N", "T4", PER_TOKEN, MELS)), "lengths": ("int64", ("N",))},
        outputs=["embeddings"],
        state={},
        dims={"N": clips, "T4": (2, 4, 16)},
    )
    return AudioEncoder(LoadedStage("audio_encoder", {"encode": graph}), AUDIO, device)


def test_clips_are_padded_and_embeddings_trimmed_to_their_length() -> None:
    shapes: list[tuple[int, ...]] = []
    clips = [clip(frames) for frames in (5, 16, 64)]
    embeddings = make_audio(shapes).encode(clips)
    assert shapes == [(2, 4), (1, 16)]
    for each, mine in zip(clips, embeddings, strict=True):
        assert mine.shape == (each.num_tokens, 2)
        assert mine[0].tolist() == pytest.approx([each.mel.sum(), len(each.mel)])


def test_calls_with_several_clips_are_larger_on_cuda(cuda: torch.device) -> None:
    """A minute on a CPU; sixteen clips of 8 s or four of 30 s where there are engines for them."""
    assert (make_audio([]).max_batch_tokens, make_audio([], cuda).max_batch_tokens) == (1500, 3200)


def test_only_sizes_that_have_an_engine_are_called() -> None:
    """As on CUDA: more clips for short ones than for long ones. No call is split that an engine takes."""
    sizes = [(1, 2), (1, 4), (1, 16), (4, 2), (4, 4), (8, 2)]
    shapes: list[tuple[int, ...]] = []
    whole = make_audio(shapes, clips=(1, 4, 8))
    engine = whole._graph.engines[None]
    graph = Graph(whole._graph.spec, {size: engine for size in sizes})
    audio = AudioEncoder(LoadedStage("audio_encoder", {"encode": graph}), AUDIO, CPU)
    short, middle, long = clip(5), clip(16), clip(64)
    for clips, size in (
        ([short], 2),
        ([short] * 3, 8),
        ([short] * 5, 16),
        ([short, middle], 16),
        ([long], 16),
    ):
        assert audio.padded_tokens(clips) == size
    for clips in ([short, long], [middle] * 5, [short] * 9):
        with pytest.raises(RequestError):
            audio.padded_tokens(clips)
    found = audio.encode([short, long, *[middle] * 5, *[short] * 7])
    assert shapes == [(1, 2), (1, 16), (4, 4), (4, 4), (4, 2)]
    for each, mine in zip([short, long, *[middle] * 5, *[short] * 7], found, strict=True):
        assert mine[0].tolist() == pytest.approx([each.mel.sum(), len(each.mel)])


def test_small_sizes_are_captured_with_valid_inputs_and_replayed(cuda: torch.device) -> None:
    """The fake engines refuse an empty softmax, also in a capture; results stay when later calls run."""
    calls: list[int] = []
    vision, plain = make_vision(calls, [], cuda), make_vision([], [])
    assert calls == [8, 4], "the largest first: the others fit into its memory"
    pictures = [picture(1, 2, 4), picture(1, 2, 6), picture(1, 4, 6)]
    found = [vision.encode([each])[0] for each in pictures]
    assert calls[2:] == [4, 4, 8]
    for mine, each in zip(found, pictures, strict=True):
        assert torch.equal(mine, plain.encode([each])[0])
    shapes: list[tuple[int, ...]] = []
    audio = make_audio(shapes, cuda)
    assert shapes == [(2, 16), (1, 16), (2, 4), (2, 2), (1, 4), (1, 2)]
    clips = [clip(frames) for frames in (5, 16, 64)]
    for mine, wanted in zip(audio.encode(clips), make_audio([]).encode(clips), strict=True):
        assert torch.equal(mine, wanted)
