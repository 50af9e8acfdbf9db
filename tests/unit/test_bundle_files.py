"""What a bundle brings for its deployment, the OCI layout, diff and prune."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from manifest_edit import edit_manifest

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.file_cache import cache_folder
from mingc.artifacts.manifest import Manifest
from mingc.bundles.comparison import diff
from mingc.bundles.deployment import deployment_files
from mingc.bundles.oci import write_oci
from mingc.bundles.packing import pack, partial_path
from mingc.bundles.pruning import prune
from mingc.bundles.sbom import runtime_distributions
from mingc.bundles.unpacking import STORE, unpack
from mingc.errors import ConfigError


@pytest.fixture
def files(artifact_path: Path, tmp_path: Path) -> dict[str, bytes]:
    licence = tmp_path / "LICENCE"
    licence.write_text("for these weights")
    made = deployment_files(open_artifact(artifact_path).manifest, None, licence)
    return {name: value if isinstance(value, bytes) else value.read_bytes() for name, value in made.items()}


def test_the_sbom_fits_the_schema_and_lists_every_file_and_library(
    files: dict[str, bytes], artifact_path: Path
) -> None:
    text = files["sbom.cdx.json"].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    hashes = {each["name"]: each.get("hashes", [{}])[0].get("content") for each in document["components"]}
    for name, record in open_artifact(artifact_path).manifest.files.items():
        assert hashes[name] == record.sha256
    assert {"torch", "uvicorn", "starlette", "numpy", "mingc"} <= hashes.keys()
    assert not {"pytest", "ruff", "mypy", "onnxruntime"} & hashes.keys()
    libraries = [each for each in document["components"] if each["type"] == "library"]
    assert all(each["version"] and each["purl"].startswith("pkg:pypi/") for each in libraries)
    broken = text.replace('"specVersion": "1.6"', '"specVersion": "1.6", "invented": 1')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(broken) is not None


def test_every_library_comes_with_its_licence(files: dict[str, bytes]) -> None:
    for name in runtime_distributions():
        own = [path for path in files if path.startswith(f"licences/{name}/")]
        assert own and all(files[path].strip() for path in own), name
    assert files["licences/model.txt"] == b"for these weights"
    assert b"Apache License" in files["licences/mingc/LICENSE"]


def test_the_unit_passes_systemds_own_check(files: dict[str, bytes], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "mingc.service"
    unit.write_bytes(files["mingc.service"])
    check = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "mingc.service" not in done.stderr, done.stderr
    unit.write_bytes(files["mingc.service"].replace(b"Type=exec", b"Type=invented"))
    assert "invented" in subprocess.run(check, capture_output=True, text=True, timeout=60).stderr


def test_the_start_script_serves_its_own_folder(
    artifact_path: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    """`mingc` is replaced by a program that prints its arguments."""
    pack(artifact_path, tmp_path / "t.mingc", files)
    out = tmp_path / "with a space"
    unpack(tmp_path / "t.mingc", out)
    environment = {"PATH": os.environ["PATH"], "MINGC": "echo"}
    words = ["sh", str(out / "bundle/start.sh"), "--port", "0"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, cwd="/")
    assert done.stdout == f"serve {out} --port 0\n"
    environment["MINGC_PUBLIC_KEY"] = "key.pub"
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, cwd="/")
    assert done.stdout == f"serve {out} --require-signature key.pub --port 0\n"


def test_the_containerfile_needs_no_network(files: dict[str, bytes]) -> None:
    text = files["Containerfile"].decode()
    runs = text[text.index("RUN ") : text.index("COPY . ")]
    assert "--no-index" in runs and "apt" not in runs and "http" not in runs


def test_wheels_are_added_or_missed_by_name(manifest: Manifest, tmp_path: Path) -> None:
    for name in ("mingc-0.1.0-py3-none-any.whl", "torch-2.13.0-cp311-cp311-linux_x86_64.whl"):
        with pytest.raises(ConfigError, match="has no wheel of"):
            deployment_files(manifest, tmp_path, None)
        (tmp_path / name).write_bytes(b"wheel")
    assert "wheels/mingc-0.1.0-py3-none-any.whl" in deployment_files(manifest, tmp_path, None)
    with pytest.raises(ConfigError, match="is not a file"):
        deployment_files(manifest, None, tmp_path / "nowhere")


def test_the_oci_layout_holds_the_bundle(artifact_path: Path, tmp_path: Path) -> None:
    """Read as a registry does: every blob by its digest, every layer a tar of one file."""
    bundle, folder = tmp_path / "t.mingc", tmp_path / "image"
    pack(artifact_path, bundle, {"start.sh": b"#!/bin/sh\n"})
    report = write_oci(bundle, folder)

    def blob(descriptor: dict[str, object]) -> bytes:
        content = (folder / "blobs" / str(descriptor["digest"]).replace(":", "/")).read_bytes()
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
        assert len(content) == descriptor["size"]
        return content

    assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (described,) = json.loads((folder / "index.json").read_text())["manifests"]
    assert described["digest"] == report.manifest_digest
    document = json.loads(blob(described))
    config = json.loads(blob(document["config"]))
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in document["layers"]]
    root = tmp_path / "root"
    for layer in document["layers"]:
        with tarfile.open(fileobj=io.BytesIO(blob(layer)), mode="r:") as tar:
            assert len(tar.getmembers()) == 1
            tar.extractall(root, filter="data")
    assert open_artifact(root / "opt/bundle").manifest == open_artifact(artifact_path).manifest
    with pytest.raises(ConfigError, match="exists"):
        write_oci(bundle, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"artifact", "t.mingc", "image", "root"}


def test_diff_lists_settings_files_and_bytes_to_transfer(artifact_path: Path, tmp_path: Path) -> None:
    pack(artifact_path, tmp_path / "one.mingc", {"start.sh": b"1"})
    assert diff(artifact_path, artifact_path).is_same
    other = tmp_path / "other"
    shutil.copytree(artifact_path, other)
    content = b"more" * 100
    (other / "weights/audio.bin").write_bytes(content)

    def change(document: dict[str, dict[str, object]]) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        document["files"]["weights/audio.bin"] = {"size_bytes": 400, "sha256": sha256}
        document["fingerprint"]["torch"] = "2.13.1"

    edit_manifest(other, change)
    pack(other, tmp_path / "two.mingc", {"start.sh": b"1", "added.txt": b"22"})
    report = diff(tmp_path / "one.mingc", tmp_path / "two.mingc")
    assert not report.is_same and report.transfer_bytes == 402
    assert [(each.file, each.change) for each in report.changes] == [
        ("bundle/added.txt", "added"),
        ("weights/audio.bin", "changed"),
    ]
    assert report.settings == ("fingerprint torch: 2.13.0 → 2.13.1",)


def test_prune_removes_only_what_is_not_used(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "bundles"
    pack(artifact_path, folder / "t.mingc", {})
    store, live, half = folder / STORE, partial_path(folder / "live"), partial_path(folder / "dead")
    store.mkdir()
    (store / "used").write_bytes(b"12")
    os.link(store / "used", folder / "weights")
    (store / "unused").write_bytes(b"123")
    work = folder / ".out.unpack"
    work.mkdir()
    (work / "x").write_bytes(b"1234")
    live.write_bytes(b"1")
    half.write_bytes(b"12345")
    copies = cache_folder() / "files"
    copies.mkdir(parents=True)
    (copies / "copy").write_bytes(b"1")
    expected = {".out.unpack", ".dead.partial", f"{STORE}/unused"}
    with live.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        dry = prune(folder, is_dry=True)
        assert {*dry.removed} == expected and dry.removed_bytes == 12 and half.exists()
        assert prune(folder) == type(dry)(folder=folder, is_dry=False, removed_bytes=12, removed=dry.removed)
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert left == {"t.mingc", "weights", STORE, f"{STORE}/used", live.name}
    assert (copies / "copy").exists()
    assert prune(folder, has_cache=True).removed == (live.name, str(copies / "copy"))
    with pytest.raises(ConfigError):
        prune(folder / "t.mingc")
