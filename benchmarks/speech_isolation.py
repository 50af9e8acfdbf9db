"""Isolation of speech: 16 mixed requests in several arrival patterns, compared with each run alone.

Runs through `TalkerWorker`. Two questions. Within one bucket of patches and of prompts: is the speech bit for bit the
same as alone, where padding fills the bucket? Between buckets: how large is the difference, in the first patch and over
the whole? Differences are relative to the request's largest sample alone.

    python benchmarks/speech_isolation.py --artifact /tmp/small --json benchmarks/results/speech-isolation-….json

makes an artifact of small dims and random weights when the folder does not exist.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.request import SpeechParams
from mingc.runtime.talker.planner import SpeechPlanner, load_voice
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker
from mingc.text.reference.segment import iter_speech_segments

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "tiny-ming"
NUM_REQUESTS = 16
STAGES = ("talker", "cfm", "audio_vae")
_TEXTS = (
    "Good morning.",
    "她把门轻轻关上了。",
    "The harbour was quiet and the boats lay side by side.",
    "第二个声音比第一个长一些，但是也不太长。",
    "No.",
)
_GUIDANCE, _SIGMA = (2.0, 1.0, 3.5), (0.25, 0.5)
_TEMPERATURE = (0.0, 0.7, 0.0, 1.0)
# Four query heads of 64 over two key heads.
_WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}

Waves = list[list[NDArray[np.float32]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalPattern:
    """Arrival pattern: the order of the requests and the patch boundary at which each one arrives."""

    name: str
    arrivals: tuple[tuple[int, int], ...]  # (boundary, request), in order of boundary


def arrival_patterns() -> list[ArrivalPattern]:
    """Three orders of simultaneous arrival, and three staggered patterns."""
    orders = {
        "given order": range(NUM_REQUESTS),
        "reversed": range(NUM_REQUESTS - 1, -1, -1),
        "shuffled": np.random.default_rng(3).permutation(NUM_REQUESTS).tolist(),
    }
    together = [
        ArrivalPattern(name=name, arrivals=tuple((0, each) for each in order))
        for name, order in orders.items()
    ]
    starts = np.random.default_rng(4).integers(0, 9, NUM_REQUESTS).tolist()
    return [
        *together,
        ArrivalPattern(name="one a patch", arrivals=tuple(enumerate(range(NUM_REQUESTS)))),
        ArrivalPattern(
            name="two every third patch", arrivals=tuple((i // 2 * 3, 15 - i) for i in range(NUM_REQUESTS))
        ),
        ArrivalPattern(
            name="random starts", arrivals=tuple(sorted(zip(starts, range(NUM_REQUESTS), strict=True)))
        ),
    ]


def write_configs(folder: Path) -> None:
    """Configs with the smallest dims that the kernels support, heads of 64."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    talker = folder / "talker"
    _edit(talker / "llm" / "config.json", [], _WIDE)
    _edit(talker / "config.json", [], {"steps": 4})
    for name in ("flowmodel", "aggregator"):
        _edit(talker / "config.json", [name], {"hidden_size": 128, "num_heads": 2})
    _edit(talker / "config.json", ["flowmodel"], {"llm_cond_dim": _WIDE["hidden_size"]})
    for name in ("enc_kwargs", "dec_kwargs"):
        _edit(talker / "vae" / "config.json", [name, "backbone"], _WIDE)


def make_artifact(output: Path, *, batch_sizes: str, jobs: int, cache: Path | None = None) -> None:
    """Export the speech stages of `write_configs` for CUDA in bfloat16."""
    with tempfile.TemporaryDirectory() as scratch:
        configs = Path(scratch) / "configs"
        write_configs(configs)
        words = ["--synthetic", "--stages", ",".join(STAGES), "--target", "cuda", "--dtype", "bfloat16"]
        words += ["--batch-sizes", batch_sizes, "--prefill-chunk-size", "64", "--jobs", str(jobs)]
        words += ["--output", str(output), *(["--cache", str(cache)] if cache is not None else [])]
        subprocess.run([sys.executable, "-m", "mingc", "export", str(configs), *words], check=True, cwd=ROOT)


