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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mingc.artifacts.artifact import check_fingerprint, open_artifact
from mingc.artifacts.file_cache import cache_folder
from mingc.artifacts.target import RTX_CAPABILITIES, Capability
from mingc.errors import ConfigError, IncompatibleError
from mingc.host.machine import current_host, driver_version, gpu
from mingc.host.onnx_library import INSTALL_CUDA, has_cuda_provider, is_installed
from mingc.host.tensorrt_library import RTX, find_library
from mingc.runtime.engines.backends import ENGINES, unavailable

State = Literal["ok", "missing", "problem"]

_OPTIONAL = (  # import name, distribution, what it is needed for, extra
    ("onnxruntime", "onnxruntime", "export: voices", "export"),
    ("onnx", "onnx", "export --backend onnx", "onnx"),
    ("onnxscript", "onnxscript", "export --backend onnx", "onnx"),
    (RTX, "tensorrt-rtx", "export --backend tensorrt, and its engines", "tensorrt"),
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
_ONNX_CUDA = "onnxruntime-gpu"
_REQUIRED = ("torch", "numpy", "safetensors", "click", "rich", "tokenizers", "pillow")


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
    """Whether one stage of an artifact would be served here. `weights_gb` are of the rank with the most of them."""

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
    """All checks of a machine. `can_export` and `can_serve`: all checks that these commands require on a CPU pass."""

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
        targets=_targets(checks),
        verdicts=tuple(each for path in artifacts for each in _verdicts(path, bad)) if torch_ok else (),
    )


def _targets(checks: Sequence[Check]) -> tuple[TargetVerdict, ...]:
    """One for each device with AOTInductor and with ONNX Runtime, for TensorRT one for CUDA and one for RTX cards."""
    base = ["python", *_REQUIRED, "torch version"]
    serve = [dist for _, dist, _, extra in _OPTIONAL if extra == "serve"]
    needs = {  # for both, to export, to serve
        "cpu, aoti": ([*base, "engine loader"], ["C++ compiler", "onnxruntime"], serve),
        "cpu, onnx": ([*base, "onnxruntime"], ["onnx", "onnxscript"], serve),
        "cuda, onnx": ([*base, "onnxruntime", "cuda", _ONNX_CUDA], ["onnx", "onnxscript"], serve),
        "cuda, aoti": ([*base, "engine loader", "cuda"], ["C++ compiler", "triton", "onnxruntime"], serve),
        # The plans are built on the GPU that they are for; whether the library runs there is found by building.
        "cuda, tensorrt": ([*base, "tensorrt-rtx", "cuda"], ["onnx", "onnxscript"], serve),
        "rtx, tensorrt": (
            [*base, "tensorrt-rtx"],
            ["onnx", "onnxscript", "onnxruntime"],  # no card: plans are built for those that --target names
            ["cuda", "RTX card", *serve],
        ),
    }
    bad = {check.name: check for check in checks if check.state != "ok"}
    verdicts = []
    for target, (both, export, served) in needs.items():
        found = [bad[name] for name in dict.fromkeys((*both, *export, *served)) if name in bad]
        verdicts.append(
            TargetVerdict(
                target=target,
                exports=not {*both, *export} & {*bad},
                serves=not {*both, *served} & {*bad},
                problem="; ".join(f"{each.name}: {each.detail or each.state}" for each in found),
                fix="; ".join(dict.fromkeys(each.fix for each in found if each.fix)) or None,
            )
        )
    return tuple(verdicts)


