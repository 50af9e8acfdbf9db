"""Speaks recorded prompts through a server's talker: `TalkerLoop` and `TalkerWorker` over observed engines.

Slots, hidden states, history windows, lengths, noise, the stop rule and the final samples are the worker's. Its graphs
record their inputs and outputs; where a recorded value replaces an output (an embedding, a hidden state, latents), the
graph is not run.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conformance.engines import Engines
from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.artifacts.spec import GraphSpec
from mingc.dtypes import torch_dtype
from mingc.errors import WorkerError
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.noise import NoiseSource
from mingc.runtime.request import AudioDelta, Recorder
from mingc.runtime.request_stream import FailedItem, Item
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker
from mingc.verify.engine_run import to_numpy
from mingc.verify.recorded_noise import RecordedNoise

STAGES = ("talker", "cfm", "audio_vae")

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_SLOT = 1
_LIMIT_S = 600.0  # for the next patch, which takes milliseconds at the released dims
# By graph: inputs and outputs that every call keeps.
_KEPT = {"prefill": ("hidden",), "step": ("hidden",), "sample": ("hidden", "history", "next_embeds")}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spoken:
    """n patches of one segment, and the sampler's inputs for each.

    Attributes:
        patches: as a client's stream gets them.
        recorder: their latents and stop probabilities.
        hidden, history, embeds: (n, D), (n, H, C), (n, D): inputs of the sampler, and its embedding of the patch.
    """

    patches: list[AudioDelta]
    recorder: Recorder
    hidden: Floats
    history: Floats
    embeds: Floats


class SpeechRunner:
    """The talker's worker, one segment at a time; on CUDA nothing is captured, so that every call is observed."""

    def __init__(self, engines: Engines) -> None:
        self._calls = _Calls()
        self._parameters = engines.parameters_of("talker", TalkerParameters)
        self._flow = engines.parameters_of("cfm", CfmParameters)
        vae = engines.parameters_of("audio_vae", VaeParameters)
        self._worker = TalkerWorker(
            *(self._calls.observe(engines.stage(name)) for name in STAGES),
            parameters=self._parameters,
            flow=self._flow,
            vae=vae,
            num_slots=_SLOT + 1,
            device=engines.device,
            depth=1,
            is_captured=False,
        )

    def segment(
        self,
        ids: Ints,
        *,
        embeds: Floats | None = None,
        embed_rows: Ints | None = None,
        noise: NoiseSource | None = None,
        history: Floats | None = None,
        arguments: tuple[float, float, float] = (0.0, 0.0, 0.0),
        max_patches: int = 1,
    ) -> SpeechSegment:
        """Make a segment with the prompt `ids` (T,), in which `embeds` (E, D) replace rows (by default all).

        `arguments`: guidance, sigma, temperature. `history`: (H, C); zeros by default.
        """
        if embeds is None:
            embeds, embed_rows = (
                np.zeros((0, self._parameters.hidden_size), np.float32),
                np.zeros(0, np.int64),
            )
        patch = (1, self._flow.latents_per_patch, self._flow.latent_dim)
        window = (self._flow.history_latents, self._flow.latent_dim)
        return SpeechSegment(
            input_ids=ids,
            embed_rows=np.arange(len(ids)) if embed_rows is None else embed_rows,
            embeds=embeds,
            num_prefix=0,
            history=np.zeros(window, np.float32) if history is None else history,
            noise=noise or RecordedNoise([1], np.zeros(patch, np.float32)),
            index=0,
            max_patches=max_patches,
            guidance=arguments[0],
            sigma=arguments[1],
            temperature=arguments[2],
        )

    def prompt(self, segment: SpeechSegment) -> Floats:
        """Hidden state (1, D) of the last prompt token; leaves the prompt in the slot."""
        self._calls.begin({})
        self._worker.add(_SLOT, segment)
        self._worker.prefill()
        return self._calls.kept("prefill", "hidden")[-1:]

    def steps(self, segment: SpeechSegment, embeds: Floats) -> Floats:
        """Step once for every patch in `embeds` (n, D), after the prompt of `segment`. Returns hidden states (n, D)."""
        # The last patch before the cap has no step.
        self.prompt(replace(segment, max_patches=len(embeds) + 1))
        self._calls.begin({"sample": ({"next_embeds": each[None]} for each in embeds)})
        for _ in embeds:
            self._patch()
        return self._calls.kept("step", "hidden")

    def sample(self, hidden: Floats, segment: SpeechSegment) -> tuple[Recorder, Floats]:
        """Run the first patch of a segment as if its prompt ended with the state `hidden` (1, D).

        Returns its latents and stop probability, and its embedding (1, D).
        """
        recorder = Recorder()
        self._calls.begin({"prefill": [{"hidden": hidden}]})
        self._worker.add(_SLOT, segment, recorder)
        self._patch()
        return recorder, self._calls.kept("sample", "next_embeds")

    def decode(self, latents: Floats) -> Floats:
        """Samples (m,) of a segment whose patches have these latents (n, P, C)."""
        self._calls.begin({"sample": ({"latents": each[None]} for each in latents)})
        self._worker.add(_SLOT, self.segment(np.zeros(1, np.int64), max_patches=len(latents)))
        return np.concatenate([self._patch().samples for _ in latents])

    def speak(self, segment: SpeechSegment) -> Spoken:
        """Speak a segment in a separate talker loop. Raises: the error of the stream if it fails."""
        self._calls.begin({})
        scheduler = TalkerScheduler(SlotPool(_SLOT + 1), max_batch=1, max_prefills_per_patch=1, max_streams=1)
        items: queue.Queue[Item] = queue.Queue()
        loop = TalkerLoop(self._worker, scheduler)
        recorder = Recorder()
        loop.add(loop.open(items.put, lambda: False, recorder=recorder), segment)
        loop.start()
        patches: list[AudioDelta] = []
        try:
            while not patches or not patches[-1].is_segment_end:
                patches.append(_next_patch(items))
        finally:
            loop.stop(_LIMIT_S)
        values = {name: self._calls.kept("sample", name) for name in _KEPT["sample"]}
        return Spoken(
            patches=patches,
            recorder=recorder,
            hidden=values["hidden"],
            history=values["history"],
            embeds=values["next_embeds"],
        )

    def _patch(self) -> AudioDelta:
        """Run one patch of the slot."""
        self._worker.launch([_SLOT])
        patch = self._worker.collect()[_SLOT]
        if patch is None:
            raise WorkerError("the model's samples are not finite", where="audio_vae")
        return patch


