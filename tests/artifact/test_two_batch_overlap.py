"""Two-batch overlap on two real ranks: a chunk and a shorter rest give the bits of single chunks, and the goldens.

The ranks all-reduce with gloo on a CPU, where nothing overlaps in time; engines and sums have the order of GPUs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from collector import Collector
from mingc_command import ENVIRONMENT
from recorded_thinker import CASES, THINKER, thinker_prompt

from mingc.runtime.request import SamplingParams
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.step import PrefillStep
from mingc.runtime.thinker.worker import StepOptions

CHUNK = 32  # prompts have 48, 57, 79, 70 and 76 tokens


def answers(
    artifact: Path, steps: StepOptions, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """Logits of each recorded case, and the tokens of each step that prefills it."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    options = EngineOptions(max_total_tokens=2048, steps=steps, loads_speech=False, prefix_cache=False)
    service = open_service(artifact, options)
    logits, counts = {}, []
    try:
        assert service.thinker is not None
        loop = service.thinker
        assert isinstance(loop.runner, RankGroup)
        prefill = loop.runner.worker.prefill

        def note(step: PrefillStep) -> torch.Tensor:
            counts[-1].append(int(step.counts.sum()))
            return prefill(step)

        monkeypatch.setattr(loop.runner.worker, "prefill", note)
        for case in CASES:
            counts.append([])
            collector = Collector()
            recorded = THINKER[f"{case}.greedy_ids"][0].tolist()
            sampling = SamplingParams(max_tokens=len(recorded), ignore_eos=True)
            loop.submit(thinker_prompt(case), sampling, 1, collector.put, recorder=collector.recorder)
            assert collector.tokens() == recorded, case
            logits[case] = np.stack(collector.recorder.logits)
            np.testing.assert_allclose(logits[case], THINKER[f"{case}.greedy_logits"][0], atol=1e-3)
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
    return logits, counts


@pytest.mark.parametrize(
    "is_static",
    [
        pytest.param(False, id="host samples"),
        pytest.param(True, marks=pytest.mark.exhaustive, id="device samples"),
    ],
)
def test_uneven_pairs_of_chunks_have_the_bits_of_single_ones(
    is_static: bool, two_rank_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = StepOptions(is_static=is_static, max_chunk=CHUNK)
    single, in_chunks = answers(two_rank_artifact, steps, monkeypatch)
    steps = StepOptions(is_static=is_static, max_chunk=CHUNK, two_batch_overlap=True)
    pairs, in_pairs = answers(two_rank_artifact, steps, monkeypatch)
    assert in_chunks == [[32, 16], [32, 25], [32, 32, 15], [32, 32, 6], [32, 32, 12]]
    assert in_pairs == [[48], [57], [64, 15], [64, 6], [64, 12]]
    for case, logits in pairs.items():
        assert np.array_equal(logits, single[case]), case
