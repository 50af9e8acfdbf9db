"""vae.safetensors: offline and streamed decoding, and encoding.

The references contain two variants of the network, with and without its sliding window; the config requests the window.
References of the silence holder (`sil.*`) are skipped: a server sends every sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.engines import Engines, pad_rows
from conformance.reference_log import ReferenceLog
from conformance.speech_runner import STAGES, SpeechRunner
from mingc.artifacts.parameters import VaeParameters
from mingc.media.dsp.audio_comparison import compare_audio
from mingc.verify.engine_run import to_numpy

_NO_WINDOW = "recorded with the sliding window turned off, contrary to the checkpoint's config"

Floats = NDArray[np.float32]


def encode_wave(engines: Engines, wave: Floats, noise: Floats) -> dict[str, Floats]:
    """Encode a wave (n,) with noise (T, 64) into `latents`, `mean` and `std` (T, 64)."""
    graph = engines.stage("audio_vae")["encode"]
    rows = engines.padded_size(graph, "T", len(noise))
    padded = np.zeros((rows, _samples_encoded(engines)), np.float32)
    padded.reshape(-1)[: len(wave)] = wave
    outputs = graph.run(
        waveform=engines.put(padded, graph, "waveform"),
        num_frames=engines.put(np.array([num_frames(engines, wave)]), graph, "num_frames"),
        noise=engines.put(pad_rows(noise, rows), graph, "noise"),
    )
    return {name: to_numpy(value)[: len(noise)].astype(np.float32) for name, value in outputs.items()}


def num_frames(engines: Engines, wave: Floats) -> int:
    """Count the frames of a wave (n,), with a partial last frame."""
    return -(-len(wave) // (_samples_encoded(engines) // _frames_per_latent(engines)))


def _samples_encoded(engines: Engines) -> int:
    """Samples per latent of the encoder; its frames may differ in length from the decoder's."""
    spec = engines.stage("audio_vae")["encode"].spec.input("waveform")
    return int(spec.shape[1])


def _frames_per_latent(engines: Engines) -> int:
    parameters = engines.parameters_of("audio_vae", VaeParameters)
    return parameters.frames_per_latent


def latents_per_patch(engines: Engines) -> int:
    """Latents per call of `stream`."""
    spec = engines.stage("audio_vae")["stream"].spec.input("latents")
    return int(spec.shape[1])


def replay_waveforms(engines: Engines, log: ReferenceLog, _: Mapping[str, Any]) -> None:
    """Replay decoding and encoding."""
    with log.case("dec.*"):
        _replay_decode(engines, log)
    for case in log.cases("noise"):
        with log.case(case):
            _replay_encode(case, engines, log)


def _replay_decode(engines: Engines, log: ReferenceLog) -> None:
    if "dec.latent" not in log:
        return
    latents = log.input("dec.latent")[0].astype(np.float32)
    graph = engines.stage("audio_vae")["decode"]
    offline = None
    if engines.is_dynamic("audio_vae", "decode") or len(latents) in graph.spec.dim("L").buckets:
        outputs = graph.run(latents=engines.put(latents[None], graph, "latents"))
        offline = to_numpy(outputs["waveform"]).reshape(1, 1, -1)
        log.tensor("dec.sliding.wav", offline)
        log.expect_difference("dec.full.wav", offline, _NO_WINDOW)
    else:
        log.skip("dec.sliding.wav", f"no engine decodes {len(latents)} latents at once")
    if len(latents) % latents_per_patch(engines):
        log.skip("dec.stream", f"{len(latents)} latents are not a whole number of patches")
        return
    if not engines.has(*STAGES):
        log.skip("dec.stream", f"speech needs the stages {', '.join(STAGES)}")
        return
    # The talker streams the patches of a segment like this.
    streamed = SpeechRunner(engines).decode(latents.reshape(-1, latents_per_patch(engines), latents.shape[1]))
    log.tensor("dec.sliding.wav", streamed[None, None], how="streamed in patches")
    if "dec.sliding.wav" in log and log.is_exact:
        hz = engines.parameters_of("audio_vae", VaeParameters).sample_rate  # the file records none
        recorded = log.references["dec.sliding.wav"].astype(np.float32).ravel()
        differences = compare_audio(streamed, recorded, found_hz=hz, recorded_hz=hz)
        log.audio("dec.sliding.wav", differences, how="streamed in patches")
    if offline is not None:
        log.tensor("dec.stream = dec.offline", streamed[None, None], reference=offline)
    streams = {name.split(".")[1] for name in log.references if name.startswith("dec.stream")}
    for name in sorted(streams):
        _compare_chunks(name, streamed, log)


def _compare_chunks(name: str, streamed: Floats, log: ReferenceLog) -> None:
    """Compare the stream with the reference's chunks, whose boundaries depend on the reference's latency."""
    start = 0
    for chunk in sorted(_chunks(name, log)):
        reference = f"dec.{name}.chunk{chunk}.wav"
        end = start + log.references[reference].shape[-1]
        part = streamed[None, None, start:end]
        if "sliding" in name:
            log.tensor(reference, part)
        elif part.size:
            log.expect_difference(reference, part, _NO_WINDOW)
        start = end
    if start:
        log.ids(f"dec.{name} samples", [len(streamed)], reference=[start])


def _chunks(name: str, log: ReferenceLog) -> list[int]:
    prefix, suffix = f"dec.{name}.chunk", ".wav"
    return [
        int(each[len(prefix) : -len(suffix)])
        for each in log.references
        if each.startswith(prefix) and each.endswith(suffix)
    ]


def _replay_encode(case: str, engines: Engines, log: ReferenceLog) -> None:
    noise = log.input(f"{case}.noise")[0].astype(np.float32)
    family = case.rsplit("_", 1)[-1]
    names = [each for each in log.cases("wav") if each.startswith("enc.") and each.endswith(family)]
    if not names:
        log.skip(f"{case}.latent", "the file has no wave for it")
        return
    wave = log.input(f"{case}.wav" if case in names else f"{names[0]}.wav")[0].astype(np.float32)
    made = encode_wave(engines, wave, noise)
    if ".full" in case:
        log.expect_difference(f"{case}.latent", made["latents"][None], _NO_WINDOW)
        log.expect_difference(f"{case}.std", made["std"][None], _NO_WINDOW)
        return
    log.tensor(f"{case}.latent", made["latents"][None])
    log.tensor(f"{case}.std", made["std"][None])
    if f"{case}.params" in log:
        mean = log.references[f"{case}.params"][:, :, : made["mean"].shape[1]]
        log.tensor(f"{case}.params", made["mean"][None], reference=mean, how="mean")
    if f"{case}.frame_num" in log:
        log.ids(f"{case}.frame_num", [-(-num_frames(engines, wave) // _frames_per_latent(engines))])
