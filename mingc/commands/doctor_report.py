"""What works on this machine: packages, compiler, GPUs, disks, and whether artifacts would be served.

Requirements come from mingc's own metadata; the engine loaders say what the engines of an artifact lack.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mingc.artifacts.artifact import check_fingerprint, open_artifact
from mingc.artifacts.file_cache import cache_folder
from mingc.bundles.distributions import OWN, own_requirements
from mingc.errors import ConfigError, IncompatibleError
from mingc.host.cxx_compiler import INSTALL, compiler, compiler_problem
from mingc.host.description import installed_version
from mingc.host.machine import current_host, driver_version, gpu

if TYPE_CHECKING:
    from packaging.requirements import Requirement

State = Literal["ok", "missing", "problem"]
Problem = tuple[str, str | None]  # what is wrong, and the fix

_EVERYTHING = "everything"
_NEEDED_FOR = {  # by extra; "" is what every command needs
    "": _EVERYTHING,
    "serve": "serve",
    "trace": "traces of serve",
    "sign": "bundle sign, bundle verify-signature, serve --require-signature",
    "bundle": "bundle pack",
    "export": "export",
    "onnx": "export --backend onnx",
    "tensorrt": "export --backend tensorrt",
    "tensorrt-classic": "export --target cuda --backend tensorrt, by classic TensorRT",
    "tensorrt-runtime": "engines of TensorRT",
}
_SAME_PACKAGE = {"onnxruntime": "onnxruntime-gpu"}  # both install the module `onnxruntime`
_EXCLUDES = {  # both install the module `torch_tensorrt`, each for another library
    "torch-tensorrt": "torch-tensorrt-rtx",
    "torch-tensorrt-rtx": "torch-tensorrt",
}
_SEVERAL_RANKS = "serve --tp 2 and more"
_LEAST_FREE_BYTES = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Result of one check. `needed_for`: the commands that fail or lose a feature if it is not ok, with commas."""

    name: str
    state: State
    detail: str
    needed_for: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether one stage of an artifact would be served here. `weights_gb`: of the rank that holds most."""

    artifact: Path
    stage: str
    target: str
    works: bool
    backend: str = ""
    weights_gb: float = 0.0
    problem: str = ""
    fix: str | None = None

    def cells(self) -> dict[str, str | bool | None]:
        """Columns of the console table, which has little space."""
        return {
            "stage": f"{self.artifact.name} {self.stage}",
            "target": f"{self.target}, {self.backend}",
            "works": self.works,
            "problem": self.problem,
            "fix": self.fix,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """All checks of a machine. `can_export` and `can_serve`: these commands work here with default options."""

    can_export: bool
    can_serve: bool
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether export and serve both work with default options, and all requested stages do."""
        return self.can_export and self.can_serve and all(each.works for each in self.verdicts)


def examine(artifacts: Sequence[Path] = ()) -> DoctorReport:
    """Run all checks. Imports torch, and compiles a small C++ file.

    Raises: ArtifactError when one of `artifacts`, folders or packed bundles, cannot be read.
    """
    packages = _packages()
    checks = [*packages, _compiler(), *_spaces()]
    is_base_ok = all(each.state == "ok" for each in packages if each.needed_for == _EVERYTHING)
    if is_base_ok:
        checks += _devices()
    return DoctorReport(
        can_export=is_base_ok and not _lacking(checks, "export"),
        can_serve=is_base_ok and not _lacking(checks, "serve"),
        checks=tuple(checks),
        verdicts=tuple(each for path in artifacts for each in _verdicts(path, checks)) if is_base_ok else (),
    )


def _check(
    name: str, needed_for: str, detail: str, fix: str | None = None, state: State = "problem"
) -> Check:
    """Make a check that is ok if there is nothing to fix, else in `state`."""
    return Check(
        name=name, state="ok" if fix is None else state, detail=detail, needed_for=needed_for, fix=fix
    )


def _lacking(checks: Iterable[Check], needed_for: str) -> list[Problem]:
    return [
        (f"{each.name}: {each.detail or each.state}", each.fix)
        for each in checks
        if needed_for in each.needed_for.split(", ") and each.state != "ok"
    ]


