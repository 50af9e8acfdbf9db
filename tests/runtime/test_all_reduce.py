"""Sums over ranks: what is chosen from measurements, one rank, two processes with gloo, several GPUs."""

from __future__ import annotations

import pytest
import torch
from reducer_group import run_ranks
from reducer_rank import part

from mingc.runtime.all_reduce import ReduceChoice, Reducer, ReduceTiming, choose, make_reducer

NUM_GPUS = torch.cuda.device_count()


def timing(num_bytes: int, nccl_us: float, one_shot_us: float) -> ReduceTiming:
    return ReduceTiming(num_bytes=num_bytes, nccl_us=nccl_us, one_shot_us=one_shot_us)


def test_one_shot_is_chosen_up_to_the_first_size_it_loses_at() -> None:
    timings = [timing(8192, 14, 7), timing(65536, 15, 9), timing(262144, 16, 17), timing(524288, 20, 19)]
    choice = choose(timings, world_size=4, backend="nccl")
    assert choice.one_shot_bytes == 65536
    assert "65536" in choice.reason and "7.0" in choice.reason and "14.0" in choice.reason
    assert choose(timings[2:], world_size=4, backend="nccl").one_shot_bytes == 0


class Recorder:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def reduce_(self, x: torch.Tensor) -> None:
        self.sizes.append(x.nbytes)


def test_a_message_goes_where_its_size_and_type_belong() -> None:
    choice = ReduceChoice(world_size=2, backend="nccl", one_shot_bytes=64, reason="")
    collective, one_shot = Recorder(), Recorder()
    reducer = Reducer(choice, collective, one_shot, torch.bfloat16)
    for shape, dtype in (((2, 16), torch.bfloat16), ((3, 16), torch.bfloat16), ((1, 16), torch.float32)):
        reducer.reduce_(torch.zeros(shape, dtype=dtype))
    assert one_shot.sizes == [64] and collective.sizes == [96, 64]


def test_one_rank_sums_nothing() -> None:
    reducer = make_reducer(torch.device("cpu"), torch.float32, width=8, batch_sizes=(1, 2))
    x = torch.ones(2, 8)
    reducer.reduce_(x)
    assert torch.equal(x, torch.ones(2, 8)) and reducer.choice.backend == "none"


def test_two_processes_get_the_same_sums() -> None:
    rows, width = [1, 7, 64], 32
    results = run_ranks(2, "cpu", dtype="float32", width=width, batch_sizes=[1, 8], rows=rows)
    for result in results:
        assert result["choice"]["backend"] == "gloo" and result["choice"]["one_shot_bytes"] == 0
        for count, total in zip(rows, result["sums"], strict=True):
            expected = part(0, count, width) + part(1, count, width)
            assert torch.equal(torch.tensor(total), expected)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_gpus_get_the_same_bits_called_or_replayed(world_size: int) -> None:
    if world_size > NUM_GPUS:
        pytest.skip(f"needs {world_size} CUDA devices")
    rows, width, sizes = [1, 16, 64, 100], 4096, [1, 2, 4, 8, 16, 32, 64]
    results = run_ranks(world_size, "cuda", dtype="bfloat16", width=width, batch_sizes=sizes, rows=rows)
    assert all(result == results[0] for result in results)
    assert results[0]["choice"]["one_shot_bytes"] > 0, results[0]["choice"]["reason"]
    assert results[0]["sums"] == results[0]["replayed"]
    for count, total in zip(rows, results[0]["sums"], strict=True):
        parts = [part(rank, count, width).to(torch.bfloat16).float() for rank in range(world_size)]
        expected = torch.stack(parts).sum(0)
        error = (torch.tensor(total) - expected).abs().max() / expected.abs().max()
        assert error < 1e-2
