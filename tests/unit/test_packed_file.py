"""A packed bundle: other programs read it, weights are mapped in it, and no changed byte of it is accepted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manifest_edit import edit_manifest
from safetensors import SafetensorError
from safetensors.torch import save_file

from mingc.artifacts.artifact import check_hashes, open_artifact
from mingc.artifacts.bundle_manifest import BUNDLE_FILE, SIGNATURE_FILE
from mingc.artifacts.file_cache import cache_folder
from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.packed_file import open_packed
from mingc.artifacts.zip_layout import ALIGNMENT, place
from mingc.bundles import packing, unpacking
from mingc.bundles.packing import kept_end_path, pack, partial_path, set_signature, tail_bytes
from mingc.bundles.signatures import generate_keys, require_signature, sign_bundle, verify_signature
from mingc.bundles.unpacking import STORE, unpack
from mingc.errors import ArtifactError, ConfigError, IntegrityError, ManifestError, SignatureError
from mingc.runtime.engines.packed_weights import PackedWeights

EXTRAS: dict[str, Path | bytes] = {"start.sh": b"#!/bin/sh\n", "licences/mingc.txt": b"Apache-2.0\n"}


@pytest.fixture
def bundle(artifact_path: Path, tmp_path: Path) -> Path:
    pack(artifact_path, tmp_path / "tiny.mingc", EXTRAS)
    return tmp_path / "tiny.mingc"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, str]:
    """Secret key file and public key."""
    made = generate_keys(tmp_path / "keys" / "team.key")
    return made.secret_key, str(made.public_key)


def _accepts(bundle: Path, public: str) -> None:
    """What `serve --require-signature` and `verify-signature` check."""
    require_signature(bundle, public)
    check_hashes(open_artifact(bundle))
    verify_signature(bundle, public)


def test_zip_programs_read_it_and_every_file_is_aligned(bundle: Path, artifact_path: Path) -> None:
    with zipfile.ZipFile(bundle) as file:
        assert file.testzip() is None
        for info in file.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            name = artifact_path / info.filename
            if name.is_file():
                assert file.read(info) == name.read_bytes()
    content = bundle.read_bytes()
    for name, region in open_packed(bundle).files.items():
        assert region.offset % ALIGNMENT == 0
        assert content[region.offset :][: region.size_bytes] == region.read() == bytes(region.mapped())
        assert zipfile.ZipFile(bundle).read(name) == region.read()


def test_unzip_finds_no_error(bundle: Path) -> None:
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    done = subprocess.run(["unzip", "-tq", bundle], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_a_packed_artifact_opens_like_its_folder(bundle: Path, artifact_path: Path) -> None:
    packed, folder = open_artifact(bundle), open_artifact(artifact_path)
    check_hashes(packed)
    assert packed.manifest == folder.manifest
    for name in folder.manifest.files:
        assert packed.region(name).read() == folder.path(name).read_bytes() == packed.path(name).read_bytes()


def test_two_packs_are_identical(bundle: Path, artifact_path: Path, tmp_path: Path) -> None:
    pack(artifact_path, tmp_path / "again.mingc", EXTRAS)
    assert (tmp_path / "again.mingc").read_bytes() == bundle.read_bytes()


def test_unpack_gives_the_folder_back(bundle: Path, artifact_path: Path, tmp_path: Path) -> None:
    unpack(bundle, tmp_path / "out")
    for path in artifact_path.rglob("*"):
        if path.is_file():
            assert (tmp_path / "out" / path.relative_to(artifact_path)).read_bytes() == path.read_bytes()
    assert (tmp_path / "out/bundle/start.sh").read_bytes() == EXTRAS["start.sh"]
    check_hashes(open_artifact(tmp_path / "out"))


def test_every_changed_byte_is_refused(bundle: Path, keys: tuple[Path, str]) -> None:
    """The first and last byte of every part, and random ones: headers, alignment, each file, signature, index."""
    sign_bundle(bundle, keys[0], "release 1")
    _accepts(bundle, keys[1])
    content = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as file:
        infos = file.infolist()
        starts = [info.header_offset for info in infos]
        ends = [*starts[1:], file.start_dir]
    edges = {*starts, *(start + 60 for start in starts), *(end - 1 for end in ends)}
    edges |= {
        end - info.file_size - 1 for info, end in zip(infos, ends, strict=True)
    }  # last byte of alignment
    edges |= {end - info.file_size for info, end in zip(infos, ends, strict=True)}
    edges |= {ends[-1] + at for at in range(0, len(content) - ends[-1], 7)}  # index and end records
    edges |= {ends[-1] - at for at in range(1, infos[-1].file_size, 3)}  # signature
    edges |= {random.Random(3).randrange(len(content)) for _ in range(60)}
    for at in sorted(edges):
        bundle.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(ArtifactError) as raised:
            _accepts(bundle, keys[1])
        part = next((info.filename for info, end in zip(infos, ends, strict=True) if at < end), "index")
        said = str(raised.value)
        assert part in said or "index" in said or "end records" in said or "signature" in said, (
            at,
            part,
            said,
        )


def test_a_bundle_cut_off_or_extended_is_refused(bundle: Path) -> None:
    content = bundle.read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], content + b"\0", content[1:], b""):
        bundle.write_bytes(changed)
        with pytest.raises(IntegrityError):
            open_artifact(bundle)


def test_sizes_beyond_64_bits_are_refused(bundle: Path) -> None:
    """Two sizes near 2^64: no place in a file can be computed for what follows them."""
    with zipfile.ZipFile(bundle) as file:
        at = file.start_dir
    content = bytearray(bundle.read_bytes())
    for _ in range(2):
        name_bytes = int.from_bytes(content[at + 28 : at + 30], "little")
        content[at + 46 + name_bytes + 4 : at + 46 + name_bytes + 12] = b"\xff" * 8
        at += 46 + name_bytes + 28
    bundle.write_bytes(content)
    with pytest.raises(IntegrityError, match="the bundle is damaged: index"):
        open_packed(bundle)


def _rebuilt(bundle: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Pack changed files in the right layout with a right bundle.json, and the former signature."""
    packed = open_packed(bundle)
    contents = {name: region.read() for name, region in packed.files.items()}
    change(contents)
    from mingc.artifacts.bundle_manifest import BundleFile
    from mingc.artifacts.zip_layout import local_header

    files = {
        name: BundleFile(
            size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), crc32=zlib.crc32(data)
        )
        for name, data in contents.items()
    }
    placed = place([(name, len(data)) for name, data in contents.items()])
    whole = b""
    for each in placed:
        whole += local_header(each, files[each.name].crc32) + contents[each.name]
    table = replace(packed.bundle, files=files)
    tail, _ = tail_bytes(
        placed, [files[each.name].crc32 for each in placed], table.to_bytes(), packed.signature
    )
    bundle.write_bytes(whole + tail)


