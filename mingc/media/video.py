"""Encoded videos → patch rows and timestamps (spec: vision.md §2).

PyAV decodes and converts colours, OpenCV resizes; both are imported at the first video. All steps after the conversion
follow the reference. Before a frame is decoded, the headers give an estimate of the memory. Frames are decoded, resized
and written one at a time.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import VisionParameters
from mingc.errors import ConfigError, RequestError
from mingc.media.containers import open_container, pixel_limit
from mingc.media.image import PatchWriter, check_aspect, check_grid, load_size
from mingc.media.limits import MediaLimits, too_large, undecodable
from mingc.prompts.conversation import VideoParams
from mingc.prompts.features import VideoFeatures

_BUDGET_SLACK = 1.05  # the largest size of a frame is at least so many times the smallest
_MAX_SOURCE_FRAMES = 1 << 18  # 2.4 hours at 30 a second
_MAX_FRAME_PIXELS = 1 << 26
_MIN_HELD_FRAMES = 4  # a decoder holds at least the current frame, references, and the returned frame
_USUAL_HELD_FRAMES = 18  # with all references that a format allows; every further thread holds one more
_MAX_THREADS = 8
_FALLBACK_BITS = 24  # per pixel, if the header has no format: 10 bits, 4:2:0
_SIDE_BYTES = 0.5  # per pixel, for the motion vectors of a decoder


class FrameSource(Protocol):
    """A video before sampling: its length and rate, and its frames, upright (H, W, 3) uint8."""

    @property
    def num_frames(self) -> int: ...

    @property
    def fps(self) -> float: ...

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of a frame in the header, before it is turned upright."""
        ...

    def plan(self, num_bytes: int, limits: MediaLimits, where: str) -> None:
        """Prepare decoding to a result of `num_bytes`.

        Raises: RequestError when decoder and result together exceed `limits`.
        """
        ...

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(index, frame) of the wanted indices in order; ends early when the video has fewer frames."""
        ...


def _undecodable(where: str, what: str) -> RequestError:
    return undecodable(
        f"the video cannot be decoded: {what}",
        where,
        "send a complete video file with a video track, such as MP4 (H.264) or WebM (VP9)",
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

    The lower of the two rates sets how many frames are sampled, evenly from the first to the last. Times advance at the
    resulting rate.
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


def sample_video(
    source: FrameSource, parameters: VisionParameters, params: VideoParams, where: str, limits: MediaLimits
) -> VideoFeatures | None:
    """Sample, resize and patch the frames of `source`; None when it has fewer than `num_frames`.

    The last frame and its time are repeated to fill the last temporal patch.
    Raises: RequestError when the frames, the tokens or the memory exceed the artifact's limits or `limits`.
    """
    indices, times = sample_frames(
        source.num_frames,
        source.fps,
        fps=parameters.video_fps if params.fps is None else params.fps,
        max_frames=parameters.video_max_frames if params.max_frames is None else params.max_frames,
    )
    missing = -len(indices) % parameters.temporal_patch_size
    indices, times = indices + indices[-1:] * missing, times + times[-1:] * missing
    planned = _plan(source, source.size, len(indices), missing, parameters, params, limits, where)
    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(index, []).append(place)
    writer: PatchWriter | None = None
    last = -1
    for index, frame in source.frames(list(places)):
        if writer is None:
            found = frame.shape[0], frame.shape[1]
            if found != source.size:  # the video is turned, or the header gives another size
                planned = _plan(source, found, len(indices), missing, parameters, params, limits, where)
            writer = PatchWriter(len(indices), *planned, parameters)
        resized = resize_frame(frame, *planned)
        for place in places[index]:
            writer.put(place, resized)
        last = index
    if writer is None or last != indices[-1]:
        return None
    means = np.asarray(times, dtype=np.float64).reshape(-1, parameters.temporal_patch_size).mean(axis=1)
    return VideoFeatures(vision=writer.features(), timestamps=tuple(means.tolist()))


def _plan(
    source: FrameSource,
    size: tuple[int, int],
    num_frames: int,
    missing: int,
    parameters: VisionParameters,
    params: VideoParams,
    limits: MediaLimits,
    where: str,
) -> tuple[int, int]:
    """(height, width) of the resized frames. Raises: RequestError when they would exceed a limit."""
    height, width = frame_size(*size, num_frames - missing, parameters, params, where)
    check_grid(height, width, num_frames, parameters, limits, where, "video")
    # All frames as bytes, and one frame that is resized before it is written.
    source.plan(3 * height * width * (num_frames + 2), limits, where)
    return height, width


class _EncodedVideo:
    """An encoded file as a `FrameSource`. The constructor reads the header; `frames` decodes."""

    def __init__(self, av: Any, data: bytes, where: str, limits: MediaLimits) -> None:
        self._av = av
        self._data = data
        self._max_pixels = min(_MAX_FRAME_PIXELS, limits.max_bytes // (3 + _MIN_HELD_FRAMES))
        self._num_threads = 1
        with self._open() as container:
            if not container.streams.video:
                raise _undecodable(where, "it has no video track")
            stream = container.streams.video[0]
            context = stream.codec_context
            if context is None:
                raise _undecodable(where, "its codec is unknown")
            width, height = context.width, context.height
            if width * height > self._max_pixels:
                raise too_large(
                    f"the video's frames have {width}×{height} pixels; {self._max_pixels} can be decoded",
                    where,
                )
            if width <= 0 or height <= 0:
                raise _undecodable(where, "it has no frame size")
            bits = _FALLBACK_BITS if context.format is None else context.format.padded_bits_per_pixel
            self._frame_bytes = int(width * height * (bits / 8 + _SIDE_BYTES))
            count = 0
            for packet in container.demux(stream):
                count += packet.size > 0
                if count > _MAX_SOURCE_FRAMES:
                    raise too_large(f"the video has more than {_MAX_SOURCE_FRAMES} frames", where)
            self.fps = float(stream.average_rate or stream.guessed_rate or 0)
        if count == 0 or self.fps <= 0:
            raise _undecodable(where, "it has no frames or no frame rate")
        self.num_frames = count
        self.size = (height, width)

    def plan(self, num_bytes: int, limits: MediaLimits, where: str) -> None:
        height, width = self.size
        # A frame as RGB, and once more when it is turned.
        others = num_bytes + 6 * height * width
        limits.check_bytes(
            others + _MIN_HELD_FRAMES * self._frame_bytes, where, f"a video of {width}×{height} pixels"
        )
        held = (limits.max_bytes - others) // self._frame_bytes
        self._num_threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, held - _USUAL_HELD_FRAMES))

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        last = wanted[-1]
        chosen = frozenset(wanted)
        with self._open() as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO" if self._num_threads > 1 else "SLICE"
            stream.codec_context.thread_count = self._num_threads
            # FFmpeg checks this for every frame: a later frame may be larger than the header says.
            stream.codec_context.options = pixel_limit(self._max_pixels)
            for index, frame in enumerate(container.decode(stream)):
                if index in chosen:
                    upright = np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90))
                    yield index, np.ascontiguousarray(upright)
                if index >= last:
                    return

    def count_decodable(self) -> None:
        """Decode all frames, and set the number of frames to their number."""
        with self._open() as container:
            stream = container.streams.video[0]
            stream.codec_context.options = pixel_limit(self._max_pixels)
            stream.codec_context.thread_count = self._num_threads
            self.num_frames = sum(1 for _ in container.decode(stream))

    def _open(self) -> Any:
        return open_container(self._av, self._data, max_pixels=self._max_pixels)


def load_video(
    data: bytes,
    parameters: VisionParameters,
    params: VideoParams,
    where: str,
    limits: MediaLimits | None = None,
) -> VideoFeatures:
    """Encoded video → patches and timestamps. `where` names the video in errors.

    Raises: RequestError when the bytes contain no decodable video, or it would exceed `limits`, which is known before a
        frame is decoded; ConfigError without PyAV or OpenCV.
    """
    if (params.fps is not None and params.fps <= 0) or (
        params.max_frames is not None and params.max_frames < 1
    ):
        raise RequestError("fps and max_frames of a video must be positive", where=where, param=where)
    av = _import_library("av", "PyAV")
    _import_cv2()
    limits = limits or MediaLimits()
    try:
        source = _EncodedVideo(av, data, where, limits)
        video = sample_video(source, parameters, params, where, limits)
        if video is None:
            # Damaged packets and hidden frames give no picture: sample again among the decodable frames.
            source.count_decodable()
            if source.num_frames:
                video = sample_video(source, parameters, params, where, limits)
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise _undecodable(where, f"{len(data)} bytes ({type(error).__name__})") from error
    if video is None:
        raise _undecodable(where, "no frame could be decoded")
    return video
