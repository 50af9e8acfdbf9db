"""Files that a bundle adds for its deployment: start script, systemd unit, Containerfile, licences, SBOM.

All of them are made from the artifact alone, so packing twice gives the same file. Paths inside are relative to the
unpacked folder.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from mingc.artifacts.manifest import Manifest
from mingc.bundles.distributions import distributions
from mingc.bundles.sbom import runtime_extras, sbom
from mingc.errors import ConfigError

_LIBRARIES = {
    "onnx": "onnxruntime",
    "onnx-gpu": "onnxruntime-gpu",
    "tensorrt-runtime": "tensorrt-rtx",
}  # what runs the engines of an extra's backend
# `serve` depends on onnxruntime; both have the same package, and pip does not say which files stay.
_ONLY_FOR_CUDA = """\
    && /opt/venv/bin/pip uninstall -y onnxruntime onnxruntime-gpu \\
    && /opt/venv/bin/pip install --no-index --find-links /tmp/wheels --no-deps onnxruntime-gpu \\
"""
_LICENCE_NAMES = ("licen", "copying", "notice", "authors")


def deployment_files(
    manifest: Manifest, wheels: Path | None, model_licence: Path | None, *, takes_tensorrt: bool = False
) -> dict[str, Path | bytes]:
    """Content by path below `bundle/`.

    Args:
        wheels: folder of wheels to add, or None.
        takes_tensorrt: whether NVIDIA's TensorRT libraries may be among them.
        model_licence: licence of the weights, which no artifact has; None leaves it to the user, and the SBOM says so.

    Raises: ConfigError when a given path does not exist or the wheels lack what serving needs.
    """
    files: dict[str, Path | bytes] = {
        "start.sh": _template("start.sh").encode(),
        "mingc.service": _unit(manifest.model).encode(),
        "Containerfile": _containerfile(manifest, wheels).encode(),
    }
    if model_licence is not None:
        if not model_licence.is_file():
            raise ConfigError(
                f"{model_licence} is not a file", where="--model-licence", fix="pass the licence's text"
            )
        files["licences/model.txt"] = model_licence.read_bytes()
    if wheels is not None:
        files |= _wheels(wheels, manifest, takes_tensorrt=takes_tensorrt)
    files |= _licences(runtime_extras(manifest))
    files["sbom.cdx.json"] = sbom(manifest, has_model_licence=model_licence is not None)
    return files


def _template(name: str) -> str:
    return resources.files("mingc.bundles").joinpath("templates", name).read_text(encoding="utf-8")


def _unit(model: str) -> str:
    # systemd expands `%`.
    return Template(_template("mingc.service")).substitute(model=model.replace("%", "%%"))


def _containerfile(manifest: Manifest, wheels: Path | None) -> str:
    """Write the Containerfile. Its comments list wheels that the user must add."""
    extras = runtime_extras(manifest)
    if wheels is None:
        absent = [f"'mingc[{','.join(extras)}]' and all that it depends on"]
    else:
        held = _wheel_names(wheels)
        absent = [each for extra, each in _LIBRARIES.items() if extra in extras and each not in held]
    python = _python(wheels)
    on_gpu = manifest.fingerprint.device == "cuda"
    return Template(_template("Containerfile")).substitute(
        target=manifest.fingerprint.target,
        python=python or "3.11 or newer",
        cuda=" and the CUDA driver's libraries come from the host" if on_gpu else "",
        notes="".join(
            f"# Before that put wheels of {each} into bundle/wheels: it has none.\n" for each in absent
        ),
        base=f"docker.io/library/python:{python or '3.11'}-slim",
        extras=",".join(extras),
        after=_ONLY_FOR_CUDA if "onnx-gpu" in extras else "",
    )


def _python(wheels: Path | None) -> str | None:
    """Python release of the torch wheels; None when their names state none, or several."""
    tags = [path.stem.split("-")[2:3] for path in _wheel_files(wheels) if _is_torch(path)] if wheels else []
    found = {match[1] for tag in tags for each in tag if (match := re.fullmatch(r"cp3(\d+)", each))}
    return f"3.{found.pop()}" if len(found) == 1 else None


def _is_torch(wheel: Path) -> bool:
    return wheel.name.lower().startswith("torch-")


def _wheel_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.whl")) if folder.is_dir() else []


def _wheel_names(folder: Path) -> set[str]:
    """List the distributions in a folder of wheels, as package indexes spell their names."""
    return {path.name.split("-")[0].replace("_", "-").lower() for path in _wheel_files(folder)}


def _wheels(folder: Path, manifest: Manifest, *, takes_tensorrt: bool) -> Mapping[str, Path]:
    found, names = _wheel_files(folder), _wheel_names(folder)
    extras = runtime_extras(manifest)
    # NVIDIA's libraries are not required: its licence may forbid passing them on.
    needed = {each for extra, each in _LIBRARIES.items() if extra in extras and extra != "tensorrt-runtime"}
    lacking = sorted({"mingc", "torch"} - names) + sorted(needed - names)
    if lacking:
        raise ConfigError(
            f"{folder} has no wheel of {', '.join(lacking)}",
            where="--with-wheels",
            fix=f"pip wheel --wheel-dir {folder} 'CHECKOUT[{','.join(extras)}]'",
        )
    _check_torch(found, manifest)
    licensed = sorted(name for name in names if name.startswith("tensorrt"))
    if licensed and not takes_tensorrt:
        raise ConfigError(
            f"{folder} has wheels of {', '.join(licensed)}, which NVIDIA licenses and others may not pass on freely",
            where="--with-wheels",
            fix="remove them from the folder, or read their licence and pass --with-tensorrt",
        )
    return {f"wheels/{path.name}": path for path in found}


def _check_torch(wheels: Sequence[Path], manifest: Manifest) -> None:
    """Raises: ConfigError unless the engines run with one of the wheels of torch."""
    versions = [path.name.split("-")[1] for path in wheels if _is_torch(path)]
    built_with = manifest.fingerprint.torch
    fitting = [each for each in versions if each.partition("+")[0] == built_with.partition("+")[0]]
    if not fitting:
        raise ConfigError(
            f"the wheel of torch is {', '.join(versions)}, the engines were built with {built_with}",
            where="--with-wheels",
            fix=f"put torch {built_with} there, or export again with the torch of the wheels",
        )
    is_for_gpu = manifest.fingerprint.device == "cuda"
    if is_for_gpu and all(each.endswith("+cpu") for each in fitting):
        raise ConfigError(
            f"torch {', '.join(fitting)} is a build for CPUs, {manifest.fingerprint.target} needs one for CUDA",
            where="--with-wheels",
            fix="replace it by a CUDA build of torch",
        )


def _licences(extras: Sequence[str]) -> dict[str, Path | bytes]:
    """Find the installed licence files of mingc and of every distribution that serving needs."""
    files: dict[str, Path | bytes] = {}
    for name in distributions(extras):
        distribution = importlib.metadata.distribution(name)
        found = False
        for file in distribution.files or ():
            _, _, inner = file.as_posix().partition(".dist-info/")
            if not inner and len(file.parts) == 1:  # beside the metadata of a checkout
                inner = file.name
            is_licence = file.name.lower().startswith(_LICENCE_NAMES) and file.suffix not in (".py", ".pyc")
            text = Path(str(distribution.locate_file(file)))
            if inner and is_licence and text.is_file():
                files[f"licences/{name}/{inner.removeprefix('licenses/')}"] = text.read_bytes()
                found = True
        if not found:  # some wheels name their licence in the metadata only
            files[f"licences/{name}/METADATA"] = (distribution.read_text("METADATA") or "").encode()
    return files