def _verdicts(path: Path, bad: set[str]) -> list[Verdict]:
    """One for each stage of the artifact at `path`, given the names of checks that are not ok."""
    artifact = open_artifact(path)
    problems: list[_Problem] = []
    fingerprint = artifact.manifest.fingerprint
    here = current_host(fingerprint.device)
    try:
        check_fingerprint(fingerprint, here)
    except IncompatibleError as error:
        problems.append((" ".join(error.message.split()), error.fix))
    packages = sorted(bad & {dist for _, dist, _, extra in _OPTIONAL if extra == "serve"})
    if packages:
        problems.append((f"not installed: {', '.join(packages)}", "pip install 'mingc[serve]'"))
    gpus = _gpu_bytes() if fingerprint.device == "cuda" and here.device == "cuda" else []
    if gpus and len(gpus) < fingerprint.world_size:
        problems.append(
            (
                f"the artifact is for {fingerprint.world_size} GPUs, {len(gpus)} are visible",
                f"make more GPUs visible, or export again with --tp {len(gpus)}",
            )
        )
    if gpus and fingerprint.world_size > 1 and "NCCL" in bad:
        problems.append(("this torch has no NCCL, which several ranks need", "install a CUDA build of torch"))
    free = _gpu_free_bytes() if gpus else []
    verdicts = []
    needed = 0  # stages share the first device
    unpacked = 0  # and the folders that their engines are copied to
    for node in artifact.manifest.graph.nodes:
        record = artifact.manifest.stages[node.name]
        weights = max((artifact.manifest.files[file].size_bytes for file in record.weights), default=0)
        needed += weights
        engines = {
            engine.file: engine.backend for graph in record.graphs.values() for engine in graph.engines
        }
        backends = tuple(dict.fromkeys(engines.values()))
        unpacked += sum(artifact.manifest.files[file].size_bytes for file in engines)
        own = [
            *problems,
            *(
                problem
                for backend in backends
                for problem in _backend_problems(backend, fingerprint.device, bad)
            ),
            *_memory_problems(needed, gpus[: fingerprint.world_size], free[: fingerprint.world_size]),
            *_disk_problems(unpacked, is_packed=artifact.packed is not None),
        ]
        verdicts.append(
            Verdict(
                artifact=path,
                stage=node.name,
                target=f"{fingerprint.device} {fingerprint.capability}, {fingerprint.world_size} rank(s)",
                backend=", ".join(sorted(backends)),
                weights_gb=round(weights / 1e9, 3),
                works=not own,
                problem="; ".join(problem for problem, _ in own),
                fix="; ".join(dict.fromkeys(fix for _, fix in own if fix)) or None,
            )
        )
    return verdicts


_Problem = tuple[str, str | None]  # what is wrong, and the fix


def _backend_problems(backend: str, device: str, bad: set[str]) -> list[_Problem]:
    """What is missing here for the engines of `backend` for `device`."""
    if backend == "aoti" and "engine loader" in bad:
        return [("this torch cannot load AOTInductor packages", "pip install 'torch>=2.11,<2.14'")]
    if backend not in ENGINES.names():
        fix = "install the distribution that provides it, or export again with another --backend"
        return [(f"no loader for engines of the backend {backend}", fix)]
    found = unavailable(backend, device)
    return [] if found is None else [(f"its engines need backend {backend}: {found[0]}", found[1])]


def _memory_problems(needed: int, gpus: Sequence[int], free_of_gpus: Sequence[int]) -> list[_Problem]:
    """Whether weights of `needed` bytes fit on the smallest of `gpus`, and into its free memory; without GPUs, on the
    host.

    On a CPU weights are memory-mapped, so the page cache makes room for them.
    """
    total = min(gpus) if gpus else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = min(free_of_gpus, default=total)
    if needed <= free:
        return []
    what = f"its weights and those of the stages before take {needed / 1e9:.1f} GB"
    if needed <= total:
        return [
            (
                f"{what}, a GPU has {free / 1e9:.1f} of {total / 1e9:.1f} GB free",
                "end what else uses the GPU (nvidia-smi lists it)",
            )
        ]
    return [
        (
            f"{what}, {'a GPU' if gpus else 'this machine'} has {total / 1e9:.1f} GB",
            "export again with --quantize fp8 or a larger --tp, or use a machine with more memory",
        )
    ]


def _disk_problems(unpacked: int, *, is_packed: bool) -> list[_Problem]:
    """Whether engines of `unpacked` bytes fit into the folder that they are unpacked to and, of a bundle, the cache."""
    places: dict[str, Callable[[], str | Path]] = {
        "TMPDIR": tempfile.gettempdir,
        "XDG_CACHE_HOME": cache_folder,
    }
    problems: list[_Problem] = []
    for variable in ("TMPDIR", "XDG_CACHE_HOME") if is_packed else ("TMPDIR",):
        try:
            folder = Path(places[variable]())
            free = _free_bytes(folder)
        except (OSError, ConfigError) as error:
            problem = error.message if isinstance(error, ConfigError) else str(error)
            problems.append((problem, f"set {variable} to a folder that can be written"))
            continue
        if unpacked > free:
            what = f"its engines and those of the stages before take {unpacked / 1e9:.2f} GB"
            fix = f"free some space there, or set {variable} to another folder"
            problems.append((f"{what}, {folder} has {free / 1e9:.2f} GB free", fix))
    return problems