class _Calls:
    """Calls of observed graphs: recorded values, and values that replace their outputs."""

    def __init__(self) -> None:
        self.begin({})

    def begin(self, forced: Mapping[str, Iterable[Mapping[str, Floats]]]) -> None:
        """Forget earlier calls. `forced`: by graph, outputs of its next calls; those not named are zeros."""
        self._kept: dict[tuple[str, str], list[Floats]] = {}
        self._forced: dict[str, Iterator[Mapping[str, Floats]]] = {
            name: iter(values) for name, values in forced.items()
        }

    def kept(self, graph: str, name: str) -> Floats:
        """Stack an input or output of all calls, one row per call: (n, …) float32."""
        return np.concatenate(self._kept[graph, name])

    def observe(self, stage: LoadedStage) -> LoadedStage:
        graphs = {name: _ObservedGraph(name, graph, self) for name, graph in stage.graphs.items()}
        return LoadedStage(stage.name, graphs, stage.weights)

    def run(self, name: str, graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if name in self._forced:
            outputs = _forced_outputs(graph.spec, next(self._forced[name]), tensors)
        else:
            outputs = graph.run(**tensors)
        for each in _KEPT.get(name, ()):
            value = to_numpy({**tensors, **outputs}[each])[:1].astype(np.float32)
            self._kept.setdefault((name, each), []).append(value)
        return outputs


class _ObservedGraph(Graph):
    """A graph whose calls go through `calls`."""

    def __init__(self, name: str, graph: Graph, calls: _Calls) -> None:
        self.spec = graph.spec
        self._name, self._graph, self._calls = name, graph, calls

    def run(self, **tensors: Tensor) -> dict[str, Tensor]:
        return self._calls.run(self._name, self._graph, tensors)


def _forced_outputs(
    spec: GraphSpec, values: Mapping[str, Floats], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs of one row; zeros where `values` has none."""
    device = next(iter(tensors.values())).device
    outputs = {}
    for output in spec.outputs:
        shape = [size if isinstance(size, int) else 1 for size in output.shape]
        value = torch.zeros(shape)
        if output.name in values:
            value[:1] = torch.from_numpy(values[output.name])
        outputs[output.name] = value.to(device, torch_dtype(output.dtype))
    return outputs


def _next_patch(items: queue.Queue[Item]) -> AudioDelta:
    try:
        item = items.get(timeout=_LIMIT_S)
    except queue.Empty:
        raise WorkerError(f"the talker made no patch for {_LIMIT_S:.0f} s", where="talker") from None
    if isinstance(item, FailedItem):
        raise item.error
    assert isinstance(item, AudioDelta), "the talker emits patches"
    return item