def test_a_swapped_manifest_or_file_is_refused_by_the_signature(bundle: Path, keys: tuple[Path, str]) -> None:
    sign_bundle(bundle, keys[0], None)

    def swap(contents: dict[str, bytes]) -> None:
        contents["bundle/start.sh"] = b"#!/bin/sh\nexit 1\n"

    _rebuilt(bundle, swap)
    open_artifact(bundle)  # the bundle itself is consistent
    with pytest.raises(SignatureError, match=r"does not fit the content of bundle\.json"):
        require_signature(bundle, keys[1])


def test_a_manifest_of_another_artifact_is_refused(bundle: Path) -> None:
    def swap(contents: dict[str, bytes]) -> None:
        contents["weights/audio.bin"] = b"x" * len(contents["weights/audio.bin"])

    _rebuilt(bundle, swap)
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: the bundle has another file"):
        open_artifact(bundle)


def test_an_unpacked_bundle_keeps_its_signature(bundle: Path, keys: tuple[Path, str], tmp_path: Path) -> None:
    sign_bundle(bundle, keys[0], "release 1")
    out = tmp_path / "out"
    unpack(bundle, out, is_shared=False)
    assert verify_signature(out, keys[1]).trusted_comment == "release 1"
    (out / "added.txt").write_text("new")
    with pytest.raises(IntegrityError, match=r"added\.txt: is not in bundle\.json"):
        verify_signature(out, keys[1])
    (out / "added.txt").unlink()
    (tmp_path / "elsewhere").mkdir()
    (out / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match=r"linked: is not in bundle\.json"):
        verify_signature(out, keys[1])
    (out / "linked").unlink()
    for path in sorted(out.rglob("*")):
        if path.is_file():
            before = path.read_bytes()
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            with pytest.raises(ArtifactError) as raised:
                verify_signature(out, keys[1])
            assert path.name in str(raised.value)
            path.write_bytes(before)
    edit_manifest(out, lambda document: document.update(model="other"))
    with pytest.raises(IntegrityError, match=r"manifest\.json: sha256 differs"):
        require_signature(out, keys[1])


