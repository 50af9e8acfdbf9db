"""What a bundle brings for its deployment, diff and prune."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace
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
from mingc.bundles import deployment
from mingc.bundles.comparison import diff
from mingc.bundles.deployment import deployment_files
from mingc.bundles.distributions import distributions
from mingc.bundles.packing import pack, partial_path
from mingc.bundles.pruning import prune
from mingc.bundles.sbom import runtime_extras, sbom
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
    assert not {"pytest", "ruff", "mypy", "onnxscript"} & hashes.keys()
    libraries = [each for each in document["components"] if each["type"] == "library"]
    # The type `pypi` of the package URL specification: lower case, `-` for `_`.
    assert all(re.match(r"pkg:pypi/[a-z0-9.-]+@", each["purl"]) and each["version"] for each in libraries)
    broken = text.replace('"specVersion": "1.6"', '"specVersion": "1.6", "invented": 1')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(broken) is not None


def test_every_library_comes_with_its_licence(files: dict[str, bytes]) -> None:
    for name in distributions(("serve", "sign")):
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


def test_wheels_that_cannot_run_the_engines_are_refused(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    own = "mingc-0.1.0-py3-none-any"
    on_gpu = _with_backend(manifest, "aoti", "cuda")
    old = _wheelhouse(tmp_path / "old", own, "torch-2.12.1+cpu-cp311-cp311-linux_x86_64")
    with pytest.raises(ConfigError, match=r"torch is 2\.12\.1\+cpu, the engines were built with 2\.13\.0"):
        deployment_files(manifest, old, None)
    cpu = _wheelhouse(tmp_path / "cpu", own, "torch-2.13.0+cpu-cp311-cp311-linux_x86_64")
    assert deployment_files(manifest, cpu, None)
    with pytest.raises(ConfigError, match="cuda needs one for CUDA"):
        deployment_files(on_gpu, cpu, None)
    name = "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64"
    both = _wheelhouse(tmp_path / "both", own, "torch-2.13.0+cpu-cp311-cp311-linux_x86_64", name)
    assert deployment_files(on_gpu, both, None), "one of them is for CUDA"
    with pytest.raises(ConfigError, match="has no wheel of onnxruntime\n") as raised:
        deployment_files(_with_backend(manifest, "onnx"), cpu, None)
    assert "[serve,sign,onnx]" in str(raised.value.fix)


def test_libraries_of_nvidia_are_packed_only_when_asked_to(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    rtx = _with_backend(manifest, "tensorrt", "cuda")
    own = ("mingc-0.1.0-py3-none-any", "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64")
    text = bytes(deployment_files(rtx, _wheelhouse(tmp_path / "w", *own), None)["Containerfile"]).decode()  # type: ignore[arg-type]
    assert "put wheels of tensorrt-rtx" in text and "'mingc[serve,sign,tensorrt-runtime]'" in text
    assert "driver's libraries come from the host" in text
    licensed = _wheelhouse(tmp_path / "licensed", *own, "tensorrt_rtx-1.7-py3-none-any")
    with pytest.raises(ConfigError, match="wheels of tensorrt-rtx, which NVIDIA licenses"):
        deployment_files(rtx, licensed, None)
    made = deployment_files(rtx, licensed, None, takes_tensorrt=True)
    assert b"put wheels" not in bytes(made["Containerfile"])  # type: ignore[arg-type]
    both = bytes(
        deployment_files(_with_backend(manifest, "onnx", "cuda"), None, None)["Containerfile"]
    ).decode()  # type: ignore[arg-type]
    assert (
        "pip uninstall -y onnxruntime onnxruntime-gpu \\\n    && /opt/venv/bin/pip install --no-index" in both
    )
    bare = bytes(deployment_files(manifest, None, None)["Containerfile"])  # type: ignore[arg-type]
    assert b"# Before that put wheels of 'mingc[serve,sign]'" in bare and b"uninstall" not in bare


def test_the_sbom_lists_the_library_that_runs_the_engines(manifest: Manifest) -> None:
    for backend in ("aoti", "onnx"):
        text = sbom(_with_backend(manifest, backend), has_model_licence=True)
        names = {each["name"] for each in json.loads(text)["components"]}
        assert ("onnxscript" in names) == (backend == "onnx")


def _with_backend(manifest: Manifest, backend: str, device: str = "cpu") -> Manifest:
    (stage,) = manifest.stages.values()
    (graph,) = stage.graphs.values()
    changed = replace(graph, engines=(replace(graph.engines[0], backend=backend),))
    fingerprint = replace(manifest.fingerprint, device=device, target=device)
    stages = {"audio_encoder": replace(stage, graphs={"encode": changed})}
    return replace(manifest, fingerprint=fingerprint, stages=stages)


@pytest.mark.parametrize(
    ("backend", "device", "extras"),
    [
        ("aoti", "cpu", ()),
        ("onnx", "cpu", ("onnx",)),
        ("onnx", "cuda", ("onnx-gpu",)),
        ("tensorrt", "cuda", ("tensorrt-runtime",)),
    ],
)
def test_a_library_has_an_extra_for_each_device(
    backend: str, device: str, extras: tuple[str, ...], manifest: Manifest
) -> None:
    assert runtime_extras(_with_backend(manifest, backend, device)) == ("serve", "sign", *extras)


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
    (dependencies,) = [each for each in document["dependencies"] if "dependsOn" in each]
    assert dependencies["ref"] == model["bom-ref"]
    assert {*dependencies["dependsOn"]} == {each["bom-ref"] for each in document["components"]}
    for each in document["components"]:
        if each["type"] == "library":
            assert "+" not in each["purl"] and each["version"] == importlib.metadata.version(each["name"])
            assert each["licenses"], each["name"]


def test_what_serving_needs_follows_extras_and_skips_what_is_not_installed() -> None:
    found = distributions(("serve", "sign"))
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


def test_the_head_of_the_sbom(manifest: Manifest) -> None:
    document = json.loads(sbom(manifest, has_model_licence=False))
    assert document["$schema"] == "http://cyclonedx.org/schema/bom-1.6.schema.json"
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    assert document["metadata"]["tools"] == {
        "components": [{"type": "application", "name": "mingc", "version": mingc.__version__}]
    }
    model = document["metadata"]["component"]
    assert model["licenses"] == [{"license": {"name": "not given when packed"}}]
    (relation,) = [each for each in document["dependencies"] if "dependsOn" in each]
    assert relation["ref"] == model["bom-ref"] == "model:tiny"
    assert {*relation["dependsOn"]} == {each["bom-ref"] for each in document["components"]}
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
    ],
)
def test_the_base_image_has_the_python_of_torchs_wheel(
    names: tuple[str, ...] | None,
    python: str | None,
    manifest: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "_licences", lambda extras: {})
    wheels = None if names is None else _wheelhouse(tmp_path / "wheels", "mingc-0.1.0-py3-none-any", *names)
    text = bytes(deployment_files(manifest, wheels, None)["Containerfile"]).decode()  # type: ignore[arg-type]
    assert f"ARG BASE=docker.io/library/python:{python or '3.11'}-slim\n" in text
    assert (python or "3.11 or newer") in text


def test_unit_and_container_serve_only_with_api_keys(files: dict[str, bytes]) -> None:
    """Both listen on every interface."""
    entry = json.loads(files["Containerfile"].decode().rpartition("ENTRYPOINT ")[2])
    assert entry[entry.index("--host") + 1] == "0.0.0.0"
    assert entry[entry.index("--api-key-file") + 1] == "/run/secrets/mingc-api-keys"
    unit = files["mingc.service"].decode()
    assert "--api-key-file ${CREDENTIALS_DIRECTORY}/api-keys\n" in unit
    assert "\nLoadCredential=api-keys:/etc/mingc/api-keys\n" in unit


def test_packing_without_the_sbom_library_says_what_to_install(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cyclonedx.model", None)
    with pytest.raises(ConfigError, match="cyclonedx-python-lib") as raised:
        sbom(manifest, has_model_licence=False)
    assert raised.value.fix == "pip install 'mingc[bundle]'"
