"""Pack: what is continued and what begins anew, what is reported, and whose work is refused; signing in place."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mingc_command import mingc_here

from mingc.artifacts.artifact import check_hashes, open_artifact
from mingc.artifacts.bundle_manifest import BUNDLE_FILE, BundleFile
from mingc.artifacts.packed_file import open_packed
from mingc.artifacts.zip_layout import Placed
from mingc.bundles import packing, transfer
from mingc.bundles.packing import PackReport, journal_path, kept_end_path, pack, partial_path, restore_end
from mingc.bundles.signatures import (
    generate_keys,
    require_signature,
    sign_bundle,
    verify_signature,
)
from mingc.bundles.unpacking import unpack
from mingc.errors import ArtifactError, ConfigError, IntegrityError, SignatureError

EXTRAS: dict[str, Path | bytes] = {"start.sh": b"run"}


def _interrupt_after(artifact: Path, output: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pack and interrupt after `files` files; their names."""
    done: list[str] = []
    original = packing._copy

    def copies(descriptor: int, place: Placed, source: Any, stop: transfer.Stop) -> BundleFile:
        if len(done) == files:
            raise KeyboardInterrupt
        done.append(place.name)
        return original(descriptor, place, source, stop)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(transfer, "THREADS", 1)
        patch.setattr(packing, "_copy", copies)
        pack(artifact, output, EXTRAS)
    return done


def test_the_report_counts_files_bytes_and_what_was_there(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new folder" / "t.mingc"
    done = _interrupt_after(artifact_path, output, 3, monkeypatch)
    steps: list[str] = []
    report = pack(artifact_path, output, EXTRAS, log=steps.append)
    packed = open_packed(output)
    assert report == PackReport(
        bundle=output,
        files=6,  # four of the artifact, manifest.json, start.sh
        size_bytes=output.stat().st_size,
        resumed_bytes=report.resumed_bytes,
        seconds=report.seconds,
        gigabytes_per_second=output.stat().st_size / 1e9 / report.seconds,
    )
    left = sum(each.size_bytes for name, each in packed.files.items() if name not in done)
    files_end = max(each.offset + each.size_bytes for each in packed.files.values())
    assert report.resumed_bytes == files_end - left
    assert steps[0] == f"{len(done)} of 6 files are there already" and {*steps[1:]} == {*packed.files} - {
        *done
    }
    assert [path.name for path in output.parent.iterdir()] == ["t.mingc"]


@pytest.mark.parametrize("change", ["content", "size", "name", "boot", "version", "time"])
def test_a_changed_input_or_an_earlier_boot_begins_anew(
    change: str, artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, wheel = tmp_path / "t.mingc", tmp_path / "wheel"
    wheel.write_bytes(b"one")
    EXTRAS_ = {"start.sh": b"run", "wheels/w": wheel}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "_finish", lambda *words: (_ for _ in ()).throw(KeyboardInterrupt))
        pack(artifact_path, output, EXTRAS_)
    extras: dict[str, Path | bytes] = {**EXTRAS_}
    if change == "content":
        extras["start.sh"] = b"RUN"
    elif change == "size":
        extras["start.sh"] = b"run\n"
    elif change == "name":
        extras["other.sh"] = extras.pop("start.sh")
    elif change == "boot":
        monkeypatch.setattr(packing, "boot_id", lambda: "another")
    elif change == "version":
        monkeypatch.setattr(packing.mingc, "__version__", "9.9")
    else:
        wheel.write_bytes(b"two")
        os.utime(wheel, (1, 1))
    assert pack(artifact_path, output, extras).resumed_bytes == 0
    with_all = tmp_path / "whole.mingc"
    pack(artifact_path, with_all, extras)
    assert output.read_bytes() == with_all.read_bytes()


def test_a_line_that_a_kill_cut_off_is_gone_before_the_next_is_written(tmp_path: Path) -> None:
    """Otherwise the next line would be glued to it, and both were lost to a second continuation."""
    record = BundleFile(size_bytes=1, sha256="0", crc32=2)
    journal = packing._Journal(tmp_path / "journal", "key")
    journal.add("one", record)
    journal._write('{"name": "two", "size')
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(whole[:-1])  # the kill came before the end of the line
    journal = packing._Journal(tmp_path / "journal", "key")
    assert {*journal.files} == {"one"}
    journal.add("three", record)
    journal.close()
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines[1:]] == ["one", "three"] and lines[0] == "key"
    journal = packing._Journal(tmp_path / "journal", "key")
    assert journal.files == {"one": record, "three": record} and journal.is_resumed
    journal.close()
    journal = packing._Journal(tmp_path / "journal", "another key")
    assert not journal.is_resumed and journal.files == {}
    journal.close()
    assert (tmp_path / "journal").read_text() == "another key\n"