def test_new_keys_replace_none_and_leave_no_half_pair(tmp_path: Path) -> None:
    made = generate_keys(tmp_path / "team.key")
    assert made.secret_key.stat().st_mode & 0o077 == 0
    before = made.secret_key.read_bytes()
    with pytest.raises(ConfigError):
        generate_keys(tmp_path / "team.key")
    assert made.secret_key.read_bytes() == before
    made.secret_key.unlink()
    with pytest.raises(ConfigError, match="exists"):
        generate_keys(tmp_path / "team.key")
    assert not made.secret_key.exists()


@pytest.mark.parametrize("name", [BUNDLE_FILE, "manifest.json"])
def test_a_file_that_this_user_may_not_read_is_named(
    name: str, bundle: Path, keys: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is not that the bundle is unsigned. Root may read every file, so the test makes the refusal."""
    sign_bundle(bundle, keys[0], None)
    unpack(bundle, tmp_path / "out")
    real = Path.open

    def refused(path: Path, *words: str, **options: str) -> object:
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return real(path, *words, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ArtifactError, match="may not read"):
        require_signature(tmp_path / "out", keys[1])


def test_unsigned_and_wrongly_signed_bundles_are_refused(
    bundle: Path, keys: tuple[Path, str], artifact_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(SignatureError, match="not signed"):
        require_signature(bundle, keys[1])
    with pytest.raises(SignatureError, match="only bundles are signed"):
        require_signature(artifact_path, keys[1])
    with pytest.raises(SignatureError, match=r"absent\.mingc does not exist"):
        require_signature(tmp_path / "absent.mingc", keys[1])
    other = generate_keys(tmp_path / "other.key")
    sign_bundle(bundle, other.secret_key, None)
    with pytest.raises(SignatureError, match=f"signed with the key {other.key_id}"):
        require_signature(bundle, keys[1])
    sign_bundle(bundle, keys[0], None)  # replaces the signature
    require_signature(bundle, keys[1])
    text = Path(keys[1]).read_text().splitlines()[1]
    require_signature(bundle, text)
    for wrong in ("nowhere.pub", text[:-4], str(bundle.parent)):
        with pytest.raises(ConfigError):
            require_signature(bundle, wrong)


def test_the_program_minisign_agrees(bundle: Path, tmp_path: Path) -> None:
    """Its keys sign here, and it verifies what was signed here; both need no file of ours but bundle.json."""
    if shutil.which("minisign") is None:
        pytest.skip("minisign is not installed")
    secret, public = tmp_path / "m.key", tmp_path / "m.pub"
    subprocess.run(
        ["minisign", "-G", "-W", "-p", public, "-s", secret], check=True, timeout=60, capture_output=True
    )
    sign_bundle(bundle, secret, "by minisign's key")
    verify_signature(bundle, str(public))
    unpack(bundle, tmp_path / "out")
    words = ["minisign", "-V", "-p", public, "-m", tmp_path / "out" / BUNDLE_FILE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "by minisign's key" in done.stdout
    # The other way round: a signature that minisign made, with a key that was made here.
    made = generate_keys(tmp_path / "ours.key")
    (tmp_path / "out" / SIGNATURE_FILE).unlink()
    words = ["minisign", "-S", "-s", made.secret_key, "-m", tmp_path / "out" / BUNDLE_FILE]
    subprocess.run([*words, "-t", "made by minisign"], check=True, timeout=60, capture_output=True)
    assert verify_signature(tmp_path / "out", str(made.public_key)).trusted_comment == "made by minisign"


@pytest.mark.parametrize("password", [None, pytest.param("word", marks=pytest.mark.exhaustive)])
def test_a_secret_key_of_minisign_with_a_password(
    password: str | None, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by `minisign -G` with the password `word`; opening it takes seconds and 1 GiB, as in minisign."""
    secret = tmp_path / "m.key"
    secret.write_text(
        "untrusted comment: minisign encrypted secret key\n"
        "RWRTY0IyCHvXPu/ef0+HjXZUYn1USswZi6WOUqR9+mKXiU7UyCEAAAACAAAAAAAAAEAAAAAA7Pj+LofGz3G5xl1T6T5Hx6vmmoy4"
        "ZsizL6r8ip891jHcwjICj4iK8DEP+XoLjtU9LNWUdvRbYSZG55jt6gPluVqPdY+hZ5tq1oc3br4PCTGZQ34A28sUhJTLpZTdYaihAoZm+8qGo8U=\n"
    )
    public = "RWQ4jFRv8cKdalkyg0zk3CwAb+ou59iLzb3+ZLU/AM6v/bPLB+nProR9"
    if password is None:
        with pytest.raises(ConfigError, match="has a password"):
            sign_bundle(bundle, secret, None)
        return
    monkeypatch.setenv("MINGC_SIGN_PASSWORD", password)
    sign_bundle(bundle, secret, None)
    verify_signature(bundle, public)


def test_an_interrupted_signing_is_named_and_done_again(
    bundle: Path, keys: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int, content: bytes, at: int) -> None:
        os.pwrite(descriptor, content[: len(content) - 30], at)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "_write_all", fails)
        sign_bundle(bundle, keys[0], None)
    assert kept_end_path(bundle).exists()
    with pytest.raises(IntegrityError):
        open_artifact(bundle)
    sign_bundle(bundle, keys[0], None)
    _accepts(bundle, keys[1])
    assert not kept_end_path(bundle).exists()


