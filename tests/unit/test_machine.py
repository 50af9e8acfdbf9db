"""What a machine says of itself."""

from __future__ import annotations

import pytest
import torch

from mingc.machine import this_machine


def test_without_a_gpu_a_machine_for_cuda_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert this_machine("cuda") == this_machine("cpu")
    assert this_machine("cpu").device == "cpu"