@pytest.mark.parametrize("which", ["partial", "journal"])
def test_work_that_another_user_may_have_made_is_not_continued(
    which: str, artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted journal could have a start script of another content signed."""
    output = tmp_path / "t.mingc"
    _interrupt_after(artifact_path, output, 2, monkeypatch)
    path = {"partial": partial_path, "journal": journal_path}[which](output)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="may be the work of another user"):
        pack(artifact_path, output, EXTRAS)
    path.chmod(0o644)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="may be the work of another user"):
        patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        pack(artifact_path, output, EXTRAS)
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    before = moved.read_bytes()
    with pytest.raises(ConfigError, match="is a link, or no work"):
        pack(artifact_path, output, EXTRAS)
    assert moved.read_bytes() == before


def test_two_packs_to_one_file_exclude_each_other(artifact_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.mingc"
    with partial_path(output).open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing"):
            pack(artifact_path, output, EXTRAS)
    pack(artifact_path, output, EXTRAS)


def test_space_is_needed_for_what_is_left_only(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, asked = tmp_path / "t.mingc", []
    done = _interrupt_after(artifact_path, output, 2, monkeypatch)
    monkeypatch.setattr(packing, "check_free", lambda folder, needed: asked.append((folder, needed)))
    pack(artifact_path, output, EXTRAS)
    files = open_packed(output).files
    assert asked == [(tmp_path, sum(each.size_bytes for name, each in files.items() if name not in done))]


def test_a_file_that_changes_its_size_while_it_is_packed_is_named(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "wheel"
    wheel.write_bytes(b"wheel")
    original = packing._Source.chunks
    for content in (b"whee", b"wheel!"):
        with monkeypatch.context() as patch:
            patch.setattr(
                packing._Source,
                "chunks",
                lambda source, content=content: iter(
                    [content] if source.content == wheel else original(source)
                ),
            )
            with pytest.raises(IntegrityError, match=r"bundle/wheel: size changed"):
                pack(artifact_path, tmp_path / "t.mingc", {"wheel": wheel})
    assert not (tmp_path / "t.mingc").exists()
    pack(artifact_path, tmp_path / "t.mingc", {"wheel": wheel})
    assert open_packed(tmp_path / "t.mingc").region("bundle/wheel").read() == b"wheel"


def test_a_link_is_not_replaced(artifact_path: Path, tmp_path: Path) -> None:
    pack(artifact_path, tmp_path / "t.mingc", EXTRAS)
    (tmp_path / "link").symlink_to(tmp_path / "t.mingc")
    for output in (tmp_path / "link", tmp_path):
        with pytest.raises(ConfigError, match="exists and is not a bundle") as raised:
            pack(artifact_path, output, EXTRAS, replace_existing=True)
        assert raised.value.where == "OUTPUT"
    with pytest.raises(ConfigError) as raised:
        pack(artifact_path, tmp_path / "t.mingc", EXTRAS)
    assert "--force" in str(raised.value.fix)


def test_signing_undone_gives_the_former_bundle(artifact_path: Path, tmp_path: Path) -> None:
    """The kept end of a killed signing: put back over a half-written end, dropped beside a bundle in order."""
    bundle = tmp_path / "t.mingc"
    pack(artifact_path, bundle, EXTRAS)
    whole = bundle.read_bytes()
    start = max(each.offset + each.size_bytes for each in open_packed(bundle).files.values())
    kept_end_path(bundle).write_bytes(start.to_bytes(8, "little") + whole[start:])
    bundle.write_bytes(whole[:start] + b"half of a longer end" * 100)
    with pytest.raises(IntegrityError, match="signing this bundle was interrupted") as raised:
        open_packed(bundle)
    assert raised.value.fix == "run mingc bundle sign again"
    restore_end(bundle)
    assert bundle.read_bytes() == whole and not kept_end_path(bundle).exists()
    restore_end(bundle)
    assert bundle.read_bytes() == whole


def test_what_is_not_as_packed_is_not_signed(artifact_path: Path, tmp_path: Path) -> None:
    made = generate_keys(tmp_path / "k.key")
    pack(artifact_path, tmp_path / "t.mingc", EXTRAS)
    unpack(tmp_path / "t.mingc", tmp_path / "out")
    (tmp_path / "out/bundle/start.sh").write_bytes(b"RUN")
    with pytest.raises(IntegrityError, match=r"bundle/start\.sh: sha256 differs"):
        sign_bundle(tmp_path / "out", made.secret_key, None)
    region = open_packed(tmp_path / "t.mingc").region("bundle/start.sh")
    with (tmp_path / "t.mingc").open("r+b") as stream:
        stream.seek(region.offset)
        stream.write(b"RUN")
    with pytest.raises(IntegrityError, match=r"bundle/start\.sh: sha256 differs"):
        sign_bundle(tmp_path / "t.mingc", made.secret_key, None)
    assert not (tmp_path / "out/bundle.json.minisig").exists()


def test_a_folder_is_signed_as_its_file_is(artifact_path: Path, tmp_path: Path) -> None:
    made = generate_keys(tmp_path / "k.key")
    pack(artifact_path, tmp_path / "t.mingc", EXTRAS)
    unpack(tmp_path / "t.mingc", tmp_path / "out", is_shared=False)
    for path in (tmp_path / "t.mingc", tmp_path / "out"):
        report = sign_bundle(path, made.secret_key, None)
        assert report.trusted_comment == "model:tiny mingc:0.1.0" and report.key_id == made.key_id
        verified = verify_signature(path, str(made.public_key))
        assert (verified.key_id, verified.trusted_comment) == (made.key_id, report.trusted_comment)
        assert verified.files == 6
        assert verified.size_bytes == sum(
            each.size_bytes for each in open_packed(tmp_path / "t.mingc").files.values()
        )
        assert verified.gigabytes_per_second == verified.size_bytes / 1e9 / verified.seconds
        assert require_signature(path, str(made.public_key)) == report.trusted_comment
        with pytest.raises(ConfigError, match="cannot be printed"):
            sign_bundle(path, made.secret_key, "two\nlines")
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    (tmp_path / "out/weights/audio.bin").unlink()
    (tmp_path / "out/engines/encode.pt2").write_bytes(b"other size")
    with pytest.raises(IntegrityError, match=r"2 file\(s\)") as raised:
        verify_signature(tmp_path / "out", str(made.public_key))
    for name in ("weights/audio.bin", "engines/encode.pt2"):
        assert f"{name}: file is missing or has another size" in raised.value.message


def test_a_manifest_that_the_signed_table_does_not_list_is_refused(
    artifact_path: Path, tmp_path: Path
) -> None:
    """A folder whose manifest.json is not covered by the signature must not be served as a signed one."""
    made = generate_keys(tmp_path / "k.key")
    pack(artifact_path, tmp_path / "t.mingc", EXTRAS)
    unpack(tmp_path / "t.mingc", tmp_path / "out", is_shared=False)
    table = json.loads((tmp_path / "out" / BUNDLE_FILE).read_text())
    del table["files"]["manifest.json"]
    (tmp_path / "out" / BUNDLE_FILE).write_text(json.dumps(table))
    from mingc.bundles import minisign

    signature = minisign.sign(
        (tmp_path / "out" / BUNDLE_FILE).read_bytes(), minisign.read_secret_key(made.secret_key), "c"
    )
    (tmp_path / "out/bundle.json.minisig").write_bytes(signature)
    with pytest.raises(IntegrityError, match=r"manifest\.json: sha256 differs"):
        require_signature(tmp_path / "out", str(made.public_key))
    with pytest.raises(IntegrityError, match=r"manifest\.json: is not in bundle\.json"):
        verify_signature(tmp_path / "out", str(made.public_key))


def test_a_signature_of_another_bundle_does_not_fit(artifact_path: Path, tmp_path: Path) -> None:
    made = generate_keys(tmp_path / "k.key")
    for name, extras in (("one", EXTRAS), ("two", {"start.sh": b"other"})):
        pack(artifact_path, tmp_path / f"{name}.mingc", {**extras})
        unpack(tmp_path / f"{name}.mingc", tmp_path / name, is_shared=False)
        sign_bundle(tmp_path / name, made.secret_key, None)
    (tmp_path / "one/bundle.json.minisig").write_bytes((tmp_path / "two/bundle.json.minisig").read_bytes())
    for check in (require_signature, verify_signature):
        with pytest.raises(SignatureError, match=r"does not fit the content of bundle\.json"):
            check(tmp_path / "one", str(made.public_key))


def test_what_cannot_be_opened_is_named(
    artifact_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "t.mingc"
    pack(artifact_path, bundle, EXTRAS)
    with pytest.raises(IntegrityError, match="nowhere: file is missing"):
        open_packed(bundle).region("nowhere")
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        open_packed(tmp_path / "nowhere")
    (tmp_path / "text").write_text("text" * 100)
    with pytest.raises(IntegrityError, match="text is not a bundle"):
        open_packed(tmp_path / "text")

    def refused(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        "mingc.artifacts.packed_file.os", SimpleNamespace(open=refused, O_RDONLY=0, O_NONBLOCK=0)
    )
    with pytest.raises(ArtifactError, match="may not read the bundle"):
        open_packed(bundle)


def test_a_name_of_the_artifacts_own_is_not_taken_by_an_extra(artifact_path: Path, tmp_path: Path) -> None:
    from manifest_edit import edit_manifest

    (artifact_path / "bundle").mkdir()
    (artifact_path / "bundle/start.sh").write_bytes(b"mine")
    record = {"size_bytes": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}
    edit_manifest(artifact_path, lambda document: document["files"].update({"bundle/start.sh": record}))
    with pytest.raises(ConfigError, match=r"already contains a file bundle/start\.sh"):
        pack(artifact_path, tmp_path / "t.mingc", EXTRAS)
    pack(artifact_path, tmp_path / "t.mingc", {})
    check_hashes(open_artifact(tmp_path / "t.mingc"))


def test_progress_names_folders_and_not_each_of_hundreds_of_files(
    artifact_path: Path, tmp_path: Path
) -> None:
    done = mingc_here("bundle", "pack", artifact_path, tmp_path / "t.mingc")
    lines = done.stderr.splitlines()
    assert done.code == 0 and len(open_packed(tmp_path / "t.mingc").files) > 50
    assert 2 <= len(lines) < 20 and any(line.endswith("bundle/") for line in lines), lines