def _packages() -> list[Check]:
    """Python and every distribution that mingc requires, with the version and fix of the first extra that names it."""
    found: dict[str, Check] = {}
    try:
        for extra in _NEEDED_FOR:
            for each in own_requirements(extra):
                before = found.get(each.name)
                if before is None and each.name != OWN:
                    found[each.name] = _package(each, extra)
                elif before is not None and before.needed_for != _EVERYTHING:
                    found[each.name] = replace(
                        before, needed_for=f"{before.needed_for}, {_NEEDED_FOR[extra]}"
                    )
    except ConfigError as error:
        return [_check(OWN, _EVERYTHING, error.message, error.fix)]
    return [*found.values()]


def _package(requirement: Requirement, extra: str) -> Check:
    name, needed = requirement.name, requirement.specifier
    fix = f"pip install 'mingc[{extra}]'" if extra else f"pip install '{name}{needed}'"
    if name == "python":
        version: str | None = platform.python_version()
        fix = f"use Python {needed}"
    else:
        version = installed_version(name) or installed_version(_SAME_PACKAGE.get(name, name))
    if version is None:
        other = _EXCLUDES.get(name, "")
        if other and installed_version(other):
            fix = f"pip uninstall {other}; {fix}"
        return _check(name, _NEEDED_FOR[extra], "", fix, "missing")
    if needed.contains(version, prereleases=True):
        return _check(name, _NEEDED_FOR[extra], version)
    return _check(name, _NEEDED_FOR[extra], f"{version}, mingc needs {needed}", fix)


def _devices() -> Iterator[Check]:
    import torch

    driver, built_for = driver_version(), torch.version.cuda
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"driver {driver or 'of unknown release'}; torch is built for CUDA {built_for}"
    detail, fix = (found, None) if count else _no_cuda(driver, built_for)
    yield _check("cuda", "export --target cuda", detail, fix, "missing")
    for index in range(count):
        device = gpu(index)
        detail = f"{device.name}, {device.memory_bytes >> 30} GiB; {device.target.describe()}"
        yield _check(f"cuda:{index}", "export --target cuda", detail)
    if count > 1:
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        detail = "in this torch" if has_nccl else "not in this torch"
        fix = None if has_nccl else "install a CUDA build of torch"
        yield _check("NCCL", _SEVERAL_RANKS, detail, fix, "missing")


def _no_cuda(driver: str | None, built_for: str | None) -> Problem:
    """Why torch sees no GPU, and the fix. Takes the driver's release and torch's CUDA release."""
    if built_for is None:
        if driver is None:
            return "this torch is a CPU build", "install a GPU's driver and a CUDA build of torch"
        return f"this torch is a CPU build; driver {driver} is there", "install a CUDA build of torch"
    if driver is None:
        fix = "install the NVIDIA driver; in a container, pass the GPUs in (--gpus all)"
        return f"no NVIDIA driver; torch is built for CUDA {built_for}", fix
    return (
        f"driver {driver} shows no device to torch, which is built for CUDA {built_for}",
        "make a GPU visible (CUDA_VISIBLE_DEVICES, the container's devices), or install a driver for that CUDA release",
    )


def _compiler() -> Check:
    name = compiler()
    if name is None:
        return _check("C++ compiler", "export", "", INSTALL, "missing")
    return _check("C++ compiler", "export", *(compiler_problem(name) or (name, None)))


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir())


def _spaces() -> Iterator[Check]:
    """Whether the two folders that mingc writes to can be written and have a GB free."""
    for name, find, variable, needed_for in (
        ("temporary files", _temporary_folder, "TMPDIR", "serve: engines are unpacked"),
        ("user cache", cache_folder, "XDG_CACHE_HOME", "export: engine cache; packed bundles"),
    ):
        yield _check(name, needed_for, *_space(find, _LEAST_FREE_BYTES, variable))


def _space(find: Callable[[], Path], needed: int, variable: str) -> Problem:
    """Free space of the folder that `find` returns, and a fix unless it can take `needed` bytes."""
    set_it = f"set {variable} to a folder that can be written and has space"
    try:
        folder = there = find()
        while not os.path.exists(there):  # Path.exists raises where a folder on the way cannot be searched
            there = there.parent
        free = shutil.disk_usage(there).free
    except (OSError, ConfigError) as error:
        return getattr(error, "message", None) or str(error), set_it
    if not os.access(there, os.W_OK):
        return f"{folder} cannot be written", set_it
    fix = f"free some space there, or {set_it}" if free < needed else None
    return f"{folder} has {free / 1e9:.2f} GB free", fix


