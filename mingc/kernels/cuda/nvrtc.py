"""CUDA C++ compiled by NVRTC and launched through the driver, for what Triton lacks: clusters, TMA copies.

Export compiles; the machine code is stored in the graph, and running it needs only the driver.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_SCHEDULING_POLICY = 15  # CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
_SPREAD = 1  # CU_CLUSTER_SCHEDULING_POLICY_SPREAD
_STRUCT_ALIGNMENT = 64  # the driver reads a struct including its padding; tensor maps need this alignment
_MAP_BYTES = 128
_MAP_BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_MAP_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_MAP_PROMOTION_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


# Not `torch.library.custom_op`: its first call imports torch's compiler, which adds seconds to a server's start.
_OPERATORS = torch.library.Library("mingc", "FRAGMENT")  # type: ignore[no-untyped-call]


class KernelError(OSError):
    """The compiler or the driver is missing or reports an error."""


def register_operator(name: str, operator: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `operator` for CUDA as `torch.ops.mingc.NAME`, with its schema from its annotations.

    `fake` takes the same arguments and returns tensors of the results' shapes and dtypes.
    """
    schema = name + torch.library.infer_schema(operator, mutates_args=())
    _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _OPERATORS.impl(name, operator, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mingc::{name}", fake, lib=_OPERATORS)


@functools.cache
def compile_source(path: Path, defines: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    """Compile the source at `path` for an `architecture`, see `Target.architecture`. Returns machine code.

    Raises: KernelError with the compiler's log.
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
    """Pack machine code and the numbers that its launcher needs into base64.

    torch writes a string argument of an operator between quotes without escaping, so it must not contain quotes or line
    breaks.
    """
    head = json.dumps({name: list(values) for name, values in numbers.items()}).encode()
    return base64.b64encode(zlib.compress(head + b"\n" + code)).decode()


def unpack(text: str) -> tuple[dict[str, list[int]], bytes]:
    """Numbers and machine code from `pack`."""
    head, _, code = zlib.decompress(base64.b64decode(text)).partition(b"\n")
    numbers: dict[str, list[int]] = json.loads(head)
    return numbers, code


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Launch parameters of one kernel; its cluster size is part of the code."""

    threads: int
    shared_bytes: int = 0
    spread: bool = False  # prefer one block of a cluster per multiprocessor


class CudaModule:
    """Kernels from `compile_source`, loaded on the current device."""

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
        """Launch on the current stream; the kernel's argument is a struct of tensor maps, then pointers, then ints."""
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
    """Tensor map of bfloat16 `values` for copies of `box`, innermost dimension first, swizzled by 128 bytes.

    Args:
        values: the tensor; it must outlive the launches that use the map.
        sizes: elements of each dimension; a copy fills zeros beyond them.
        strides: bytes between elements of each dimension except the innermost.
        box: elements of each dimension in one copy; 64 of the innermost.
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
        0,  # no interleaving
        _MAP_SWIZZLE_128,
        _MAP_PROMOTION_128,
        0,  # zeros beyond the sizes
    )
    _check(driver, status)
    return ctypes.string_at(place, _MAP_BYTES)


def _check(driver: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise KernelError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({status})")


def _open_nvrtc() -> ctypes.CDLL:
    """Load NVRTC: from the system, or the library installed with torch."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).resolve().parents[1] / "nvidia"
    for candidate in (name, *map(str, packages.glob(f"*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise KernelError(
        f"{name} was not found on the library path or under {packages}; install the CUDA toolkit or torch with CUDA"
    )


def _take(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw
