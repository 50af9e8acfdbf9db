"""What a machine says of itself."""

from __future__ import annotations

import pytest
import torch

from mingc.host import current_host


def test_without_a_gpu_a_machine_for_cuda_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_host("cuda") == current_host("cpu")
    assert current_host("cpu").device == "cpu"
