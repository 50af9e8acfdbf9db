"""All-reduce: selection from measured times, one rank, two processes with gloo, several GPUs."""

from __future__ import annotations

import os

import pytest
import torch
from all_reduce_group import run_ranks
from all_reduce_rank import rank_input

from mingc.errors import WorkerError
from mingc.runtime.distributed import process_group
from mingc.runtime.distributed.algorithms import split_into_lanes
from mingc.runtime.distributed.all_reduce import (
    AlgorithmName,
    Algorithms,
    AllReduce,
    AllReduceTiming,
    _is_candidate,
    create_all_reduce,
    select_algorithms,
)

NUM_GPUS = torch.cuda.device_count()


def timing(
    num_bytes: int, collective_us: float, one_shot_us: float | None = None, two_shot_us: float | None = None
) -> AllReduceTiming:
    us: dict[AlgorithmName, float | None] = {
        "collective": collective_us,
        "one-shot": one_shot_us,
        "two-shot": two_shot_us,
    }
    return AllReduceTiming(
        num_bytes=num_bytes, us={name: value for name, value in us.items() if value is not None}
    )


TIMINGS = (
    timing(2**13, 14.0, 7.0),
    timing(2**16, 15.0, 9.0, 12.0),
    timing(2**18, 16.0, 17.0, 16.0),
    timing(2**20, 21.0, 19.0, 18.0),
    timing(2**25, 190.0, None, 140.0),
)


def test_the_fastest_algorithm_is_selected_for_each_size() -> None:
    plan = select_algorithms(TIMINGS[::-1], world_size=4, backend="nccl")
    assert plan.timings == TIMINGS
    for num_bytes, name in (
        (1, "one-shot"),
        (2**13, "one-shot"),
        (2**16, "one-shot"),
        (2**16 + 1, "collective"),  # wins the tie with two-shot
        (2**18, "collective"),
        (2**20, "two-shot"),
        (2**25, "two-shot"),
        (2**25 + 1, "collective"),  # not measured
    ):
        assert plan.algorithm(num_bytes) == name, num_bytes


def test_the_reason_names_size_ranges_times_and_what_is_unavailable() -> None:
    plan = select_algorithms(TIMINGS, world_size=4, backend="nccl", unavailable_reason="no peer access")
    assert plan.reason == (
        "one-shot up to 65536 bytes (µs: nccl 15.0, one-shot 9.0, two-shot 12.0), "
        "nccl up to 262144 bytes (µs: nccl 16.0, one-shot 17.0, two-shot 16.0), "
        "two-shot up to 33554432 bytes (µs: nccl 190.0, two-shot 140.0); no peer access"
    )
    plan = select_algorithms((), world_size=2, backend="gloo", unavailable_reason="no peer access")
    assert plan.reason == "no peer access"


