"""The engine cache: its limit, what an export does when an engine is removed under it, and a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mingc.artifacts.artifact import new_artifact, writing
from mingc.errors import CompileError, ConfigError
from mingc.export.compile import engine_cache, onnx_program
from mingc.export.compile.backends import aoti
from mingc.export.compile.backends.aoti import compile_graph
from mingc.export.compile.backends.onnx import BACKEND
from mingc.export.compile.engine_cache import keep, take, trim, writing_cache


def _engine(cache: Path, digit: str, size: int, used: int, suffix: str = "pt2") -> Path:
    path = cache / f"{digit * 64}.{suffix}"
    path.write_bytes(b"x" * size)
    os.utime(path, (used, used))
    return path


def test_engines_not_used_for_longest_go_until_the_others_fit(tmp_path: Path) -> None:
    one, two, three = (
        _engine(tmp_path, digit, 100, used) for digit, used in (("1", 30), ("2", 10), ("3", 20))
    )
    trim(tmp_path, 300)
    assert {*tmp_path.iterdir()} == {one, two, three}
    trim(tmp_path, 299)
    assert {*tmp_path.iterdir()} == {one, three}
    trim(tmp_path, 100)
    assert {*tmp_path.iterdir()} == {one}
    trim(tmp_path, 0)
    assert not [*tmp_path.iterdir()]


def test_engines_of_every_backend_count_and_nothing_else_is_touched(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in ("autotune-0.json", "notes.pt2", f"{'a' * 63}.pt2")]
    for path in kept:
        path.write_bytes(b"x" * 1000)
    (tmp_path / "engine-0123abcd.partial").mkdir()
    old, new = _engine(tmp_path, "a", 60, 1, "plan"), _engine(tmp_path, "b", 60, 2)
    trim(tmp_path, 100)
    assert {*tmp_path.iterdir()} == {*kept, tmp_path / "engine-0123abcd.partial", new} and not old.exists()


def test_use_counts_and_not_age(tmp_path: Path) -> None:
    first, second = _engine(tmp_path, "1", 100, 10), _engine(tmp_path, "2", 100, 20)
    assert take(first, tmp_path / "copy") and (tmp_path / "copy").read_bytes() == b"x" * 100
    trim(tmp_path, 100)
    assert first.exists() and not second.exists()


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class _Compiles:
    """Calls of the compiler, which writes a small package."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.cache, self.engine = folder / "cache", folder / "engine.pt2"
        self._program = torch.export.export(_Doubled(), (torch.ones(4),))
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", self._write)

    def _write(self, program: object, *, package_path: str, inductor_configs: object) -> None:
        self.count += 1
        with zipfile.ZipFile(package_path, "w") as package:
            package.writestr("engine.so", b"code" * 100)

    def compile(self) -> float:
        """Compile or take the engine; the seconds of compilation."""
        return compile_graph(self._program, self.engine, device="cpu", cache=self.cache, where="test")


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Compiles:
    return _Compiles(tmp_path, monkeypatch)


