"""vae.safetensors and vae.json: decode whole and streamed, encode, and the silence holder.

The references hold two variants of the network, with and without its sliding window; the right one honours the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingc.runtime.text.silence import TAIL_S, SilenceHolder
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.stages import Engines, pad_rows, to_numpy

_NO_WINDOW = "made with the sliding window forced off, against the checkpoint's config"
_HOLDER_FAULT = "the reference loses or repeats silence here; the rule without the fault is checked instead"
_SLOT = 1

Floats = NDArray[np.float32]


def encode_wave(engines: Engines, wave: Floats, noise: Floats) -> dict[str, Floats]:
    """`latents`, `mean` and `std` (T, 64) of a wave (n,) with noise (T, 64)."""
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
    """Frames of a wave (n,), the last one filled up."""
    return -(-len(wave) // (_samples_encoded(engines) // _frames_per_latent(engines)))


def _samples_encoded(engines: Engines) -> int:
    """Samples that become one latent; the encoder's frames need not be as long as the decoder's."""
    spec = next(each for each in engines.stage("audio_vae")["encode"].spec.inputs if each.name == "waveform")
    return int(spec.shape[1])


def _frames_per_latent(engines: Engines) -> int:
    parameters = engines.parameters.audio_vae
    assert parameters is not None
    return parameters.frames_per_latent


def stream_wave(engines: Engines, latents: Floats) -> Floats:
    """The wave (n,) of latents (T, 64), decoded one patch at a time with carried state."""
    parameters = engines.parameters.audio_vae
    assert parameters is not None
    stage = engines.stage_with_state("audio_vae")
    graph = stage["stream"]
    state = stage.allocate_state({"S": 2}, engines.device)
    patch = latents_per_patch(engines)
    rows = engines.padded_size(graph, "B", 1)
    pieces = []
    for index in range(len(latents) // patch):
        slots, indices = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        slots[0], indices[0] = _SLOT, index
        part = latents[None, index * patch : (index + 1) * patch]
        outputs = graph.run(
            latents=engines.put(pad_rows(part, rows), graph, "latents"),
            slots=engines.put(slots, graph, "slots"),
            patch_index=engines.put(indices, graph, "patch_index"),
            **state,
        )
        start = max(0, parameters.tail_samples - index * patch * parameters.samples_per_latent)
        is_last = (index + 1) * patch == len(latents)
        end = patch * parameters.samples_per_latent + (parameters.tail_samples if is_last else 0)
        pieces.append(to_numpy(outputs["samples"])[0, start:end])
    return np.concatenate(pieces).astype(np.float32)


def latents_per_patch(engines: Engines) -> int:
    """Latents that one call of `stream` decodes."""
    spec = next(each for each in engines.stage("audio_vae")["stream"].spec.inputs if each.name == "latents")
    return int(spec.shape[1])


def replay(engines: Engines, ledger: ComparisonLog, chunks: Mapping[str, Any]) -> None:
    """`chunks` is vae.json: the latents and samples of each chunk."""
    with ledger.case("dec.*"):
        _replay_decode(engines, ledger)
    for case in ledger.cases("noise"):
        with ledger.case(case):
            _replay_encode(case, engines, ledger)
    for case in ledger.cases("in"):
        with ledger.case(case):
            _replay_holder(case, ledger, chunks)


def _replay_decode(engines: Engines, ledger: ComparisonLog) -> None:
    if "dec.latent" not in ledger:
        return
    latents = ledger.input("dec.latent")[0].astype(np.float32)
    graph = engines.stage("audio_vae")["decode"]
    offline = None
    if engines.is_dynamic("audio_vae", "decode") or len(latents) in graph.spec.dim("L").buckets:
        outputs = graph.run(latents=engines.put(latents[None], graph, "latents"))
        offline = to_numpy(outputs["waveform"]).reshape(1, 1, -1)
        ledger.tensor("dec.sliding.wav", offline)
        ledger.differs("dec.full.wav", offline, _NO_WINDOW)
    else:
        ledger.skip("dec.sliding.wav", f"no engine decodes {len(latents)} latents at once")
    if len(latents) % latents_per_patch(engines):
        ledger.skip("dec.stream", f"{len(latents)} latents are no whole number of patches")
        return
    streamed = stream_wave(engines, latents)
    ledger.tensor("dec.sliding.wav", streamed[None, None], how="streamed in patches")
    if offline is not None:
        ledger.tensor("dec.stream = dec.offline", streamed[None, None], reference=offline)
    streams = {name.split(".")[1] for name in ledger.references if name.startswith("dec.stream")}
    for name in sorted(streams):
        _compare_chunks(name, streamed, ledger)


def _compare_chunks(name: str, streamed: Floats, ledger: ComparisonLog) -> None:
    """Cut our stream where the reference's chunks end; their latency differs, the samples must not."""
    start = 0
    for chunk in sorted(_chunks(name, ledger)):
        reference = f"dec.{name}.chunk{chunk}.wav"
        end = start + ledger.references[reference].shape[-1]
        part = streamed[None, None, start:end]
        if "sliding" in name:
            ledger.tensor(reference, part)
        elif part.size:
            ledger.differs(reference, part, _NO_WINDOW)
        start = end
    if start:
        ledger.ids(f"dec.{name} samples", [len(streamed)], reference=[start])


