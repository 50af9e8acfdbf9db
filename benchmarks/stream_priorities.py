"""Slowdown of the talker beside an encoder that never rests, with and without stream priorities, on one GPU.

The talker makes patch after patch, as in a server, while another thread encodes long clips, whose kernels fill the
device: alone, beside an encoder of lower priority (as served), and beside one of the talker's priority.
Random weights of the released dims; engines of an artifact with `audio_encoder`, `talker`, `cfm` and `audio_vae`.

    python benchmarks/stream_priorities.py --artifact ARTIFACT --json benchmarks/results/stream-priorities-….json
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from arguments import whole, wholes
from talker import Run, Step, served_times
from torch import Tensor

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.parameters import AudioParameters
from mingc.runtime.encoders.graph import EncoderGraph
from mingc.runtime.engines import stream_priority
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage

GRAPHS = {"talker": "step", "cfm": "sample", "audio_vae": "stream"}
DEVICE = torch.device("cuda", 0)


def runs_of(stages: Mapping[str, LoadedStage]) -> dict[str, Run]:
    """The engines of a patch, called with named tensors."""

    def run(stage: str, graph: str) -> Run:
        return lambda tensors: stages[stage][graph].run(**tensors)

    return {stage: run(stage, graph) for stage, graph in GRAPHS.items()}


class Encoding:
    """Encodes one clip again and again in a thread of its own."""

    def __init__(self, stage: LoadedStage, parameters: AudioParameters, seconds: int) -> None:
        frames = seconds * parameters.sample_rate // parameters.hop_samples
        bucket = stage["encode"].bucket("T4", -(-frames // parameters.frames_per_token))
        mel = torch.rand(1, bucket, parameters.frames_per_token, parameters.num_mels)
        self._inputs: dict[str, Tensor] = {"mel": mel.bfloat16(), "lengths": torch.tensor([frames])}
        self._graph = EncoderGraph(stage["encode"], DEVICE)
        self._ends = threading.Event()
        self.times_ms: list[float] = []

    @contextmanager
    def running(self) -> Iterator[list[float]]:
        """Encode inside the block. The list receives the milliseconds of every call."""
        times: list[float] = []
        has_begun = threading.Event()

        def work() -> None:
            while not self._ends.is_set():
                begun = time.perf_counter()
                self._graph(self._inputs, 1)
                times.append(1e3 * (time.perf_counter() - begun))
                has_begun.set()

        self._graph(self._inputs, 1)
        self._ends.clear()
        thread = threading.Thread(target=work)
        thread.start()
        has_begun.wait()
        try:
            yield times
        finally:
            self._ends.set()
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--batches", type=wholes(1, 256), default="1,16")
    parser.add_argument("--count", type=whole(10), default=60, help="timed patches")
    parser.add_argument("--clip-seconds", type=whole(1, 300), default=60)
    parser.add_argument("--json", type=Path, help="write the result here")
    given = harness.parse_args(parser)
    artifact = open_artifact(given.artifact)
    with torch.inference_mode():
        stages = {name: load_stage(artifact, name, DEVICE) for name in (*GRAPHS, "audio_encoder")}
        rates = harness.peak_rates()
        specs = {stage: stages[stage][graph].spec for stage, graph in GRAPHS.items()}
        parameters = artifact.manifest.parameters_of("audio_encoder", AudioParameters)

        def encoding(priority: int) -> Encoding:
            with mock.patch.object(stream_priority, "ENCODERS", priority):
                return Encoding(stages["audio_encoder"], parameters, given.clip_seconds)

        beside = {
            "an encoder of lower priority": encoding(stream_priority.ENCODERS),
            "an encoder of equal priority": encoding(stream_priority.DECODING),
        }
        with beside["an encoder of lower priority"].running() as alone:
            time.sleep(1.0)
        figures: list[dict[str, Any]] = [
            {"name": "encode_ms", "beside": "nothing", **harness.summary(alone), "unit": "ms"}
        ]
        for batch in given.batches:
            step = Step(batch, runs_of(stages), specs)
            keys = {"batch": batch, "unit": "ms"}
            times, _ = served_times(step, batch, given.count)
            figures.append({"name": "patch_ms", "beside": "nothing", **keys, **harness.summary(times)})
            for name, each in beside.items():
                with each.running() as encoded:
                    times, _ = served_times(step, batch, given.count)
                figures.append({"name": "patch_ms", "beside": name, **keys, **harness.summary(times)})
                talker = f"the talker, beside {name}"
                figures.append({"name": "encode_ms", "beside": talker, **keys, **harness.summary(encoded)})
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items() if key != "samples"), flush=True)
    if given.json:
        harness.write(given.json, harness.result("stream_priorities", rates, figures))


if __name__ == "__main__":
    main()
