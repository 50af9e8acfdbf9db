"""Encoded videos → patch rows and timestamps (spec: vision.md §2).

PyAV decodes and converts colours, OpenCV resizes; both are imported at the first video. All steps after the conversion
follow the reference, which assumes a constant rate; where frames come at other times, the same rule is applied to their
times. Before a frame is decoded, the headers give an estimate of the memory. Frames are decoded, resized
and written one at a time.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import VisionParameters
from mingc.errors import RequestError
from mingc.media.containers import open_container, pixel_limit
from mingc.media.formats import undecodable_file
from mingc.media.image import PatchWriter, check_aspect, check_grid, load_size
from mingc.media.libraries import load_library
from mingc.media.limits import MAX_PIXELS, MAX_VIDEO_FRAMES, MediaLimits, too_large, undecodable
from mingc.prompts.conversation import VideoParams
from mingc.prompts.features import VideoFeatures

_BUDGET_SLACK = 1.05  # the largest size of a frame is at least so many times the smallest
_MIN_HELD_FRAMES = 4  # a decoder holds at least the current frame, references, and the returned frame
_USUAL_HELD_FRAMES = 18  # with all references that a format allows; every further thread holds one more
_MAX_THREADS = 8
_FIX = "send a complete video file with a video track, such as MP4 (H.264) or WebM (VP9)"
_NO_TIME = -(1 << 62)
_FALLBACK_BITS = 24  # per pixel, if the header has no format: 10 bits, 4:2:0
# Frames this close to a constant rate have that rate; the prompt states tenths of a second.
_MAX_JITTER_S = 0.05
_SIDE_BYTES = 0.5  # per pixel, for the motion vectors of a decoder


class FrameSource(Protocol):
    """A video before sampling: its length and rate, and its frames, upright (H, W, 3) uint8."""

    @property
    def num_frames(self) -> int: ...

    @property
    def fps(self) -> float: ...

    @property
    def times(self) -> NDArray[np.float64] | None:
        """(num_frames + 1,) seconds: when each frame is shown, from 0 on, and the end; None for a constant rate."""
        ...

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
        _FIX,
    )


def _import_cv2() -> Any:
    cv2 = load_library("cv2")
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
    source_frames: int,
    source_fps: float,
    *,
    fps: float,
    max_frames: int,
    source_times: NDArray[np.float64] | None = None,
) -> tuple[list[int], list[float]]:
    """Indices of the sampled frames and their times in seconds. `source_times`: see `FrameSource.times`.

    The lower of the two rates sets how many frames are sampled, evenly from the first to the last. Times advance at the
    resulting rate. With `source_times`, "evenly" is meant in time, and a frame may be sampled several times; if all
    frames are sampled, each has its own time. For a constant rate both ways give the same.
    """
    if source_times is not None:
        source_fps = source_frames / float(source_times[-1])
    duration = source_frames / source_fps
    count = max(1, min(max_frames, int(duration * min(fps, source_fps) + 0.5)))
    if source_times is not None:
        starts = source_times[:-1]
        if count == source_frames:
            return list(range(count)), starts.tolist()
        shown = np.linspace(0, duration * (1 - 1 / source_frames), count)
        found = np.searchsorted(starts, shown, side="right") - 1
        return found.tolist(), [index * duration / count for index in range(count)]
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
        source_times=source.times,
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
        self._max_pixels = min(MAX_PIXELS, limits.max_bytes // (3 + _MIN_HELD_FRAMES))
        self._num_threads = 1
        with self._open() as container:
            if not container.streams.video:
                raise undecodable_file(
                    data, "video", where, what="the video cannot be decoded: it has no video track", fix=_FIX
                )
            stream = self._stream(container)
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
            starts, durations, dts = array("q"), array("q"), array("q")
            for packet in container.demux(stream):
                if packet.size == 0 or packet.is_discard:
                    continue
                if len(starts) == MAX_VIDEO_FRAMES:
                    raise too_large(f"the video has more than {MAX_VIDEO_FRAMES} frames", where)
                start = packet.dts if packet.pts is None else packet.pts
                starts.append(_NO_TIME if start is None else start)
                durations.append(packet.duration or 0)
                dts.append(starts[-1] if packet.dts is None else packet.dts)
            self.fps = float(stream.average_rate or stream.guessed_rate or 0)
            self._time_base = float(stream.time_base or 0)
            # Of the container, which may be longer than its video.
            self._end_s = ((container.start_time or 0) + (container.duration or 0)) / av.time_base
        self.num_frames = len(starts)
        if not starts or self.fps <= 0:
            raise _undecodable(where, "it has no frames or no frame rate")
        is_in_order = bool((np.diff(dts) >= 0).all())  # else the clock was set back, as between joined files
        self.times = self._frame_times(starts, durations) if is_in_order else None
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
            stream = self._stream(container)
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
        """Decode all frames, and set the number of frames to their number, and the times to theirs."""
        with self._open() as container:
            stream = self._stream(container)
            stream.codec_context.options = pixel_limit(self._max_pixels)
            stream.codec_context.thread_count = self._num_threads
            starts, durations = array("q"), array("q")
            for frame in container.decode(stream):
                starts.append(_NO_TIME if frame.pts is None else frame.pts)
                durations.append(frame.duration or 0)
        self.num_frames = len(starts)
        self.times = self._frame_times(starts, durations) if starts and self.times is not None else None

    def _frame_times(self, starts: array[int], durations: array[int]) -> NDArray[np.float64] | None:
        """See `FrameSource.times`. `starts`, `durations`: of all frames in any order, in the stream's time base."""
        ordered = np.sort(np.asarray(starts, dtype=np.int64))
        if ordered[0] == _NO_TIME:
            return None
        last = int(np.argmax(starts))
        last_s = durations[last] * self._time_base
        # Durations are those of the order of decoding, so the last frame may have that of another.
        if (left_s := self._end_s - starts[last] * self._time_base) > 0:
            last_s = min(last_s, left_s)
        times = np.append(ordered - ordered[0], 0) * self._time_base
        times[-1] = times[-2] + (last_s or 1 / self.fps)
        jitter = np.abs(times - np.arange(len(times)) / self.fps).max()
        return None if jitter <= min(_MAX_JITTER_S, 0.5 / self.fps) else times

    def _stream(self, container: Any) -> Any:
        """The video track that FFmpeg prefers: no cover picture if there is another one."""
        return container.streams.best("video") or container.streams.video[0]

    def _open(self) -> Any:
        return open_container(self._av, self._data, max_pixels=self._max_pixels)


def open_video(data: bytes, where: str, limits: MediaLimits) -> _EncodedVideo:
    """The frames of an encoded video, not decoded yet. Raises: RequestError; av.FFmpegError for damaged bytes."""
    return _EncodedVideo(load_library("av"), data, where, limits)


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
    av = load_library("av")
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
        what = f"the video cannot be decoded: {len(data)} bytes ({type(error).__name__})"
        raise undecodable_file(data, "video", where, what=what, fix=_FIX) from error
    if video is None:
        raise _undecodable(where, "no frame could be decoded")
    return video