def _chunks(name: str, ledger: ComparisonLog) -> list[int]:
    prefix, suffix = f"dec.{name}.chunk", ".wav"
    return [
        int(each[len(prefix) : -len(suffix)])
        for each in ledger.references
        if each.startswith(prefix) and each.endswith(suffix)
    ]


def _replay_encode(case: str, engines: Engines, ledger: ComparisonLog) -> None:
    noise = ledger.input(f"{case}.noise")[0].astype(np.float32)
    family = case.rsplit("_", 1)[-1]
    names = [each for each in ledger.cases("wav") if each.startswith("enc.") and each.endswith(family)]
    if not names:
        ledger.skip(f"{case}.latent", "the file has no wave for it")
        return
    wave = ledger.input(f"{case}.wav" if case in names else f"{names[0]}.wav")[0].astype(np.float32)
    made = encode_wave(engines, wave, noise)
    if ".full" in case:
        ledger.differs(f"{case}.latent", made["latents"][None], _NO_WINDOW)
        ledger.differs(f"{case}.std", made["std"][None], _NO_WINDOW)
        return
    ledger.tensor(f"{case}.latent", made["latents"][None])
    ledger.tensor(f"{case}.std", made["std"][None])
    if f"{case}.params" in ledger:
        mean = ledger.references[f"{case}.params"][:, :, : made["mean"].shape[1]]
        ledger.tensor(f"{case}.params", made["mean"][None], reference=mean, how="mean")
    if f"{case}.frame_num" in ledger:
        ledger.ids(f"{case}.frame_num", [-(-num_frames(engines, wave) // _frames_per_latent(engines))])


def _replay_holder(case: str, ledger: ComparisonLog, chunks: Mapping[str, Any]) -> None:
    """Held silence: equal to the reference where it is right, the mended rule everywhere."""
    if case not in chunks:
        ledger.skip(case, "its chunk sizes are not recorded")
        return
    given = ledger.input(f"{case}.in")[0].astype(np.float32)
    rate, sizes = int(chunks[case]["sample_rate"]), [int(each["chunk"]) for each in chunks[case]["chunks"]]
    holder = SilenceHolder(rate)
    parts = np.split(given, np.cumsum(sizes)[:-1])
    outputs = [holder.push(part, index + 1 == len(parts)) for index, part in enumerate(parts)]
    joined = np.concatenate(outputs)
    kept = joined.size <= given.size and np.array_equal(joined, given[: joined.size])
    dropped = given[joined.size :]
    is_quiet = dropped.size == 0 or float(np.abs(dropped).max()) < float(np.abs(given).max())
    rule = f"samples leave in order, none lost or repeated; only the tail beyond {TAIL_S} s is cut"
    ledger.claim(f"{case} rule", bool(kept and is_quiet), rule)
    names = [f"{case}.out{index}" for index in range(len(outputs))]
    recorded = np.concatenate([ledger.references[name][0] for name in names])
    is_right = recorded.size <= given.size and np.array_equal(recorded, given[: recorded.size])
    for name, output in zip(names, outputs, strict=True):
        if is_right or np.array_equal(output, ledger.references[name][0]):
            ledger.ids(name, output[None], how="samples")
        else:
            ledger.differs(name, output[None], _HOLDER_FAULT)
