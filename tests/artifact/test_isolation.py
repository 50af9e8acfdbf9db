"""An answer depends only on its own request: not on other requests, the batch, or the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from mingc_command import Server
from mixed_clients import Answer, Request, send, send_together
from mixed_requests import MIXED

# GEMMs of another batch size sum in another order; after one more patch the difference is still below this.
TOLERANCE = 2e-4
SAMPLES_PER_PATCH = 14112  # 0.32 s at 44.1 kHz


@pytest.fixture(scope="module")
def alone(server: Server) -> list[Answer]:
    return [send(server.url, request) for request in MIXED]


def test_the_requests_differ_and_have_audio(alone: list[Answer]) -> None:
    assert len({answer.text for answer in alone[:6]}) == 6
    spoken = [answer for answer in alone if answer.samples.size]
    assert len(spoken) == 4
    assert all(answer.samples.size % SAMPLES_PER_PATCH == 0 for answer in spoken)
    assert all(np.abs(answer.samples).max() > 1e-3 for answer in spoken)


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3, 4, 5, 6, 7), (7, 3, 5, 1, 6, 2, 4, 0)], ids=["given", "shuffled"]
)
def test_a_batch_of_eight_gives_the_same_answers_as_alone(
    server: Server, alone: list[Answer], order: tuple[int, ...]
) -> None:
    together = send_together(server.url, [MIXED[index] for index in order])
    for index, answer in zip(order, together, strict=True):
        _assert_same(answer, alone[index])


def test_two_ranks_give_the_same_answers_as_one(two_rank_server: Server, alone: list[Answer]) -> None:
    for answer, expected in zip(send_together(two_rank_server.url, MIXED), alone, strict=True):
        _assert_same(answer, expected)


def test_another_seed_gives_another_sound(server: Server, alone: list[Answer]) -> None:
    request = Request(path=MIXED[6].path, body={**MIXED[6].body, "seed": 99})
    other = send(server.url, request)
    assert other.samples.shape == alone[6].samples.shape
    assert np.abs(other.samples - alone[6].samples).max() > 1e-2


def _assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.text == expected.text
    assert answer.samples.shape == expected.samples.shape
    if answer.samples.size:
        scale = np.abs(expected.samples).max()
        assert np.abs(answer.samples - expected.samples).max() <= TOLERANCE * scale
