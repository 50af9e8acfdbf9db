"""Compiler options by device, and mapping of compiler errors; nothing is compiled."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingc.errors import CompileError
from mingc.export.compile.backends import aoti
from mingc.export.compile.backends.aoti import compile_graph


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [("cpu", "AVX512", True), ("cpu", "AVX2", True), ("cpu", "DEFAULT", None), ("cuda", "AVX512", False)],
)
def test_vector_instructions_are_not_probed_where_they_are_known_or_not_needed(
    device: str,
    capability: str,
    expected: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Probing takes a worker half a minute. None: Inductor probes."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    seen: dict[str, Any] = {}

    def compile_nothing(program: object, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        seen.update(inductor_configs)
        zipfile.ZipFile(package_path, "w").close()

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)
    program = torch.export.export(Double(), (torch.ones(3),))
    compile_graph(program, tmp_path / "engine.pt2", device=device, cache=None, where="toy")
    assert seen.get("cpp.vec_isa_ok") is expected
    with torch._inductor.config.patch(seen):  # refuses names that it does not know
        assert torch._inductor.config.cpp.vec_isa_ok is expected


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "Failed to run autotuning code block: CUDA out of memory. Tried to allocate 4.00 GiB",
            torch.OutOfMemoryError,
        ),
        ("no such operator", CompileError),
    ],
)
def test_memory_that_ran_out_amid_a_compile_is_known_as_such(
    message: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the export then names the remedy: fewer jobs."""

    def fail(program: object, **_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    program = torch.export.export(Double(), (torch.ones(3),))
    with pytest.raises(kind, match=message.partition(".")[0]):
        compile_graph(program, tmp_path / "engine.pt2", device="cuda", cache=None, where="toy")


def test_a_missing_compiler_is_reported_by_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the cache names the compiler, before anything is compiled."""

    def fail(program: object, **_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    program = torch.export.export(Double(), (torch.ones(3),))
    with pytest.raises(CompileError, match="no compiler"):
        compile_graph(program, tmp_path / "engine.pt2", device="cpu", cache=tmp_path, where="toy")


def test_an_array_is_declared_wherever_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers may have methods with the same id; the second must still get its declaration."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    monkeypatch.setattr(CppWrapperCpu, "codegen_int_array_var", CppWrapperCpu.codegen_int_array_var)
    aoti._declare_every_int_array()
    wrapper = CppWrapperCpu.__new__(CppWrapperCpu)
    wrapper.int_array_id, wrapper.declared_int_array_vars = itertools.count(), set()
    wrapper.codegen_int_array_var_cache = {}
    written: list[str] = []
    names = {wrapper.codegen_int_array_var("{1L, 2L}", written.append, True) for _ in range(3)}
    assert len(names) == len(written) == 3
    assert all(any(f"{name}[]" in line for line in written) for name in names)
