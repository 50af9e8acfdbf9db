"""Encodes thinker steps for the sockets between ranks as a JSON header and the raw arrays, without pickle.

`rank_group` encodes a step once and sends the same bytes to all ranks; `rank_process` decodes them.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mingc.errors import WorkerError
from mingc.runtime.thinker.step import DecodeStep, PrefillStep, SampleStep

Step = PrefillStep | DecodeStep | SampleStep

_LENGTH = struct.Struct("<I")
_NUM_PAGES = struct.Struct("<Q")
_TENSOR_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def encode_step(step: Step) -> bytes:
    """Serialize a step: length of the header, header, arrays."""
    header: dict[str, Any] = {"kind": type(step).__name__, "numbers": {}, "arrays": []}
    arrays: list[bytes] = []
    for name in step.__slots__:
        value = getattr(step, name)
        if isinstance(value, int):
            header["numbers"][name] = value
        elif isinstance(value, Tensor):
            host = value.detach().cpu().contiguous()
            header["arrays"].append((name, str(host.dtype), list(host.shape)))
            arrays.append(host.view(torch.uint8).numpy().tobytes())
        elif value is not None:
            host_array = np.ascontiguousarray(value)
            header["arrays"].append((name, str(host_array.dtype), list(host_array.shape)))
            arrays.append(host_array.tobytes())
    text = json.dumps(header).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *arrays))


def broadcast_step(sockets: Sequence[socket.socket], step: Step, *, timeout_s: float) -> None:
    """Encode a step once and send it to ranks 1, 2, … over `sockets`.

    Raises: WorkerError when a rank has closed its socket or does not read within `timeout_s`.
    """
    _broadcast(sockets, encode_step(step), timeout_s)


def broadcast_num_pages(sockets: Sequence[socket.socket], num_pages: int, *, timeout_s: float) -> None:
    """Send the number of KV pages, before all steps. Raises: WorkerError like `broadcast_step`."""
    _broadcast(sockets, _NUM_PAGES.pack(num_pages), timeout_s)


def receive_num_pages(sock: socket.socket) -> int | None:
    """The number of KV pages; None when the other side has closed the socket."""
    data = _receive(sock, _NUM_PAGES.size)
    return None if data is None else int(_NUM_PAGES.unpack(data)[0])


def receive_step(sock: socket.socket) -> Step | None:
    """The next step; None when the other side has closed the socket."""
    start = _receive(sock, _LENGTH.size)
    if start is None:
        return None
    header = json.loads(_receive(sock, _LENGTH.unpack(start)[0]) or b"null")
    if header is None:
        return None
    fields: dict[str, Any] = dict(header["numbers"])
    for name, dtype, shape in header["arrays"]:
        is_tensor = dtype in _TENSOR_DTYPES
        itemsize = _TENSOR_DTYPES[dtype].itemsize if is_tensor else np.dtype(dtype).itemsize
        data = _receive(sock, int(np.prod(shape)) * itemsize)
        if data is None:
            return None
        if is_tensor:
            fields[name] = torch.frombuffer(data, dtype=_TENSOR_DTYPES[dtype]).view(shape)
        else:
            fields[name] = np.frombuffer(data, dtype=dtype).reshape(shape)
    if header["kind"] == PrefillStep.__name__:
        fields.setdefault("embeds", None)
        return PrefillStep(**fields)
    if header["kind"] == SampleStep.__name__:
        return SampleStep(**fields)
    return DecodeStep(**fields)


def _broadcast(sockets: Sequence[socket.socket], data: bytes, timeout_s: float) -> None:
    for rank, sock in enumerate(sockets, start=1):
        sock.settimeout(timeout_s)
        try:
            sock.sendall(data)
        except OSError as error:
            raise WorkerError(f"rank {rank} does not receive steps: {error}", where=f"rank {rank}") from error


def _receive(sock: socket.socket, size: int) -> bytearray | None:
    """Exactly `size` bytes; None at the end of the stream."""
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            return None
        done += count
    return data
