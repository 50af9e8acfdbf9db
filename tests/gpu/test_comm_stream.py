"""Work on the communication stream runs after queued work and before whatever waits for it, called and captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mingc.runtime.engines.cuda_graphs import GraphPool
from mingc.runtime.thinker.layers import CommStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE, ROUNDS = 2048, 8


def test_started_work_runs_between_start_and_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    side = CommStream(device)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, device=device))[0]
    x, beside = (torch.ones(SIZE, SIZE, dtype=torch.float64, device=device) for _ in range(2))

    def run() -> tuple[Tensor, ...]:
        flows = [x.clone(), x.clone()]
        waits = [lambda: None, lambda: None]
        for _ in range(ROUNDS):
            for index in range(2):
                waits[index]()
                flows[index] = turn @ flows[index]  # long, so that reading without waiting gets the old value
                waits[index] = side.start(lambda flow=flows[index]: flow.mul_(2).add_(beside))  # type: ignore[misc]
        for wait in waits:
            wait()
        return tuple(flows)

    expected = x.clone()
    for _ in range(ROUNDS):
        expected = 2 * (turn @ expected) + beside
    graph, captured = GraphPool(device).capture(run, "work beside")
    for _ in range(5):
        graph.replay()
        called = run()
        for flow in (*called, *captured):
            torch.testing.assert_close(flow, expected)