def _edit(path: Path, keys: Sequence[str], values: dict[str, int]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    place = document
    for key in keys:
        place = place[key]
    place.update(values)
    path.write_text(json.dumps(document), encoding="utf-8")


def _parameters(artifact: Artifact) -> tuple[TalkerParameters, CfmParameters, VaeParameters]:
    manifest = artifact.manifest
    return (
        manifest.parameters_of("talker", TalkerParameters),
        manifest.parameters_of("cfm", CfmParameters),
        manifest.parameters_of("audio_vae", VaeParameters),
    )


def make_segments(artifact: Artifact) -> list[SpeechSegment]:
    """The 16 requests: texts, voices, guidance, sigma, temperature, seed and length all vary."""
    talker, flow, vae = _parameters(artifact)
    planner = SpeechPlanner(
        SpeechPromptBuilder(TextTokenizer.from_file(artifact.path(artifact.manifest.tokenizers["talker"]))),
        {record.name: load_voice(artifact, record) for record in artifact.manifest.voices},
        parameters=talker,
        flow=flow,
        vae=vae,
    )
    voices = [record.name for record in artifact.manifest.voices]
    segments = []
    for index in range(NUM_REQUESTS):
        params = SpeechParams(
            voice=voices[index % len(voices)],
            guidance=_GUIDANCE[index % len(_GUIDANCE)],
            sigma=_SIGMA[index // 2 % len(_SIGMA)],
            temperature=_TEMPERATURE[index // 2 % len(_TEMPERATURE)],
            max_steps=2 + index % 5,
        )
        text = next(iter_speech_segments(_TEXTS[index % len(_TEXTS)], talker.max_segment_length))
        segments.append(planner.segment(text, index % 3, params, PhiloxNoise(100 + index)))
    return segments


def open_worker(artifact: Artifact, device: torch.device) -> TalkerWorker:
    """A worker with a slot for each row of the largest bucket."""
    stages = [load_stage(artifact, name, device) for name in STAGES]
    talker, flow, vae = _parameters(artifact)
    return TalkerWorker(
        *stages,
        parameters=talker,
        flow=flow,
        vae=vae,
        num_slots=NUM_REQUESTS + 1,
        device=device,
    )


@contextmanager
def only_bucket(worker: TalkerWorker, size: int) -> Iterator[None]:
    """Run every patch inside the block in the bucket `size`, and all prompts in the largest chunk.

    Prompts that come together share a chunk, which may be larger than that of one alone.
    """
    engines = worker.engines
    sizes, chunks = engines.batch_sizes, engines.chunk_sizes
    engines.batch_sizes, engines.chunk_sizes = [size], chunks[-1:]
    try:
        yield
    finally:
        engines.batch_sizes, engines.chunk_sizes = sizes, chunks


def speak(worker: TalkerWorker, segments: Sequence[SpeechSegment], pattern: ArrivalPattern) -> Waves:
    """Run the requests of `pattern`, as many at a time as fit. Returns the patches of each; [] for absent requests."""
    waves: Waves = [[] for _ in segments]
    coming = list(pattern.arrivals)
    most = min(worker.engines.batch_sizes[-1], worker.num_slots - 1)
    # Slots are allocated from the last one; rows are launched in the order of admission.
    free, running = list(range(1, most + 1)), dict[int, int]()
    boundary = 0
    while coming or running:
        while coming and free and coming[0][0] <= boundary:
            slot = free.pop()
            running[slot] = coming.pop(0)[1]
            worker.add(slot, segments[running[slot]])
        boundary += 1
        launchable = [slot for slot in running if worker.is_launchable(slot)]
        if launchable:
            worker.launch(launchable)
        if worker.num_in_flight == worker.depth or (worker.num_in_flight and not launchable):
            for slot, patch in worker.collect().items():
                assert patch is not None, "the samples are not finite"
                waves[running[slot]].append(patch.samples)
                if patch.is_segment_end:
                    worker.remove(slot)
                    free.append(slot)
                    del running[slot]
    return waves


def speak_alone(worker: TalkerWorker, segments: Sequence[SpeechSegment]) -> Waves:
    """Every request run alone."""
    return [
        speak(worker, segments, ArrivalPattern(name="alone", arrivals=((0, index),)))[index]
        for index in range(len(segments))
    ]


def compare(waves: Waves, alone: Waves) -> tuple[float, float, int]:
    """Largest difference in first patches, largest in all, and how many requests are equal bit for bit."""
    first = whole = 0.0
    equal = 0
    for mine, expected in zip(waves, alone, strict=True):
        assert [len(each) for each in mine] == [len(each) for each in expected], "another number of samples"
        scale = float(max(np.abs(each).max() for each in expected))
        gaps = [float(np.abs(a - b).max()) / scale for a, b in zip(mine, expected, strict=True)]
        first, whole = max(first, gaps[0]), max(whole, *gaps)
        equal += all(np.array_equal(a, b) for a, b in zip(mine, expected, strict=True))
    return first, whole, equal


def measure(worker: TalkerWorker, segments: Sequence[SpeechSegment]) -> list[dict[str, Any]]:
    """Figures of every pattern, inside the largest bucket and across buckets."""
    sizes = list(worker.engines.batch_sizes)
    largest = sizes[-1]
    alone = {}
    for size in sizes:
        with only_bucket(worker, size):
            alone[size] = speak_alone(worker, segments)
    figures = []

    def add(name: str, case: str, waves: Waves, expected: Waves, **more: object) -> None:
        first, whole, equal = compare(waves, expected)
        common = {"name": name, "case": case, **more, "n": len(waves)}
        figures.append(
            {**common, "median": whole, "first_patch": first, "equal": equal, "unit": "of the largest"}
        )

    with only_bucket(worker, sizes[0]):
        add(
            "isolation_same_bucket",
            "alone again",
            speak_alone(worker, segments),
            alone[sizes[0]],
            bucket=sizes[0],
        )
    for pattern in arrival_patterns():
        with only_bucket(worker, largest):
            waves = speak(worker, segments, pattern)
        add("isolation_same_bucket", pattern.name, waves, alone[largest], bucket=largest)
        waves = speak(worker, segments, pattern)
        add("isolation_across_buckets", pattern.name, waves, alone[sizes[0]], bucket=f"{sizes}")
    for size in sizes[1:]:
        add("isolation_across_buckets", "alone", alone[size], alone[sizes[0]], bucket=size)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True, help="made when it does not exist")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--jobs", type=int, default=12, help="compiler processes at a time")
    parser.add_argument("--cache", type=Path, help="folder of engines to use again")
    parser.add_argument("--json", type=Path)
    given = harness.parse_args(parser)
    if not given.artifact.exists():
        make_artifact(given.artifact, batch_sizes=given.batch_sizes, jobs=given.jobs, cache=given.cache)
    artifact = open_artifact(given.artifact)
    worker = open_worker(artifact, torch.device(artifact.manifest.fingerprint.device))
    figures = measure(worker, make_segments(artifact))
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    if given.json:
        harness.write(given.json, harness.result("speech_isolation", {}, figures))


if __name__ == "__main__":
    main()
