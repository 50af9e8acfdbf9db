"""talker.safetensors and talker.json: prompts, voices, the speech LLM, single patches, and whole generation loops.

All speech runs through a server's talker (`SpeechRunner`), with recorded noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.engines import Engines, pad_rows
from conformance.reference_log import ReferenceLog
from conformance.speech_runner import STAGES, SpeechRunner
from conformance.vae import encode_wave
from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.errors import ArtifactError
from mingc.media.dsp.fbank import kaldi_fbank
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.request import SpeechParams
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.voices import VoicePack
from mingc.verify.engine_run import to_numpy
from mingc.verify.recorded_noise import RecordedNoise

FBANK_TOLERANCE = 1e-4
_FBANK_HZ = 16000  # sample rate of the speaker network

Floats = NDArray[np.float32]


def replay_speech(engines: Engines, log: ReferenceLog, arguments: Mapping[str, Any]) -> None:
    """Replay voices, prompts, patches and loops; `arguments` is talker.json, which prompt ids require."""
    with log.case("voice.*"):
        _replay_voices(engines, log)
    if not engines.has(*STAGES):
        log.skip("prompts, patches and loops", f"speech needs the stages {', '.join(STAGES)}")
        return
    speech = SpeechRunner(engines)
    for case in log.cases("input_ids"):
        with log.case(case):
            _replay_prompt(case, engines, speech, log, arguments)
    for case in log.cases("y0"):
        with log.case(case):
            if case.startswith("cfm."):
                _replay_patch(case.removeprefix("cfm."), engines, speech, log)
            elif case.startswith("loop."):
                _replay_loop(case, engines, speech, log)


def _run_rows(engines: Engines, name: str, values: Floats) -> Floats:
    """Outputs (N, D) of a graph of `cfm` that takes rows (N, …)."""
    graph = engines.stage("cfm")[name]
    source = graph.spec.inputs[0].name
    most = max(graph.spec.dim("N").buckets, default=graph.spec.dim("N").maximum)
    results = []
    for start in range(0, len(values), most):
        part = values[start : start + most]
        rows = engines.padded_size(graph, "N", len(part))
        outputs = graph.run(**{source: engines.put(pad_rows(part, rows), graph, source)})
        results.append(to_numpy(outputs[graph.spec.outputs[0].name])[: len(part)])
    return np.concatenate(results).astype(np.float32)


def _replay_voices(engines: Engines, log: ReferenceLog) -> None:
    for case in log.cases("spk_emb_raw"):
        wave_name = f"{case}.spk_wav16k"
        if wave_name in log:
            fbank = kaldi_fbank(log.input(wave_name)[0].astype(np.float32), sample_rate=_FBANK_HZ)
            log.tensor(f"{case}.fbank", fbank, tolerance=FBANK_TOLERANCE)
            _replay_speaker_network(case, fbank, engines, log)
        raw = log.input(f"{case}.spk_emb_raw").astype(np.float32)
        log.tensor(f"{case}.spk_emb", _run_rows(engines, "speaker", raw))
        latents_name = f"{case}.prompt_wav_lat"
        if engines.has("audio_vae") and f"{case}.vae_input" in log:
            noise = log.input(f"{case}.vae_noise")[0].T.astype(np.float32)
            wave = log.input(f"{case}.vae_input")[0].astype(np.float32)
            log.tensor(latents_name, encode_wave(engines, wave, noise)["latents"][None])
        latents = log.references[latents_name][0].astype(np.float32)
        patch = engines.parameters_of("cfm", CfmParameters)
        patches = latents.reshape(-1, patch.latents_per_patch, patch.latent_dim)
        log.tensor(f"{case}.prompt_wav_emb", _run_rows(engines, "aggregate", patches)[None])


def _replay_speaker_network(case: str, fbank: Floats, engines: Engines, log: ReferenceLog) -> None:
    """Run the speaker network, an ONNX file of the checkpoint; skip it without onnxruntime."""
    name, file = f"{case}.spk_emb_raw", engines.artifact.manifest.speaker_network
    if file is None:
        return
    try:
        import onnxruntime
    except ImportError:
        log.skip(name, "onnxruntime is not installed")
        return
    features = (fbank - fbank.mean(axis=0, keepdims=True))[None]
    try:
        session = onnxruntime.InferenceSession(
            str(engines.artifact.path(file)), providers=["CPUExecutionProvider"]
        )
        (made,) = session.run(None, {session.get_inputs()[0].name: features})
    except Exception as error:  # its errors have no other class in common
        raise ArtifactError(
            f"the speaker network does not run: {str(error)[:200]}", where=file, fix="export again"
        ) from error
    log.tensor(name, made, tolerance=FBANK_TOLERANCE)


def _replay_prompt(
    case: str, engines: Engines, speech: SpeechRunner, log: ReferenceLog, arguments: Mapping[str, Any]
) -> None:
    """Ids of the assembled prompt; hidden states of recorded embeddings, and of token ids where recorded."""
    name = case.removeprefix("prompt.")
    ids = log.references[f"{case}.input_ids"][0].astype(np.int64)
    embeds = log.input(f"{case}.inputs_embeds")[0].astype(np.float32)
    tokenizer = engines.tokenizer("talker")
    if tokenizer is not None and name in arguments:
        given = arguments[name]
        speakers, patches = given.get("spk_emb"), 0
        if given.get("prompt_text"):
            patches = given["decoded"].count("<audioPatch>")
        prompt = SpeechPromptBuilder(tokenizer).build(
            given["text"],
            num_speakers=int(speakers.strip("list[]")) if speakers else 0,
            transcript=given.get("prompt_text"),
            num_prompt_patches=patches,
            instruction=given.get("instruction"),
            task=given["prompt"],
        )
        log.ids(f"{case}.input_ids", prompt.token_ids[None])
        replaced = np.concatenate([prompt.speaker_rows, prompt.patch_rows])
        if (prompt.token_ids.tolist()) == ids.tolist():
            # Token embeddings are internal to the engine; the hidden state shows whether they are right.
            mixed = speech.prompt(speech.segment(ids, embeds=embeds[replaced], embed_rows=replaced))
            whole = speech.prompt(speech.segment(ids, embeds=embeds))
            log.tensor(f"{case}.inputs_embeds", mixed, reference=whole, how="by the hidden state")
    if f"llm.{name}.last_hidden_state" in log:
        ends = range(1, len(ids) + 1)
        hidden = [speech.prompt(speech.segment(ids[:end], embeds=embeds[:end])) for end in ends]
        log.tensor(f"llm.{name}.last_hidden_state", np.concatenate(hidden)[None])
        half = len(ids) // 2
        stepped = speech.steps(speech.segment(ids[:half], embeds=embeds[:half]), embeds[half:])
        reference = log.references[f"llm.{name}.last_hidden_state"][0, half:]
        log.tensor(
            f"llm.{name}.last_hidden_state", stepped, reference=reference, how="second half step by step"
        )


def _replay_patch(name: str, engines: Engines, speech: SpeechRunner, log: ReferenceLog) -> None:
    case = f"cfm.{name}"
    history = log.input(f"{case}.lat_cond") if f"{case}.lat_cond" in log else None
    hidden = log.input(f"{case}.llm_cond") if f"{case}.llm_cond" in log else None
    flow = engines.parameters_of("cfm", CfmParameters)
    if hidden is None:  # the first patch of a plain loop is recorded with the loop
        log.skip(f"{case}.out", "its condition is not recorded; checked by the loops")
        return
    if history is None:
        history = np.zeros((1, flow.history_latents, flow.latent_dim), np.float32)
    segment = speech.segment(
        np.zeros(1, np.int64),
        noise=RecordedNoise(
            [1], log.input(f"{case}.y0").astype(np.float32), _step_noise(log, f"{case}.sde_rnd")
        ),
        history=history[0].astype(np.float32),
        arguments=_arguments(log, case, engines),
    )
    recorder, embeds = speech.sample(hidden[:, 0].astype(np.float32), segment)
    log.tensor(f"{case}.out", recorder.latents[0][None])
    log.tensor(f"agg.{name}.out", embeds[:, None])
    if f"stop.{name}.softmax" in log:
        reference = log.references[f"stop.{name}.softmax"][:, 1]
        log.tensor(f"stop.{name}.softmax", recorder.stop_probabilities, reference=reference, how="stop")


def _replay_loop(case: str, engines: Engines, speech: SpeechRunner, log: ReferenceLog) -> None:
    """Run the generation loop with recorded noise, for all recorded patches."""
    parameters = engines.parameters_of("talker", TalkerParameters)
    embeds = log.input(f"{case}.inputs_embeds")[0].astype(np.float32)
    noise = log.input(f"{case}.y0")[:, 0].astype(np.float32)
    step_noise = (
        log.input(f"{case}.sde_rnd")[:, :, 0].astype(np.float32) if f"{case}.sde_rnd" in log else None
    )
    if f"{case}.prompt_wav_lat" in log:
        _replay_history(case, engines, log)
    spoken = speech.speak(
        speech.segment(
            np.zeros(len(embeds), np.int64),
            embeds=embeds,
            noise=RecordedNoise([len(noise)], noise, step_noise),
            history=log.input(f"{case}.first_history")[0].astype(np.float32),
            arguments=_arguments(log, case, engines),
            max_patches=len(noise),
        )
    )
    count = len(spoken.patches)  # fewer than recorded if the stop rule ends the loop too early
    latents = np.stack(spoken.recorder.latents)
    stop = np.array(spoken.recorder.stop_probabilities, np.float32)
    ended = np.zeros(len(noise), bool)
    ended[:count] = [patch.is_segment_end and not patch.is_capped for patch in spoken.patches]
    for name, value, reference in (
        ("last_hidden", spoken.hidden[None], _first(log, f"{case}.last_hidden", count, axis=1)),
        ("gen_lat", latents[:, None], _first(log, f"{case}.gen_lat", count)),
        (
            "latents",
            np.concatenate(latents)[None],
            _first(log, f"{case}.latents", count * latents.shape[1], axis=1),
        ),
        ("next_embeds", spoken.embeds[None], _first(log, f"{case}.next_embeds", count, axis=1)),
    ):
        log.tensor(f"{case}.{name}", value, reference=reference)
    if count == len(noise):
        log.tensor(f"{case}.last_history", spoken.history[-1:])
    if f"{case}.stop_prob" in log:
        reference = log.references[f"{case}.stop_prob"][:count, 1]
        log.tensor(f"{case}.stop_prob", stop, reference=reference, how="stop")
    # In low precision a probability near the threshold may fall on either side.
    is_near = log.is_near(stop[:, None], np.full((len(stop), 1), parameters.stop_threshold)).any()
    waiver = "a stop probability is near the threshold" if is_near and not log.is_exact else ""
    log.ids(f"{case}.ended", ended, how="stop step", waiver=waiver)


def _first(log: ReferenceLog, name: str, count: int, axis: int = 0) -> NDArray[np.generic] | None:
    """Take the first `count` rows of a reference along `axis`; None without the reference."""
    if name not in log:
        return None
    return log.references[name].take(range(count), axis=axis)


def _replay_history(case: str, engines: Engines, log: ReferenceLog) -> None:
    """Compare the latents of a voice before the first patch; a server's planner makes them."""
    parameters = engines.find_parameters("talker", TalkerParameters)
    flow = engines.find_parameters("cfm", CfmParameters)
    vae = engines.find_parameters("audio_vae", VaeParameters)
    tokenizer = engines.tokenizer("talker")
    if parameters is None or flow is None or vae is None or tokenizer is None:
        return
    latents = log.input(f"{case}.prompt_wav_lat")[0].astype(np.float32)
    voice = VoicePack(
        name="golden",
        transcript="x",
        latents=latents,
        embeds=np.zeros((len(latents) // flow.latents_per_patch, parameters.hidden_size), np.float32),
        speaker=np.zeros(parameters.hidden_size, np.float32),
    )
    planner = SpeechPlanner(
        SpeechPromptBuilder(tokenizer), {"golden": voice}, parameters=parameters, flow=flow, vae=vae
    )
    segment = planner.segment("x", 0, SpeechParams(voice="golden"), PhiloxNoise(0))
    log.tensor(f"{case}.first_history", segment.history[None], tolerance=0.0)


def _arguments(log: ReferenceLog, case: str, engines: Engines) -> tuple[float, float, float]:
    """Guidance, sigma and temperature: recorded values, or the model's defaults."""
    if f"{case}.sde_args" in log:
        guidance, sigma, temperature = log.input(f"{case}.sde_args").tolist()
        return guidance, sigma, temperature
    flow = engines.parameters_of("cfm", CfmParameters)
    return flow.guidance, flow.sigma, flow.temperature


def _step_noise(log: ReferenceLog, name: str) -> Floats | None:
    """Transpose recorded noise (steps, 1, p, 64) to (1, steps, p, 64)."""
    if name not in log:
        return None
    return log.input(name).swapaxes(0, 1).astype(np.float32)
