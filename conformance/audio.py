"""audio.safetensors: log-mel features of recorded waves, and embeddings of recorded log-mel features."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from mingc.artifacts.parameters import AudioParameters
from mingc.media.audio import Wave, wave_features
from mingc.media.dsp.resample import resample
from mingc.prompts.features import AudioFeatures
from mingc.runtime.encoders.encoder import AudioEncoder
from mingc.verify.engine_run import to_numpy

MEL_TOLERANCE = 1e-5
_BATCHED = "in the reference a shorter clip attends to the padding of its batch; mingc masks the padding"
_RATE = re.compile(r"^(?P<case>.+)\.wav_int16_stereo_(?P<khz>\d+)k$")


def replay_clips(engines: Engines, log: ReferenceLog, _: Mapping[str, Any]) -> None:
    """Compare log-mel of waves, embeddings of log-mel, and several clips in one call."""
    parameters = engines.parameters_of("audio_encoder", AudioParameters)
    encoder = AudioEncoder(engines.stage("audio_encoder"), parameters, engines.device)
    _replay_resampling(log, parameters)
    alone: dict[str, NDArray[np.float32]] = {}  # embeddings of single clips, by the bytes of their wave
    for case in log.cases("audio_embeds"):
        with log.case(f"{case}.audio_embeds"):
            _replay_case(case, log, parameters, encoder, alone)


def _replay_case(
    case: str,
    log: ReferenceLog,
    parameters: AudioParameters,
    encoder: AudioEncoder,
    alone: dict[str, NDArray[np.float32]],
) -> None:
    waves = _waves(case, log)
    features = [_features(wave, parameters.sample_rate, parameters) for wave in waves]
    mel = np.concatenate([feature.mel for feature in features])
    frames = [len(feature.mel) for feature in features]
    log.tensor(f"{case}.audio_feats", mel[None], tolerance=MEL_TOLERANCE)
    log.ids(f"{case}.audio_feats_lengths", [frames])
    for part, rows in (("first40", mel[:40]), ("last40", mel[-40:])):
        log.tensor(f"{case}.audio_feats_{part}", rows, tolerance=MEL_TOLERANCE)
    log.tensor(f"{case}.audio_feats_row_mean", mel.mean(axis=1), tolerance=MEL_TOLERANCE)

    tokens = [feature.num_tokens for feature in features]
    for name in ("audio_embeds_lengths", "encoder_feats_lengths"):
        log.ids(f"{case}.{name}", [tokens])
    recorded = f"{case}.audio_feats"
    if recorded in log:  # check the encoder alone, on the recorded log-mel
        clips = np.split(log.input(recorded)[0].astype(np.float32), np.cumsum(frames)[:-1])
        features = [
            AudioFeatures(mel=clip, num_tokens=count) for clip, count in zip(clips, tokens, strict=True)
        ]
    embeddings = [to_numpy(each).astype(np.float32) for each in encoder.encode(features)]
    if len(features) == 1:
        log.tensor(f"{case}.audio_embeds", embeddings[0][None])
        alone[waves[0].tobytes().hex()] = np.asarray(log.references[f"{case}.audio_embeds"][0], np.float32)
        return
    reference = np.split(log.references[f"{case}.audio_embeds"][0], np.cumsum(tokens)[:-1])
    for index, clip in enumerate(embeddings):
        if frames[index] == max(frames):
            log.tensor(f"{case}.audio_embeds", clip, reference=reference[index], how=f"clip {index}")
            continue
        single = alone.get(waves[index].tobytes().hex())
        if single is not None:
            log.tensor(f"{case}.audio_embeds", clip, reference=single, how=f"clip {index}, encoded alone")
        else:
            log.tensor(
                f"{case}.audio_embeds",
                clip,
                reference=to_numpy(encoder.encode([features[index]])[0]),
                how=f"clip {index}, encoded alone",
            )
    log.expect_difference(f"{case}.audio_embeds", np.concatenate(embeddings)[None], _BATCHED)


def _features(wave: NDArray[np.float32], rate: int, parameters: AudioParameters) -> AudioFeatures:
    return wave_features(Wave(samples=wave, sample_rate=rate), parameters, "golden")


def _waves(case: str, log: ReferenceLog) -> list[NDArray[np.float32]]:
    """Read the clips of a case; one may be a recorded second that repeats with rising gain."""
    if f"{case}.base_1s" in log:
        base = log.input(f"{case}.base_1s").astype(np.float32)
        count = int(np.ravel(log.input(f"{case}.tiles"))[0])
        return [np.concatenate([base * np.float32((tile + 1) / count) for tile in range(count)])]
    waves: list[NDArray[np.float32]] = []
    while (name := f"{case}.wav{len(waves)}") in log:
        waves.append(log.input(name)[0].astype(np.float32))
    return waves


def _replay_resampling(log: ReferenceLog, parameters: AudioParameters) -> None:
    for name in list(log.references):
        match = _RATE.match(name)
        if match is None:
            continue
        case, rate = match["case"], int(match["khz"]) * 1000
        first = log.input(name)[0].astype(np.float32) / np.float32(32768)
        resampled = resample(first, rate, parameters.sample_rate)
        log.tensor(f"{case}.wav_{parameters.sample_rate // 1000}k", resampled, tolerance=MEL_TOLERANCE)
        mel = _features(first, rate, parameters).mel
        log.tensor(f"{case}.audio_feats", mel[None], tolerance=MEL_TOLERANCE)
