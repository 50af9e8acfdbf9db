"""CUDA C++ compiled by NVRTC and launched through the driver: for what Triton cannot say (clusters, bulk copies).

Compilation belongs to export: the machine code travels in the graph, and who runs it needs the driver only.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_SCHEDULING_POLICY = 15  # CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
_SPREAD = 1  # CU_CLUSTER_SCHEDULING_POLICY_SPREAD
_STRUCT_ALIGNMENT = 64  # the driver reads a struct to the end of its padding; tensor maps are aligned so
_MAP_BYTES = 128
_MAP_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_MAP_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_MAP_PROMOTION_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class KernelError(OSError):
    """The compiler or the driver refuses, or is not there."""


@functools.cache
def compile_source(path: Path, defines: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    """Compile the source at `path` for an `architecture`, see `Target.architecture`. Returns machine code.

    Raises: KernelError with the compiler's words.
    """
    library = _open_nvrtc()
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines]
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None)
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), encoded)
    if status:
        log = _take(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        raise KernelError(f"NVRTC cannot compile {path.name} ({status}): {log.decode(errors='replace')}")
    code = _take(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code


def pack(numbers: Mapping[str, Sequence[int]], code: bytes) -> str:
    """Host code and numbers that its launcher needs, in base64.

    Other text would not do for an operator's argument: torch writes it between quotes as it stands, and a quote or a
    line break of its own would end it.
    """
    head = json.dumps({name: list(values) for name, values in numbers.items()}).encode()
    return base64.b64encode(zlib.compress(head + b"\n" + code)).decode()


def unpack(text: str) -> tuple[dict[str, list[int]], bytes]:
    """What `pack` was given."""
    head, _, code = zlib.decompress(base64.b64decode(text)).partition(b"\n")
    numbers: dict[str, list[int]] = json.loads(head)
    return numbers, code


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one kernel of a module is launched; the size of its clusters stands in the code."""

    threads: int
    shared_bytes: int = 0
    spread: bool = False  # the blocks of a cluster over multiprocessors, not two on one


class CudaModule:
    """Kernels of machine code from `compile_source`, loaded on the current device."""

    def __init__(self, code: bytes, launches: Mapping[str, Launch]) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._launches = dict(launches)
        self._functions: dict[str, ctypes.c_void_p] = {}
        module = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), code))
        for name, launch in launches.items():
            function = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            self._check(
                self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, launch.shared_bytes)
            )
            if launch.spread:
                self._check(self._driver.cuFuncSetAttribute(function, _CLUSTER_SCHEDULING_POLICY, _SPREAD))
            self._functions[name] = function

    def launch(
        self,
        name: str,
        blocks: int,
        pointers: Sequence[Tensor | None],
        numbers: Sequence[int],
        maps: Sequence[bytes] = (),
    ) -> None:
        """On the current stream; the kernel's one argument is a struct of these maps, then pointers, then ints."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointers]
        packed = b"".join(maps) + struct.pack(f"{len(addresses)}Q{len(numbers)}i", *addresses, *numbers)
        argument = ctypes.create_string_buffer(packed, len(packed) + _STRUCT_ALIGNMENT)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launch = self._launches[name]
        grid, block = (blocks, 1, 1), (launch.threads, 1, 1)
        self._check(
            self._driver.cuLaunchKernel(
                self._functions[name], *grid, *block, launch.shared_bytes, stream, arguments, None
            )
        )

    def _check(self, status: int) -> None:
        _check(self._driver, status)


def tensor_map(values: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """A tensor map over bfloat16 `values` for copies of `box`, innermost dimension first, swizzled by 128 bytes.

    Args:
        values: what the map points to; it must outlive the launches that get the map.
        sizes: elements of each dimension; a copy beyond them brings zeros.
        strides: bytes between elements of each dimension but the innermost.
        box: elements of each dimension that one copy brings; 64 of the innermost.
    """
    rank = len(sizes)
    memory = ctypes.create_string_buffer(2 * _MAP_BYTES)
    place = -(-ctypes.addressof(memory) // _STRUCT_ALIGNMENT) * _STRUCT_ALIGNMENT
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        _MAP_BFLOAT16,
        rank,
        ctypes.c_void_p(values.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # not interleaved
        _MAP_SWIZZLE_128,
        _MAP_PROMOTION_128,
        0,  # beyond the sizes zeros
    )
    _check(driver, status)
    return ctypes.string_at(place, _MAP_BYTES)


def _check(driver: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise KernelError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({status})")


def _open_nvrtc() -> ctypes.CDLL:
    """The compiler that came with torch, or the toolkit's."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).resolve().parents[1] / "nvidia"
    for candidate in (name, *map(str, packages.glob(f"*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise KernelError(f"{name} is neither on the loader's path nor under {packages}")


def _take(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw
