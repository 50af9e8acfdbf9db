"""Software bill of materials of a bundle, in CycloneDX 1.6.

It contains no timestamp and no random number, so the same artifact gives the same document.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from typing import TYPE_CHECKING

import mingc
from mingc.artifacts.manifest import Manifest
from mingc.bundles.distributions import distributions
from mingc.errors import ConfigError

if TYPE_CHECKING:
    from cyclonedx.model.component import Component

_EXTRAS = ("serve", "sign")
# Backends whose engines run in a library; ONNX Runtime has a distribution for each device.
_EXTRAS_OF_BACKENDS = {"cpu": {"onnx": "onnx"}, "cuda": {"onnx": "onnx-gpu", "tensorrt": "tensorrt-runtime"}}


def runtime_extras(manifest: Manifest) -> tuple[str, ...]:
    """List the extras of mingc that serving the artifact needs."""
    backends = {
        engine.backend
        for stage in manifest.stages.values()
        for graph in stage.graphs.values()
        for engine in graph.engines
    }
    extras = _EXTRAS_OF_BACKENDS[manifest.fingerprint.device]
    return (*_EXTRAS, *(extra for backend, extra in extras.items() if backend in backends))


def sbom(manifest: Manifest, *, has_model_licence: bool) -> bytes:
    """Describe the model, its files with their SHA-256, and the Python distributions that serve it.

    Raises: ConfigError without the library that writes it.
    """
    try:
        from cyclonedx.model import HashAlgorithm, HashType
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.model.license import DisjunctiveLicense
        from cyclonedx.model.tool import ToolRepository
        from cyclonedx.output.json import JsonV1Dot6
    except ImportError as error:
        raise ConfigError(
            "the SBOM of a bundle is written with cyclonedx-python-lib, which is not installed",
            where="python environment",
            fix="pip install 'mingc[bundle]'",
        ) from error

    def sha256(content: str) -> list[HashType]:
        return [HashType(alg=HashAlgorithm.SHA_256, content=content)]

    licence = "see bundle/licences/model.txt" if has_model_licence else "not given when packed"
    model = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=f"model:{manifest.model}",
        name=manifest.model,
        version=manifest.fingerprint.checkpoint_sha256[:16],
        hashes=sha256(manifest.fingerprint.checkpoint_sha256),
        licenses=[DisjunctiveLicense(name=licence)],
    )
    files = [
        Component(type=ComponentType.FILE, bom_ref=f"file:{name}", name=name, hashes=sha256(record.sha256))
        for name, record in manifest.files.items()
    ]
    components = [*map(_library, distributions(runtime_extras(manifest))), *files]
    tool = Component(type=ComponentType.APPLICATION, name="mingc", version=mingc.__version__)
    metadata = BomMetaData(component=model, tools=ToolRepository(components=[tool]))
    metadata.timestamp = None  # type: ignore[assignment]  # optional in the schema
    # A serial number has to be unique to the document: this one is a hash of its content.
    bom = Bom(components=components, metadata=metadata, serial_number=uuid.UUID(int=0))
    bom.register_dependency(model, components)
    content = JsonV1Dot6(bom).output_as_string()
    bom.serial_number = uuid.UUID(hashlib.sha256(content.encode()).hexdigest()[:32], version=4)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    return (json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def _library(name: str) -> Component:
    """Describe an installed distribution. Its licence is the expression, first line or classifier that it states."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

    metadata = importlib.metadata.metadata(name)
    purl = PackageURL("pypi", name=name, version=metadata["Version"])
    classifiers = [each for each in metadata.get_all("Classifier") or () if each.startswith("License ::")]
    (stated,) = metadata.get_all("License-Expression") or [""]
    (text,) = metadata.get_all("License") or [""]
    first_line = text.strip().partition("\n")[0]
    licence = stated or (first_line if len(first_line) < 100 else "")
    licence = licence or (classifiers[0].rpartition("::")[2].strip() if classifiers else "")
    return Component(
        bom_ref=str(purl),
        name=name,
        version=metadata["Version"],
        purl=purl,
        licenses=[LicenseFactory().make_from_string(licence)] if licence else (),
    )
