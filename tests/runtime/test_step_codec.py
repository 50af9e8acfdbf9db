"""Steps between ranks."""

from __future__ import annotations

import socket

import numpy as np
import torch

from mingc.runtime.thinker.ranks.step_codec import Step, receive_step, send_step
from mingc.runtime.thinker.step import DecodeStep, PrefillStep


def test_steps_cross_the_wire_unchanged() -> None:
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
            starts=np.array([0]),
            pages=np.array([[1]]),
            slots=np.array([0]),
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
    ]
    with ours, theirs:
        for step in steps:
            send_step(ours, step)
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
