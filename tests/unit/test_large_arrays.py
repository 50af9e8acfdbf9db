"""Large arrays: as NumPy's, but their memory goes back to the system in steps, by another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mingc.host import large_arrays
from mingc.runtime.encoders import host_tensors

LARGE = 5 << 20
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_arrays, "LARGE_BYTES", LARGE)


def is_mapped(address: int) -> bool:
    """Whether this process has memory at `address`, by the kernel's list."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def wait_until_unmapped(address: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while is_mapped(address):
        assert time.monotonic() < deadline, "the memory is kept"
        time.sleep(0.005)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Thread, start and size of each step in which memory is returned."""
    found: list[tuple[int, int, int]] = []

    class Recorded(large_arrays._Block):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            found.append((threading.get_ident(), start, min(length, len(self) - start)))
            super().madvise(option, start, length)

    monkeypatch.setattr(large_arrays, "_Block", Recorded)
    yield found


@pytest.mark.parametrize("dtype", ["u1", "<f4", "<f8"])
@pytest.mark.parametrize("shape", [0, (0, 3), (), (5, 7), (3, 2 << 20), (1025, 513, 17)])
def test_they_are_used_like_other_arrays(shape: int | tuple[int, ...], dtype: str) -> None:
    expected = np.empty(shape, dtype)
    array = large_arrays.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (expected.shape, expected.dtype, expected.strides)
    values = np.random.default_rng(1).integers(0, 200, expected.shape).astype(dtype)
    array[...] = values
    np.testing.assert_array_equal(array, values)
    assert array.data.contiguous and not array.data.readonly


@pytest.mark.parametrize("size", [LARGE, LARGE + 1, 3 * LARGE - 5])
def test_memory_goes_back_in_small_steps_in_another_thread(
    size: int, steps: list[tuple[int, int, int]]
) -> None:
    array = large_arrays.empty(size, np.uint8)
    array[:] = 1
    address = array.ctypes.data
    assert is_mapped(address) and not steps
    del array
    wait_until_unmapped(address)
    assert {thread for thread, _, _ in steps}.isdisjoint({threading.get_ident()})
    assert max(count for _, _, count in steps) <= 4 << 20
    ends = [start + count for _, start, count in steps]
    assert [start for _, start, _ in steps] == [0, *ends[:-1]] and ends[-1] == size, "every byte once"


def test_memory_is_kept_as_long_as_anything_views_it() -> None:
    expected = np.random.default_rng(2).integers(0, 256, LARGE, np.uint8)
    array = large_arrays.empty(LARGE, np.uint8)
    array[:] = expected
    view, rows = array.data[5:], torch.from_numpy(array).view(2, -1)[1]
    other = large_arrays.empty(LARGE, np.uint8)
    other[:] = 0
    address, other_address = array.ctypes.data, other.ctypes.data
    del array
    del other
    wait_until_unmapped(other_address)  # it was dropped later
    assert bytes(view) == expected[5:].tobytes()
    np.testing.assert_array_equal(rows.numpy(), expected[LARGE // 2 :])
    del view
    assert is_mapped(address)
    del rows
    wait_until_unmapped(address)


def test_memory_does_not_pile_up_while_its_thread_gets_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads that keep Python's lock slow it down to a tenth of the rate at which arrays are dropped."""
    turn = threading.Event()

    class Late(large_arrays._Block):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            turn.wait(WAIT_S)
            super().madvise(option, start, length)

    monkeypatch.setattr(large_arrays, "_Block", Late)
    arrays = [large_arrays.empty(LARGE, np.uint8) for _ in range(30)]
    addresses = [array.ctypes.data for array in arrays]
    try:
        while arrays:
            arrays.pop()
        assert 1 <= sum(map(is_mapped, addresses)) <= 5
    finally:
        turn.set()
    for address in addresses:
        wait_until_unmapped(address)


def test_the_memory_of_all_arrays_is_returned_by_one_thread() -> None:
    arrays = [large_arrays.empty(LARGE, np.uint8)]
    threads = set(threading.enumerate())
    arrays += [large_arrays.empty(LARGE, np.uint8) for _ in range(3)]
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_parts_are_joined_as_bytes_are(count: int) -> None:
    generator = np.random.default_rng(3)
    parts = [generator.bytes(int(size)) for size in generator.integers(1, 100_000, count)]
    expected = b"".join(parts)
    assert large_arrays.join(parts) == expected
    assert parts == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_are_copied_and_concatenated_as_by_torch(dtype: torch.dtype) -> None:
    values = torch.randn(1500, 4096, generator=torch.Generator().manual_seed(4)).to(dtype)
    parts = [values[:3], values[3:1000], values[1000:]]
    for found in (host_tensors.copy(values), host_tensors.concatenate(parts)):
        assert found.is_contiguous() and found.data_ptr() != values.data_ptr()
        assert torch.equal(found, values)
    across = host_tensors.copy(values.T)
    assert across.is_contiguous() and torch.equal(across, values.T)
    address = across.data_ptr()
    del across
    wait_until_unmapped(address)
