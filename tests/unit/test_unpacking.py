"""Unpack: what is shared, resumed, refused and reported; folders of other users; a full disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from manifest_edit import edit_manifest

from mingc.artifacts.artifact import check_hashes, open_artifact
from mingc.artifacts.packed_file import open_packed
from mingc.bundles import transfer, unpacking
from mingc.bundles.packing import pack
from mingc.bundles.pruning import prune
from mingc.bundles.signatures import generate_keys, sign_bundle
from mingc.bundles.unpacking import SHARED_FROM_BYTES, STORE, UnpackReport, unpack
from mingc.errors import ArtifactError, ConfigError, IntegrityError

LARGE = random.Random(1).randbytes(SHARED_FROM_BYTES)


@pytest.fixture
def bundle(artifact_path: Path, tmp_path: Path) -> Path:
    """Two files that are just large enough to be shared, one that just is not, and small ones."""
    contents = {
        "weights/audio.bin": LARGE,
        "goldens/encode.safetensors": LARGE[::-1],
        "engines/encode.pt2": LARGE[1:],
    }
    for name, content in contents.items():
        (artifact_path / name).write_bytes(content)
    records = {
        name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    edit_manifest(artifact_path, lambda document: document["files"].update(records))
    pack(artifact_path, tmp_path / "t.mingc", {"start.sh": b"run"})
    return tmp_path / "t.mingc"


def _state(bundle: Path, changes: dict[str, str] | None = None) -> str:
    sha256 = hashlib.sha256(open_packed(bundle).bundle_bytes).hexdigest()
    return json.dumps({"boot": transfer.boot_id(), "bundle": sha256} | (changes or {}))


def test_only_files_from_one_mebibyte_on_are_linked_and_read_only(bundle: Path, tmp_path: Path) -> None:
    report = unpack(bundle, tmp_path / "out")
    stored = {path.name for path in (tmp_path / STORE).iterdir()}
    assert stored == {hashlib.sha256(LARGE).hexdigest(), hashlib.sha256(LARGE[::-1]).hexdigest()}
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            is_shared = path.stat().st_size >= SHARED_FROM_BYTES
            assert path.stat().st_nlink == (2 if is_shared else 1), path
            assert bool(path.stat().st_mode & 0o200) != is_shared, path
    size = sum(region.size_bytes for region in open_packed(bundle).files.values())
    assert report == UnpackReport(
        folder=tmp_path / "out",
        files=len(open_packed(bundle).files) + 1,
        size_bytes=size,
        resumed_bytes=0,
        shared_bytes=0,
        seconds=report.seconds,
        gigabytes_per_second=size / 1e9 / report.seconds,
        notes=(),
    )


def test_a_signed_bundle_counts_its_signature_and_a_second_folder_shares(
    bundle: Path, tmp_path: Path
) -> None:
    sign_bundle(bundle, generate_keys(tmp_path / "k.key").secret_key, None)
    first, second = (unpack(bundle, tmp_path / name) for name in ("first", "second"))
    assert first.files == second.files == len(open_packed(bundle).files) + 2
    assert (first.shared_bytes, second.shared_bytes) == (0, 2 * len(LARGE))
    assert (tmp_path / "second/bundle.json.minisig").read_bytes() == open_packed(bundle).signature


def test_without_sharing_there_is_no_store_and_files_may_be_written(bundle: Path, tmp_path: Path) -> None:
    unpack(bundle, tmp_path / "out", is_shared=False)
    assert not (tmp_path / STORE).exists()
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or (path.stat().st_nlink == 1 and path.stat().st_mode & 0o200)


def test_finished_files_are_resumed_and_counted(bundle: Path, tmp_path: Path) -> None:
    files = tmp_path / ".out.unpack/files"
    (files / "weights").mkdir(parents=True)
    (files / "weights/audio.bin").write_bytes(LARGE)
    (files.parent / ".unpack-state").write_text(_state(bundle))
    (files / "goldens").mkdir()
    (files / "goldens/encode.safetensors.half").write_bytes(LARGE[::-1][:1000])
    report = unpack(bundle, tmp_path / "out", is_shared=False)
    assert report.resumed_bytes == len(LARGE) + 1000
    check_hashes(open_artifact(tmp_path / "out"))
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")]


def test_a_partial_file_that_is_too_long_is_cut(bundle: Path, tmp_path: Path) -> None:
    files = tmp_path / ".out.unpack/files"
    (files / "goldens").mkdir(parents=True)
    (files.parent / ".unpack-state").write_text(_state(bundle))
    (files / "goldens/encode.safetensors.half").write_bytes(LARGE[::-1] + b"more")
    unpack(bundle, tmp_path / "out", is_shared=False)
    assert (tmp_path / "out/goldens/encode.safetensors").read_bytes() == LARGE[::-1]
    check_hashes(open_artifact(tmp_path / "out"))


@pytest.mark.parametrize("state", [{"boot": "an earlier one"}, {"bundle": "another one"}, None])
def test_what_another_bundle_or_boot_left_is_removed(
    state: dict[str, str] | None, bundle: Path, tmp_path: Path
) -> None:
    """After a power failure the content of a renamed file may not be on the disk."""
    files = tmp_path / ".out.unpack/files"
    (files / "weights").mkdir(parents=True)
    (files / "weights/audio.bin").write_bytes(b"wrong")
    (files / "left").write_bytes(b"over")
    if state is not None:
        (files.parent / ".unpack-state").write_text(_state(bundle, state))
    assert unpack(bundle, tmp_path / "out").resumed_bytes == 0
    check_hashes(open_artifact(tmp_path / "out"))
    assert not (tmp_path / "out/left").exists()


def _of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def _writable_for_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o777)


def _writable_for_its_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o775)


@pytest.mark.parametrize("change", [_of_another_user, _writable_for_all, _writable_for_its_group])
def test_work_that_another_user_may_have_made_is_not_continued(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a folder like /tmp: files there would be taken for finished ones without reading them again."""
    work = tmp_path / ".out.unpack"
    (work / "files/weights").mkdir(parents=True)
    (work / "files/weights/audio.bin").write_bytes(b"planted")
    (work / ".unpack-state").write_text(_state(bundle))
    change(work, monkeypatch)
    with pytest.raises(ConfigError, match=r"\.out\.unpack may be the work of another user") as raised:
        unpack(bundle, tmp_path / "out")
    assert raised.value.fix == "remove it, or pass another path"
    assert not (tmp_path / "out").exists() and (work / "files/weights/audio.bin").exists()


