"""Encoded videos, or lists of frames, → patch rows and timestamps (spec: vision.md §2).

Decoding needs PyAV, which is imported at the first video. Colour conversion is the decoder's; everything after it
follows the reference.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import VisionParameters
from mingc.errors import ConfigError, RequestError
from mingc.runtime.preprocess.cubic import resize_cubic
from mingc.runtime.preprocess.image import VisionFeatures, check_aspect, load_size, patchify
from mingc.runtime.request import VideoParams

_BUDGET_SLACK = 1.05  # the largest frame is at least this many times the smallest
_FRAME_LIST_FPS = 2.0  # assumed for a list of frames, which has no clock
_MAX_SOURCE_FRAMES = 1 << 18  # 2.4 hours at 30 a second
_MAX_FRAME_PIXELS = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFeatures:
    """One video: its patches, grid (pairs, h, w), and the time of each pair in seconds."""

    vision: VisionFeatures
    timestamps: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What is known of a video before its frames are chosen."""

    num_frames: int
    fps: float


def _undecodable(where: str, what: str) -> RequestError:
    return RequestError(
        f"the video cannot be decoded: {what}",
        where=where,
        fix="send a whole video file with a video track, as MP4 (H.264) or WebM (VP9)",
        param=where,
    )


def _import_av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            "videos need PyAV, which is not installed", where="video input", fix="pip install av"
        ) from error


def sample_frames(
    source_frames: int, source_fps: float, *, fps: float, max_frames: int
) -> tuple[list[int], list[float]]:
    """Indices of the frames to use and their times in seconds.

    The number follows the lower of both rates, the indices are spread evenly from the first to the last frame, and the
    times run at the rate that results.
    """
    duration = source_frames / source_fps
    count = max(1, min(max_frames, int(duration * min(fps, source_fps) + 0.5)))
    indices = np.linspace(0, source_frames - 1, count).astype(np.int64).tolist()
    return indices, [index * duration / count for index in range(count)]


def frame_size(
    height: int, width: int, num_frames: int, parameters: VisionParameters, params: VideoParams, where: str
) -> tuple[int, int]:
    """(height, width) of every frame, from the pixels that `num_frames` share.

    Raises: RequestError for an extreme aspect ratio or a budget that leaves no pixel on the short side.
    """
    check_aspect(height, width, where)
    cell = parameters.patch_size * parameters.merge_size
    min_pixels = parameters.video_min_pixels if params.min_pixels is None else params.min_pixels
    total_pixels = parameters.video_total_pixels if params.total_pixels is None else params.total_pixels
    max_pixels: float
    if params.max_pixels is None:
        shared = total_pixels / num_frames * parameters.temporal_patch_size
        max_pixels = max(shared, int(min_pixels * _BUDGET_SLACK))
    else:
        max_pixels = params.max_pixels
    new_height, new_width = load_size(
        height,
        width,
        # The reference has a constant here and fails when merged tokens do not divide it.
        factor=parameters.load_factor if parameters.load_factor % cell == 0 else cell,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )
    if not new_height or not new_width:
        raise RequestError(
            f"a frame of {width}×{height} does not fit {int(max_pixels)} pixels",
            where=where,
            fix="raise max_pixels or total_pixels, or lower max_frames",
            param=where,
        )
    return new_height, new_width


def _assemble(
    frames: list[NDArray[np.uint8]], times: list[float], parameters: VisionParameters
) -> VideoFeatures:
    """Resized frames to patches; the last frame and its time are repeated until the frames fill temporal patches."""
    temporal = parameters.temporal_patch_size
    missing = -len(frames) % temporal
    frames = frames + frames[-1:] * missing
    times = times + times[-1:] * missing
    vision = patchify(np.stack(frames), parameters)
    means = np.asarray(times, dtype=np.float64).reshape(-1, temporal).mean(axis=1)
    return VideoFeatures(vision=vision, timestamps=tuple(means.tolist()))