def _verdicts(path: Path, checks: Sequence[Check]) -> Iterator[Verdict]:
    """Judge each stage of the artifact at `path`."""
    from mingc.runtime.engines.backends import unavailable

    artifact = open_artifact(path)
    manifest, fingerprint = artifact.manifest, artifact.manifest.fingerprint
    here, ranks = current_host(fingerprint.device), fingerprint.world_size
    problems = _lacking(checks, "serve")
    try:
        check_fingerprint(fingerprint, here)
    except IncompatibleError as error:
        problems.append((" ".join(error.message.split()), error.fix))
    gpus = _gpu_memory() if here.device == fingerprint.device == "cuda" else []
    if gpus and len(gpus) < ranks:
        fix = f"make more GPUs visible, or export again with --tp {len(gpus)}"
        problems.append((f"the artifact is for {ranks} GPUs, {len(gpus)} are visible", fix))
    if gpus and ranks > 1:
        problems += _lacking(checks, _SEVERAL_RANKS)
    needed = unpacked = 0  # stages share the first device, and the folder that their engines are copied to
    for node in manifest.graph.nodes:
        record = manifest.stages[node.name]
        engines = {each.file: each.backend for graph in record.graphs.values() for each in graph.engines}
        backends = sorted({*engines.values()})
        weights = max(
            (sum(manifest.files[file].size_bytes for file in files) for files in record.weights), default=0
        )
        needed += weights
        unpacked += sum(manifest.files[file].size_bytes for file in engines)
        own = [
            *problems,
            *(each for name in backends if (each := unavailable(name, fingerprint.device)) is not None),
            *_memory_problems(needed, gpus[:ranks]),
            *_disk_problems(unpacked, is_packed=artifact.packed is not None),
        ]
        yield Verdict(
            artifact=path,
            stage=node.name,
            target=f"{fingerprint.device} {fingerprint.capability}, {ranks} rank(s)",
            backend=", ".join(backends),
            weights_gb=round(weights / 1e9, 3),
            works=not own,
            problem="; ".join(problem for problem, _ in own),
            fix="; ".join(dict.fromkeys(fix for _, fix in own if fix)) or None,
        )


def _gpu_memory() -> list[tuple[int, int]]:
    """Free and total bytes of every visible GPU."""
    import torch

    def free(index: int) -> int:
        try:
            return torch.cuda.mem_get_info(index)[0]
        except RuntimeError:  # no memory for a context, or in exclusive use
            return 0

    return [(free(index), gpu(index).memory_bytes) for index in range(torch.cuda.device_count())]


def _memory_problems(needed: int, gpus: Sequence[tuple[int, int]]) -> list[Problem]:
    """Whether weights of `needed` bytes fit into every GPU of `gpus`; without GPUs, into the host's memory, where
    weights are memory-mapped and the page cache makes room for them.
    """
    total = min(
        (total for _, total in gpus), default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    free = min((free for free, _ in gpus), default=total)
    what = f"its weights and the weights of earlier stages take {needed / 1e9:.1f} GB"
    if needed > total:
        fix = "export again with --quantize fp8 or a larger --tp, or use a machine with more memory"
        return [(f"{what}, {'a GPU' if gpus else 'this machine'} has {total / 1e9:.1f} GB", fix)]
    if needed > free:
        fix = "end what else uses the GPU (nvidia-smi lists it)"
        return [(f"{what}, a GPU has {free / 1e9:.1f} of {total / 1e9:.1f} GB free", fix)]
    return []


def _disk_problems(unpacked: int, *, is_packed: bool) -> list[Problem]:
    """Whether engines of `unpacked` bytes fit into the folder where they are unpacked and, of a bundle, the cache."""
    found = [_space(_temporary_folder, unpacked, "TMPDIR")]
    if is_packed:
        found.append(_space(cache_folder, unpacked, "XDG_CACHE_HOME"))
    what = f"its engines and the engines of earlier stages take {unpacked / 1e9:.2f} GB"
    return [(f"{what}, {space}", fix) for space, fix in found if fix is not None]