class Recorder:
    """An algorithm that records the size of each message."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def all_reduce_(self, x: torch.Tensor) -> None:
        self.sizes.append(x.nbytes)


def test_a_message_is_dispatched_by_its_size_and_dtype() -> None:
    plan = select_algorithms((timing(64, 2, 1), timing(128, 3, None, 2)), world_size=2, backend="nccl")
    collective, one_shot, two_shot = Recorder(), Recorder(), Recorder()
    algorithms: Algorithms = {"collective": collective, "one-shot": one_shot, "two-shot": two_shot}
    all_reduce = AllReduce(plan, algorithms, torch.bfloat16)
    for rows, dtype in ((2, torch.bfloat16), (3, torch.bfloat16), (5, torch.bfloat16), (1, torch.float32)):
        all_reduce.all_reduce_(torch.zeros((rows, 16), dtype=dtype))
    assert one_shot.sizes == [64] and two_shot.sizes == [96] and collective.sizes == [160, 64]


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (2**13, ["collective", "one-shot"]),
        (2**17, ["collective", "one-shot", "two-shot"]),
        (2**22, ["collective", "one-shot", "two-shot"]),
        (2**22 + 16, ["collective", "two-shot"]),
        (2**30, ["collective", "two-shot"]),
    ],
)
def test_only_small_messages_get_buffers_of_the_one_shot_kernel(num_bytes: int, expected: list[str]) -> None:
    names: tuple[AlgorithmName, ...] = ("collective", "one-shot", "two-shot")
    assert [name for name in names if _is_candidate(name, num_bytes)] == expected


@pytest.mark.timeout(60)
def test_a_group_that_does_not_come_together_says_so_and_leaves_multicast_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")  # what a user sets is kept
    store = process_group.host_store(timeout_s=5)
    # torch counts a group that was not joined; the next one of this process would have another name than its peers'.
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "group_count", 0)
    with pytest.raises(WorkerError, match="rank 0 of 2 cannot join the group") as error:
        process_group.init(rank=0, world_size=2, port=store.port, timeout_s=0.5)
    assert error.value.where == f"port {store.port}"
    assert os.environ["NCCL_NVLS_ENABLE"] == "2"
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert process_group.num_ranks() == 1


@pytest.mark.parametrize("numel", [8, 64, 65 * 8, 1000 * 8, 4096 * 8 + 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_lanes_cover_a_message_once_and_are_aligned(numel: int, count: int) -> None:
    x = torch.zeros(numel, dtype=torch.bfloat16)
    pieces = split_into_lanes(x, count)
    for piece in pieces:
        assert piece.data_ptr() % 16 == x.data_ptr() % 16 and piece.nbytes % 16 == 0
        piece += 1
    assert torch.equal(x, torch.ones_like(x)) and len(pieces) <= max(count, 1)
    # The buffer of a lane holds an even share of the longest message with as many lanes.
    assert all(len(piece) <= -(-numel // max(count, 1)) + 63 for piece in pieces)


def test_one_rank_leaves_the_tensor_unchanged() -> None:
    all_reduce = create_all_reduce(torch.device("cpu"), torch.float32, width=8, tokens=(1, 2))
    x = torch.ones(2, 8)
    all_reduce.all_reduce_(x)
    assert torch.equal(x, torch.ones(2, 8)) and all_reduce.plan.backend == "none"


def test_two_processes_get_the_same_sums_columns_and_values_of_rank_0() -> None:
    rows, width = [1, 7, 64], 32
    results = run_ranks(2, "cpu", dtype="float32", width=width, tokens=[1, 8], rows=rows, repeated=[])
    for result in results:
        assert result["plan"]["backend"] == "gloo" and not result["plan"]["timings"]
        assert "they need CUDA devices" in result["plan"]["reason"]
        for count, total in zip(rows, result["sums"], strict=True):
            expected = rank_input(0, count, width) + rank_input(1, count, width)
            assert torch.equal(torch.tensor(total), expected)
        own, other = (rank_input(rank, rows[0], width) for rank in range(2))
        assert torch.equal(torch.tensor(result["gathered"]), torch.cat([own, other], dim=1))
        assert torch.equal(torch.tensor(result["broadcast"]), own)
        assert result["agree"] == [False, True]


def test_one_rank_needs_no_group_to_gather_and_broadcast() -> None:
    x = torch.ones(2, 3)
    process_group.broadcast_from_rank0_(x)
    assert process_group.all_gather_last(x) is x and process_group.num_ranks() == 1


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_gpus_get_the_same_bits_eager_and_replayed(world_size: int) -> None:
    if world_size > NUM_GPUS:
        pytest.skip(f"needs {world_size} CUDA devices")
    rows, width, sizes = [1, 16, 64, 100], 4096, [1, 16, 64, 128, 1024]
    repeated = [1, 33, 1023, 4095]  # 4,095 rows are an odd number of vectors per rank and lane
    results = run_ranks(
        world_size, "cuda", dtype="bfloat16", width=width, tokens=sizes, rows=rows, repeated=repeated
    )
    assert all(result == results[0] for result in results)
    assert not any(results[0]["wrong"]), results[0]["wrong"]
    first, last = (results[0]["plan"]["timings"][index] for index in (0, -1))
    assert "one-shot" in first["us"] and "two-shot" in last["us"]
    assert results[0]["sums"] == results[0]["replayed"]
    for count, total in zip(rows, results[0]["sums"], strict=True):
        inputs = [rank_input(rank, count, width).to(torch.bfloat16).float() for rank in range(world_size)]
        expected = torch.stack(inputs).sum(0)
        error = (torch.tensor(total) - expected).abs().max() / expected.abs().max()
        assert error < 1e-2
