"""Encoded videos, or lists of frames, → patch rows and timestamps (spec: vision.md §2).

PyAV decodes and OpenCV resizes; both are imported at the first video. PyAV also converts colours; every later step
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
from mingc.runtime.preprocess.image import VisionFeatures, check_aspect, load_size, patchify
from mingc.runtime.request import VideoParams

_BUDGET_SLACK = 1.05  # the largest frame is at least this many times the smallest
_FRAME_LIST_FPS = 2.0  # assumed for a list of frames, which has no clock
_MAX_SOURCE_FRAMES = 1 << 18  # 2.4 hours at 30 a second
_MAX_FRAME_PIXELS = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFeatures:
    """Input of the vision encoder for one video: patches, grid (pairs, h, w), and the time of each pair in seconds."""

    vision: VisionFeatures
    timestamps: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Length and rate of a video, read before frames are sampled."""

    num_frames: int
    fps: float


def _undecodable(where: str, what: str) -> RequestError:
    return RequestError(
        f"the video cannot be decoded: {what}",
        where=where,
        fix="send a complete video file with a video track, such as MP4 (H.264) or WebM (VP9)",
        param=where,
    )


def _import_library(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"video input needs {name}, which is not installed",
            where="video input",
            fix="pip install 'mingc[serve]'",
        ) from error


def _import_av() -> Any:
    return _import_library("av", "PyAV")


def _import_cv2() -> Any:
    cv2 = _import_library("cv2", "OpenCV")
    # Requests are already prepared in parallel; threads inside one resize would oversubscribe the CPU.
    cv2.setNumThreads(1)
    return cv2


def resize_frame(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize (H, W, 3) uint8 to (height, width, 3) with OpenCV's bicubic filter, as the reference does.

    The filter has no low-pass when shrinking, unlike Pillow's. Raises: ConfigError without OpenCV.
    """
    if frame.shape[:2] == (height, width):
        return frame
    cv2 = _import_cv2()
    resized: NDArray[np.uint8] = cv2.resize(frame, (width, height), interpolation=cv2.INTER_CUBIC)
    return resized


def sample_frames(
    source_frames: int, source_fps: float, *, fps: float, max_frames: int
) -> tuple[list[int], list[float]]:
    """Indices of the sampled frames and their times in seconds.

    The lower of the two rates sets the number of frames. Indices are spread evenly from the first to the last frame;
    times advance at the resulting rate.
    """
    duration = source_frames / source_fps
    count = max(1, min(max_frames, int(duration * min(fps, source_fps) + 0.5)))
    indices = np.linspace(0, source_frames - 1, count).astype(np.int64).tolist()
    return indices, [index * duration / count for index in range(count)]


def frame_size(
    height: int, width: int, num_frames: int, parameters: VisionParameters, params: VideoParams, where: str
) -> tuple[int, int]:
    """(height, width) of each frame after resizing, from the pixel budget shared by `num_frames`.

    Raises: RequestError for an extreme aspect ratio, or when the budget leaves the short side without a pixel.
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
        # The reference uses a constant and fails when the side of a merged token does not divide it.
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
    """Convert resized frames to patches; repeat the last frame and its time to fill the last temporal patch."""
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
    """Convert (H, W, 3) uint8 frames to a video at 2 frames per second. All frames are used.

    Frames are first stretched to the most frequent frame size.
    """
    if not frames:
        raise RequestError("the video has no frames", where=where, fix="send at least one frame", param=where)
    shapes = [(frame.shape[0], frame.shape[1]) for frame in frames]
    height, width = max(shapes, key=shapes.count)
    size = frame_size(height, width, len(frames), parameters, params, where)
    common = [resize_frame(frame, height, width) for frame in frames]
    times = [index / _FRAME_LIST_FPS for index in range(len(frames))]
    return _assemble([resize_frame(frame, *size) for frame in common], times, parameters)


def _probe(av: Any, data: bytes, where: str) -> _Source:
    """Count the frames and read their rate from the packets, without decoding."""
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
    """Yield (index, upright frame) for the wanted indices in order; stop early when the video has fewer frames."""
    last = wanted[-1]
    chosen = frozenset(wanted)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for index, frame in enumerate(container.decode(stream)):
            if index in chosen:
                if frame.width * frame.height > _MAX_FRAME_PIXELS:  # the header may give a smaller size
                    raise ValueError(f"a frame of {frame.width}×{frame.height}")
                upright = np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90))
                yield index, np.ascontiguousarray(upright)
            if index >= last:
                return


def _load(
    av: Any, data: bytes, source: _Source, parameters: VisionParameters, params: VideoParams, where: str
) -> VideoFeatures | None:
    """Sample the video as if it had `source.num_frames` frames; None when decoding yields fewer."""
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
        frames[index] = resize_frame(frame, *size)
    if indices[-1] not in frames:
        return None
    return _assemble([frames[index] for index in indices], times, parameters)


def _count_decodable(av: Any, data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(container.streams.video[0]))


def load_video(data: bytes, parameters: VisionParameters, params: VideoParams, where: str) -> VideoFeatures:
    """Encoded video → patches and timestamps. `where` names the video in errors.

    Raises: RequestError when the bytes hold no decodable video, ConfigError without PyAV or OpenCV.
    """
    if (params.fps is not None and params.fps <= 0) or (
        params.max_frames is not None and params.max_frames < 1
    ):
        raise RequestError("fps and max_frames of a video must be positive", where=where, param=where)
    av = _import_av()
    _import_cv2()
    try:
        source = _probe(av, data, where)
        video = _load(av, data, source, parameters, params, where)
        if video is None:
            # Damaged packets and hidden frames give no picture: sample again among the decodable frames.
            count = _count_decodable(av, data)
            if count:
                source = _Source(num_frames=count, fps=source.fps)
                video = _load(av, data, source, parameters, params, where)
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise _undecodable(where, f"{len(data)} bytes ({type(error).__name__})") from error
    if video is None:
        raise _undecodable(where, "no frame could be decoded")
    return video
