"""Checks of this machine (interpreter, torch, compiler, devices, packages, disks) and of artifacts on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mingc.artifacts.artifact import check_fingerprint, open_artifact
from mingc.artifacts.file_cache import cache_folder
from mingc.errors import ConfigError, IncompatibleError
from mingc.host import current_host, gpu

State = Literal["ok", "missing", "problem"]

_OPTIONAL = (  # import name, distribution, what it is needed for, extra
    ("onnxruntime", "onnxruntime", "export: voices", "export"),
    ("onnx", "onnx", "export --backend onnx", "onnx"),
    ("onnxscript", "onnxscript", "export --backend onnx", "onnx"),
    ("starlette", "starlette", "serve", "serve"),
    ("uvicorn", "uvicorn", "serve", "serve"),
    ("httpx", "httpx", "serve: media from URLs; demo", "serve"),
    ("msgspec", "msgspec", "serve: request bodies", "serve"),
    ("soundfile", "soundfile", "serve: audio input, FLAC output", "serve"),
    ("soxr", "soxr", "serve: audio input", "serve"),
    ("av", "av", "serve: video and compressed audio input", "serve"),
    ("cv2", "opencv-python-headless", "serve: video input", "serve"),
    ("prometheus_client", "prometheus-client", "serve: metrics", "serve"),
    ("cryptography", "cryptography", "bundle sign, verify-signature; serve --require-signature", "sign"),
)
_REQUIRED = ("torch", "numpy", "safetensors", "click", "rich", "tokenizers", "pillow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Result of one check. `needed_for` names the commands that fail or lose a feature unless it is ok."""

    name: str
    state: State
    detail: str
    needed_for: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether one stage of an artifact would be served here."""

    artifact: Path
    stage: str
    target: str
    works: bool
    problem: str = ""
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """All checks of a machine. `can_export` and `can_serve`: all checks that these commands require on a CPU pass."""

    can_export: bool
    can_serve: bool
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether export and serve both work with default options, and every stage that was asked about."""
        return self.can_export and self.can_serve and all(each.works for each in self.verdicts)


def examine(artifacts: Sequence[Path] = ()) -> DoctorReport:
    """Run all checks. Imports torch, and compiles a small C++ file when a compiler is found.

    Raises: ArtifactError when one of `artifacts`, folders or packed bundles, cannot be read.
    """
    checks = [_python(), *(_package(name, name, "everything", None) for name in _REQUIRED)]
    torch_ok = checks[1].state == "ok"
    if torch_ok:
        checks.append(_torch_version())
        checks.append(_loader())
        checks.extend(_devices())
    checks.append(_compiler())
    checks.append(_memory())
    checks.append(_temporary_space())
    checks.append(_cache_space())
    checks.extend(_package(module, dist, use, extra) for module, dist, use, extra in _OPTIONAL)
    bad = {check.name for check in checks if check.state != "ok"}
    base_ok = not bad & {"python", "torch version", "engine loader", *_REQUIRED}
    return DoctorReport(
        can_export=base_ok and not bad & {"C++ compiler", "onnxruntime"},
        can_serve=base_ok and not bad & {dist for _, dist, _, extra in _OPTIONAL if extra == "serve"},
        checks=tuple(checks),
        verdicts=tuple(each for path in artifacts for each in _verdicts(path, bad)) if torch_ok else (),
    )


