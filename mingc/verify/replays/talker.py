"""talker.safetensors and talker.json: prompts, voices, the speech LLM, single patches, and whole generation loops.

Noise is recorded, so the replay runs the graphs directly; the server's worker would sample its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.dsp.fbank import kaldi_fbank
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.preprocess.speech_prompt import SpeechPromptBuilder
from mingc.runtime.request import SpeechParams
from mingc.runtime.talker.planner import SpeechPlanner, VoicePack
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.engines import Engines, pad_rows, to_numpy
from mingc.verify.replays.vae import encode_wave

FBANK_TOLERANCE = 1e-4
_FBANK_HZ = 16000  # sample rate of the speaker network
_SLOT = 1

Floats = NDArray[np.float32]


class SpeechGraphs:
    """Graphs of one spoken request: speech LLM in one slot, sampler, aggregator and speaker head."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        talker = engines.stateful_stage("talker")
        self._prefill, self._step = talker["prefill"], talker["step"]
        self._state = talker.allocate_state({"S": 2}, engines.device)
        self._cfm = engines.stage("cfm")

    def prefill(self, ids: NDArray[np.int64], embeds: Floats, use_embed: NDArray[np.bool_]) -> Floats:
        """Hidden states (T, D) of every prompt token, in chunks of the largest size of the engine."""
        longest = self._prefill.spec.dim("T")
        chunk = max(longest.buckets) if longest.buckets else longest.maximum
        hidden = []
        for start in range(0, len(ids), chunk):
            count = min(chunk, len(ids) - start)
            for last in range(count):
                hidden.append(self._run_prefill(ids, embeds, use_embed, start, count, last))
        return np.concatenate(hidden)

    def prompt(self, ids: NDArray[np.int64], embeds: Floats, use_embed: NDArray[np.bool_]) -> Floats:
        """Hidden state (1, D) of the last prompt token; leaves the prompt in the slot."""
        longest = self._prefill.spec.dim("T")
        chunk = max(longest.buckets) if longest.buckets else longest.maximum
        hidden = np.zeros((0, 0), np.float32)
        for start in range(0, len(ids), chunk):
            count = min(chunk, len(ids) - start)
            hidden = self._run_prefill(ids, embeds, use_embed, start, count, count - 1)
        return hidden

    def step(self, embeds: Floats, length: int) -> Floats:
        """Hidden state (1, D) after one more token; the slot holds `length` tokens before."""
        rows = self._engines.padded_size(self._step, "B", 1)
        slots, lengths = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        slots[0], lengths[0] = _SLOT, length
        outputs = self._step.run(
            embeds=self._engines.put(pad_rows(embeds, rows), self._step, "embeds"),
            slots=self._engines.put(slots, self._step, "slots"),
            lengths=self._engines.put(lengths, self._step, "lengths"),
            **self._state,
        )
        return to_numpy(outputs["hidden"])[:1].astype(np.float32)

    def sample(
        self, hidden: Floats, history: Floats, noise: Floats, step_noise: Floats | None, arguments: Floats
    ) -> dict[str, Floats]:
        """Outputs of `cfm.sample` for one patch, batch 1. `arguments`: guidance, sigma, temperature."""
        graph = self._cfm["sample"]
        rows = self._engines.padded_size(graph, "B", 1)
        spec = next(each for each in graph.spec.inputs if each.name == "step_noise")
        if step_noise is None:
            step_noise = np.zeros((1, *(size for size in spec.shape if isinstance(size, int))), np.float32)
        values = {"hidden": hidden, "history": history, "noise": noise, "step_noise": step_noise}
        for index, name in enumerate(("guidance", "sigma", "temperature")):
            values[name] = arguments[index : index + 1].astype(np.float32)
        inputs = {
            name: self._engines.put(pad_rows(value, rows), graph, name) for name, value in values.items()
        }
        return {name: to_numpy(value)[:1].astype(np.float32) for name, value in graph.run(**inputs).items()}

    def aggregate(self, latents: Floats) -> Floats:
        """Embeddings (N, D) of patches (N, p, 64)."""
        return self._rows("aggregate", latents)

    def speaker(self, vectors: Floats) -> Floats:
        """Embeddings (N, D) of speaker network outputs (N, 192)."""
        return self._rows("speaker", vectors)

    def _rows(self, name: str, values: Floats) -> Floats:
        graph = self._cfm[name]
        source = graph.spec.inputs[0].name
        most = max(graph.spec.dim("N").buckets, default=graph.spec.dim("N").maximum)
        results = []
        for start in range(0, len(values), most):
            part = values[start : start + most]
            rows = self._engines.padded_size(graph, "N", len(part))
            outputs = graph.run(**{source: self._engines.put(pad_rows(part, rows), graph, source)})
            results.append(to_numpy(outputs[graph.spec.outputs[0].name])[: len(part)])
        return np.concatenate(results).astype(np.float32)

    def _run_prefill(
        self,
        ids: NDArray[np.int64],
        embeds: Floats,
        use_embed: NDArray[np.bool_],
        start: int,
        count: int,
        last: int,
    ) -> Floats:
        graph, part = self._prefill, slice(start, start + count)
        rows = self._engines.padded_size(graph, "T", count)
        put = self._engines.put
        outputs = graph.run(
            input_ids=put(pad_rows(ids[part], rows), graph, "input_ids"),
            embeds=put(pad_rows(embeds[part], rows), graph, "embeds"),
            use_embed=put(pad_rows(use_embed[part], rows), graph, "use_embed"),
            slot=put(np.array([_SLOT]), graph, "slot"),
            start=put(np.array([start]), graph, "start"),
            last=put(np.array([last]), graph, "last"),
            **self._state,
        )
        return to_numpy(outputs["hidden"]).astype(np.float32)


