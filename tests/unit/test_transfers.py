"""Transfer rates: bytes over seconds of each kind, with devices and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from mingc.probe import transfers
from mingc.probe.report import Transfer
from mingc.probe.transfers import best_seconds, measure_transfers

SIZE = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(transfers, "NUM_BYTES", SIZE)
    monkeypatch.setattr(transfers, "nccl_all_reduce", lambda tensors: None)
    return []


def half_a_second(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
    run()
    return 0.5


def by_name(rows: Sequence[Transfer]) -> dict[str, Transfer]:
    assert len({row.transfer for row in rows}) == len(rows)
    return {row.transfer: row for row in rows}


def test_a_machine_without_a_gpu_measures_its_host_memory_alone(steps: list[str]) -> None:
    rows = by_name(measure_transfers(steps.append, [], half_a_second))
    assert steps == ["transfer rates"]
    copy, read = rows.pop("host memory, copy (read + write)"), rows.pop("host memory, read")
    assert (copy.num_bytes, copy.ms, copy.gb_s) == (2 * SIZE, 500.0, round(4 * SIZE / 1e9, 3))
    assert (read.num_bytes, read.ms, read.gb_s) == (SIZE, 500.0, round(2 * SIZE / 1e9, 3))
    assert [*rows] == [
        "host to GPU, pinned",
        "GPU to host, pinned",
        "host to GPU, pageable",
        "GPU to host, pageable",
        "GPU to GPU, peer copy",
        "NCCL all-reduce, bus bandwidth",
    ]
    for row in rows.values():
        assert (row.num_bytes, row.ms, row.gb_s, row.not_run) == (0, None, None, "no CUDA device")
        assert row.cells()["mb"] is None and row.cells()["not_run"] == "no CUDA device"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_gpu_and_every_pair_has_its_rows(
    count: int, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices of type `meta` stand for GPUs: copies from and to them are asked for and move nothing."""
    pinned: list[bool] = []
    waited: list[tuple[torch.device, ...]] = []
    gpus = [torch.device("meta", index) for index in range(count)]

    def block(*, is_pinned: bool) -> torch.Tensor:
        pinned.append(is_pinned)
        return torch.empty(SIZE, dtype=torch.uint8, device="meta")

    def timer(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
        waited.append(tuple(devices))
        return half_a_second(run, devices)

    monkeypatch.setattr(transfers, "host_block", block)
    rows = by_name(measure_transfers(steps.append, gpus, timer))
    for gpu in gpus:
        for name in (f"host to {gpu}, ", f"{gpu} to host, "):
            for kind in ("pinned", "pageable"):
                row = rows.pop(name + kind)
                assert (row.num_bytes, row.gb_s, row.not_run) == (SIZE, round(2 * SIZE / 1e9, 3), "")
    assert pinned == [True, False] * count
    host = [name for name in rows if name.startswith("host memory")]
    assert len(host) == 2 and all(rows.pop(name).gb_s for name in host)
    if count == 1:
        assert {row.not_run for row in rows.values()} == {"1 of 2 CUDA devices"} and len(rows) == 2
        return
    reduced = rows.pop(f"NCCL all-reduce of {count} GPUs, bus bandwidth")
    assert reduced.num_bytes == 2 * (count - 1) * SIZE // count, "what each sends in a ring"
    assert set(rows) == {f"{one} to {other}, peer copy" for one in gpus for other in gpus if one != other}
    assert all(row.num_bytes == SIZE for row in rows.values())
    assert waited[-1] == tuple(gpus), "all devices have finished"
    assert {frozenset(pair) for pair in waited[-1 - len(rows) : -1]} == {
        frozenset((one, other)) for one in gpus for other in gpus if one != other
    }


def test_memory_that_does_not_suffice_is_a_row_that_is_not_run(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def block(*, is_pinned: bool) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    def refuse(tensors: list[torch.Tensor]) -> None:
        raise RuntimeError("NCCL Error 1: unhandled cuda error")

    monkeypatch.setattr(transfers, "host_block", block)
    monkeypatch.setattr(transfers, "nccl_all_reduce", refuse)
    gpus = [torch.device("meta", 0), torch.device("meta", 1)]
    rows = by_name(measure_transfers(steps.append, gpus, half_a_second))
    assert rows["host to meta:0, pinned"].not_run == "CUDA error: out of memory"
    assert rows["meta:1 to host, pageable"].gb_s is None
    assert rows["NCCL all-reduce of 2 GPUs, bus bandwidth"].not_run == "NCCL Error 1: unhandled cuda error"
    assert rows["meta:0 to meta:1, peer copy"].gb_s is not None


def test_the_fastest_sample_counts_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of 8, 4, 2 … seconds for 4 calls each; the first one is not counted."""
    clock = iter([0.0, 0.1, 10.0, 18.0, 20.0, 24.0, 30.0, 32.0, 40.0, 46.0, 50.0, 57.0])
    monkeypatch.setattr("mingc.probe.transfers.time.perf_counter", lambda: next(clock))
    calls: list[int] = []
    assert best_seconds(lambda: calls.append(1), [CPU]) == 2.0 / 4
    assert len(calls) == 6 * 4


def test_a_copy_moves_all_bytes_in_the_direction_of_its_name(steps: list[str]) -> None:
    target, source = torch.zeros(SIZE, dtype=torch.uint8), transfers.host_block(is_pinned=False)
    assert int(source.sum()) == SIZE, "its pages are written"
    transfers._copy(target, source)()
    assert torch.equal(target, source)
