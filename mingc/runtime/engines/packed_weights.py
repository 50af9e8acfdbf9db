"""Maps weights inside a packed bundle, and finds their bytes: the library safetensors does neither.

File format: 8 bytes with the length of the header, the header as JSON (name → dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mingc.artifacts.file_region import FileRegion
from mingc.dtypes import SAFETENSORS_NAMES

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the library


class PackedWeights:
    """The tensors of a safetensors file, which a bundle may hold, with the methods of `safe_open` that mingc uses.

    Raises: SafetensorError when the header is damaged.
    """

    def __init__(self, region: FileRegion) -> None:
        self._region = region
        self._content = region.mapped() if region.size_bytes else memoryview(b"")
        try:
            self._tensors, self._metadata, self._start = self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SafetensorError(f"the header is damaged: {error}") from error

    def _read_header(self) -> tuple[dict[str, tuple[torch.dtype, list[int], int]], dict[str, str], int]:
        size = int.from_bytes(self._content[:8], "little")
        if not 2 <= size <= min(_MAX_HEADER_BYTES, len(self._content) - 8):
            raise ValueError(f"its length is {size} bytes")
        header: dict[str, Any] = json.loads(bytes(self._content[8 : 8 + size]))
        metadata = header.pop("__metadata__", {})
        tensors, covered = {}, 0
        for name, each in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = each["data_offsets"]
            dtype, shape = _DTYPES[each["dtype"]], [int(size) for size in each["shape"]]
            if (
                begin != covered
                or end - begin != math.prod(shape) * dtype.itemsize
                or min(shape, default=0) < 0
            ):
                raise ValueError(f"the offsets of {name} do not fit its shape")
            tensors[name], covered = (dtype, shape, begin), end
        if 8 + size + covered != len(self._content):
            raise ValueError("its tensors do not fill the file")
        return tensors, metadata, 8 + size

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def metadata(self) -> dict[str, str]:
        """Strings that the writer added."""
        return self._metadata

    def location(self, name: str) -> tuple[Path, int]:
        """The file on disk that holds the tensor `name`, and the tensor's offset in it."""
        return self._region.path, self._region.offset + self._start + self._tensors[name][2]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Map a tensor; its bytes are not read yet. Raises: SafetensorError for an unknown name."""
        if name not in self._tensors:
            raise SafetensorError(f"File does not contain tensor {name}")
        dtype, shape, begin = self._tensors[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=self._start + begin).view(
            shape
        )
