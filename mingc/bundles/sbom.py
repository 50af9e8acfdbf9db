"""Software bill of materials of a bundle, in CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json/).

It has no time and no random number, so that the same artifact gives the same document.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

import mingc
from mingc.artifacts.manifest import FILE_NAME, Manifest
from mingc.errors import ConfigError

_OWN = "mingc"
_EXTRAS = ("serve", "sign")
# Of backends whose engines are run by a library; ONNX Runtime has a distribution for each device.
_EXTRAS_OF_BACKENDS = {"cpu": {"onnx": "onnx"}, "cuda": {"onnx": "onnx-gpu", "tensorrt": "tensorrt"}}
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\])?[^;]*(?:;(.*))?$")


def runtime_extras(manifest: Manifest) -> tuple[str, ...]:
    """The extras of mingc needed to serve the engines."""
    backends = manifest.stages_by_backend()
    extras = _EXTRAS_OF_BACKENDS[manifest.fingerprint.device]
    return (*_EXTRAS, *(extra for backend, extra in extras.items() if backend in backends))


def runtime_distributions(extras: Sequence[str] = _EXTRAS) -> list[str]:
    """Distributions that are installed here and that mingc with `extras` needs, mingc first, by name.

    Raises: ConfigError when mingc itself is not installed as a distribution.
    """
    found: dict[str, None] = {}
    waiting = [(_OWN, frozenset(extras))]
    while waiting:
        name, of_it = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # needed elsewhere only: another platform, an older Python
        key = _normal(distribution.metadata["Name"])
        if key in found:
            continue
        found[key] = None
        for requirement in distribution.requires or ():
            match = _REQUIREMENT.match(requirement)
            if match is not None and _applies(match[3] or "", of_it):
                waiting.append((match[1], _names(match[2] or "")))
    if _OWN not in found:
        raise ConfigError(
            "mingc runs from its sources, so what it depends on is unknown",
            where="python environment",
            fix="pip install mingc into this environment first: pip install -e 'CHECKOUT[serve,sign]'",
        )
    return sorted(found, key=lambda name: (name != _OWN, name))


def _applies(marker: str, extras: frozenset[str]) -> bool:
    """Whether a requirement applies: those of an extra only if the extra is requested.

    Other markers depend on this installation.
    """
    wanted = re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    return not wanted or any(extra in extras for extra in wanted)


def _names(extras: str) -> frozenset[str]:
    return frozenset(part.strip() for part in extras.strip("[]").split(",") if part.strip())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sbom(manifest: Manifest, *, has_model_licence: bool) -> bytes:
    """The document: the model, each of its files with its SHA-256, and the Python distributions that serve it."""
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": f"model:{manifest.model}",
        "name": manifest.model,
        "version": manifest.fingerprint.checkpoint_sha256[:16],
        "hashes": [{"alg": "SHA-256", "content": manifest.fingerprint.checkpoint_sha256}],
        "licenses": [
            {
                "license": {
                    "name": "see bundle/licences/model.txt" if has_model_licence else "not given when packed"
                }
            }
        ],
    }
    files = [
        {
            "type": "file",
            "bom-ref": f"file:{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": record.sha256}],
        }
        for name, record in sorted(manifest.files.items())
    ]
    libraries = [_library(name) for name in runtime_distributions(runtime_extras(manifest))]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": _OWN, "version": mingc.__version__}]},
            "component": model,
        },
        "components": [*libraries, *files],
        "dependencies": [
            {
                "ref": model["bom-ref"],
                "dependsOn": [each["bom-ref"] for each in (*libraries, *files)],
            }
        ],
    }
    content = json.dumps(document, sort_keys=True)
    # A serial number is required to be unique to the document: here it names its content.
    serial = uuid.UUID(hashlib.sha256(f"{FILE_NAME}{content}".encode()).hexdigest()[:32], version=4)
    document["serialNumber"] = f"urn:uuid:{serial}"
    return (json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def _library(name: str) -> dict[str, Any]:
    metadata = importlib.metadata.distribution(name).metadata
    version = metadata["Version"]
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    licence = _licence(metadata)
    if licence is not None:
        component["licenses"] = [licence]
    return component


def _licence(metadata: Any) -> dict[str, Any] | None:
    """As the distribution states it: an SPDX expression, else the first line of its licence, else its classifier."""
    expression = metadata.get("License-Expression")
    if expression:
        return {"expression": expression}
    text = (metadata.get("License") or "").strip().splitlines()
    if text and len(text[0]) < 100:
        return {"license": {"name": text[0]}}
    classifiers = [each for each in metadata.get_all("Classifier") or () if each.startswith("License ::")]
    return {"license": {"name": classifiers[0].split("::")[-1].strip()}} if classifiers else None