def test_an_engine_that_another_export_removes_is_compiled(
    compiles: _Compiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles.compile()
    assert compiles.compile() == 0.0 and compiles.count == 1
    whole = engine_cache.take

    def removed(kept: Path, path: Path) -> bool:
        kept.unlink()  # another export removes it between the check and the copy
        return whole(kept, path)

    monkeypatch.setattr("mingc.export.compile.backends.aoti.take", removed)
    compiles.compile()
    assert compiles.count == 2 and compiles.engine.exists()
    with pytest.raises(FileNotFoundError):  # a missing folder of the artifact is not a missing engine
        take(_engine(tmp_path, "1", 1, 1), tmp_path / "nowhere" / "engine.pt2")


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_engine_of_the_cache_is_compiled_anew(compiles: _Compiles, damage: str) -> None:
    (compiles.cache / "engine-0123abcd.partial").mkdir(
        parents=True
    )  # an export was killed while it wrote this
    compiles.compile()
    assert compiles.count == 1
    (kept,) = compiles.cache.iterdir()
    whole = kept.read_bytes()
    changed = whole.replace(b"codecode", b"codeCode", 1)
    kept.write_bytes({"cut": whole[: len(whole) // 2], "changed": changed, "emptied": b""}[damage])
    for _ in range(2):
        compiles.compile()
        assert compiles.count == 2
    assert compiles.engine.read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_of_the_cache_is_named_as_the_caches(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output may have enough space, so the error must not name it."""

    def full(source: Path, target: Path) -> Any:
        raise OSError(number, os.strerror(number))

    (tmp_path / "engine").write_bytes(b"x")
    monkeypatch.setattr(engine_cache.shutil, "copyfile", full)
    says = f"the engine cache {tmp_path / 'cache'} cannot be written: {os.strerror(number)}"
    with (
        pytest.raises(ConfigError, match=says) as raised,
        new_artifact(tmp_path / "out", replace_existing=False),
    ):
        keep(tmp_path / "engine", tmp_path / "cache" / "kept.pt2")
    assert raised.value.where == "--cache" and "--no-cache" in str(raised.value.fix)
    assert {path.name for path in tmp_path.iterdir()} == {"engine", "cache"}
    assert not [*(tmp_path / "cache").iterdir()]
    with pytest.raises(OSError, match="broken") as other, writing_cache(tmp_path):
        raise OSError(errno.EIO, "broken")
    assert not isinstance(other.value, ConfigError)


def test_a_key_covers_all_that_decides_the_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho another compiler\n")
    compiler.chmod(0o755)
    usual = aoti._key(program, {"cpp.march": "native"}, "cpu")
    assert aoti._key(program, {"cpp.march": "native"}, "cpu") == usual
    keys = {
        usual,
        aoti._key(torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),)), {"cpp.march": "native"}, "cpu"),
        aoti._key(program, {"cpp.march": "other"}, "cpu"),
        aoti._key(program, {}, "cpu"),
    }
    for module, name, value in (
        (torch, "__version__", "2.99.0"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
        (aoti.platform, "machine", lambda: "other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            keys.add(aoti._key(program, {"cpp.march": "native"}, "cpu"))
    with monkeypatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        keys.add(aoti._key(program, {"cpp.march": "native"}, "cpu"))
    assert len(keys) == 8


def test_a_model_of_onnx_comes_from_the_cache_unless_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constants are part of the model, so they select it too."""
    translated: list[str] = []

    def compile_(factor: float, name: str) -> bytes:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.factor = torch.tensor([factor, 1.0])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.factor

        program = torch.export.export(Scaled(), (torch.ones(2),))
        seconds = BACKEND.compile(
            program, tmp_path / name, device="cpu", cache=tmp_path / "cache", where="test"
        )
        assert (seconds == 0.0) == (len(translated) == before)
        return (tmp_path / name).read_bytes()

    real = onnx_program.to_onnx

    def translate(program: torch.export.ExportedProgram, where: str) -> Any:
        translated.append(where)
        return real(program, where)

    monkeypatch.setattr(onnx_program, "to_onnx", translate)
    (tmp_path / "cache").mkdir()
    before = 0
    first = compile_(2.0, "first")
    before = len(translated)
    assert compile_(2.0, "again") == first and len(translated) == 1
    assert compile_(3.0, "other") != first and len(translated) == 2
    for kept in (tmp_path / "cache").iterdir():
        kept.write_bytes(kept.read_bytes().replace(b"factor", b"faktor", 1))
    assert compile_(2.0, "third") == first and len(translated) == 3


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save(torch.zeros(100_000), path),  # as AOTInductor's packages: "unexpected pos"
        lambda path: save_file({"a": torch.zeros(100_000)}, path),
        lambda path: path.write_bytes(bytes(400_000)),
    ],
)
def test_a_full_disk_is_named_with_the_file_and_its_space(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    """On a real file system of 64 KiB, in any library's words."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        with (
            pytest.raises(
                ConfigError, match=r"engine\.pt2 cannot be written: No space left on device"
            ) as caught,
            writing(tmp_path / "engine.pt2", 400_000),
        ):
            write(tmp_path / "engine.pt2")
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)  # an error may still hold the file
    assert "it has 400,000 bytes, " in caught.value.message and " are free there" in caught.value.message
    assert str(tmp_path) in str(caught.value.where)


def test_a_compile_on_a_full_disk_is_no_fault_of_the_graph(tmp_path: Path) -> None:
    """Otherwise `--backend auto` would go on without the backend."""
    with (
        pytest.raises(ConfigError, match=r"cfm\.pt2 cannot be written: No space left"),
        writing(tmp_path / "cfm.pt2"),
    ):
        raise CompileError("AOTInductor failed: RuntimeError: [enforce fail] . unexpected pos 704 vs 598")
    with pytest.raises(CompileError), writing(tmp_path / "cfm.pt2"):
        raise CompileError("no such operator")
