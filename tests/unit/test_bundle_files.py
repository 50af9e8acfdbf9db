"""What a bundle brings for its deployment, the OCI layout, diff and prune."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import uuid
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from manifest_edit import edit_manifest
from mingc_command import mingc_here

import mingc
from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.file_cache import cache_folder
from mingc.artifacts.manifest import Manifest
from mingc.artifacts.packed_file import open_packed
from mingc.bundles import deployment
from mingc.bundles.comparison import diff
from mingc.bundles.deployment import deployment_files
from mingc.bundles.oci import write_oci
from mingc.bundles.packing import pack, partial_path
from mingc.bundles.pruning import prune
from mingc.bundles.sbom import _licence, runtime_distributions, runtime_extras, sbom
from mingc.bundles.signatures import generate_keys, sign_bundle, verify_signature
from mingc.bundles.unpacking import STORE, unpack
from mingc.cli import main as cli_main
from mingc.errors import ConfigError, IntegrityError

_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())

# Python 3.11.4 has the filter that later versions want to be named.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


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
    # The type `pypi` of the package URL specification: lower case, `-` for `_`.
    assert all(re.match(r"pkg:pypi/[a-z0-9.-]+@", each["purl"]) and each["version"] for each in libraries)
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


def test_wheels_are_added_or_missed_by_name(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})  # reading all takes a second
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
        assert int(layer["size"]) % tarfile.BLOCKSIZE == 0, "an archive has whole blocks"
        with tarfile.open(fileobj=io.BytesIO(blob(layer)), mode="r:") as tar:
            assert len(tar.getmembers()) == 1
            tar.extractall(root, **SAFELY)
    assert open_artifact(root / "opt/bundle").manifest == open_artifact(artifact_path).manifest
    with pytest.raises(ConfigError, match="exists"):
        write_oci(bundle, folder)
    with pytest.raises(ConfigError, match="cannot be made") as raised:
        write_oci(bundle, bundle / "image")
    assert raised.value.where == "--oci"
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
    dry = prune(folder, is_dry=True, has_cache=True)
    assert dry.removed == (live.name, str(copies / "copy")) and dry.removed_bytes == 2
    assert (copies / "copy").exists() and live.exists()
    assert prune(folder, has_cache=True).removed == (live.name, str(copies / "copy"))
    with pytest.raises(ConfigError):
        prune(folder / "t.mingc")


def test_prune_counts_only_bytes_that_become_free(tmp_path: Path) -> None:
    """A file of an interrupted unpack that is linked to the store stays there until the store is pruned as well."""
    store, work = tmp_path / STORE, tmp_path / ".out.unpack"
    store.mkdir()
    (work / "weights").mkdir(parents=True)
    (work / "weights/a").write_bytes(b"1234567")
    (work / "weights/b").write_bytes(b"123")
    os.link(work / "weights/a", store / "a")
    (tmp_path / ".x.partial").write_bytes(b"1")
    (tmp_path / ".x.partial.journal").write_bytes(b"12")
    (tmp_path / ".link.partial").symlink_to(tmp_path / "out")
    (tmp_path / "x.partial").write_bytes(b"not hidden")
    report = prune(tmp_path)
    assert report.removed == (".out.unpack", ".x.partial", ".x.partial.journal", f"{STORE}/a")
    assert report.removed_bytes == 3 + 1 + 2 + 7
    assert {path.name for path in tmp_path.iterdir()} == {STORE, ".link.partial", "x.partial"}


def test_a_replaced_bundle_goes_when_the_one_that_replaces_it_is_there(tmp_path: Path) -> None:
    old = tmp_path / ".ming.0123abcd.old"
    old.mkdir()
    (old / "engine").write_bytes(b"123")
    (tmp_path / ".notes.old").touch()
    assert prune(tmp_path).removed == ()
    (tmp_path / "ming").mkdir()
    report = prune(tmp_path)
    assert (report.removed, report.removed_bytes) == ((old.name,), 3)
    assert {path.name for path in tmp_path.iterdir()} == {"ming", ".notes.old"}


def test_a_copy_that_a_server_is_writing_stays_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copies = cache_folder() / "files"
    copies.mkdir(parents=True)
    names = ("ab.so", "cd.so.01234567.partial", "ef.so.01234567.partial")
    for name in names:
        (copies / name).write_bytes(b"12")
    (tmp_path / "bundles").mkdir()
    with (copies / names[1]).open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        report = prune(tmp_path / "bundles", has_cache=True)
    assert report.removed_bytes == 4 and [path.name for path in copies.iterdir()] == [names[1]]


def test_the_journal_of_a_living_pack_stays(tmp_path: Path) -> None:
    partial, journal = tmp_path / ".x.partial", tmp_path / ".x.partial.journal"
    partial.touch()
    journal.touch()
    with partial.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert prune(tmp_path).removed == ()
    assert prune(tmp_path).removed == (partial.name, journal.name)


def test_diff_of_settings_alone_is_a_difference(artifact_path: Path, tmp_path: Path) -> None:
    """Each kind of value by name; files are the same, so an upgrade transfers nothing."""
    other = tmp_path / "other"
    shutil.copytree(artifact_path, other)

    def change(document: dict[str, Any]) -> None:
        document["model"] = "tiny 2"
        document["fingerprint"]["dtype"] = "bfloat16"
        document["voices"][0]["name"] = "DB31"
        document["graph"]["nodes"][0]["policy"] = "autoregressive"
        document["parameters"]["audio_encoder"]["hop_samples"] = 161

    edit_manifest(other, change)
    report = diff(artifact_path, other)
    assert report.settings == (
        "model: tiny → tiny 2",
        "fingerprint dtype: float32 → bfloat16",
        "voices: DB30 → DB31",
        "stage graph: differs",
        "parameters of audio_encoder: hop_samples",
    )
    assert not report.is_same and report.changes == () and report.transfer_bytes == 0
    sizes = [record.size_bytes for record in open_artifact(artifact_path).manifest.files.values()]
    assert (report.same_files, report.same_bytes) == (len(sizes), sum(sizes))
    done = mingc_here("bundle", "diff", artifact_path, other)
    assert done.code == 3 and "tiny 2" in done.stdout
    assert mingc_here("bundle", "diff", artifact_path, artifact_path).code == 0


def test_diff_shows_which_file_has_which_use(artifact_path: Path, tmp_path: Path) -> None:
    """With the same names and files, other words of a voice or another tokenizer make other answers."""
    other = tmp_path / "other"
    shutil.copytree(artifact_path, other)

    def change(document: dict[str, Any]) -> None:
        document["voices"][0]["transcript"] += "!"
        document["tokenizers"] = {"talker": document["voices"][0]["file"]}
        document["speaker_network"] = document["voices"][0]["file"]

    edit_manifest(other, change)
    file = open_artifact(artifact_path).manifest.voices[0].file
    report = diff(artifact_path, other)
    assert report.settings == (
        "tokenizers: differs",
        f"speaker network: None → {file}",
        "voice DB30: transcript",
    )
    assert not report.is_same and report.changes == ()


def test_diff_of_files_counts_equal_content_once_and_under_any_name(
    artifact_path: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.mingc", tmp_path / "two.mingc"
    pack(artifact_path, one, {"a": b"same", "gone": b"123", "moved": b"content"})
    pack(artifact_path, two, {"a": b"same", "new1": b"12345", "new2": b"12345", "renamed": b"content"})
    report = diff(one, two)
    assert [(each.file, each.change, each.bytes_before, each.bytes_after) for each in report.changes] == [
        ("bundle/gone", "removed", 3, None),
        ("bundle/moved", "removed", 7, None),
        ("bundle/new1", "added", None, 5),
        ("bundle/new2", "added", None, 5),
        ("bundle/renamed", "added", None, 7),
    ]
    assert report.transfer_bytes == 5 and not report.is_same and report.settings == ()
    unpack(two, tmp_path / "two")
    assert diff(two, tmp_path / "two").is_same  # a folder has the files that the bundle added
    assert diff(tmp_path / "two", one).transfer_bytes == 3


def test_a_damaged_bundle_is_not_written_as_an_image(artifact_path: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "t.mingc"
    pack(artifact_path, bundle, {})
    region = open_packed(bundle).region("weights/audio.bin")
    with bundle.open("r+b") as stream:
        stream.seek(region.offset)
        stream.write(b"W")
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: sha256 differs"):
        write_oci(bundle, tmp_path / "image")
    assert [path.name for path in tmp_path.iterdir() if "image" in path.name] == []


def test_an_image_of_a_signed_bundle_brings_the_signature(artifact_path: Path, tmp_path: Path) -> None:
    bundle, folder = tmp_path / "t.mingc", tmp_path / "image"
    made = generate_keys(tmp_path / "k.key")
    pack(artifact_path, bundle, {})
    sign_bundle(bundle, made.secret_key, None)
    steps: list[str] = []
    report = write_oci(bundle, folder, log=steps.append)
    assert steps == [*open_packed(bundle).files, "bundle.json", "bundle.json.minisig"]
    (described,) = json.loads((folder / "index.json").read_text())["manifests"]
    assert described["platform"] == {"architecture": _ARCHITECTURE, "os": "linux"}
    assert described["annotations"] == {"org.opencontainers.image.ref.name": "latest"}
    document = json.loads((folder / "blobs/sha256" / described["digest"].partition(":")[2]).read_text())
    assert document["annotations"] == {"org.opencontainers.image.title": "tiny"}
    assert report.layers == len(steps) == len(document["layers"])
    assert report.size_bytes == sum(layer["size"] for layer in document["layers"])
    for layer in document["layers"]:
        assert int(layer["size"]) % tarfile.BLOCKSIZE == 0, "an archive has whole blocks"
        with tarfile.open(folder / "blobs/sha256" / layer["digest"].partition(":")[2], "r:") as tar:
            (member,) = tar.getmembers()
            assert member.name.startswith("opt/bundle/") and member.mode == 0o644
            tar.extractall(tmp_path / "root", **SAFELY)
    assert verify_signature(tmp_path / "root/opt/bundle", str(made.public_key)).files == len(steps) - 2


def test_files_of_a_deployment_name_the_model_and_the_device(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    files = deployment_files(manifest, None, None)
    assert "licences/model.txt" not in files
    on_gpu = deployment_files(
        replace(manifest, fingerprint=replace(manifest.fingerprint, device="cuda")), None, None
    )
    assert b"driver's libraries come from the host" in bytes(on_gpu["Containerfile"])  # type: ignore[arg-type]
    assert b"driver" not in bytes(files["Containerfile"])  # type: ignore[arg-type]
    assert b"Description=mingc serving tiny\n" in bytes(files["mingc.service"])  # type: ignore[arg-type]
    assert files == deployment_files(manifest, None, None)


def test_wheels_are_recognised_in_every_spelling(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    for name in (
        "Mingc-0.1.0-py3-none-any.whl",
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        "typing_extensions-4-py3-none-any.whl",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(name.encode())
    files = deployment_files(manifest, tmp_path, None)
    assert sorted(name for name in files if name.startswith("wheels/")) == [
        f"wheels/{name}" for name in sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".whl")
    ]
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").unlink()
    with pytest.raises(ConfigError, match="has no wheel of torch\n") as raised:
        deployment_files(manifest, tmp_path, None)
    assert raised.value.where == "--with-wheels"
    with pytest.raises(ConfigError, match="has no wheel of mingc, torch\n"):
        deployment_files(manifest, tmp_path / "nowhere", None)


def _wheelhouse(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / f"{name}.whl").write_bytes(name.encode())
    return folder


def _for_cards(manifest: Manifest, backend: str) -> Manifest:
    """With engines of `backend` for RTX cards."""
    fingerprint = replace(manifest.fingerprint, target="rtx:sm86,sm89", device="cuda", capability="8.6,8.9")
    return replace(_with_backend(manifest, backend), fingerprint=fingerprint)


def test_a_containerfile_installs_what_the_engines_need(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    cards = _for_cards(manifest, "tensorrt")
    python = "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64"
    wheels = _wheelhouse(tmp_path / "wheels", "mingc-0.1.0-py3-none-any", python)
    for given, extras, is_on_gpu in ((manifest, "serve,sign", False), (cards, "serve,sign,tensorrt", True)):
        text = bytes(deployment_files(given, wheels, None)["Containerfile"]).decode()  # type: ignore[arg-type]
        assert "-f bundle/Containerfile ." in text and f"'mingc[{extras}]'" in text
        assert json.loads(text.rpartition("ENTRYPOINT ")[2])[-2:] == ["--host", "0.0.0.0"]
        assert ("driver's libraries come from the host" in text) == is_on_gpu
        assert ("put wheels of tensorrt-rtx" in text) == is_on_gpu, (
            "NVIDIA's licence keeps them out of the bundle"
        )
        assert "ARG BASE=docker.io/library/python:3.12-slim\n" in text
    _wheelhouse(tmp_path / "licensed", "mingc-0.1.0-py3-none-any", python, "tensorrt_rtx-1.7-py3-none-any")
    with pytest.raises(ConfigError, match="wheels of tensorrt-rtx, which NVIDIA licenses"):
        deployment_files(cards, tmp_path / "licensed", None)
    made = deployment_files(cards, tmp_path / "licensed", None, takes_tensorrt=True)
    assert b"put wheels" not in bytes(made["Containerfile"])  # type: ignore[arg-type]
    alone = bytes(deployment_files(manifest, wheels, None)["Containerfile"])  # type: ignore[arg-type]
    assert b"put wheels" not in alone
    bare = bytes(deployment_files(manifest, None, None)["Containerfile"])  # type: ignore[arg-type]
    assert b"# Before that put wheels of 'mingc[serve,sign]'" in bare


def test_wheels_that_cannot_run_the_engines_are_refused(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    own = "mingc-0.1.0-py3-none-any"
    old = _wheelhouse(tmp_path / "old", own, "torch-2.12.1+cpu-cp311-cp311-linux_x86_64")
    with pytest.raises(ConfigError, match=r"torch is 2\.12\.1\+cpu, the engines were built with 2\.13\.0"):
        deployment_files(manifest, old, None)
    cpu = _wheelhouse(tmp_path / "cpu", own, "torch-2.13.0+cpu-cp311-cp311-linux_x86_64")
    assert deployment_files(manifest, cpu, None)
    with pytest.raises(ConfigError, match="rtx:sm86,sm89 needs one for CUDA"):
        deployment_files(_for_cards(manifest, "tensorrt"), cpu, None)
    name = "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64"
    both = _wheelhouse(tmp_path / "both", own, "torch-2.13.0+cpu-cp311-cp311-linux_x86_64", name)
    assert deployment_files(_for_cards(manifest, "aoti"), both, None), "one of them is for CUDA"
    with pytest.raises(ConfigError, match="has no wheel of onnxruntime\n") as raised:
        deployment_files(_with_backend(manifest, "onnx"), cpu, None)
    assert "[serve,sign,onnx]" in str(raised.value.fix)


def test_the_sbom_lists_the_library_that_runs_the_engines(manifest: Manifest) -> None:
    for backend in ("aoti", "onnx"):
        text = sbom(_with_backend(manifest, backend), has_model_licence=True)
        names = {each["name"] for each in json.loads(text)["components"]}
        assert ("onnxruntime" in names) == (backend == "onnx")


@pytest.mark.parametrize(
    ("backend", "on_cpu", "on_gpu"),
    [("aoti", (), ()), ("onnx", ("onnx",), ("onnx-gpu",)), ("tensorrt", (), ("tensorrt",))],
)
def test_a_library_has_an_extra_for_each_device(
    backend: str, on_cpu: tuple[str, ...], on_gpu: tuple[str, ...], manifest: Manifest
) -> None:
    base = ("serve", "sign")
    assert runtime_extras(_with_backend(manifest, backend)) == (*base, *on_cpu)
    assert runtime_extras(_for_cards(manifest, backend)) == (*base, *on_gpu)


def _with_backend(manifest: Manifest, backend: str) -> Manifest:
    (stage,) = manifest.stages.values()
    (graph,) = stage.graphs.values()
    changed = replace(graph, engines=(replace(graph.engines[0], backend=backend),))
    return replace(manifest, stages={"audio_encoder": replace(stage, graphs={"encode": changed})})


def test_the_sbom_names_the_model_its_hash_and_its_licence(manifest: Manifest) -> None:
    document = json.loads(sbom(manifest, has_model_licence=True))
    model = document["metadata"]["component"]
    assert model["name"] == "tiny" and model["type"] == "machine-learning-model"
    assert model["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}] and model["version"] == "1" * 16
    assert model["licenses"] == [{"license": {"name": "see bundle/licences/model.txt"}}]
    other = json.loads(sbom(manifest, has_model_licence=False))
    assert other["metadata"]["component"]["licenses"] == [{"license": {"name": "not given when packed"}}]
    assert other["serialNumber"] != document["serialNumber"]
    assert sbom(manifest, has_model_licence=True) == sbom(manifest, has_model_licence=True)
    (dependencies,) = document["dependencies"]
    assert dependencies["ref"] == model["bom-ref"]
    assert {*dependencies["dependsOn"]} == {each["bom-ref"] for each in document["components"]}
    for each in document["components"]:
        if each["type"] == "library":
            assert "+" not in each["purl"] and each["version"] == importlib.metadata.version(each["name"])
            assert each["licenses"], each["name"]


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT", "License": "other"}, {"expression": "MIT"}),
        ({"License": "BSD\nmore text"}, {"license": {"name": "BSD"}}),
        ({"License": "x" * 100}, None),
        ({"Classifier": "License :: OSI Approved :: ISC License"}, {"license": {"name": "ISC License"}}),
        ({"Classifier": "Topic :: Audio"}, None),
    ],
)
def test_a_library_states_its_licence_in_one_of_three_places(
    fields: dict[str, str], licence: dict[str, object] | None
) -> None:
    message = Message()
    for name, value in fields.items():
        message[name] = value
    assert _licence(message) == licence


def test_what_serving_needs_follows_extras_and_skips_what_is_not_installed() -> None:
    found = runtime_distributions()
    assert found[0] == "mingc" and found[1:] == sorted(found[1:])
    assert {"cryptography", "safetensors", "click", "uvicorn", "h11"} <= {*found}  # h11 by way of uvicorn
    assert not {"hypothesis", "openai", "ray", "onnx"} & {*found}


def test_a_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG Base Directory Specification: all paths must be absolute, others are invalid and ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("cache", "./cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == tmp_path / ".cache" / "mingc"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "mingc"


def test_an_existing_folder_of_an_image_is_refused_before_anything_is_packed(
    artifact_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image").mkdir()
    bundle = tmp_path / "t.mingc"
    with pytest.raises(SystemExit) as ended:
        cli_main(["bundle", "pack", str(artifact_path), str(bundle), "--oci", str(tmp_path / "image")])
    assert ended.value.code == 2 and "--oci" in capsys.readouterr().err
    assert [path for path in tmp_path.iterdir() if "t.mingc" in path.name] == []


def test_documents_of_an_image_are_those_of_the_specification(artifact_path: Path, tmp_path: Path) -> None:
    """OCI image format 1.1: index, manifest and configuration, without an entry point."""
    bundle, folder = tmp_path / "t.mingc", tmp_path / "image"
    pack(artifact_path, bundle, {"start.sh": b"#!/bin/sh\n"})
    report = write_oci(bundle, folder)

    def read(descriptor: dict[str, Any]) -> Any:
        return json.loads((folder / "blobs" / descriptor["digest"].replace(":", "/")).read_bytes())

    kind = "application/vnd.oci.image"
    index = json.loads((folder / "index.json").read_text())
    (described,) = index["manifests"]
    assert index == {
        "schemaVersion": 2,
        "mediaType": f"{kind}.index.v1+json",
        "manifests": [
            {
                "mediaType": f"{kind}.manifest.v1+json",
                "digest": report.manifest_digest,
                "size": described["size"],
                "platform": {"architecture": _ARCHITECTURE, "os": "linux"},
                "annotations": {"org.opencontainers.image.ref.name": "latest"},
            }
        ],
    }
    manifest = read(described)
    layers, config = manifest["layers"], manifest["config"]
    assert manifest == {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", "digest": config["digest"], "size": config["size"]},
        "layers": [
            {"mediaType": f"{kind}.layer.v1.tar", "digest": each["digest"], "size": each["size"]}
            for each in layers
        ],
        "annotations": {"org.opencontainers.image.title": "tiny"},
    }
    assert read(config) == {
        "architecture": _ARCHITECTURE,
        "os": "linux",
        "config": {"WorkingDir": "/opt/bundle"},
        "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in layers]},
    }
    assert (report.folder, report.layers) == (folder, len(layers))
    assert report.size_bytes == sum(each["size"] for each in layers)
    (folder / "again").mkdir()
    again = write_oci(bundle, folder / "again" / "image")
    assert again.manifest_digest == report.manifest_digest, "nothing in it depends on time or place"


def test_the_head_of_the_sbom(manifest: Manifest) -> None:
    document = json.loads(sbom(manifest, has_model_licence=False))
    assert document["$schema"] == "http://cyclonedx.org/schema/bom-1.6.schema.json"
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert document["metadata"]["tools"] == {
        "components": [{"type": "application", "name": "mingc", "version": mingc.__version__}]
    }
    model = document["metadata"]["component"]
    assert model["licenses"] == [{"license": {"name": "not given when packed"}}]
    (relation,) = document["dependencies"]
    assert relation["ref"] == model["bom-ref"] == "model:tiny"
    assert relation["dependsOn"] == [each["bom-ref"] for each in document["components"]]
    serial = uuid.UUID(document["serialNumber"].removeprefix("urn:uuid:"))
    assert (serial.version, serial.variant, serial.urn) == (4, uuid.RFC_4122, document["serialNumber"])
    assert sbom(manifest, has_model_licence=False) == sbom(manifest, has_model_licence=False)
    other = json.loads(sbom(replace(manifest, model="tïny"), has_model_licence=True))
    assert other["serialNumber"] != document["serialNumber"]
    assert "tïny".encode() in sbom(replace(manifest, model="tïny"), has_model_licence=True)


@pytest.mark.parametrize(
    ("names", "python"),
    [
        (None, None),
        (("torch-2.13.0-cp312-cp312-linux_x86_64", "numpy-2-cp311-cp311-linux_x86_64"), "3.12"),
        (("torch-2.13.0-cp311-cp311-linux_x86_64", "torch-2.13.0-cp312-cp312-linux_x86_64"), None),
        (("numpy-2-cp311-cp311-linux_x86_64",), None),
    ],
)
def test_the_base_image_has_the_python_of_torchs_wheel(
    names: tuple[str, ...] | None, python: str | None, manifest: Manifest, tmp_path: Path
) -> None:
    wheels = None if names is None else _wheelhouse(tmp_path / "wheels", *names)
    text = deployment._containerfile(manifest, wheels)
    assert f"docker.io/library/python:{python or '3.11'}-slim" in text
    assert (python or "3.11 or newer") in text
    assert "the CUDA driver's libraries" not in text
    cuda = replace(manifest, fingerprint=replace(manifest.fingerprint, device="cuda", target="cuda"))
    text = deployment._containerfile(cuda, wheels)
    assert "the CUDA driver's libraries come from the host" in text