def test_a_link_or_a_file_in_place_of_the_work_is_refused(bundle: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    work = tmp_path / ".out.unpack"
    work.symlink_to(elsewhere)
    for _ in range(2):
        with pytest.raises(ConfigError, match="is a link, or no work"):
            unpack(bundle, tmp_path / "out")
        work.unlink()
        work.write_text("a file")
    assert [*elsewhere.iterdir()] == [elsewhere / "mine"]


def test_new_folders_cannot_be_written_by_others(bundle: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        unpack(bundle, tmp_path / "out")
    finally:
        os.umask(before)
    for path in (tmp_path / "out", tmp_path / STORE):
        assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o775, 0o757], ids=["group", "all"])
def test_a_store_that_others_may_change_is_not_used(mode: int, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / STORE).mkdir()
    (tmp_path / STORE).chmod(mode)
    report = unpack(bundle, tmp_path / "out")
    assert report.notes == (f"files are not shared: other users may change {tmp_path / STORE}",)
    assert not [*(tmp_path / STORE).iterdir()]
    check_hashes(open_artifact(tmp_path / "out"))


def test_stored_files_of_other_users_links_and_other_sizes_are_not_taken(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / STORE).mkdir()
    store = unpacking.FileStore(tmp_path / STORE)
    record = open_packed(bundle).bundle.files["weights/audio.bin"]
    stored = store.path(record)
    assert not store.has(record)
    stored.write_bytes(LARGE)
    assert store.has(record)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert store.has(record) == (stored.stat().st_uid == 0)
    with monkeypatch.context() as patch:  # root's files, which tests may write, are anybody's to take
        patch.setattr(
            unpacking.Path,
            "lstat",
            lambda path: os.stat_result((*os.lstat(path)[:4], 54321, *os.lstat(path)[5:])),
        )
        assert not store.has(record)
    stored.write_bytes(LARGE[1:])
    assert not store.has(record)
    stored.rename(tmp_path / "moved")
    (tmp_path / "moved").write_bytes(LARGE)
    stored.symlink_to(tmp_path / "moved")
    assert not store.has(record)


