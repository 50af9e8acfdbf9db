"""On CUDA: the answer to a request does not depend on the other requests of its batch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import thinker_clients
import thinker_isolation
import torch

from mingc.artifacts.artifact import open_artifact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Another batch bucket sums in another order. Relative to the request's largest logit. In bfloat16 rounding routes some
# token of nearly every request to another expert, after which outputs cannot be compared: no bound holds there.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Measured:
    dtype: str
    figures: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [each for each in self.figures if each["name"] == name]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def measured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Measured:
    path = tmp_path_factory.mktemp("isolation") / "tiny"
    cache = os.environ.get("MINGC_TEST_CACHE")
    thinker_isolation.make_artifact(
        path,
        target="cuda",
        dtype=request.param,
        batch_sizes="1,8,32",
        jobs=os.cpu_count() or 1,
        cache=Path(cache) if cache else None,
    )
    artifact = open_artifact(path)
    parameters = thinker_clients.thinker_parameters(artifact)
    worker = thinker_clients.TracingWorker(artifact, torch.device("cuda", 0))
    requests = thinker_clients.make_requests(parameters)
    return Measured(request.param, thinker_isolation.measure(worker, parameters, requests))


def test_within_a_bucket_an_answer_equals_its_single_run_bit_for_bit(measured: Measured) -> None:
    same = measured.of("isolation_same_bucket")
    assert len(same) == len(thinker_clients.arrival_patterns())
    assert [each for each in same if each["same_bits"] < thinker_clients.NUM_REQUESTS] == []


@pytest.mark.parametrize("measured", ["float32"], indirect=True)
def test_across_buckets_answers_differ_by_rounding_only(measured: Measured) -> None:
    across = measured.of("isolation_across_buckets")
    assert len(across) == 1 + len(thinker_clients.arrival_patterns())
    assert max(each["median"] for each in across) <= TOLERANCE
    # A sampled number may lie where rounding decides between two tokens.
    assert {each["same_tokens"] + each["at_an_edge"] for each in across} == {thinker_clients.NUM_REQUESTS}
    assert min(each["same_tokens"] for each in across) >= thinker_clients.NUM_REQUESTS - 3
