"""On CUDA in bfloat16: a request's speech does not depend on the other requests of its batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import speech_isolation
import torch

from mingc.artifacts.artifact import open_artifact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Another batch bucket sums in another order: bfloat16 rounds differently, and each patch conditions the next.
# Shares of the request's largest sample; the first patch of another seed differs by 0.4 to 3.
TOLERANCE_FIRST_PATCH, TOLERANCE = 0.1, 0.5


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("isolation") / "small"
    cache = os.environ.get("MINGC_TEST_CACHE")
    speech_isolation.make_artifact(
        path, batch_sizes="1,4,16", jobs=os.cpu_count() or 1, cache=Path(cache) if cache else None
    )
    artifact = open_artifact(path)
    worker = speech_isolation.open_worker(artifact, torch.device("cuda", 0))
    return speech_isolation.measure(worker, speech_isolation.make_segments(artifact))


def test_within_a_bucket_every_request_equals_its_single_run_bit_for_bit(
    figures: list[dict[str, Any]],
) -> None:
    same = [each for each in figures if each["name"] == "isolation_same_bucket"]
    assert len(same) == 1 + len(speech_isolation.arrival_patterns())
    assert [each for each in same if each["equal"] < speech_isolation.NUM_REQUESTS] == []


def test_across_buckets_requests_differ_by_rounding_only(figures: list[dict[str, Any]]) -> None:
    across = [each for each in figures if each["name"] == "isolation_across_buckets"]
    assert len(across) == 2 + len(speech_isolation.arrival_patterns())
    assert max(each["first_patch"] for each in across) <= TOLERANCE_FIRST_PATCH
    assert max(each["median"] for each in across) <= TOLERANCE
