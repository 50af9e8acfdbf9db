"""Encoding of steps between ranks."""

from __future__ import annotations

import io
import socket
from typing import Any

import numpy as np
import pytest
import torch

from mingc.errors import WorkerError
from mingc.runtime.thinker.ranks import step_codec
from mingc.runtime.thinker.ranks.step_codec import Step, broadcast_step, receive_step
from mingc.runtime.thinker.step import DecodeStep, PrefillStep, SampleStep


def test_steps_are_received_unchanged() -> None:
    ours, theirs = socket.socketpair()
    steps: list[Step] = [
        PrefillStep(
            input_ids=np.arange(5),
            positions=np.arange(15).reshape(3, 5) - 4,
            embed_kind=np.array([0, 1, 0, 2, 0]),
            embeds=torch.randn(5, 4).bfloat16(),
            counts=np.array([3, 2]),
            starts=np.array([7, 0]),
            pages=np.array([[4, 2], [5, 0]]),
            slots=np.array([3, 1]),
            ended=np.array([1]),
            sampling=np.random.default_rng(2).random((1, 6)),
        ),
        PrefillStep(
            input_ids=np.arange(2),
            positions=np.zeros((3, 2), np.int64),
            embed_kind=np.zeros(2, np.int64),
            embeds=None,
            counts=np.array([2]),
            starts=np.array([3]),
            pages=np.array([[1]]),
            slots=np.array([0]),
            skipped_ids=np.array([8, 8, 9]),
            skipped_counts=np.array([3]),
        ),
        DecodeStep(
            input_ids=np.array([3, 4]),
            positions=np.array([8, 9]),
            lengths=np.array([9, 10]),
            pages=np.array([[1, 2], [3, 0]]),
        ),
        DecodeStep(
            input_ids=np.array([3, -1]),
            positions=np.array([8, 9]),
            lengths=np.array([9, 10]),
            pages=np.array([[1, 2], [3, 0]]),
            slots=np.array([2, 1]),
            sampling=np.random.default_rng(1).random((2, 6)),
        ),
        SampleStep(slots=np.array([2, 1]), sampling=np.random.default_rng(3).random((2, 6))),
    ]
    with ours, theirs:
        for step in steps:
            broadcast_step([ours], step, timeout_s=60)
            got = receive_step(theirs)
            assert type(got) is type(step)
            for name in step.__slots__:
                sent, received = getattr(step, name), getattr(got, name)
                if isinstance(sent, torch.Tensor):
                    assert torch.equal(sent, received) and sent.dtype == received.dtype
                else:
                    assert np.array_equal(sent, received), name
        ours.close()
        assert receive_step(theirs) is None


def test_embeddings_that_are_a_view_are_sent() -> None:
    ours, theirs = socket.socketpair()
    embeds = torch.randn(4, 6)[:, ::2]
    step = PrefillStep(
        input_ids=np.arange(4),
        positions=np.zeros((3, 4), np.int64),
        embed_kind=np.ones(4, np.int64),
        embeds=embeds,
        counts=np.array([4]),
        starts=np.array([0]),
        pages=np.array([[1]]),
        slots=np.array([0]),
    )
    with ours, theirs:
        broadcast_step([ours], step, timeout_s=60)
        received = receive_step(theirs)
    assert isinstance(received, PrefillStep) and received.embeds is not None
    assert torch.equal(received.embeds, embeds)


def make_decode_step() -> DecodeStep:
    return DecodeStep(
        input_ids=np.array([3]), positions=np.array([8]), lengths=np.array([9]), pages=np.array([[1]])
    )


def test_a_step_is_encoded_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = step_codec.encode_step, list[bytes]()

    def counted(step: Step) -> bytes:
        encoded.append(encode(step))
        return encoded[-1]

    monkeypatch.setattr(step_codec, "encode_step", counted)
    pairs = [socket.socketpair() for _ in range(3)]
    try:
        broadcast_step([ours for ours, _ in pairs], make_decode_step(), timeout_s=60)
        assert len(encoded) == 1
        for _, theirs in pairs:
            theirs.settimeout(10)
            assert theirs.recv(1 << 20) == encoded[0]
    finally:
        for pair in pairs:
            for sock in pair:
                sock.close()


def test_a_rank_that_has_closed_its_socket_is_named() -> None:
    alive, closed = socket.socketpair(), socket.socketpair()
    closed[1].close()
    try:
        with pytest.raises(WorkerError, match="rank 2 does not receive steps"):
            broadcast_step([alive[0], closed[0]], make_decode_step(), timeout_s=60)
        assert receive_step(alive[1]) is not None
    finally:
        for sock in (*alive, closed[0]):
            sock.close()


class SlowSocket:
    """The receiving end of a connection that delivers 3 bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def recv_into(self, buffer: memoryview) -> int:
        return self._data.readinto(buffer[:3])


def test_a_step_that_arrives_in_pieces_is_whole() -> None:
    data = step_codec.encode_step(make_decode_step())
    slow: Any = SlowSocket(data)
    step = receive_step(slow)
    assert isinstance(step, DecodeStep) and (step.input_ids.tolist(), step.pages.tolist()) == ([3], [[1]])
    assert receive_step(slow) is None
    for size in (2, 10, len(data) - 1):
        cut: Any = SlowSocket(data[:size])
        assert receive_step(cut) is None


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_read_is_named() -> None:
    pages = np.zeros((1000, 1000), np.int64)  # more than a socket buffers
    step = DecodeStep(input_ids=np.array([3]), positions=np.array([8]), lengths=np.array([9]), pages=pages)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(WorkerError, match="rank 1 does not receive steps: timed out"):
        broadcast_step([ours], step, timeout_s=0.1)