def replay(engines: Engines, log: ComparisonLog, arguments: Mapping[str, Any]) -> None:
    """Replay voices, prompts, patches and loops; `arguments` is talker.json, which prompt ids require."""
    graphs = SpeechGraphs(engines)
    with log.case("voice.*"):
        _replay_voices(engines, graphs, log)
    for case in log.cases("input_ids"):
        with log.case(case):
            _replay_prompt(case, engines, graphs, log, arguments)
    for case in log.cases("y0"):
        with log.case(case):
            if case.startswith("cfm."):
                _replay_patch(case.removeprefix("cfm."), engines, graphs, log)
            elif case.startswith("loop."):
                _replay_loop(case, engines, graphs, log)


def _replay_voices(engines: Engines, graphs: SpeechGraphs, log: ComparisonLog) -> None:
    for case in log.cases("spk_emb_raw"):
        wave_name = f"{case}.spk_wav16k"
        if wave_name in log:
            fbank = kaldi_fbank(log.input(wave_name)[0].astype(np.float32), sample_rate=_FBANK_HZ)
            log.tensor(f"{case}.fbank", fbank, tolerance=FBANK_TOLERANCE)
            _replay_speaker_network(case, fbank, engines, log)
        raw = log.input(f"{case}.spk_emb_raw").astype(np.float32)
        log.tensor(f"{case}.spk_emb", graphs.speaker(raw))
        latents_name = f"{case}.prompt_wav_lat"
        if engines.has("audio_vae") and f"{case}.vae_input" in log:
            noise = log.input(f"{case}.vae_noise")[0].T.astype(np.float32)
            wave = log.input(f"{case}.vae_input")[0].astype(np.float32)
            log.tensor(latents_name, encode_wave(engines, wave, noise)["latents"][None])
        latents = log.references[latents_name][0].astype(np.float32)
        patch = engines.parameters_of("cfm", CfmParameters)
        patches = latents.reshape(-1, patch.latents_per_patch, patch.latent_dim)
        log.tensor(f"{case}.prompt_wav_emb", graphs.aggregate(patches)[None])


def _replay_speaker_network(case: str, fbank: Floats, engines: Engines, log: ComparisonLog) -> None:
    """The speaker network, an ONNX file of the checkpoint; skipped without onnxruntime."""
    name, file = f"{case}.spk_emb_raw", engines.artifact.manifest.speaker_network
    if file is None:
        return
    try:
        import onnxruntime
    except ImportError:
        log.skip(name, "onnxruntime is not installed")
        return
    session = onnxruntime.InferenceSession(
        str(engines.artifact.path(file)), providers=["CPUExecutionProvider"]
    )
    features = (fbank - fbank.mean(axis=0, keepdims=True))[None]
    log.tensor(
        name, session.run(None, {session.get_inputs()[0].name: features})[0], tolerance=FBANK_TOLERANCE
    )


def _replay_prompt(
    case: str, engines: Engines, graphs: SpeechGraphs, log: ComparisonLog, arguments: Mapping[str, Any]
) -> None:
    """Ids of the assembled prompt; hidden states of recorded embeddings, and of token ids where recorded."""
    name = case.removeprefix("prompt.")
    ids = log.references[f"{case}.input_ids"][0].astype(np.int64)
    embeds = log.input(f"{case}.inputs_embeds")[0].astype(np.float32)
    replaced = np.zeros(len(ids), bool)
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
        replaced[prompt.speaker_rows] = replaced[prompt.patch_rows] = True
        if (prompt.token_ids.tolist()) == ids.tolist():
            # Token embeddings are internal to the engine; the hidden state shows whether they are right.
            mixed = graphs.prompt(ids, np.where(replaced[:, None], embeds, 0), replaced)
            whole = graphs.prompt(ids, embeds, np.ones(len(ids), bool))
            log.tensor(f"{case}.inputs_embeds", mixed, reference=whole, how="by the hidden state")
    if f"llm.{name}.last_hidden_state" in log:
        hidden = graphs.prefill(ids, embeds, np.ones(len(ids), bool))
        log.tensor(f"llm.{name}.last_hidden_state", hidden[None])
        half = len(ids) // 2
        graphs.prompt(ids[:half], embeds[:half], np.ones(half, bool))
        stepped = np.concatenate([graphs.step(embeds[i : i + 1], i) for i in range(half, len(ids))])
        reference = log.references[f"llm.{name}.last_hidden_state"][0, half:]
        log.tensor(
            f"llm.{name}.last_hidden_state", stepped, reference=reference, how="second half step by step"
        )


