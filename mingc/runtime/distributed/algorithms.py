"""Ways to sum a tensor over the ranks: the group's own collective, and two over memory that the GPUs share.

All replace a tensor by the sum, give the same bits on every rank, and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.host import gpu_target

TWO_SHOT_RANKS = (2, 4, 8)  # that torch's kernel is compiled for
_LANES = 4  # of a two-shot sum at most
_LANE_BLOCKS = 24  # thread blocks of torch's two-shot kernel at most, each of a whole multiprocessor
_LANE_BYTES = 2**21  # of a message, from which on a lane is worth being started
_LANE_ALIGNMENT = 128  # bytes
_FIRST = -1  # priority: other ranks wait for every lane


class Method(Protocol):
    """One way to sum up."""

    def reduce_(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over the ranks. Does not wait for the device."""
        ...


class Collective:
    """The group's own all-reduce."""

    def reduce_(self, x: Tensor) -> None:
        dist.all_reduce(x)


class OneShot:
    """Each rank reads the parts of all and adds them itself, in the order of the ranks: for small messages.

    Args:
        max_bytes: of a message. So much of the device's memory is kept, open to the other ranks.

    Making one is a collective.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, max_bytes: int) -> None:
        self._shared = _Shared(device, dtype, max_bytes)

    def reduce_(self, x: Tensor) -> None:
        shared = self._shared.like(x)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._shared.group_name, x)


class TwoShot:
    """Each rank adds up its own share in the order of the ranks, then all read the others' sums: for large messages.

    torch's kernel does it all on a few multiprocessors, which are not enough for the links between the GPUs. A message
    is therefore cut into as many lanes as fit beside each other, with a stream and shared memory each; while one
    waits for the others' writes, another one copies. They must fit: a block waits for its fellows on the other ranks.

    Args:
        max_bytes: of a message. So much of the device's memory is kept, open to the other ranks.
        lanes: at most; None for what the device has room for.

    Making one is a collective.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, max_bytes: int, lanes: int | None = None
    ) -> None:
        processors = gpu_target(device).num_multiprocessors
        count = max(1, min(lanes or _LANES, processors // _LANE_BLOCKS))
        # So many lanes are taken together that their pieces are no longer than this.
        self._shared = [_Shared(device, dtype, max_bytes // lane) for lane in range(1, count + 1)]
        self._streams = [
            torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]
            for _ in range(count - 1)
        ]

    def reduce_(self, x: Tensor) -> None:
        pieces = cut(x, min(len(self._shared), x.nbytes // _LANE_BYTES))
        own = torch.cuda.current_stream(x.device)
        begin = own.record_event()
        lanes = list(zip(self._streams, self._shared[1:], pieces[1:], strict=False))
        for stream, shared, piece in lanes:
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                _two_shot_(piece, shared)
        _two_shot_(pieces[0], self._shared[0])
        for stream, _, _ in lanes:
            own.wait_event(stream.record_event())


def cut(x: Tensor, count: int) -> list[Tensor]:
    """`x`, contiguous, in at most `count` flat pieces one behind the other, as long as each other but for the last."""
    flat = x.view(-1)
    step = _LANE_ALIGNMENT // x.itemsize
    size = -(-flat.numel() // (max(count, 1) * step)) * step
    return [flat[start : start + size] for start in range(0, flat.numel(), size)]


class _Shared:
    """Memory of this device that the other ranks read and write."""

    def __init__(self, device: torch.device, dtype: torch.dtype, max_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None, "the ranks have met"
        self.group_name = group.group_name
        self._buffer = symmetric_memory.empty(max_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._peers = symmetric_memory.rendezvous(self._buffer, self.group_name)

    def like(self, x: Tensor) -> Tensor:
        """Its first values in the shape of `x`."""
        return self._buffer[: x.numel()].view(x.shape)


def _two_shot_(piece: Tensor, shared: _Shared) -> None:
    """Replace `piece` by its sum. The kernel begins and ends with a meeting of all ranks: memory is free again then."""
    copy = shared.like(piece)
    copy.copy_(piece)
    torch.ops.symm_mem.two_shot_all_reduce_out(copy, "sum", shared.group_name, piece)
