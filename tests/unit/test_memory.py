"""Memory account: sums by device and owner, and the lines of the log."""

from __future__ import annotations

import logging

import pytest
import torch

from mingc.runtime.request import MemoryUse
from mingc.runtime.service.build_context import HOST, MemoryAccount, free_bytes


def test_bytes_of_one_owner_on_one_device_are_added_up() -> None:
    memory = MemoryAccount()
    memory.add(torch.device("cuda", 1), "talker_slots", 5)
    memory.add(torch.device("cuda", 0), "kv_pages", 7)
    memory.add(torch.device("cuda", 1), "talker_slots", 6)
    memory.add(torch.device("cuda", 0), "talker_slots", 1)
    assert set(memory.uses) == {
        MemoryUse(device="cuda:0", owner="kv_pages", num_bytes=7),
        MemoryUse(device="cuda:0", owner="talker_slots", num_bytes=1),
        MemoryUse(device="cuda:1", owner="talker_slots", num_bytes=11),
    }


def test_each_device_has_one_line_with_what_is_free_where_that_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = MemoryAccount()
    memory.add("cuda:0", "thinker_weights", 95 << 30)
    memory.add(HOST, "encoder_cache", 512 << 20)
    memory.add("cuda:1", "talker_weights", 3 << 19)
    memory.add("cuda:0", "kv_pages", 1 << 30)
    with caplog.at_level(logging.INFO, "mingc.startup"):
        memory.log({"cuda:0": 10 << 20, "cuda:7": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "memory of cuda:0: thinker_weights 97,280.0 MiB, kv_pages 1,024.0 MiB; free 10.0 MiB",
        "memory of cuda:1: talker_weights 1.5 MiB",
        "memory of host: encoder_cache 512.0 MiB",
    ]


def test_only_cuda_devices_have_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 + device.index, 1000))
    devices = [torch.device("cpu"), torch.device("cuda", 2), torch.device("cuda", 0)]
    assert free_bytes(devices) == {"cuda:2": 102, "cuda:0": 100}