def test_a_stored_file_that_has_changed_is_replaced(bundle: Path, tmp_path: Path) -> None:
    unpack(bundle, tmp_path / "first")
    stored = tmp_path / STORE / hashlib.sha256(LARGE).hexdigest()
    stored.unlink()
    stored.write_bytes(LARGE[:-1] + bytes([LARGE[-1] ^ 1]))
    report = unpack(bundle, tmp_path / "second")
    assert (report.shared_bytes, report.notes) == (len(LARGE), ())
    assert stored.read_bytes() == LARGE and stored.samefile(tmp_path / "second/weights/audio.bin")
    check_hashes(open_artifact(tmp_path / "second"))


def test_a_link_in_place_of_the_store_is_not_followed(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / STORE).symlink_to(tmp_path / "elsewhere")
    report = unpack(bundle, tmp_path / "out")
    assert report.notes == (f"files are not shared: {tmp_path / STORE} is a link",)
    assert not [*(tmp_path / "elsewhere").iterdir()]
    check_hashes(open_artifact(tmp_path / "out"))


def test_large_files_are_copied_first(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "THREADS", 1)
    copied: list[str] = []
    unpack(bundle, tmp_path / "out", log=copied.append)
    files = open_packed(bundle).bundle.files
    sizes = [files[name].size_bytes for name in copied]
    assert len(copied) == len(files) and sizes == sorted(sizes, reverse=True)


def test_what_a_broken_bundle_gave_is_not_kept(bundle: Path, tmp_path: Path) -> None:
    region = open_packed(bundle).files["engines/encode.pt2"]
    with bundle.open("r+b") as stream:
        stream.seek(region.offset)
        stream.write(b"!!!!")
    with pytest.raises(
        IntegrityError, match=r"engines/encode\.pt2: sha256 differs from bundle\.json"
    ) as raised:
        unpack(bundle, tmp_path / "out")
    assert (raised.value.where, raised.value.fix) == (str(bundle), "copy the bundle again, or pack again")
    assert not [*(tmp_path / ".out.unpack").rglob("encode.pt2*")]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP])
def test_a_file_system_without_links_is_noted_and_files_are_copied(
    number: int, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refused)
        report = unpack(bundle, tmp_path / "out")
    assert report.notes == (f"files are not shared: {os.strerror(number)}",)
    check_hashes(open_artifact(tmp_path / "out"))