def _verdicts(path: Path, bad: set[str]) -> list[Verdict]:
    """One for each stage of the artifact at `path`, given the names of checks that are not ok."""
    artifact = open_artifact(path)
    fingerprint = artifact.manifest.fingerprint
    here = current_host(fingerprint.device)
    problems: list[tuple[str, str | None]] = []
    try:
        check_fingerprint(fingerprint, here)
    except IncompatibleError as error:
        problems.append((" ".join(error.message.split()), error.fix))
    packages = sorted(bad & {dist for _, dist, _, extra in _OPTIONAL if extra == "serve"})
    if packages:
        problems.append((f"not installed: {', '.join(packages)}", "pip install 'mingc[serve]'"))
    if "engine loader" in bad:
        problems.append(("this torch cannot load AOTInductor packages", "pip install 'torch>=2.11,<2.14'"))
    gpus = _gpu_bytes() if fingerprint.device == "cuda" and here.device == "cuda" else []
    if gpus and len(gpus) < fingerprint.world_size:
        problems.append(
            (
                f"the artifact is for {fingerprint.world_size} GPUs, {len(gpus)} are visible",
                f"make more GPUs visible, or export again with --tp {len(gpus)}",
            )
        )
    limit = min(gpus) if gpus else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    verdicts = []
    needed = 0  # stages share the first device
    for node in artifact.manifest.graph.nodes:
        record = artifact.manifest.stages[node.name]
        needed += max((artifact.manifest.files[file].size_bytes for file in record.weights), default=0)
        own = list(problems)
        if needed > limit:
            own.append(
                (
                    f"its weights and those of the stages before take {needed / 1e9:.1f} GB, "
                    f"{'a GPU' if gpus else 'this machine'} has {limit / 1e9:.1f} GB",
                    "export again with --quantize fp8 or a larger --tp, or use a machine with more memory",
                )
            )
        verdicts.append(
            Verdict(
                artifact=path,
                stage=node.name,
                target=f"{fingerprint.device} {fingerprint.capability}, {fingerprint.world_size} rank(s)",
                works=not own,
                problem="; ".join(problem for problem, _ in own),
                fix="; ".join(dict.fromkeys(fix for _, fix in own if fix)) or None,
            )
        )
    return verdicts


def _gpu_bytes() -> list[int]:
    """Memory of every visible GPU."""
    import torch

    return [gpu(index).memory_bytes for index in range(torch.cuda.device_count())]


def _python() -> Check:
    version = platform.python_version()
    is_new = sys.version_info >= (3, 11)
    return Check(
        name="python",
        state="ok" if is_new else "problem",
        detail=version,
        needed_for="everything",
        fix=None if is_new else "use Python 3.11 or newer",
    )


def _package(module: str, distribution: str, needed_for: str, extra: str | None) -> Check:
    module = {"pillow": "PIL"}.get(module, module)
    if importlib.util.find_spec(module) is None:
        fix = f"pip install 'mingc[{extra}]'" if extra else f"pip install {distribution}"
        return Check(name=distribution, state="missing", detail="", needed_for=needed_for, fix=fix)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Check(name=distribution, state="ok", detail=version, needed_for=needed_for)


def _torch_version() -> Check:
    import torch

    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    fits = (2, 11) <= release < (2, 14)
    return Check(
        name="torch version",
        state="ok" if fits else "problem",
        detail=torch.__version__,
        needed_for="everything",
        fix=None if fits else "pip install 'torch>=2.11,<2.14'",
    )


def _loader() -> Check:
    import torch

    has_loader = hasattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader")
    return Check(
        name="engine loader",
        state="ok" if has_loader else "problem",
        detail="AOTInductor packages" if has_loader else "this torch cannot load AOTInductor packages",
        needed_for="serve, verify",
        fix=None if has_loader else "pip install 'torch>=2.11,<2.14'",
    )


