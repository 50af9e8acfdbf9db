"""Host tensors whose memory returns to the system without stopping other threads (`large_arrays`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mingc.host import large_arrays


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like `torch.empty`, on the host."""
    memory = large_arrays.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(*shape)


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Like `torch.cat(parts)`."""
    first = parts[0]
    return torch.cat(list(parts), out=empty((sum(map(len, parts)), *first.shape[1:]), first.dtype))


def copy(values: Tensor) -> Tensor:
    """Like `values.clone()`, contiguous."""
    return empty(values.shape, values.dtype).copy_(values)