def _replay_patch(name: str, engines: Engines, graphs: SpeechGraphs, log: ComparisonLog) -> None:
    case = f"cfm.{name}"
    history = log.input(f"{case}.lat_cond") if f"{case}.lat_cond" in log else None
    hidden = log.input(f"{case}.llm_cond") if f"{case}.llm_cond" in log else None
    flow = engines.parameters_of("cfm", CfmParameters)
    if hidden is None:  # the first patch of a plain loop is recorded with the loop
        log.skip(f"{case}.out", "its condition is not recorded; checked by the loops")
        return
    if history is None:
        history = np.zeros((1, flow.history_latents, flow.latent_dim), np.float32)
    made = graphs.sample(
        hidden[:, 0].astype(np.float32),
        history.astype(np.float32),
        log.input(f"{case}.y0").astype(np.float32),
        _step_noise(log, f"{case}.sde_rnd"),
        _arguments(log, case, engines),
    )
    log.tensor(f"{case}.out", made["latents"])
    log.tensor(f"agg.{name}.out", made["next_embeds"][:, None])
    if f"stop.{name}.softmax" in log:
        reference = log.references[f"stop.{name}.softmax"][:, 1]
        log.tensor(f"stop.{name}.softmax", made["stop_probability"], reference=reference, how="stop")


def _replay_loop(case: str, engines: Engines, graphs: SpeechGraphs, log: ComparisonLog) -> None:
    """The generation loop with recorded noise, for all recorded patches."""
    parameters = engines.parameters_of("talker", TalkerParameters)
    embeds = log.input(f"{case}.inputs_embeds")[0].astype(np.float32)
    noise = log.input(f"{case}.y0").astype(np.float32)
    step_noise = log.input(f"{case}.sde_rnd").astype(np.float32) if f"{case}.sde_rnd" in log else None
    history = log.input(f"{case}.first_history").astype(np.float32)
    if f"{case}.prompt_wav_lat" in log:
        _replay_history(case, engines, log)
    arguments = _arguments(log, case, engines)
    hidden = graphs.prompt(np.zeros(len(embeds), np.int64), embeds, np.ones(len(embeds), bool))
    made: dict[str, list[Floats]] = {name: [] for name in ("hidden", "latents", "embeds", "stop", "before")}
    for patch in range(len(noise)):
        rest = None if step_noise is None else step_noise[patch].swapaxes(0, 1)
        outputs = graphs.sample(hidden, history, noise[patch], rest, arguments)
        made["hidden"].append(hidden)
        made["before"].append(history)
        made["latents"].append(outputs["latents"])
        made["embeds"].append(outputs["next_embeds"])
        made["stop"].append(outputs["stop_probability"])
        history = outputs["next_history"]
        if patch + 1 < len(noise):
            hidden = graphs.step(outputs["next_embeds"], len(embeds) + patch)
    log.tensor(f"{case}.last_hidden", np.concatenate(made["hidden"])[None])
    log.tensor(f"{case}.gen_lat", np.stack(made["latents"]))
    log.tensor(f"{case}.latents", np.concatenate(made["latents"], axis=1))
    log.tensor(f"{case}.next_embeds", np.concatenate(made["embeds"])[None])
    log.tensor(f"{case}.last_history", made["before"][-1])
    stop = np.concatenate(made["stop"])
    if f"{case}.stop_prob" in log:
        reference = log.references[f"{case}.stop_prob"][:, 1]
        log.tensor(f"{case}.stop_prob", stop, reference=reference, how="stop")
    ended = (stop > parameters.stop_threshold) & (np.arange(len(stop)) > parameters.min_stop_step)
    # In low precision a probability near the threshold may fall on either side.
    is_near = log.is_near(stop[:, None], np.full((len(stop), 1), parameters.stop_threshold)).any()
    waiver = "a stop probability is near the threshold" if is_near and not log.is_exact else ""
    log.ids(f"{case}.ended", ended, how="stop step", waiver=waiver)


def _replay_history(case: str, engines: Engines, log: ComparisonLog) -> None:
    """The latents of a voice before the first patch, from the planner of a server."""
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


def _arguments(log: ComparisonLog, case: str, engines: Engines) -> Floats:
    """Guidance, sigma and temperature: recorded values, or the model's defaults."""
    if f"{case}.sde_args" in log:
        return log.input(f"{case}.sde_args").astype(np.float32)
    flow = engines.parameters_of("cfm", CfmParameters)
    return np.array([flow.guidance, flow.sigma, flow.temperature], np.float32)


def _step_noise(log: ComparisonLog, name: str) -> Floats | None:
    """The recorded noise (steps, 1, p, 64) as (1, steps, p, 64)."""
    if name not in log:
        return None
    return log.input(name).swapaxes(0, 1).astype(np.float32)