def _devices() -> list[Check]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    checks = [
        Check(
            name="cpu",
            state="ok",
            detail=f"{os.cpu_count()} cores, {capability}",
            needed_for="export --target cpu",
        )
    ]
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "no device or no driver"
        checks.append(Check(name="cuda", state="missing", detail=why, needed_for="export --target cuda"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = gpu(index)
        detail = f"{device.name}, {device.memory_bytes >> 30} GiB; {device.target.describe()}"
        checks.append(
            Check(name=f"cuda:{index}", state="ok", detail=detail, needed_for="export --target cuda")
        )
    if count > 1:
        closed = [
            f"{one}-{other}"
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ]
        checks.append(peer_check(closed))
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        checks.append(
            Check(
                name="NCCL",
                state="ok" if has_nccl else "missing",
                detail="in this torch" if has_nccl else "not in this torch",
                needed_for="serve --tp 2 and more",
                fix=None if has_nccl else "install a CUDA build of torch",
            )
        )
    return checks


def peer_check(closed: list[str]) -> Check:
    """All-reduce algorithms for several ranks; `closed` lists device pairs `a-b` without peer access."""
    detail = "peer access: `mingc serve` chooses NCCL or one-shot all-reduce by measurement"
    if closed:
        detail = f"NCCL all-reduce only: no peer access between devices {', '.join(closed)}"
    return Check(name="GPU links", state="ok", detail=detail, needed_for="serve --tp 2 and more")


def _compiler() -> Check:
    """Check that a compiler exists and links libstdc++ dynamically: torch crashes on engines with a static one."""
    name = os.environ.get("CXX") or next((each for each in ("g++", "clang++") if shutil.which(each)), None)
    fix = "apt-get install g++, or set CXX to a compiler"
    if name is None:
        return Check(name="C++ compiler", state="missing", detail="", needed_for="export", fix=fix)
    try:
        scratch = tempfile.TemporaryDirectory()
    except OSError as error:
        detail = f"not tried, as no temporary file can be written: {error.strerror}"
        fix = "set TMPDIR to a folder that can be written and has space"
        return Check(name="C++ compiler", state="problem", detail=detail, needed_for="export", fix=fix)
    with scratch as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        command = [*name.split(), "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            source.write_text("#include <string>\nstd::string hello() { return std::string(99, 'x'); }\n")
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            words = getattr(error, "stderr", None) or str(error)
            detail = f"{name}: {words.strip().splitlines()[-1] if words.strip() else 'failed'}"
            return Check(name="C++ compiler", state="problem", detail=detail, needed_for="export", fix=fix)
        is_dynamic = b"libstdc++.so" in library.read_bytes() or b"libc++.so" in library.read_bytes()
    if not is_dynamic:
        return Check(
            name="C++ compiler",
            state="problem",
            detail=f"{name} links libstdc++ statically: engines built with it crash when loaded",
            needed_for="export",
            fix="set CXX=/usr/bin/g++ CC=/usr/bin/gcc and unset CUDAHOSTCXX",
        )
    return Check(name="C++ compiler", state="ok", detail=name, needed_for="export")


def _temporary_space() -> Check:
    name, needed_for = "temporary files", "serve: engines are unpacked"
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Check(
            name=name,
            state="problem",
            detail="no folder for them can be written",
            needed_for=needed_for,
            fix="set TMPDIR to a folder that can be written and has space",
        )
    return _space(name, folder, "TMPDIR", needed_for)


def _cache_space() -> Check:
    name, needed_for = "user cache", "export: engine cache; packed bundles"
    try:
        folder = cache_folder()
    except ConfigError as error:
        return Check(name=name, state="problem", detail=error.message, needed_for=needed_for, fix=error.fix)
    return _space(name, folder, "XDG_CACHE_HOME", needed_for)


def _space(name: str, folder: Path, variable: str, needed_for: str) -> Check:
    """Whether the nearest folder of `folder` that exists can be written and has a GiB free."""
    there = folder
    while not os.path.exists(there):  # Path.exists raises where a folder on the way cannot be searched
        there = there.parent
    fix = f"free some space there, or set {variable} to another folder"
    if not os.access(there, os.W_OK):
        detail = f"{folder} cannot be written"
        return Check(name=name, state="problem", detail=detail, needed_for=needed_for, fix=fix)
    free = shutil.disk_usage(there).free
    state: State = "ok" if free >= 1 << 30 else "problem"
    return Check(
        name=name,
        state=state,
        detail=f"{folder}: {free / 2**30:.1f} GiB free",
        needed_for=needed_for,
        fix=None if state == "ok" else fix,
    )


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check(name="memory", state="ok", detail=f"{total / 2**30:.1f} GiB", needed_for="everything")
