"""Compares the answers of a service to the recorded requests with the answers of the eager model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mingc.errors import MingcError
from mingc.media.dsp.audio_comparison import LIMITS, LOW_PRECISION_LIMITS, Figure, compare_audio
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.runtime.request import AudioDelta, Done, Event, ImageDone, ImageEvent, Recorder, TextDelta
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.served.cases import ServedCase, ServedGoldens
from mingc.verify.served.requests import PIXEL_STRIDE

Floats = NDArray[np.float32]

FEATURE_TOLERANCE = 1e-5
# In low precision rounding routes tokens to other experts, and then a step or the rest of an answer is another one.
# Shares of the recorded tokens and patches that must be found within the tolerance.
MIN_SHARE_LOW_PRECISION = 0.5
# A picture follows its condition smoothly, whatever experts its tokens have: the tiny model had 0.08 on a CPU.
MAX_PICTURE_ERROR_LOW_PRECISION = 0.15


@dataclass(slots=True)
class Served:
    """What a client received for one case, and what the engines recorded for it."""

    tokens: list[int] = field(default_factory=list)
    samples: list[Floats] = field(default_factory=list)
    pictures: list[NDArray[np.uint8]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    done: Done | None = None
    error: MingcError | None = None
    num_events: int = 0

    def accept(self, event: Event | ImageEvent) -> None:
        self.num_events += 1
        match event:
            case TextDelta():
                if event.token is not None:
                    self.tokens.append(event.token)
            case AudioDelta():
                self.samples.append(event.samples)
            case ImageDone():
                self.pictures.append(event.pixels)
            case Done():
                self.done = event


@dataclass(slots=True)
class Share:
    """In low precision: the recorded steps, and how many a service reproduced within the tolerance."""

    near: int = 0
    total: int = 0

    def add(self, near: int, total: int) -> None:
        self.near += near
        self.total += total


class ServedComparison:
    """Rows of all requests, added to a log.

    Args:
        log: its references are the tensors of `goldens`.
        sample_rate: of the served speech.

    Attributes:
        text: in low precision, tokens whose past is the recorded one.
        speech: in low precision, patches before the first difference of each request.
    """

    def __init__(self, goldens: ServedGoldens, log: ComparisonLog, sample_rate: int) -> None:
        self._goldens = goldens
        self._log = log
        self._sample_rate = sample_rate
        self.text, self.speech = Share(), Share()

    def check_prompt(self, case: ServedCase, prepared: PreparedPrompt) -> None:
        """Compare the prompt that the service prepared with the recorded one."""
        for key in ("input_ids", "positions", "embed_kind"):
            recorded = self._goldens.get(case, key)
            self._log.ids(f"{case.name}.{key}", getattr(prepared.tokens, key), reference=recorded)
        self._log.ids(
            f"{case.name}.rope_delta", prepared.tokens.rope_delta, reference=np.array(case.rope_delta)
        )
        for index, image in enumerate(prepared.media.vision):
            self._compare_features(case, f"vision.{index}", image.pixels)
        for index, clip in enumerate(prepared.media.audio):
            self._compare_features(case, f"audio.{index}", clip.mel)

    def _compare_features(self, case: ServedCase, name: str, value: Floats) -> None:
        recorded = self._goldens.get(case, name)
        self._log.tensor(f"{case.name}.{name}", value, reference=recorded, tolerance=FEATURE_TOLERANCE)

    def compare(self, case: ServedCase, served: Served, how: str) -> None:
        """Compare text and speech of one request; `how` it was served is part of the rows' names."""
        with self._log.case(f"{case.name} ({how})"):
            if served.error is not None:
                raise served.error
            if case.drawing is not None:
                self._compare_picture(case, served, how)
            if case.is_chat:
                self._compare_text(case, served, how)
            if case.speech is not None:
                self._compare_speech(case, served, how)

    def _compare_text(self, case: ServedCase, served: Served, how: str) -> None:
        log, name = self._log, case.name
        tokens, columns = self._goldens.get(case, "tokens"), self._goldens.get(case, "columns")
        recorded = self._goldens.get(case, "logits")
        given = np.array(served.tokens, np.int64)
        # Without a row when the first token ends the answer.
        logits = np.array([each[columns] for each in served.recorder.logits]).reshape(-1, len(columns))
        log.rule(
            f"{name}.usage",
            served.done is not None
            and served.done.usage.completion_tokens == len(given)
            and served.done.usage.prompt_tokens == len(self._goldens.get(case, "input_ids")),
            f"{how}: the usage counts the prompt's and the answer's tokens",
        )
        if log.is_exact:
            log.ids(f"{name}.tokens", given, how=how)
            log.tensor(f"{name}.logits", logits, reference=recorded[: len(tokens)], how=how)
            finish = served.done.finish_reason if served.done is not None else "none"
            log.rule(f"{name}.finish", finish == case.finish, f"{how}: the answer ends by {case.finish}")
            return
        same = common_length(given, tokens)
        count = min(same + 1, len(logits), len(recorded))  # the first other token has the same past
        near = log.is_near(logits[:count], recorded[:count])
        # After another token that ranks as high, but for rounding, nothing more can be expected.
        is_rounded = 0 < count == same + 1 <= len(given) and near[-1]
        if is_rounded:  # and the answer is greedy
            is_rounded = logits[same][columns == given[same]].max(initial=-np.inf) >= logits[same].max()
        self.text.add(int(near.sum()), count if is_rounded else len(recorded))

    def _compare_speech(self, case: ServedCase, served: Served, how: str) -> None:
        log, name, recorded = self._log, case.name, served.recorder
        if case.messages and not log.is_exact:
            tokens = self._goldens.get(case, "tokens")
            if served.tokens != tokens.tolist():
                return  # other words are spoken
        count = int(self._goldens.get(case, "patches").sum())
        usage = None if served.done is None else served.done.usage
        if count == 0:
            log.rule(f"{name}.patches", not served.samples, f"{how}: nothing is spoken")
            return
        if log.is_exact:
            log.rule(
                f"{name}.patches",
                usage is not None
                and usage.audio_patches == len(served.samples) == len(recorded.latents) == count,
                f"{how}: {count} patches, {len(served.samples)} made; the usage counts them",
            )
        if not served.samples or not recorded.latents:
            log.rule(f"{name}.speech", False, f"{how}: no patch was made")
            return
        values = {
            "latents": np.stack(recorded.latents),
            "stop": np.array(recorded.stop_probabilities, np.float32),
            "samples": np.concatenate(served.samples),
        }
        if log.is_exact:
            for key, value in values.items():
                log.tensor(f"{name}.{key}", value, reference=self._goldens.get(case, key), how=how)
            self._compare_audio(case, values["samples"], LIMITS, how)
            return
        found, expected = values["latents"], self._goldens.get(case, "latents")
        length = min(len(expected), len(found))
        near = log.is_near(found[:length].reshape(length, -1), expected[:length].reshape(length, -1))
        self.speech.add(common_length(near, np.ones(length)), len(expected))
        if length == len(expected) == len(found) and near.all():
            self._compare_audio(case, values["samples"], LOW_PRECISION_LIMITS, how)

    def _compare_picture(self, case: ServedCase, served: Served, how: str) -> None:
        log, name = self._log, case.name
        pixels = self._goldens.get(case, "pixels").astype(np.int64)
        recorded = self._goldens.get(case, "latents").astype(np.float32)
        if not served.pictures or not served.recorder.image_latents:
            log.rule(f"{name}.picture", False, f"{how}: no picture was drawn")
            return
        latents, picture = served.recorder.image_latents[0], served.pictures[0]
        found = picture[::PIXEL_STRIDE, ::PIXEL_STRIDE].astype(np.int64)
        if log.is_exact:
            log.tensor(f"{name}.latents", latents, reference=recorded, how=how)
            worst = int(np.abs(found - pixels).max()) if found.shape == pixels.shape else 255
            log.rule(f"{name}.pixels", worst <= 1, f"{how}: at most 1 off, found {worst}")
            return
        error = float(np.linalg.norm(latents - recorded) / np.linalg.norm(recorded))
        log.rule(
            f"{name}.latents",
            error <= MAX_PICTURE_ERROR_LOW_PRECISION,
            f"{how}: relative error {error:.3f}, at most {MAX_PICTURE_ERROR_LOW_PRECISION}",
        )

    def _compare_audio(
        self, case: ServedCase, samples: Floats, limits: Mapping[Figure, float], how: str
    ) -> None:
        """Rate, length, loudness and timbre of all samples of a request."""
        differences = compare_audio(
            samples,
            self._goldens.get(case, "samples").astype(np.float32),
            found_hz=self._sample_rate,
            recorded_hz=self._goldens.sample_rate,
            limits=limits,
        )
        self._log.audio(f"{case.name}.speech", differences, how=how)

    def end(self) -> None:
        """In low precision: compare the share of reproduced steps over all requests."""
        for name, share in (
            ("tokens after the recorded ones", self.text),
            ("patches before the first difference of each request", self.speech),
        ):
            if share.total:
                self._log.share(
                    name,
                    same=share.near,
                    total=share.total,
                    minimum=MIN_SHARE_LOW_PRECISION,
                    note="rounding routes tokens to other experts, and makes other words and patches of them",
                )


def common_length(one: NDArray[np.generic], other: NDArray[np.generic]) -> int:
    """Count the equal values at the start of both."""
    count = min(len(one), len(other))
    is_other = one[:count] != other[:count]
    return int(np.argmax(is_other)) if is_other.any() else count
