"""Isolation of thinker answers: 32 ragged requests in several arrival patterns, compared with each run alone.

Runs through `ThinkerLoop`, its scheduler and `ThinkerWorker`. Two questions. Within one bucket: are all logits bit for
bit the same as alone, where padding fills the bucket? Between buckets: how large is the difference, in tokens and in
logits up to the first other token? Differences are relative to the request's largest logit alone.

    python benchmarks/thinker_isolation.py --artifact /tmp/tiny --dtype bfloat16 \\
        --json benchmarks/results/thinker-isolation-….json

exports the tiny checkpoint of the test data when the folder does not exist; for bfloat16 a wider one of random weights,
because our kernels for experts and router do not take the tiny one's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from thinker_clients import (
    CONTEXT_TOKENS,
    Answer,
    Request,
    TracingWorker,
    answer_alone,
    answer_together,
    arrival_patterns,
    make_requests,
    only_bucket,
    thinker_parameters,
)

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.parameters import ThinkerParameters
from mingc.runtime.thinker.sampler import SamplerRow, sample

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "data" / "tiny-ming"
_PREFILL_TOKENS = 64
_MOVES = 256  # of logits, to see what else could have been chosen
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128}


def make_artifact(
    output: Path, *, target: str, dtype: str, batch_sizes: str, jobs: int, cache: Path | None = None
) -> None:
    """Export the tiny thinker; in bfloat16 one of random weights, just wide enough for all Triton kernels."""
    words = ["--stages", "thinker", "--target", target, "--dtype", dtype, "--batch-sizes", batch_sizes]
    words += ["--max-model-len", str(CONTEXT_TOKENS), "--prefill-chunk-size", str(_PREFILL_TOKENS)]
    words += ["--jobs", str(jobs), "--output", str(output), *(["--cache", str(cache)] if cache else [])]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = TINY
        if dtype != "float32":
            checkpoint = Path(scratch) / "configs"
            shutil.copytree(TINY, checkpoint, ignore=shutil.ignore_patterns("*.safetensors"))
            path = checkpoint / "config.json"
            document = json.loads(path.read_text(encoding="utf-8"))
            document["llm_config"].update(_WIDE)
            path.write_text(json.dumps(document), encoding="utf-8")
            words.append("--synthetic")
        subprocess.run(
            [sys.executable, "-m", "mingc", "export", str(checkpoint), *words], check=True, cwd=ROOT
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """Comparison of batched answers with answers of single runs.

    Attributes:
        same_tokens: requests that got the same tokens; of those that left, as many as they received.
        same_bits: requests whose logits are also equal bit for bit.
        at_an_edge: requests whose first different token is explained by rounding: the difference of the two answers'
            logits is enough to choose either.
        gap: largest difference of logits up to the first other token, in shares of the request's largest.
    """

    num_answers: int
    same_tokens: int
    same_bits: int
    at_an_edge: int
    gap: float


def compare(
    answers: Mapping[int, Answer], alone: Mapping[int, Answer], requests: Sequence[Request]
) -> Likeness:
    """Compare `answers` with `alone`, the answers of single runs; token i was sampled from row i of the logits."""
    same_tokens = same_bits = at_an_edge = 0
    largest = 0.0
    for index, answer in answers.items():
        expected = alone[index]
        pairs = zip(answer.tokens, expected.tokens, strict=False)
        other = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        rows = len(answer.tokens) if other is None else other + 1
        mine, theirs = answer.logits[:rows], expected.logits[:rows]
        same_tokens += other is None
        same_bits += other is None and torch.equal(mine, theirs)
        at_an_edge += other is not None and _is_at_an_edge(requests[index], answer, expected, other)
        largest = max(largest, float((mine - theirs).abs().max() / theirs.abs().max()))
    return Likeness(
        num_answers=len(answers),
        same_tokens=same_tokens,
        same_bits=same_bits,
        at_an_edge=at_an_edge,
        gap=largest,
    )


def _is_at_an_edge(request: Request, answer: Answer, alone: Answer, place: int) -> bool:
    """Whether the host's sampler selects either answer's token from slightly perturbed logits of token `place`."""
    logits = alone.logits[place]
    gap = (answer.logits[place] - logits).abs().max()
    generator = torch.Generator().manual_seed(place)
    moves = torch.rand(_MOVES, logits.numel(), generator=generator) * 2 - 1
    row = SamplerRow.begin(
        request.sampling, request.seed, request.prompt.input_ids.tolist(), logits.numel(), logits.device
    )
    for token in alone.tokens[:place]:
        row.advance(token)
    chosen = sample(logits + 2 * gap * moves, [row] * _MOVES)
    return {answer.tokens[place], alone.tokens[place]} <= set(chosen)


def measure(
    worker: TracingWorker, parameters: ThinkerParameters, requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """Figures of every pattern, inside the largest bucket and across buckets."""
    largest = worker.max_batch
    with only_bucket(worker, largest):
        alone_in_largest = answer_alone(worker, parameters, requests)
    alone = answer_alone(worker, parameters, requests)
    figures = [
        _figure(
            "isolation_across_buckets", "alone", compare(alone_in_largest, alone, requests), largest_batch=1
        )
    ]
    for pattern in arrival_patterns():
        for name, expected in (
            ("isolation_same_bucket", alone_in_largest),
            ("isolation_across_buckets", alone),
        ):
            worker.largest_batch = 0
            with only_bucket(worker, largest) if expected is alone_in_largest else nullcontext():
                answers = answer_together(worker, parameters, requests, pattern)
            likeness = compare(answers, expected, requests)
            figures.append(_figure(name, pattern.name, likeness, largest_batch=worker.largest_batch))
    return figures


def _figure(name: str, case: str, likeness: Likeness, *, largest_batch: int) -> dict[str, Any]:
    return {
        "name": name,
        "case": case,
        "largest_batch": largest_batch,
        "n": likeness.num_answers,
        "same_tokens": likeness.same_tokens,
        "same_bits": likeness.same_bits,
        "at_an_edge": likeness.at_an_edge,
        "median": likeness.gap,
        "unit": "of the largest logit",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True, help="made when it does not exist")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--jobs", type=int, default=12, help="compiler processes at a time")
    parser.add_argument("--cache", type=Path, help="folder of engines to use again")
    parser.add_argument("--json", type=Path)
    given = harness.parse_args(parser)
    if not given.artifact.exists():
        make_artifact(
            given.artifact,
            target="cuda",
            dtype=given.dtype,
            batch_sizes=given.batch_sizes,
            jobs=given.jobs,
            cache=given.cache,
        )
    artifact = open_artifact(given.artifact)
    parameters = thinker_parameters(artifact)
    worker = TracingWorker(artifact, torch.device(artifact.manifest.fingerprint.device))
    figures = measure(worker, parameters, make_requests(parameters))
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    if given.json:
        harness.write(given.json, harness.result("thinker_isolation", {}, figures))


if __name__ == "__main__":
    main()
