"""`mingc bundle pack --oci`: the bundle as an OCI image layout, for registries and mirrors that carry images.

One uncompressed layer per file, so that a registry stores equal weights of two bundles once. A layer is a tar of one
file below `opt/bundle`. https://github.com/opencontainers/image-spec, version 1.1.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingc.artifacts.bundle_manifest import BUNDLE_FILE, SIGNATURE_FILE
from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.manifest import FILE_NAME, parse_manifest
from mingc.artifacts.packed_file import open_packed
from mingc.artifacts.work_folder import work_folder
from mingc.bundles.transfer import check_free, make_parent, writing
from mingc.errors import ConfigError, IntegrityError

_ROOT = "opt/bundle/"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, kw_only=True, slots=True)
class OciReport:
    folder: Path
    layers: int
    size_bytes: int
    manifest_digest: str
    seconds: float


def write_oci(bundle: Path, folder: Path, *, log: Callable[[str], None] = lambda step: None) -> OciReport:
    """Write the packed `bundle` to the new folder `folder` as an OCI image layout.

    Raises: ConfigError when `folder` exists, IntegrityError when a file has changed since packing.
    """
    started = time.perf_counter()
    check_new(folder)
    packed = open_packed(bundle)
    manifest = packed.region(FILE_NAME)
    model = parse_manifest(manifest.read(), str(manifest)).model
    contents: list[tuple[str, FileRegion | bytes, str | None]] = [
        (name, region, packed.bundle.files[name].sha256) for name, region in packed.files.items()
    ]
    contents.append((BUNDLE_FILE, packed.bundle_bytes, None))
    if packed.signature is not None:
        contents.append((SIGNATURE_FILE, packed.signature, None))
    with writing(folder):
        check_free(folder.parent, bundle.stat().st_size)
        with work_folder(folder.parent, f".{folder.name}.") as work:
            blobs = work / "blobs" / "sha256"
            blobs.mkdir(parents=True)
            layers = []
            for name, content, sha256 in contents:
                log(name)
                layers.append(_layer(blobs, name, content, sha256, bundle))
            config = _blob(blobs, _json(_image_config(layers)))
            document = {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": {"mediaType": _CONFIG, **config},
                "layers": [{"mediaType": _LAYER, **layer} for layer in layers],
                "annotations": {"org.opencontainers.image.title": model},
            }
            described = _blob(blobs, _json(document))
            index = {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.index.v1+json",
                "manifests": [
                    {
                        "mediaType": _MANIFEST,
                        **described,
                        "platform": {"architecture": _architecture(), "os": "linux"},
                        "annotations": {"org.opencontainers.image.ref.name": "latest"},
                    }
                ],
            }
            (work / "index.json").write_bytes(_json(index))
            (work / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
            work.rename(folder)
    return OciReport(
        folder=folder,
        layers=len(layers),
        size_bytes=sum(layer["size"] for layer in layers),
        manifest_digest=described["digest"],
        seconds=time.perf_counter() - started,
    )


def check_new(folder: Path) -> None:
    """Make the folder around `folder`. Raises: ConfigError when `folder` exists or cannot be made."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists", where="--oci", fix="pass another folder")
    with writing(folder):
        make_parent(folder, "--oci")


def _layer(
    blobs: Path, name: str, content: FileRegion | bytes, sha256: str | None, bundle: Path
) -> dict[str, Any]:
    """A tar of one file; its content is compared with `sha256` on the way."""
    size = len(content) if isinstance(content, bytes) else content.size_bytes
    inner = hashlib.sha256()

    def parts() -> Iterator[bytes]:
        header = tarfile.TarInfo(_ROOT + name)
        header.size, header.mode = size, 0o644
        yield header.tobuf(tarfile.PAX_FORMAT)
        for chunk in [content] if isinstance(content, bytes) else content.chunks():
            inner.update(chunk)
            yield chunk
        yield bytes(-size % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)

    described = _blob(blobs, parts())
    if sha256 is not None and inner.hexdigest() != sha256:
        raise IntegrityError(
            f"{name}: sha256 differs from {BUNDLE_FILE}",
            where=str(bundle),
            fix="copy the bundle again, or pack again",
        )
    return described


def _blob(blobs: Path, parts: Iterable[bytes] | bytes) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    half = blobs / "half"
    with half.open("wb") as stream:
        for part in [parts] if isinstance(parts, bytes) else parts:
            digest.update(part)
            size += len(part)
            stream.write(part)
    half.rename(blobs / digest.hexdigest())
    return {"digest": f"sha256:{digest.hexdigest()}", "size": size}


def _image_config(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """A data image without an entry point, because the site provides the base image with Python."""
    return {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"WorkingDir": "/opt/bundle"},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }


def _architecture() -> str:
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