def test_the_end_of_a_former_bundle_is_not_put_into_a_new_one(
    bundle: Path, keys: tuple[Path, str], artifact_path: Path
) -> None:
    """A kill before the end of signing left it, and the bundle was packed again but not signed again."""
    kept_end_path(bundle).write_bytes((4096).to_bytes(8, "little") + b"end of a former, smaller bundle")
    pack(artifact_path, bundle, {**EXTRAS, "added": b"1" * 5000}, replace_existing=True)
    sign_bundle(bundle, keys[0], None)
    _accepts(bundle, keys[1])
    assert not kept_end_path(bundle).exists()


def test_a_signature_that_is_replaced_by_a_shorter_one_leaves_nothing(bundle: Path) -> None:
    set_signature(bundle, b"long" * 500)
    set_signature(bundle, b"short")
    assert open_packed(bundle).signature == b"short"


def test_pack_continues_with_the_files_that_it_has(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, copied = tmp_path / "tiny.mingc", []
    original = packing._copy

    def fails_at_the_fourth(descriptor, placed, source, stop):  # type: ignore[no-untyped-def]
        copied.append(placed.name)
        if len(copied) >= 4:
            raise KeyboardInterrupt
        return original(descriptor, placed, source, stop)

    monkeypatch.setattr("mingc.bundles.transfer.THREADS", 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "_copy", fails_at_the_fourth)
        pack(artifact_path, output, EXTRAS)
    assert not output.exists() and partial_path(output).exists()
    unfinished = copied[3:]
    monkeypatch.setattr(packing, "_copy", lambda *words: (copied.append(words[1].name), original(*words))[1])
    report = pack(artifact_path, output, EXTRAS)
    assert report.resumed_bytes > 0
    assert sorted(copied) == sorted([*open_packed(output).files, *unfinished])
    pack(artifact_path, tmp_path / "whole.mingc", EXTRAS)
    assert output.read_bytes() == (tmp_path / "whole.mingc").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pack_does_not_continue_another_artifact(artifact_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "tiny.mingc"
    partial_path(output).write_bytes(b"half of something else")
    packing.journal_path(output).write_text('other\n{"name": "weights/audio.bin", "size_bytes": 1')
    assert pack(artifact_path, output, EXTRAS).resumed_bytes == 0
    check_hashes(open_artifact(output))


def test_pack_does_not_replace_a_bundle_that_appears_while_it_packs(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "tiny.mingc"
    pack(artifact_path, tmp_path / "other.mingc", {})
    finish = packing._finish

    def after_another(*words) -> None:  # type: ignore[no-untyped-def]
        shutil.copyfile(tmp_path / "other.mingc", output)
        finish(*words)

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="exists"):
        patch.setattr(packing, "_finish", after_another)
        pack(artifact_path, output, EXTRAS)
    assert output.read_bytes() == (tmp_path / "other.mingc").read_bytes()
    assert pack(artifact_path, output, EXTRAS, replace_existing=True).resumed_bytes > 0


def test_a_line_of_the_journal_that_cannot_be_read_counts_as_not_written(tmp_path: Path) -> None:
    record = packing.BundleFile(size_bytes=1, sha256="0", crc32=2)
    journal = packing._Journal(tmp_path / "journal", "key")
    journal.add("one", record)
    journal._write('{"name": "two", "size_by{"name": "three"}')
    journal.add("four", record)
    journal.close()
    journal = packing._Journal(tmp_path / "journal", "key")
    assert journal.is_resumed and {*journal.files} == {"one", "four"}
    journal.close()


def test_a_journal_without_its_file_is_not_trusted(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the rename of the bundle and the removal of its journal leaves this."""
    output = tmp_path / "tiny.mingc"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: _interrupt(path))
        pack(artifact_path, output, EXTRAS)
    assert output.exists() and packing.journal_path(output).exists()
    assert pack(artifact_path, output, EXTRAS, replace_existing=True).resumed_bytes == 0
    check_hashes(open_artifact(output))


def _interrupt(path: Path) -> None:
    if path.name.endswith(".journal") and path.exists():
        raise KeyboardInterrupt


def test_pack_refuses_a_changed_file_and_what_it_may_not_replace(artifact_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "tiny.mingc"
    output.write_text("something else")
    with pytest.raises(ConfigError, match="is not a bundle"):
        pack(artifact_path, output, EXTRAS, replace_existing=True)
    output.unlink()
    weights = artifact_path / "weights/audio.bin"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: sha256 differs"):
        pack(artifact_path, output, EXTRAS)
    assert not output.exists()
    weights.write_bytes(weights.read_bytes()[::-1])
    pack(artifact_path, output, EXTRAS)
    with pytest.raises(ConfigError, match="exists"):
        pack(artifact_path, output, EXTRAS)
    with pytest.raises(ConfigError, match="packed already"):
        pack(output, tmp_path / "b.mingc", EXTRAS)


@pytest.fixture
def large(artifact_path: Path, tmp_path: Path) -> Path:
    """A bundle with weights of 9 MiB."""
    content = random.Random(5).randbytes(9 << 20)
    (artifact_path / "weights/audio.bin").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    record = {"size_bytes": len(content), "sha256": sha256}
    edit_manifest(artifact_path, lambda document: document["files"].update({"weights/audio.bin": record}))
    pack(artifact_path, tmp_path / "large.mingc", {})
    return tmp_path / "large.mingc"


def test_unpack_continues_inside_a_file(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues after an interruption, and starts anew when the half file has other content."""
    out, work = tmp_path / "out", tmp_path / ".out.unpack"
    original = FileRegion.chunks
    with monkeypatch.context() as patch:

        def ends_early(region: FileRegion, start: int = 0):  # type: ignore[no-untyped-def]
            for chunk in original(region, start):
                yield chunk
                if region.name == "weights/audio.bin":
                    raise KeyboardInterrupt

        patch.setattr(FileRegion, "chunks", ends_early)
        with pytest.raises(KeyboardInterrupt):
            unpack(large, out)
    half = work / "files/weights/audio.bin.half"
    assert not out.exists() and half.stat().st_size == 4 << 20
    starts: list[int] = []
    with monkeypatch.context() as patch:

        def counts(region: FileRegion, start: int = 0):  # type: ignore[no-untyped-def]
            if region.name == "weights/audio.bin":
                starts.append(start)
            return original(region, start)

        patch.setattr(FileRegion, "chunks", counts)
        report = unpack(large, out)
    assert starts == [4 << 20] and report.resumed_bytes >= 4 << 20
    check_hashes(open_artifact(out))
    assert not work.exists()
    # A half file with other content is copied anew.
    again = tmp_path / "again"
    work = tmp_path / ".again.unpack"
    (work / "files/weights").mkdir(parents=True)
    (work / "files/weights/audio.bin.half").write_bytes(b"wrong" * 1000)
    state = {
        "boot": unpacking.boot_id(),
        "bundle": hashlib.sha256(open_packed(large).bundle_bytes).hexdigest(),
    }
    (work / ".unpack-state").write_text(json.dumps(state))
    unpack(large, again, is_shared=False)
    check_hashes(open_artifact(again))


def test_bundles_with_the_same_weights_have_them_on_disk_once(large: Path, tmp_path: Path) -> None:
    first, second, own = tmp_path / "first", tmp_path / "second", tmp_path / "own"
    assert unpack(large, first).shared_bytes == 0
    assert unpack(large, second).shared_bytes == 9 << 20
    unpack(large, own, is_shared=False)
    file = "weights/audio.bin"
    assert os.path.samefile(first / file, second / file) and not os.path.samefile(first / file, own / file)
    assert (first / file).stat().st_mode & 0o222 == 0  # a write would change the other
    stored = next(path for path in (tmp_path / STORE).iterdir())
    stored.chmod(0o644)
    stored.write_bytes(b"x" * (9 << 20))  # also changes `first`, which its hash shows
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin"):
        check_hashes(open_artifact(first))
    assert unpack(large, tmp_path / "third").shared_bytes == 0
    check_hashes(open_artifact(tmp_path / "third"))


def test_unpack_names_a_damaged_file_and_leaves_no_folder(large: Path, tmp_path: Path) -> None:
    region = open_packed(large).region("weights/audio.bin")
    with large.open("r+b") as stream:
        stream.seek(region.offset + (8 << 20))
        stream.write(b"changed")
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: sha256 differs"):
        unpack(large, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_in_the_cache_that_was_changed_is_made_anew(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    artifact = open_artifact(bundle)
    copy = artifact.path("engines/encode.pt2")
    assert copy.is_relative_to(cache_folder())
    right = copy.read_bytes()
    copy.write_bytes(right[::-1])
    assert artifact.path("engines/encode.pt2").read_bytes() == right
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(ArtifactError, match="cannot be copied to the cache"):
        artifact.path("engines/encode.pt2")


def test_weights_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "f32": torch.randn(3, 5, generator=generator),
        "bf16": torch.randn(7, generator=generator).bfloat16(),
        "fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "i64": torch.arange(6).view(2, 3),
        "u8": torch.arange(11, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path, metadata={"key": "value"})
    content = path.read_bytes()
    shifted = tmp_path / "shifted"
    shifted.write_bytes(b"x" * 4096 + content + b"after")
    region = FileRegion(shifted, "weights", 4096, len(content))
    read = PackedWeights(region)
    assert {*read.keys()} == {*tensors} and read.metadata() == {"key": "value"}
    for name, tensor in tensors.items():
        found = read.get_tensor(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(
            found.view(torch.uint8) if name == "fp8" else found,
            tensor.view(torch.uint8) if name == "fp8" else tensor,
        )
        at, offset = read.location(name)
        held = at.read_bytes()[offset : offset + tensor.nbytes]
        assert held == tensor.view(-1).view(torch.uint8).numpy().tobytes()
    with pytest.raises(SafetensorError):
        read.get_tensor("nowhere")
    for at, byte in ((0, 0xFF), (7, 0x7F), (8, 0)):
        broken = bytearray(content)
        broken[at] = byte
        shifted.write_bytes(b"x" * 4096 + broken)
        with pytest.raises(SafetensorError):
            PackedWeights(region)
    with pytest.raises(SafetensorError):
        PackedWeights(FileRegion(shifted, "weights", 4096, len(content) - 1))
    for header in (
        b"[]",
        b'"a"',
        b"12",
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 0]}}',
    ):
        shifted.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(SafetensorError, match="header is damaged"):
            PackedWeights(FileRegion(shifted, "weights", 0, 8 + len(header)))


def test_a_bundle_of_another_format_is_refused(bundle: Path) -> None:
    from mingc.artifacts.bundle_manifest import parse_bundle_manifest

    with pytest.raises(ManifestError, match="bundle format 2, this mingc reads format 1"):
        parse_bundle_manifest(b'{"format": 2}', "x")
    for name in (
        "../outside",
        "/outside",
        "./manifest.json",
        "weights//audio.bin",
        "weights",
        "manifest.json/a",
    ):
        document = json.loads(open_packed(bundle).bundle_bytes)
        document["files"][name] = next(iter(document["files"].values()))
        with pytest.raises(ManifestError, match="is not a path inside the bundle"):
            parse_bundle_manifest(json.dumps(document).encode(), "x")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a named pipe waited for a writer forever."""
    os.mkfifo(tmp_path / "pipe.mingc")
    for path in (tmp_path / "pipe.mingc", Path("/dev/zero")):
        with pytest.raises(ArtifactError, match="not a regular file"):
            open_packed(path)


def test_an_output_that_cannot_be_made_is_named(bundle: Path, artifact_path: Path, tmp_path: Path) -> None:
    """Outputs below a file or in /proc were reported as a bug of mingc. The store is not a valid output either."""
    before = sorted(path.name for path in tmp_path.iterdir())
    for parent in (bundle, bundle / "deeper", Path("/proc/nowhere")):
        with pytest.raises(ConfigError, match="cannot be made"):
            unpack(bundle, parent / "out")
        with pytest.raises(ConfigError, match="cannot be made"):
            pack(artifact_path, parent / "out.mingc", {})
    with pytest.raises(ConfigError, match=f"{STORE} is the folder"):
        unpack(bundle, tmp_path / STORE)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