def _free_bytes(folder: Path) -> int:
    """Free bytes of the disk of `folder`, or of its nearest folder that exists."""
    return shutil.disk_usage(_nearest(folder)).free


def _gpu_bytes() -> list[int]:
    """Memory of every visible GPU."""
    import torch

    return [gpu(index).memory_bytes for index in range(torch.cuda.device_count())]


def _gpu_free_bytes() -> list[int]:
    """Memory of every visible GPU that nothing uses."""
    import torch

    def free(index: int) -> int:
        try:
            return torch.cuda.mem_get_info(index)[0]
        except RuntimeError:  # no memory for a context, or in exclusive use
            return 0

    return [free(index) for index in range(torch.cuda.device_count())]


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
    is_there = find_library() == RTX if module == RTX else importlib.util.find_spec(module) is not None
    if not is_there:
        fix = f"pip install 'mingc[{extra}]'" if extra else f"pip install {distribution}"
        return Check(name=distribution, state="missing", detail="", needed_for=needed_for, fix=fix)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Check(name=distribution, state="ok", detail=version, needed_for=needed_for)


def _onnx_cuda() -> Check:
    has = has_cuda_provider()
    return Check(
        name=_ONNX_CUDA,
        state="ok" if has else "missing",
        detail="" if has else "this ONNX Runtime is for CPUs" if is_installed() else "",
        needed_for="export --target cuda --backend onnx, and its engines",
        fix=None if has else INSTALL_CUDA,
    )


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
    driver = driver_version()
    if not torch.cuda.is_available():
        why, fix = _no_cuda(driver, torch.version.cuda)
        checks.append(
            Check(name="cuda", state="missing", detail=why, needed_for="export --target cuda", fix=fix)
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        release = f"{driver or 'release unknown'}; torch is built for CUDA {torch.version.cuda}"
        checks.append(
            Check(name="NVIDIA driver", state="ok", detail=release, needed_for="export --target cuda")
        )
        checks.append(_package("triton", "triton", "export --target cuda", None))
        checks.append(_onnx_cuda())
    for index in range(count):
        device = gpu(index)
        detail = f"{device.name}, {device.memory_bytes >> 30} GiB; {device.target.describe()}"
        checks.append(
            Check(name=f"cuda:{index}", state="ok", detail=detail, needed_for="export --target cuda")
        )
    if count:
        checks.append(_rtx_card([gpu(index).capability for index in range(count)]))
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


def _rtx_card(capabilities: Sequence[Capability]) -> Check:
    """Whether TensorRT for RTX builds engines for one of the visible GPUs, given their capabilities."""
    names = [".".join(map(str, each)) for each in dict.fromkeys(capabilities)]
    is_there = bool({*capabilities} & {*RTX_CAPABILITIES})
    known = ", ".join(".".join(map(str, each)) for each in RTX_CAPABILITIES)
    return Check(
        name="RTX card",
        state="ok" if is_there else "missing",
        detail=f"compute capability {', '.join(names)}"
        + ("" if is_there else f"; TensorRT for RTX builds engines for {known}"),
        needed_for="serve: artifacts of --target rtx:…",
        fix=None if is_there else "serve such artifacts on a machine with one of these cards",
    )


def _no_cuda(driver: str | None, built_for: str | None) -> tuple[str, str]:
    """Why torch sees no GPU, from the driver's release and torch's CUDA release, and the fix."""
    if built_for is None and driver is None:
        return "this torch is a CPU build", "install a GPU's driver and a CUDA build of torch"
    if built_for is None:
        return f"this torch is a CPU build; driver {driver} is there", "install a CUDA build of torch"
    if driver is None:
        fix = "install the NVIDIA driver; in a container, pass the GPUs in (--gpus all)"
        return f"no NVIDIA driver; torch is built for CUDA {built_for}", fix
    return (
        f"driver {driver} shows no device to torch, which is built for CUDA {built_for}",
        "make a GPU visible (CUDA_VISIBLE_DEVICES, the container's devices), or install a driver for that CUDA release",
    )


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
    there = _nearest(folder)
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


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above that exists."""
    while not os.path.exists(folder):  # Path.exists raises where a folder on the way cannot be searched
        folder = folder.parent
    return folder


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check(name="memory", state="ok", detail=f"{total / 2**30:.1f} GiB", needed_for="everything")
