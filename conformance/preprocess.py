"""preprocess.safetensors and preprocess.json: pixels, resize sizes, prompts, token ids and positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from mingc.artifacts.parameters import AudioParameters, ThinkerParameters, VisionParameters
from mingc.errors import ConfigError
from mingc.media.image import encoder_size, load_size, patchify, resize_for_encoder, resize_loaded
from mingc.media.limits import MediaLimits
from mingc.media.video import frame_size, resize_frame, sample_video
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import MediaPart, Message, Role, TextPart, VideoParams
from mingc.prompts.features import AudioFeatures, Features, Grid, VideoFeatures, VisionFeatures
from mingc.prompts.tokenizer import TextTokenizer

PIXEL_TOLERANCE = 1e-5
RECORDED_FPS = 2.0  # the reference's rate for a list of frames; all of them are sampled

Image = NDArray[np.uint8]
_Recorded = TypeVar("_Recorded")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedFrames:
    """Frames of one size that are already decoded, as a `FrameSource`."""

    pictures: Sequence[NDArray[np.uint8]]
    fps: float
    times: NDArray[np.float64] | None = None

    @property
    def num_frames(self) -> int:
        return len(self.pictures)

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.pictures[0].shape[:2]
        return height, width

    def plan(self, num_bytes: int, limits: MediaLimits, where: str) -> None:
        limits.check_bytes(num_bytes, where, "the video")

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        return ((index, self.pictures[index]) for index in wanted)


def replay_preprocessing(engines: Engines, log: ReferenceLog, document: Mapping[str, Any]) -> None:
    """Replay the tensors of `log` and the cases of `document`, preprocess.json; either may be empty."""
    vision = engines.find_parameters("vision_encoder", VisionParameters)
    thinker = engines.find_parameters("thinker", ThinkerParameters)
    tokenizer = engines.tokenizer("thinker")
    video: VideoFeatures | None = None
    if vision is not None:
        for case in log.cases("pixel_values"):
            with log.case(case):
                _replay_images(case, vision, log)
        with log.case("video"):
            video = _replay_video(vision, log, document.get("video", {}))
        with log.case("smart_resize"):
            _replay_sizes(log, document.get("smart_resize", {}))
    if tokenizer is None or thinker is None:
        log.skip("processor_template", "this artifact has no thinker")
        return
    for text, expected in document.get("tokenizer", {}).items():
        log.ids(f"tokenizer {text[:20]!r}", tokenizer.encode(text), reference=expected["ids"])
        decoded = [tokenizer.decode(expected["ids"], skip_special_tokens=skip) for skip in (False, True)]
        log.text(f"decoded {text[:20]!r}", decoded, [expected["decoded"], expected["decoded_skip_special"]])
    audio = engines.find_parameters("audio_encoder", AudioParameters)
    processor = ChatProcessor(tokenizer, thinker, vision=vision, audio=audio)
    parsing = ChatProcessor(tokenizer, thinker, vision=vision, audio=audio, parse_special_tokens=True)
    for name, case in document.get("processor_template", {}).items():
        chosen = parsing if any(_typed_tags(turn) for turn in case["messages"]) else processor
        with log.case(f"processor_template.{name}"):
            _replay_prompt(name, case, chosen, tokenizer, engines, log, video)
    for name, case in document.get("tokenizer_jinja_template", {}).items():
        ids = tokenizer.encode(case["prompt"])
        log.ids(f"tokenizer_jinja_template.{name}.input_ids", ids, reference=case["input_ids"])
    if "eos_token_id" in document:
        same = document["eos_token_id"] in thinker.stop_token_ids
        log.rule("eos_token_id", same, f"token {document['eos_token_id']} ends an answer")


def _replay_images(case: str, vision: VisionParameters, log: ReferenceLog) -> None:
    """Images through both resizes; cases recorded without the first resize lack its output."""
    pixels, grids = [], []
    index = 0
    while f"{case}.raw{index}" in log:
        raw: Image = np.asarray(log.input(f"{case}.raw{index}"), np.uint8)
        fetched_name = f"{case}.fetched{index}"
        image = raw
        if fetched_name in log:
            target = log.references[fetched_name].shape[:2]
            image = resize_loaded(
                raw, vision, case, max_pixels=_max_pixels(raw, (target[0], target[1]), vision)
            )
            log.ids(fetched_name, image)
        elif _loaded_size(raw, vision, vision.load_max_pixels) != raw.shape[:2]:
            image = raw  # recorded without the first resize
        features = patchify(resize_for_encoder(image, vision, case)[None], vision)
        pixels.append(features.pixels)
        grids.append(features.grid)
        index += 1
    log.tensor(f"{case}.pixel_values", np.concatenate(pixels), tolerance=PIXEL_TOLERANCE)
    log.ids(f"{case}.grid_thw", grids)


def _loaded_size(raw: Image, vision: VisionParameters, max_pixels: int) -> tuple[int, int]:
    return load_size(
        raw.shape[0],
        raw.shape[1],
        factor=vision.load_factor,
        min_pixels=vision.load_min_pixels,
        max_pixels=max_pixels,
    )


def _max_pixels(raw: Image, target: tuple[int, int], vision: VisionParameters) -> int | None:
    """Find a pixel limit that gives this image its recorded size; limits are not recorded. None: the default does."""
    if _loaded_size(raw, vision, vision.load_max_pixels) == target:
        return None
    area = target[0] * target[1]
    limits = range(area, 4 * area, max(1, area // 256))
    return next((limit for limit in limits if _loaded_size(raw, vision, limit) == target), None)


def _replay_video(
    vision: VisionParameters, log: ReferenceLog, document: Mapping[str, Any]
) -> VideoFeatures | None:
    frames: list[Image] = []
    while (name := f"video.raw_frame{len(frames)}") in log:
        frames.append(np.asarray(log.input(name), np.uint8))
    if not frames:
        return None
    options = document.get("options", {})
    params = VideoParams(min_pixels=options.get("min_pixels"), total_pixels=options.get("total_pixels"))
    source = DecodedFrames(pictures=frames, fps=RECORDED_FPS)
    video = sample_video(source, vision, params, "video", MediaLimits())
    assert video is not None, "all frames are there"
    height, width = frames[0].shape[:2]
    size = frame_size(height, width, len(frames), vision, params, "video")
    resized = [resize_frame(frame, *size) for frame in frames]
    resized += resized[-1:] * (-len(resized) % vision.temporal_patch_size)
    log.ids("video.fetched", np.stack(resized).transpose(0, 3, 1, 2))
    log.tensor("video.pixel_values_videos", video.vision.pixels, tolerance=PIXEL_TOLERANCE)
    log.ids("video.grid_thw", [video.vision.grid])
    if "timestamps_per_temporal_patch" in document:
        log.tensor(
            "video.timestamps", video.timestamps, reference=document["timestamps_per_temporal_patch"][0]
        )
    return video


def _replay_sizes(log: ReferenceLog, document: Mapping[str, Any]) -> None:
    rows = document.get("rows", [])
    same = 0
    for row in rows:
        limits = {"min_pixels": row["min_pixels"], "max_pixels": row["max_pixels"]}
        encoder = encoder_size(row["h"], row["w"], factor=document["image_processor_factor"], **limits)
        loaded = load_size(row["h"], row["w"], factor=document["fetch_image_factor"], **limits)
        same += [list(encoder), list(loaded)] == [row["image_processor"], row["fetch_image"]]
    if rows:
        log.share("smart_resize", same=same, total=len(rows), minimum=1.0)


def _replay_prompt(
    name: str,
    case: Mapping[str, Any],
    processor: ChatProcessor,
    tokenizer: TextTokenizer,
    engines: Engines,
    log: ReferenceLog,
    video: VideoFeatures | None,
) -> None:
    """Token ids, positions and audio spans of messages whose media have the recorded grids and lengths."""
    media = _Media(case, engines, video)
    messages: list[Message] = []
    roles: dict[str, Role] = {"HUMAN": "user", "ASSISTANT": "assistant"}
    if "sys_prompt_exp" in case["kwargs"]:
        messages.append(Message(role="system", parts=(TextPart(text=case["kwargs"]["sys_prompt_exp"]),)))
    for turn in case["messages"]:
        parts = tuple(part for item in _without_suppressed(turn) for part in media.parts(item))
        messages.append(Message(role=roles[turn["role"]], parts=parts))
    if media.missing:
        log.skip(f"processor_template.{name}", media.missing)
        return
    prompt, features = processor.prepare(messages, thinking=bool(case["kwargs"].get("use_cot_system_prompt")))
    prefix = f"processor_template.{name}"
    log.ids(f"{prefix}.input_ids", prompt.input_ids, reference=case["input_ids"])
    log.ids(f"{prefix}.position_ids", prompt.positions, reference=case["position_ids"])
    log.ids(f"{prefix}.rope_delta", prompt.rope_delta, reference=case["rope_delta"])
    decoded = tokenizer.decode(prompt.input_ids.tolist(), skip_special_tokens=False)
    log.text(f"{prefix}.text_roundtrip", decoded, case["text_roundtrip"])
    if "audio_placeholder_loc_lens" in case:
        places = [[span.start, span.length] for span in features.spans if span.kind == "audio"]
        log.ids(f"{prefix}.audio_places", [places], reference=case["audio_placeholder_loc_lens"])


def _typed_tags(turn: Mapping[str, Any]) -> Counter[str]:
    """Count how often the text of a recorded turn names the tag of each kind of media."""
    text = "".join(item["text"] for item in turn["content"] if item["type"] == "text")
    return +Counter({kind: text.count(f"<{kind}>") for kind in ("image", "audio", "video")})


def _without_suppressed(turn: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the content of a recorded turn without the media that its typed tags suppress.

    The reference parses tags and leaves out one item of media per tag; the runtime places media by structure.
    """
    suppressed = _typed_tags(turn)
    for item in turn["content"]:
        if suppressed[item["type"]]:
            suppressed[item["type"]] -= 1
        else:
            yield item


