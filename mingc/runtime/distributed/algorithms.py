"""All-reduce algorithms: the process group's collective, and one-shot and two-shot kernels over symmetric memory.

Each replaces a tensor by its sum over the ranks, gives the same bits on every rank, and can be captured in a CUDA
graph. `mingc.runtime.distributed.all_reduce` selects among them by measured time.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.host.machine import gpu_target
from mingc.runtime.engines import stream_priority

TWO_SHOT_WORLD_SIZES = (2, 4, 8)  # torch's two-shot kernel is compiled for these
_MAX_LANES = 4  # per two-shot all-reduce
_BLOCKS_PER_LANE = (
    24  # torch's two-shot kernel has at most so many thread blocks; each fills a multiprocessor
)
_MIN_LANE_BYTES = 2**21  # with fewer bytes per lane, a further lane costs more than it saves
_LANE_ALIGNMENT = 128  # bytes


class AllReduceAlgorithm(Protocol):
    """One way to all-reduce a tensor."""

    def all_reduce_(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over the ranks. Does not wait for the device."""
        ...


class CollectiveAllReduce:
    """The all-reduce of the process group: NCCL on GPUs, gloo on the CPU."""

    def all_reduce_(self, x: Tensor) -> None:
        dist.all_reduce(x)


class OneShotAllReduce:
    """Every rank reads the tensors of all ranks and adds them in rank order. For small messages.

    Args:
        max_bytes: size of the largest message. As much device memory is allocated, and the other ranks map it.

    The constructor is a collective.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, max_bytes: int) -> None:
        self._buffer = _SymmetricBuffer(device, dtype, max_bytes)

    def all_reduce_(self, x: Tensor) -> None:
        source = self._buffer.like(x)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(source, x, "sum", self._buffer.group_name, x)


class TwoShotAllReduce:
    """Every rank sums one share in rank order, then reads the sums of the other shares. For large messages.

    torch's kernel uses only a few multiprocessors, too few to saturate the links between the GPUs. A message is
    therefore split into lanes that run concurrently, each with its own stream and symmetric buffer: while one lane
    waits for the other ranks' writes, another lane copies. All lanes must be resident at once, because their thread
    blocks wait for the matching blocks of the other ranks.

    Args:
        max_bytes: size of the largest message. Up to 2.1 times as much device memory is allocated, and the other ranks
            map it.
        lanes: most lanes; None: as many as the device has room for.

    The constructor is a collective.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, max_bytes: int, lanes: int | None = None
    ) -> None:
        processors = gpu_target(device).num_multiprocessors
        count = max(1, min(lanes or _MAX_LANES, processors // _BLOCKS_PER_LANE))
        # Lane i is used only by messages split into more than i pieces, so its pieces fit into max_bytes // (i + 1).
        self._buffers = [_SymmetricBuffer(device, dtype, max_bytes // lane) for lane in range(1, count + 1)]
        self._streams = [
            torch.cuda.Stream(device, priority=stream_priority.COMMUNICATION)  # type: ignore[no-untyped-call]
            for _ in range(count - 1)
        ]

    def all_reduce_(self, x: Tensor) -> None:
        pieces = split_into_lanes(x, min(len(self._buffers), x.nbytes // _MIN_LANE_BYTES))
        main = torch.cuda.current_stream(x.device)
        start = main.record_event()
        lanes = list(zip(self._streams, self._buffers[1:], pieces[1:], strict=False))
        for stream, buffer, piece in lanes:
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                _two_shot_(piece, buffer)
        _two_shot_(pieces[0], self._buffers[0])
        for stream, _, _ in lanes:
            main.wait_event(stream.record_event())


def split_into_lanes(x: Tensor, count: int) -> list[Tensor]:
    """Split `x`, contiguous, into at most `count` flat views of equal length; the last one may be shorter."""
    flat = x.view(-1)
    step = _LANE_ALIGNMENT // x.itemsize
    size = -(-flat.numel() // (max(count, 1) * step)) * step
    return [flat[start : start + size] for start in range(0, flat.numel(), size)]


class _SymmetricBuffer:
    """Memory of this device that the other ranks read and write."""

    def __init__(self, device: torch.device, dtype: torch.dtype, max_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None, "the process group is initialized"
        self.group_name = group.group_name
        self._buffer = symmetric_memory.empty(max_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._peers = symmetric_memory.rendezvous(self._buffer, self.group_name)

    def like(self, x: Tensor) -> Tensor:
        """A view of its first values in the shape of `x`."""
        return self._buffer[: x.numel()].view(x.shape)


def _two_shot_(piece: Tensor, buffer: _SymmetricBuffer) -> None:
    """All-reduce `piece` in place. The kernel starts and ends with a barrier, after which the buffer is free again."""
    copy = buffer.like(piece)
    copy.copy_(piece)
    torch.ops.symm_mem.two_shot_all_reduce_out(copy, "sum", buffer.group_name, piece)