def frames_to_video(
    frames: Sequence[NDArray[np.uint8]], parameters: VisionParameters, params: VideoParams, where: str
) -> VideoFeatures:
    """A list of (H, W, 3) uint8 frames as a video of 2 frames a second. All frames are used.

    The most frequent frame size decides; frames of another size are stretched to it.
    """
    if not frames:
        raise RequestError("the video has no frames", where=where, fix="send at least one frame", param=where)
    shapes = [(frame.shape[0], frame.shape[1]) for frame in frames]
    height, width = max(shapes, key=shapes.count)
    size = frame_size(height, width, len(frames), parameters, params, where)
    common = [resize_cubic(frame, height, width) for frame in frames]
    times = [index / _FRAME_LIST_FPS for index in range(len(frames))]
    return _assemble([resize_cubic(frame, *size) for frame in common], times, parameters)


def _probe(av: Any, data: bytes, where: str) -> _Source:
    """Number and rate of the frames, by walking the packets without decoding them."""
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.video:
            raise _undecodable(where, "it has no video track")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise _undecodable(where, "its codec is unknown")
        if stream.codec_context.width * stream.codec_context.height > _MAX_FRAME_PIXELS:
            raise _undecodable(where, f"frames have more than {_MAX_FRAME_PIXELS} pixels")
        count = 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > _MAX_SOURCE_FRAMES:
                raise _undecodable(where, f"it has more than {_MAX_SOURCE_FRAMES} frames")
        rate = float(stream.average_rate or stream.guessed_rate or 0)
    if count == 0 or rate <= 0:
        raise _undecodable(where, "it has no frames or no frame rate")
    return _Source(num_frames=count, fps=rate)


def _decoded(av: Any, data: bytes, wanted: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(index, frame) of the wanted indices in order, upright; ends early when the video has fewer frames."""
    last = wanted[-1]
    chosen = frozenset(wanted)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for index, frame in enumerate(container.decode(stream)):
            if index in chosen:
                if frame.width * frame.height > _MAX_FRAME_PIXELS:  # the header may have said otherwise
                    raise ValueError(f"a frame of {frame.width}×{frame.height}")
                upright = np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90))
                yield index, np.ascontiguousarray(upright)
            if index >= last:
                return


def _load(
    av: Any, data: bytes, source: _Source, parameters: VisionParameters, params: VideoParams, where: str
) -> VideoFeatures | None:
    """The video taken as having `source.num_frames` frames; None when decoding yields fewer."""
    indices, times = sample_frames(
        source.num_frames,
        source.fps,
        fps=parameters.video_fps if params.fps is None else params.fps,
        max_frames=parameters.video_max_frames if params.max_frames is None else params.max_frames,
    )
    size: tuple[int, int] | None = None
    frames: dict[int, NDArray[np.uint8]] = {}
    for index, frame in _decoded(av, data, indices):
        if size is None:
            size = frame_size(frame.shape[0], frame.shape[1], len(indices), parameters, params, where)
        frames[index] = resize_cubic(frame, *size)
    if indices[-1] not in frames:
        return None
    return _assemble([frames[index] for index in indices], times, parameters)


def _count_decodable(av: Any, data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(container.streams.video[0]))


def load_video(data: bytes, parameters: VisionParameters, params: VideoParams, where: str) -> VideoFeatures:
    """Encoded video → patches and timestamps. `where` names the video in errors.

    Raises: RequestError when the bytes hold no decodable video, ConfigError without PyAV.
    """
    if (params.fps is not None and params.fps <= 0) or (
        params.max_frames is not None and params.max_frames < 1
    ):
        raise RequestError("fps and max_frames of a video must be positive", where=where, param=where)
    av = _import_av()
    try:
        source = _probe(av, data, where)
        video = _load(av, data, source, parameters, params, where)
        if video is None:
            # Some packets give no picture (damaged, or hidden frames): sample again among those that do.
            count = _count_decodable(av, data)
            if count:
                source = _Source(num_frames=count, fps=source.fps)
                video = _load(av, data, source, parameters, params, where)
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise _undecodable(where, f"{len(data)} bytes ({type(error).__name__})") from error
    if video is None:
        raise _undecodable(where, "no frame could be decoded")
    return video