class _Media:
    """Placeholder media with the recorded shapes; a prompt does not depend on their contents."""

    def __init__(self, case: Mapping[str, Any], engines: Engines, video: VideoFeatures | None) -> None:
        self._grids: Iterator[list[int]] = iter(case.get("image_grid_thw", []))
        self._frames: Iterator[int] = iter(case.get("audio_feats_lengths", [[]])[0])
        self._vision = engines.find_parameters("vision_encoder", VisionParameters)
        self._audio = engines.find_parameters("audio_encoder", AudioParameters)
        self._video = video
        self.missing = ""

    def parts(self, item: Mapping[str, Any]) -> list[TextPart | MediaPart]:
        """Convert one entry of a recorded turn to parts; newlines separate media of one entry."""
        kind = item["type"]
        if kind == "text":
            return [TextPart(text=item["text"])]
        items: list[Features] = []
        if kind == "image" and self._vision is not None:
            items = [_image(_next(self._grids)) for _ in range(int(item["image"].split()[0]))]
        elif kind == "audio" and self._audio is not None:
            bands = self._audio.num_mels
            counts = [_next(self._frames) for _ in range(int(item["audio"].split()[0]))]
            for count in counts:
                tokens = -(-count // self._audio.frames_per_token)
                items.append(AudioFeatures(mel=np.zeros((count, bands), np.float32), num_tokens=tokens))
        elif kind == "video" and self._video is not None:
            items = [self._video]
        else:
            self.missing = f"no recorded {kind}, or no encoder for it in this artifact"
        found: list[TextPart | MediaPart] = []
        for features in items:
            found += [TextPart(text="\n")] if found else []
            found.append(MediaPart(kind=kind, data=features, where=kind))
        return found


def _next(recorded: Iterator[_Recorded]) -> _Recorded:
    """Take the next recorded size. Raises: ConfigError when a message has more media than sizes are recorded."""
    for each in recorded:
        return each
    raise ConfigError("a message has more media than sizes are recorded", where="--reference")


def _image(grid: list[int]) -> VisionFeatures:
    shape: Grid = (grid[0], grid[1], grid[2])
    return VisionFeatures(patches=np.zeros((grid[0] * grid[1] * grid[2], 1), np.float32), grid=shape)