def test_another_failure_of_a_link_is_not_hidden(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(ArtifactError, match="out cannot be written: No space left") as raised:
        unpack(bundle, tmp_path / "out")
    assert raised.value.where == str(tmp_path) and not (tmp_path / "out").exists()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of free space that each unpack asks for."""
    found: list[int] = []
    monkeypatch.setattr(unpacking, "check_free", lambda folder, needed: found.append(needed))
    return found


def test_space_is_needed_only_for_what_is_neither_there_nor_stored(
    bundle: Path, tmp_path: Path, asked: list[int]
) -> None:
    total = sum(region.size_bytes for region in open_packed(bundle).files.values())
    unpack(bundle, tmp_path / "first")
    unpack(bundle, tmp_path / "second")
    work = tmp_path / ".third.unpack"
    (work / "files/bundle").mkdir(parents=True)
    (work / ".unpack-state").write_text(_state(bundle))
    (work / "files/bundle/start.sh").write_bytes(b"run")
    (work / "files/weights").mkdir()
    (work / "files/weights/audio.bin.half").write_bytes(LARGE[:1000])
    unpack(bundle, tmp_path / "third", is_shared=False)
    assert asked == [total, total - 2 * len(LARGE), total - 3 - 1000]


def test_a_stored_file_that_an_interrupted_run_linked_takes_no_space_once(
    bundle: Path, tmp_path: Path, asked: list[int]
) -> None:
    """It was subtracted twice, from the work and from the store, and another file of its size counted for nothing."""
    total = sum(region.size_bytes for region in open_packed(bundle).files.values())
    unpack(bundle, tmp_path / "first")
    for path in (tmp_path / STORE).iterdir():
        if path.read_bytes() != LARGE:
            path.unlink()
    work = tmp_path / ".second.unpack"
    (work / "files/weights").mkdir(parents=True)
    (work / ".unpack-state").write_text(_state(bundle))
    os.link(tmp_path / STORE / hashlib.sha256(LARGE).hexdigest(), work / "files/weights/audio.bin")
    unpack(bundle, tmp_path / "second")
    assert asked[1] == total - len(LARGE)


def test_work_that_failed_is_kept_and_continued(bundle: Path, tmp_path: Path) -> None:
    def fail(step: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(bundle, tmp_path / "out", is_shared=False, log=fail)
    assert not (tmp_path / "out").exists()
    assert unpack(bundle, tmp_path / "out", is_shared=False).resumed_bytes > 0
    assert not (tmp_path / ".out.unpack").exists()


KILLED = """
import os, sys
from pathlib import Path
from mingc.bundles.unpacking import unpack

bundle, folder, moment, when = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rename = Path.rename
seen = []

def killed(path, target):
    seen.append(path)
    if len(seen) == moment and when == "before":
        os._exit(9)
    done = rename(path, target)
    if len(seen) == moment and when == "after":
        os._exit(9)
    return done

Path.rename = killed
unpack(bundle, folder, replace_existing=True, is_shared=False)
"""


@pytest.mark.parametrize(
    "moment, when, is_there",
    [(1, "before", "old"), (1, "after", None), (2, "before", None), (2, "after", "new")],
)
def test_an_unpack_killed_between_its_renames_is_continued_without_writing_again(
    moment: int, when: str, is_there: str | None, bundle: Path, tmp_path: Path
) -> None:
    """The old folder is renamed away, then the new one gets its name."""
    parent = tmp_path / "site"
    out = parent / "out"
    unpack(bundle, out, is_shared=False)
    (out / "old").touch()
    words = [sys.executable, "-c", KILLED, bundle, out, str(moment), when]
    assert subprocess.run(words, check=False, timeout=60).returncode == 9
    found = ("old" if (out / "old").exists() else "new") if out.exists() else None
    assert found == is_there
    if found == "new":
        check_hashes(open_artifact(out))
    report = unpack(bundle, out, replace_existing=True, is_shared=False)
    assert report.resumed_bytes == (0 if is_there == "new" else report.size_bytes)
    check_hashes(open_artifact(out))
    assert [*parent.iterdir()] == [out] and not (out / "old").exists()


def test_space_is_compared_with_what_the_disk_has_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3_000_000_000))
    transfer.check_free(tmp_path, 3_000_000_000)
    with pytest.raises(ArtifactError, match=r"3\.20 GB are needed, 3\.00 GB are free") as raised:
        transfer.check_free(tmp_path, 3_200_000_000)
    assert raised.value.where == str(tmp_path)


def test_an_existing_folder_is_replaced_only_when_asked(bundle: Path, tmp_path: Path) -> None:
    unpack(bundle, tmp_path / "out")
    with pytest.raises(ConfigError, match="out exists") as raised:
        unpack(bundle, tmp_path / "out")
    assert raised.value.where == "OUTPUT" and "--force" in str(raised.value.fix)
    (tmp_path / "out/added").touch()
    unpack(bundle, tmp_path / "out", replace_existing=True)
    assert not (tmp_path / "out/added").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine").touch()
    with pytest.raises(ConfigError, match="is not an artifact") as raised:
        unpack(bundle, tmp_path / "other", replace_existing=True)
    assert raised.value.where == "OUTPUT" and (tmp_path / "other/mine").exists()
    with pytest.raises(ConfigError, match="is a folder"):
        unpack(tmp_path / "out", tmp_path / "third")


def test_a_folder_that_appears_meanwhile_is_not_replaced(bundle: Path, tmp_path: Path) -> None:
    def meanwhile(step: str) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/mine").touch()

    with pytest.raises(ConfigError, match="it was not there at the start") as raised:
        unpack(bundle, tmp_path / "out", log=meanwhile)
    assert raised.value.where == "OUTPUT" and [*(tmp_path / "out").iterdir()] == [tmp_path / "out/mine"]


@pytest.fixture
def lock() -> Iterator[Callable[[Path, int], None]]:
    """Locks a path as another process does."""
    descriptors = []

    def take(path: Path, kind: int) -> None:
        descriptors.append(os.open(path, os.O_RDONLY))
        fcntl.flock(descriptors[-1], kind)

    yield take
    for descriptor in descriptors:
        os.close(descriptor)


def test_two_unpacks_of_one_folder_exclude_each_other(
    bundle: Path, tmp_path: Path, lock: Callable[[Path, int], None]
) -> None:
    work = tmp_path / ".out.unpack"
    work.mkdir()
    lock(work, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match=f"another process is writing {tmp_path / 'out'}"):
        unpack(bundle, tmp_path / "out")


def test_the_lock_of_a_writer_excludes_another_writer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = (os.open(tmp_path / "file", os.O_RDONLY) for _ in range(2))
    with transfer.locked(first, tmp_path):
        with (
            pytest.raises(ConfigError, match="another process is writing"),
            transfer.locked(second, tmp_path),
        ):
            pass
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(second)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    third = os.open(tmp_path / "file", os.O_RDONLY)
    with transfer.locked(third, tmp_path):
        pass


def test_prune_beside_an_unpack_says_so_and_removes_nothing(
    bundle: Path, tmp_path: Path, lock: Callable[[Path, int], None]
) -> None:
    """It does not wait for the end of the unpack; a dry run answers at once."""
    unpack(bundle, tmp_path / "out")
    store, left = tmp_path / STORE, tmp_path / ".x.unpack"
    (store / "unused").write_bytes(b"123")
    left.mkdir()
    lock(store, fcntl.LOCK_SH)
    with pytest.raises(ConfigError, match="an unpack is adding files to") as raised:
        prune(tmp_path)
    assert raised.value.where == str(store) and raised.value.fix == "run again when it has ended"
    assert left.exists() and (store / "unused").exists()
    assert prune(tmp_path, is_dry=True).removed == (".x.unpack", f"{STORE}/unused")


def test_unpacks_that_add_to_one_store_do_not_exclude_each_other(
    bundle: Path, tmp_path: Path, lock: Callable[[Path, int], None]
) -> None:
    (tmp_path / STORE).mkdir()
    lock(tmp_path / STORE, fcntl.LOCK_SH)
    unpack(bundle, tmp_path / "out")
    assert len([*(tmp_path / STORE).iterdir()]) == 2


def test_prune_during_an_unpack_of_the_same_process_cannot_take_its_files(
    bundle: Path, tmp_path: Path
) -> None:
    refused = []

    def meanwhile(step: str) -> None:
        with pytest.raises(ConfigError, match="an unpack is adding files"):
            prune(tmp_path)
        refused.append(step)

    unpack(bundle, tmp_path / "out", log=meanwhile)
    assert {*refused} == {*open_packed(bundle).files}


def test_the_first_failure_ends_all_threads_and_is_the_one_that_is_raised() -> None:
    ran: list[int] = []

    def work(item: int, stop: transfer.Stop) -> None:
        if item == 1:
            raise ArtifactError("the first")
        while True:
            stop()

    with pytest.raises(ArtifactError, match="the first"):
        transfer.run_all([0, 1], work)
    transfer.run_all([5, 6, 7], lambda item, stop: ran.append(item))
    assert sorted(ran) == [5, 6, 7]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "full"), "cannot be written: full"),
        (OSError(errno.EDQUOT, "quota"), "cannot be written: quota"),
        (PermissionError(errno.EACCES, "denied"), "cannot be written: denied"),
        (OSError(errno.EIO, "broken"), None),
        (ValueError("a bug"), None),
    ],
)
def test_a_disk_that_cannot_be_written_is_named_and_other_errors_stay(
    error: Exception, says: str | None, tmp_path: Path
) -> None:
    expected = type(error) if says is None else ArtifactError
    with pytest.raises(expected, match=says or "broken|a bug") as raised, transfer.writing(tmp_path / "out"):
        raise error
    if says is None:
        assert raised.value is error
    else:
        assert isinstance(raised.value, ArtifactError) and raised.value.where == str(tmp_path)
