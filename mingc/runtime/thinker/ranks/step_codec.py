"""Steps of the thinker as bytes on a socket between its ranks: a JSON header, then the raw arrays. No pickle."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mingc.runtime.thinker.step import DecodeStep, PrefillStep

Step = PrefillStep | DecodeStep

_LENGTH = struct.Struct("<I")
_TENSOR_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def send_step(sock: socket.socket, step: Step) -> None:
    """Send one step. Raises OSError when the other side is gone, TimeoutError when it does not read."""
    header: dict[str, Any] = {"kind": type(step).__name__, "numbers": {}, "arrays": []}
    payload: list[bytes] = []
    for name in step.__slots__:
        value = getattr(step, name)
        if isinstance(value, int):
            header["numbers"][name] = value
        elif isinstance(value, Tensor):
            host = value.detach().cpu().contiguous()
            header["arrays"].append((name, str(host.dtype), list(host.shape)))
            payload.append(host.view(torch.uint8).numpy().tobytes())
        elif value is not None:
            host_array = np.ascontiguousarray(value)
            header["arrays"].append((name, str(host_array.dtype), list(host_array.shape)))
            payload.append(host_array.tobytes())
    text = json.dumps(header).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)
    for part in payload:
        sock.sendall(part)


def receive_step(sock: socket.socket) -> Step | None:
    """The next step; None when the other side has closed."""
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
    return DecodeStep(**fields)


def _receive(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            return None
        done += count
    return data
