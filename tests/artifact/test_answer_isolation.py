"""Sixteen ragged requests through the thinker's loop: an answer depends only on its own request (on the CPU).

tests/gpu has twice as many, with longer answers, in every pattern.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import thinker_clients
import torch
from thinker_clients import Answer, ArrivalPattern, Request, TracingWorker
from thinker_isolation import compare

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.parameters import ThinkerParameters
from mingc.runtime.thinker.sampler import uniform

# GEMMs of another batch size sum in another order, so float32 rounds differently.
TOLERANCE = 1e-5
NUM_REQUESTS, SHORTEST_ANSWER, LARGEST_BUCKET = 16, 30, 32
# Of the patterns of one kind, one. Those that stay have the three orders and the random starts in them.
PATTERNS = [
    each
    for each in thinker_clients.arrival_patterns(NUM_REQUESTS, last_start=200)
    if each.name not in ("reversed", "shuffled", "random starts")
]


@pytest.fixture(scope="module")
def artifact(wide_thinker_artifact: Path) -> Artifact:
    return open_artifact(wide_thinker_artifact)


@pytest.fixture(scope="module")
def parameters(artifact: Artifact) -> ThinkerParameters:
    return thinker_clients.thinker_parameters(artifact)


@pytest.fixture(scope="module")
def requests(parameters: ThinkerParameters) -> list[Request]:
    return thinker_clients.make_requests(parameters, NUM_REQUESTS, SHORTEST_ANSWER)


@pytest.fixture(scope="module")
def host_worker(artifact: Artifact) -> TracingWorker:
    return TracingWorker(artifact, torch.device("cpu"), is_static=False)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="host samples"),
        pytest.param(True, marks=pytest.mark.exhaustive, id="device samples"),
    ],
)
def worker(artifact: Artifact, host_worker: TracingWorker, request: pytest.FixtureRequest) -> TracingWorker:
    return TracingWorker(artifact, torch.device("cpu"), is_static=True) if request.param else host_worker


@pytest.fixture(scope="module")
def alone(
    host_worker: TracingWorker, parameters: ThinkerParameters, requests: list[Request]
) -> dict[int, Answer]:
    """Each request alone in the largest bucket, sampled by the host; the other rows are padding."""
    with thinker_clients.only_bucket(host_worker, LARGEST_BUCKET):
        return thinker_clients.answer_alone(host_worker, parameters, requests)


def test_the_requests_differ_and_are_ragged(requests: list[Request], alone: dict[int, Answer]) -> None:
    assert len({tuple(answer.tokens) for answer in alone.values()}) == NUM_REQUESTS
    assert len({len(request.prompt.input_ids) for request in requests}) > NUM_REQUESTS // 2
    assert len({len(answer.tokens) for answer in alone.values()}) > 5


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda each: each.name)
def test_in_one_bucket_answers_are_bit_identical_to_answers_alone(
    worker: TracingWorker,
    parameters: ThinkerParameters,
    requests: list[Request],
    alone: dict[int, Answer],
    pattern: ArrivalPattern,
) -> None:
    worker.largest_batch = 0
    with thinker_clients.only_bucket(worker, LARGEST_BUCKET):
        answers = thinker_clients.answer_together(worker, parameters, requests, pattern)
    likeness = compare(answers, alone, requests)
    assert (likeness.gap, likeness.same_bits) == (0.0, NUM_REQUESTS)
    if pattern.name == "given order":
        assert worker.largest_batch == NUM_REQUESTS


@pytest.mark.parametrize("pattern", PATTERNS[::2], ids=lambda each: each.name)
def test_in_fitting_buckets_the_tokens_are_the_same(
    worker: TracingWorker,
    parameters: ThinkerParameters,
    requests: list[Request],
    alone: dict[int, Answer],
    pattern: ArrivalPattern,
) -> None:
    answers = thinker_clients.answer_together(worker, parameters, requests, pattern)
    likeness = compare(answers, alone, requests)
    assert likeness.same_tokens == NUM_REQUESTS
    assert likeness.gap <= TOLERANCE


def test_a_wrong_token_is_distinguished_from_one_that_rounding_decides(
    requests: list[Request], alone: dict[int, Answer]
) -> None:
    """Two equally likely tokens: a random number at their boundary allows either, any other allows one."""
    index, place = 1, 2
    request = requests[index]
    assert request.sampling.draws and request.sampling.repetition_penalty == 1.0
    point = uniform(request.seed, place)
    logits = torch.full((place + 1, alone[index].logits.shape[1]), -1e4)
    logits[:, 3], logits[:, 7] = 0.0, 0.0
    at_edge = logits.clone()
    at_edge[place, 3] = request.sampling.temperature * math.log(
        point / (1 - point)
    )  # its share ends at the point
    moved = torch.zeros_like(logits)
    moved[place, 3] = 1e-4
    for own, expected in ((at_edge, 1), (logits, 0)):
        theirs = Answer(tokens=[3, 3, 3], logits=own)
        mine = Answer(tokens=[3, 3, 7], logits=own - moved)
        likeness = compare({index: mine}, {index: theirs}, requests)
        assert (likeness.same_tokens, likeness.at_an_edge) == (0, expected)
