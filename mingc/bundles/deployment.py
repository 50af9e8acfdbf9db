"""Files that a bundle adds for its deployment: start script, systemd unit, Containerfile, licences, SBOM.

All of them are made from the artifact alone, so packing twice gives the same file. Paths inside are relative to the
unpacked folder.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from mingc.artifacts.manifest import Manifest
from mingc.bundles.sbom import runtime_distributions, sbom
from mingc.errors import ConfigError

_START = """\
#!/bin/sh
# Serve this bundle. Arguments are options of `mingc serve`; MINGC_PUBLIC_KEY requires its signature.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
if [ -n "${MINGC_PUBLIC_KEY:-}" ]; then
    set -- --require-signature "$MINGC_PUBLIC_KEY" "$@"
fi
exec "${MINGC:-mingc}" serve "$here" "$@"
"""

_UNIT = """\
# Copy to /etc/systemd/system/mingc.service; the bundle is unpacked in /opt/mingc/current (docs/operations.md).
[Unit]
Description=mingc serving {model}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
Environment=MINGC=/opt/mingc/venv/bin/mingc
Environment=XDG_CACHE_HOME=/var/cache/mingc
# A key in this file makes the signature required: MINGC_PUBLIC_KEY=/etc/mingc/mingc.pub
EnvironmentFile=-/etc/mingc/environment
ExecStart=/bin/sh /opt/mingc/current/bundle/start.sh --host 0.0.0.0 --port 8000
# 4: a rank was lost; every code but that of a wrong option is worth another start.
Restart=on-failure
RestartPreventExitStatus=2 3
RestartSec=5
TimeoutStopSec=30
DynamicUser=yes
CacheDirectory=mingc
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target
"""

_CONTAINERFILE = """\
# Built in the unpacked bundle, without a network: `buildah bud --network=none -f bundle/Containerfile .`
# The base image holds Python {python} and libstdc++{cuda}; it has to be on the machine.
ARG BASE={base}
FROM ${{BASE}}
COPY bundle/wheels /tmp/wheels
RUN python3 -m venv /opt/venv \\
    && /opt/venv/bin/pip install --no-index --find-links /tmp/wheels 'mingc[serve,sign]' \\
    && rm -r /tmp/wheels
COPY . /opt/bundle
ENV MINGC=/opt/venv/bin/mingc XDG_CACHE_HOME=/tmp/cache
EXPOSE 8000
USER 65534
ENTRYPOINT ["/bin/sh", "/opt/bundle/bundle/start.sh", "--host", "0.0.0.0"]
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
    is_cuda = manifest.fingerprint.device == "cuda"
    files: dict[str, Path | bytes] = {
        "start.sh": _START.encode(),
        "mingc.service": _UNIT.format(model=manifest.model).encode(),
        "Containerfile": _CONTAINERFILE.format(
            python="3.11 or newer",
            cuda=" and the CUDA driver's libraries come from the host" if is_cuda else "",
            base="docker.io/library/python:3.11-slim",
        ).encode(),
    }
    if model_licence is not None:
        if not model_licence.is_file():
            raise ConfigError(
                f"{model_licence} is not a file", where="--model-licence", fix="pass the licence's text"
            )
        files["licences/model.txt"] = model_licence.read_bytes()
    if wheels is not None:
        files |= _wheels(wheels, takes_tensorrt=takes_tensorrt)
    files |= _licences()
    files["sbom.cdx.json"] = sbom(manifest, has_model_licence=model_licence is not None)
    return files


def _wheels(folder: Path, *, takes_tensorrt: bool) -> Mapping[str, Path]:
    found = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    names = {path.name.split("-")[0].replace("_", "-").lower() for path in found}
    lacking = sorted({"mingc", "torch"} - names)
    if lacking:
        raise ConfigError(
            f"{folder} has no wheel of {', '.join(lacking)}",
            where="--with-wheels",
            fix=f"pip wheel --wheel-dir {folder} 'CHECKOUT[serve,sign]'",
        )
    licensed = sorted(name for name in names if name.startswith("tensorrt"))
    if licensed and not takes_tensorrt:
        raise ConfigError(
            f"{folder} has wheels of {', '.join(licensed)}, which NVIDIA licenses and others may not pass on freely",
            where="--with-wheels",
            fix="remove them from the folder, or read their licence and pass --with-tensorrt",
        )
    return {f"wheels/{path.name}": path for path in found}


def _licences() -> dict[str, Path | bytes]:
    """The licence files of mingc and of every distribution that serving needs, as they are installed here."""
    files: dict[str, Path | bytes] = {}
    for name in runtime_distributions():
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
