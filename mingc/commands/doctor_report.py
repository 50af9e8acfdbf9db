"""What works on this machine: packages, compiler, devices, disks, and whether artifacts would be served.

Requirements come from mingc's own metadata; what a target or a backend lacks, from the checks of export and of the
engine loaders.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mingc.artifacts.artifact import check_fingerprint, open_artifact
from mingc.artifacts.file_cache import cache_folder
from mingc.artifacts.target import RTX_CAPABILITIES, Capability, is_rtx
from mingc.bundles.distributions import OWN, not_installed, requirements
from mingc.errors import ConfigError, IncompatibleError
from mingc.host.machine import current_host, driver_version, gpu

if TYPE_CHECKING:
    from packaging.requirements import Requirement

State = Literal["ok", "missing", "problem"]
Problem = tuple[str, str | None]  # what is wrong, and the fix

_EVERYTHING = "everything"
_NEEDED_FOR = {  # by extra; "" is what every command needs
    "": _EVERYTHING,
    "serve": "serve",
    "sign": "bundle sign, bundle verify-signature, serve --require-signature",
    "bundle": "bundle pack",
    "export": "export",
    "onnx": "export --backend onnx",
    "tensorrt": "export --backend tensorrt, and its engines",
}
_SAME_PACKAGE = {"onnxruntime": "onnxruntime-gpu"}  # both install the module `onnxruntime`
_TARGETS = ("cpu", "cuda", "rtx:sm89")
_LEAST_FREE_BYTES = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Result of one check. `needed_for` names the commands that fail or lose a feature if it is not ok."""

    name: str
    state: State
    detail: str
    needed_for: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetVerdict:
    """Whether artifacts for a target can be exported and served here, with a fix for each "no"."""

    target: str
    exports: bool
    serves: bool
    problem: str = ""
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether one stage of an artifact would be served here. `weights_gb`: of the rank with the most of them."""

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
    targets: tuple[TargetVerdict, ...] = ()
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
    base = [each for each in packages if each.needed_for == _EVERYTHING]
    serving = [each for each in packages if each.needed_for == _NEEDED_FOR["serve"]]
    checks = [*packages, _compiler(), *_spaces()]
    is_base_ok = all(each.state == "ok" for each in base)
    targets: list[TargetVerdict] = []
    if is_base_ok:
        checks += [_loader(), *_devices()]
        targets = list(_targets(checks, serving))
    return DoctorReport(
        can_export=bool(targets) and targets[0].exports,
        can_serve=bool(targets) and targets[0].serves,
        checks=tuple(checks),
        targets=tuple(targets),
        verdicts=tuple(each for path in artifacts for each in _verdicts(path, checks, serving))
        if is_base_ok
        else (),
    )


def _check(
    name: str, needed_for: str, detail: str, fix: str | None = None, state: State = "problem"
) -> Check:
    """A check that is ok if there is nothing to fix, else in `state`."""
    return Check(
        name=name, state="ok" if fix is None else state, detail=detail, needed_for=needed_for, fix=fix
    )


def _packages() -> list[Check]:
    """Python and every distribution that mingc requires, each for the first extra that names it."""
    try:
        needed = importlib.metadata.metadata(OWN)["Requires-Python"]
        by_extra = {extra: requirements(OWN, (extra,)) for extra in _NEEDED_FOR}
    except importlib.metadata.PackageNotFoundError:
        error = not_installed()
        return [_check(OWN, _EVERYTHING, error.message, error.fix)]
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    fits = SpecifierSet(needed).contains(version, prereleases=True)
    found = {"python": _check("python", _EVERYTHING, version, None if fits else f"use Python {needed}")}
    for extra, listed in by_extra.items():
        for each in listed:
            if each.name not in (OWN, *found):
                found[each.name] = _package(each, extra)
    return [*found.values()]


def _package(requirement: Requirement, extra: str) -> Check:
    name, needed = requirement.name, requirement.specifier
    fix = f"pip install 'mingc[{extra}]'" if extra else f"pip install '{name}{needed}'"
    installed = [each for each in (name, _SAME_PACKAGE.get(name)) if each and _version(each)]
    if not installed:
        return _check(name, _NEEDED_FOR[extra], "", fix, "missing")
    version = _version(installed[0]) or ""
    if needed.contains(version, prereleases=True):
        return _check(name, _NEEDED_FOR[extra], version)
    return _check(name, _NEEDED_FOR[extra], f"{version}, mingc needs {needed}", fix)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _loader() -> Check:
    import torch

    if hasattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader"):
        return _check("engine loader", "serve, verify", "AOTInductor packages")
    problem, fix = "this torch cannot load AOTInductor packages", "pip install a torch with AOTInductor"
    return _check("engine loader", "serve, verify", problem, fix)


def _devices() -> Iterator[Check]:
    import torch

    cores = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    yield _check("cpu", "export --target cpu", cores)
    driver, needed_for = driver_version(), "export --target cuda"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield _check("cuda", needed_for, *_no_cuda(driver, torch.version.cuda), "missing")
        return
    release = f"{driver or 'release unknown'}; torch is built for CUDA {torch.version.cuda}"
    yield _check("NVIDIA driver", needed_for, release)
    for index in range(count):
        device = gpu(index)
        detail = f"{device.name}, {device.memory_bytes >> 30} GiB; {device.target.describe()}"
        yield _check(f"cuda:{index}", needed_for, detail)
    if count > 1:
        needed_for = "serve --tp 2 and more"
        pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
        closed = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        detail = "peer access: `mingc serve` chooses NCCL or one-shot all-reduce by measurement"
        if closed:
            detail = f"NCCL all-reduce only: no peer access between devices {', '.join(closed)}"
        yield _check("GPU links", needed_for, detail)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            yield _check("NCCL", needed_for, "in this torch")
        else:
            yield _check("NCCL", needed_for, "not in this torch", "install a CUDA build of torch", "missing")


def _no_cuda(driver: str | None, built_for: str | None) -> Problem:
    """Why torch sees no GPU, from the driver's release and torch's CUDA release, and the fix."""
    if built_for is None:
        what = f"; driver {driver} is there" if driver else ""
        fix = (
            "install a CUDA build of torch" if driver else "install a GPU's driver and a CUDA build of torch"
        )
        return f"this torch is a CPU build{what}", fix
    if driver is None:
        fix = "install the NVIDIA driver; in a container, pass the GPUs in (--gpus all)"
        return f"no NVIDIA driver; torch is built for CUDA {built_for}", fix
    return (
        f"driver {driver} shows no device to torch, which is built for CUDA {built_for}",
        "make a GPU visible (CUDA_VISIBLE_DEVICES, the container's devices), or install a driver for that CUDA release",
    )


def _compiler() -> Check:
    """Whether a compiler exists and links libstdc++ dynamically: torch crashes on engines with a static one."""
    name = os.environ.get("CXX") or next((each for each in ("g++", "clang++") if shutil.which(each)), None)

    install = "apt-get install g++, or set CXX to a compiler"
    if name is None:
        return _check("C++ compiler", "export", "", install, "missing")
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
            source.write_text("#include <string>\nstd::string hello() { return std::string(99, 'x'); }\n")
            command = [*name.split(), "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            code = library.read_bytes()
    except subprocess.SubprocessError as error:
        words = getattr(error, "stderr", None) or str(error)
        words = words.strip().splitlines()[-1] if words.strip() else "failed"
        return _check("C++ compiler", "export", f"{name}: {words}", install)
    except OSError as error:
        detail = f"{name}: not tried: {error.strerror}"
        return _check(
            "C++ compiler", "export", detail, f"{install}; set TMPDIR to a folder that can be written"
        )
    if b"libstdc++.so" not in code and b"libc++.so" not in code:
        detail = f"{name} links libstdc++ statically: engines built with it crash when loaded"
        return _check(
            "C++ compiler", "export", detail, "set CXX=/usr/bin/g++ CC=/usr/bin/gcc and unset CUDAHOSTCXX"
        )
    return _check("C++ compiler", "export", name)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir())


def _spaces() -> Iterator[Check]:
    """Memory, and whether the two folders that mingc writes to can be written and have a GB free."""
    yield _check("memory", _EVERYTHING, f"{_memory_bytes() / 1e9:.1f} GB")
    for name, find, variable, needed_for in (
        ("temporary files", _temporary_folder, "TMPDIR", "serve: engines are unpacked"),
        ("user cache", cache_folder, "XDG_CACHE_HOME", "export: engine cache; packed bundles"),
    ):
        yield _check(name, needed_for, *_space(find, _LEAST_FREE_BYTES, variable))


def _space(find: Callable[[], Path], needed: int, variable: str) -> Problem:
    """Free space of the folder that `find` gives, and a fix unless it can take `needed` bytes."""
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


def _targets(checks: Sequence[Check], serving: Sequence[Check]) -> Iterator[TargetVerdict]:
    """One for each device and backend: what the backend and the engine loader say about them."""
    from mingc.export.compile.backends import BACKENDS, find_backend
    from mingc.export.recipe import BACKEND

    cuda = _lacking([each for each in checks if each.name == "cuda"])
    for target in _TARGETS:
        device = "cpu" if target == "cpu" else "cuda"
        for backend in sorted(BACKENDS.names(), key=lambda name: (name != BACKEND, name)):
            reason = find_backend(backend).unsupported_reason(target, "float32")
            problem, colon, install = (reason or "").partition(": pip ")
            if reason is not None and not colon:
                continue  # it builds nothing for this target
            needs = [each for each in checks if each.needed_for == "export"]
            if backend != BACKEND:  # only AOTInductor compiles C++
                needs = [each for each in needs if each.name != "C++ compiler"]
            export = [*_lacking(needs), *([(problem, f"pip {install}")] if reason else [])]
            serve = [*_lacking(serving), *_engine_problems(backend, device, checks)]
            if device == "cuda":
                serve += cuda
                export += cuda if target == "cuda" else []  # engines for RTX cards are built without one
            if is_rtx(target) and not cuda and not {*_capabilities()} & {*RTX_CAPABILITIES}:
                known = ", ".join("{}.{}".format(*each) for each in RTX_CAPABILITIES)
                fix = "serve artifacts of --target rtx:… on a machine with one of these cards"
                serve.append((f"no card of compute capability {known}", fix))
            both = dict.fromkeys((*export, *serve))
            yield TargetVerdict(
                target=f"{target.partition(':')[0]}, {backend}",
                exports=not export,
                serves=not serve,
                problem="; ".join(problem for problem, _ in both),
                fix="; ".join(dict.fromkeys(fix for _, fix in both if fix)) or None,
            )


def _capabilities() -> list[Capability]:
    import torch

    return [gpu(index).capability for index in range(torch.cuda.device_count())]


def _lacking(checks: Sequence[Check]) -> list[Problem]:
    return [(f"{each.name}: {each.detail or each.state}", each.fix) for each in checks if each.state != "ok"]


def _engine_problems(backend: str, device: str, checks: Sequence[Check]) -> list[Problem]:
    """Why engines of `backend` cannot be loaded here."""
    from mingc.runtime.engines.backends import unavailable

    found = unavailable(backend, device)
    loader = [each for each in checks if each.name == "engine loader"] if backend == "aoti" else []
    return [*_lacking(loader), *([] if found is None else [found])]


def _verdicts(path: Path, checks: Sequence[Check], serving: Sequence[Check]) -> Iterator[Verdict]:
    """One for each stage of the artifact at `path`."""
    artifact = open_artifact(path)
    manifest, fingerprint = artifact.manifest, artifact.manifest.fingerprint
    here = current_host(fingerprint.device)
    problems = _lacking(serving)
    try:
        check_fingerprint(fingerprint, here)
    except IncompatibleError as error:
        problems.append((" ".join(error.message.split()), error.fix))
    gpus, free = _gpu_memory() if here.device == fingerprint.device == "cuda" else ([], [])
    ranks = fingerprint.world_size
    if gpus and len(gpus) < ranks:
        fix = f"make more GPUs visible, or export again with --tp {len(gpus)}"
        problems.append((f"the artifact is for {ranks} GPUs, {len(gpus)} are visible", fix))
    if gpus and ranks > 1:
        problems += _lacking([each for each in checks if each.name == "NCCL"])
    needed = unpacked = 0  # stages share the first device, and the folder that their engines are copied to
    for node in manifest.graph.nodes:
        record = manifest.stages[node.name]
        engines = {each.file: each.backend for graph in record.graphs.values() for each in graph.engines}
        weights = max((manifest.files[file].size_bytes for file in record.weights), default=0)
        needed += weights
        unpacked += sum(manifest.files[file].size_bytes for file in engines)
        backends = sorted({*engines.values()})
        own = [
            *problems,
            *(each for name in backends for each in _engine_problems(name, fingerprint.device, checks)),
            *_memory_problems(needed, gpus[:ranks], free[:ranks]),
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


def _gpu_memory() -> tuple[list[int], list[int]]:
    """Memory of every visible GPU, and what of it is free."""
    import torch

    def free(index: int) -> int:
        try:
            return torch.cuda.mem_get_info(index)[0]
        except RuntimeError:  # no memory for a context, or in exclusive use
            return 0

    indices = range(torch.cuda.device_count())
    return [gpu(index).memory_bytes for index in indices], [free(index) for index in indices]


def _memory_problems(needed: int, gpus: Sequence[int], free_of_gpus: Sequence[int]) -> list[Problem]:
    """Whether weights of `needed` bytes fit on the smallest of `gpus` and into its free memory; without GPUs, on the
    host, where weights are memory-mapped and the page cache makes room for them.
    """
    total = min(gpus, default=0) or _memory_bytes()
    free = min(free_of_gpus, default=total)
    what = f"its weights and those of the stages before take {needed / 1e9:.1f} GB"
    if needed > total:
        fix = "export again with --quantize fp8 or a larger --tp, or use a machine with more memory"
        return [(f"{what}, {'a GPU' if gpus else 'this machine'} has {total / 1e9:.1f} GB", fix)]
    if needed > free:
        fix = "end what else uses the GPU (nvidia-smi lists it)"
        return [(f"{what}, a GPU has {free / 1e9:.1f} of {total / 1e9:.1f} GB free", fix)]
    return []


def _disk_problems(unpacked: int, *, is_packed: bool) -> list[Problem]:
    """Whether engines of `unpacked` bytes fit where they are unpacked to and, of a bundle, into the user's cache."""
    found = [_space(_temporary_folder, unpacked, "TMPDIR")]
    if is_packed:
        found.append(_space(cache_folder, unpacked, "XDG_CACHE_HOME"))
    what = f"its engines and those of the stages before take {unpacked / 1e9:.2f} GB"
    return [(f"{what}, {space}", fix) for space, fix in found if fix is not None]
