"""audio.safetensors: log-mel of recorded waves, and embeddings of recorded log-mel."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import AudioParameters
from mingc.dsp.resample import resample
from mingc.runtime.preprocess.audio import AudioFeatures, Wave, wave_features
from mingc.runtime.service.encoders import AudioEncoder
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.stages import Engines, to_numpy

MEL_TOLERANCE = 1e-5
_BATCHED = "the reference lets a shorter clip see the padding of its batch; here it is encoded as if alone"
_RATE = re.compile(r"^(?P<case>.+)\.wav_int16_stereo_(?P<khz>\d+)k$")


def replay(engines: Engines, ledger: ComparisonLog) -> None:
    """Waves to log-mel, log-mel to embeddings, several clips in one call."""
    parameters = engines.parameters.audio_encoder
    assert parameters is not None
    encoder = AudioEncoder(engines.stage("audio_encoder"), parameters, engines.device)
    _replay_resampling(ledger, parameters)
    alone: dict[str, NDArray[np.float32]] = {}  # embeddings of single clips by their wave's bytes
    for case in ledger.cases("audio_embeds"):
        with ledger.case(f"{case}.audio_embeds"):
            _replay_case(case, ledger, parameters, encoder, alone)


def _replay_case(
    case: str,
    ledger: ComparisonLog,
    parameters: AudioParameters,
    encoder: AudioEncoder,
    alone: dict[str, NDArray[np.float32]],
) -> None:
    waves = _waves(case, ledger)
    features = [_features(wave, parameters.sample_rate, parameters) for wave in waves]
    mel = np.concatenate([feature.mel for feature in features])
    frames = [len(feature.mel) for feature in features]
    ledger.tensor(f"{case}.audio_feats", mel[None], tolerance=MEL_TOLERANCE)
    ledger.ids(f"{case}.audio_feats_lengths", [frames])
    for part, rows in (("first40", mel[:40]), ("last40", mel[-40:])):
        ledger.tensor(f"{case}.audio_feats_{part}", rows, tolerance=MEL_TOLERANCE)
    ledger.tensor(f"{case}.audio_feats_row_mean", mel.mean(axis=1), tolerance=MEL_TOLERANCE)

    tokens = [feature.num_tokens for feature in features]
    for name in ("audio_embeds_lengths", "encoder_feats_lengths"):
        ledger.ids(f"{case}.{name}", [tokens])
    recorded = f"{case}.audio_feats"
    if recorded in ledger:  # the encoder on its own: from the recorded log-mel, not from ours
        clips = np.split(ledger.input(recorded)[0].astype(np.float32), np.cumsum(frames)[:-1])
        features = [
            AudioFeatures(mel=clip, num_tokens=count) for clip, count in zip(clips, tokens, strict=True)
        ]
    embeddings = [to_numpy(each).astype(np.float32) for each in encoder.encode(features)]
    if len(features) == 1:
        ledger.tensor(f"{case}.audio_embeds", embeddings[0][None])
        alone[waves[0].tobytes().hex()] = np.asarray(ledger.references[f"{case}.audio_embeds"][0], np.float32)
        return
    reference = np.split(ledger.references[f"{case}.audio_embeds"][0], np.cumsum(tokens)[:-1])
    for index, clip in enumerate(embeddings):
        if frames[index] == max(frames):
            ledger.tensor(f"{case}.audio_embeds", clip, reference=reference[index], how=f"clip {index}")
            continue
        own = alone.get(waves[index].tobytes().hex())
        if own is not None:
            ledger.tensor(f"{case}.audio_embeds", clip, reference=own, how=f"clip {index} as if alone")
        else:
            ledger.tensor(
                f"{case}.audio_embeds",
                clip,
                reference=to_numpy(encoder.encode([features[index]])[0]),
                how=f"clip {index} as if alone",
            )
    ledger.differs(f"{case}.audio_embeds", np.concatenate(embeddings)[None], _BATCHED)


def _features(wave: NDArray[np.float32], rate: int, parameters: AudioParameters) -> AudioFeatures:
    return wave_features(Wave(samples=wave, sample_rate=rate), parameters, "golden")


def _waves(case: str, ledger: ComparisonLog) -> list[NDArray[np.float32]]:
    """The clips of a case: recorded, or one second tiled with rising loudness."""
    if f"{case}.base_1s" in ledger:
        base = ledger.input(f"{case}.base_1s").astype(np.float32)
        count = int(np.ravel(ledger.input(f"{case}.tiles"))[0])
        return [np.concatenate([base * np.float32((tile + 1) / count) for tile in range(count)])]
    waves: list[NDArray[np.float32]] = []
    while (name := f"{case}.wav{len(waves)}") in ledger:
        waves.append(ledger.input(name)[0].astype(np.float32))
    return waves


def _replay_resampling(ledger: ComparisonLog, parameters: AudioParameters) -> None:
    for name in list(ledger.references):
        match = _RATE.match(name)
        if match is None:
            continue
        case, rate = match["case"], int(match["khz"]) * 1000
        first = ledger.input(name)[0].astype(np.float32) / np.float32(32768)
        resampled = resample(first, rate, parameters.sample_rate)
        ledger.tensor(f"{case}.wav_{parameters.sample_rate // 1000}k", resampled, tolerance=MEL_TOLERANCE)
        mel = _features(first, rate, parameters).mel
        ledger.tensor(f"{case}.audio_feats", mel[None], tolerance=MEL_TOLERANCE)
