"""The layout as other programs read it, also beyond 4 GiB, and the regions and tables that describe its files."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import zipfile
import zlib
from pathlib import Path

import pytest

from mingc.artifacts.bundle_manifest import BUNDLE_FILE, BundleFile, BundleManifest, parse_bundle_manifest
from mingc.artifacts.file_cache import cache_folder, file_copy
from mingc.artifacts.file_region import CHUNK_BYTES, FileRegion
from mingc.artifacts.zip_layout import ALIGNMENT, central_directory, local_header, place, read_directory
from mingc.errors import ConfigError, IntegrityError, ManifestError

NAMES = ("weights/large", "名前/ключ.txt", "n" * 4000, "last")


def test_files_beyond_4_gib_are_found_by_other_programs(tmp_path: Path) -> None:
    """A sparse file: 5 GiB take no space."""
    path, small = tmp_path / "t.zip", b"content"
    sizes = [(NAMES[0], 5 << 30), *((name, len(small)) for name in NAMES[1:])]
    placed = place(sizes)
    crcs = [0, *[zlib.crc32(small)] * 3]
    with path.open("wb") as stream:
        for each, crc in zip(placed, crcs, strict=True):
            stream.seek(each.header_at)
            header = local_header(each, crc)
            assert len(header) == each.data_at - each.header_at
            stream.write(header)
            if each.size_bytes == len(small):
                stream.write(small)
        stream.seek(placed[-1].end)
        stream.write(central_directory(placed, crcs))
    with zipfile.ZipFile(path) as file:
        assert [(info.filename, info.file_size, info.CRC) for info in file.infolist()] == [
            (name, size, crc) for (name, size), crc in zip(sizes, crcs, strict=True)
        ]
        assert [info.header_offset for info in file.infolist()] == [each.header_at for each in placed]
        assert all(file.read(name) == small for name in NAMES[1:])
        assert all(info.external_attr >> 16 == 0o100644 for info in file.infolist())
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-p", path, "last"], capture_output=True, timeout=60)
        assert done.stdout == small


def test_headers_of_every_length_fill_their_place() -> None:
    for length in range(1, 300):
        for start in (0, ALIGNMENT - 54 - length, ALIGNMENT - 53 - length):
            (placed,) = place([("n" * length, 9)], max(start, 0))
            assert len(local_header(placed, 0)) == placed.data_at - placed.header_at


def test_files_follow_each_other_at_multiples_of_the_alignment() -> None:
    placed = place([(name, size) for name, size in zip(NAMES, (1, 4096, 0, 4095), strict=True)], 5)
    assert placed[0].header_at == 5
    for each, following in itertools.pairwise(placed):
        assert each.end == each.data_at + each.size_bytes == following.header_at
    for each in placed:
        assert each.data_at % ALIGNMENT == 0
        # As near as its header allows: 30 bytes, the name, 20 of ZIP64, 4 of padding.
        assert 0 <= each.data_at - each.header_at - 54 - len(each.name.encode()) < ALIGNMENT


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_region_reads_its_own_bytes_only(size: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    (tmp_path / "file").write_bytes(b"before" + content + b"after")
    region = FileRegion(tmp_path / "file", "name", 6, size)
    assert region.read() == content
    assert [len(chunk) for chunk in region.chunks()] == [CHUNK_BYTES] * (size // CHUNK_BYTES) + (
        [size % CHUNK_BYTES] if size % CHUNK_BYTES else []
    )
    for start in {0, size // 2, size}:
        assert b"".join(region.chunks(start)) == content[start:]
    (tmp_path / "file").write_bytes(b"before" + content[:-1])  # cut off
    assert region.read() == content[:-1]


def test_a_mapped_region_is_not_aligned_and_never_written_back(tmp_path: Path) -> None:
    content = bytes(range(256)) * 64
    (tmp_path / "file").write_bytes(content)
    view = FileRegion(tmp_path / "file", "name", 5001, 100).mapped()
    assert bytes(view) == content[5001:5101]
    view[0] = 0
    assert (tmp_path / "file").read_bytes() == content


def test_a_region_is_named_by_its_bundle_and_its_name_inside() -> None:
    assert str(FileRegion(Path("/b.mingc"), "weights/a", 4096, 1)) == "/b.mingc: weights/a"
    assert str(FileRegion(Path("/folder/weights/a"), "weights/a", 0, 1, is_whole=True)) == "/folder/weights/a"


def _table(**changes: object) -> bytes:
    files = {
        "b": BundleFile(size_bytes=1, sha256="0", crc32=2),
        "a": BundleFile(size_bytes=3, sha256="4", crc32=5),
    }
    document = json.loads(BundleManifest(format=1, model="m", mingc="0", files=files).to_bytes())
    return json.dumps(document | changes).encode()


def test_bundle_json_is_the_same_for_any_order_of_files() -> None:
    parsed = parse_bundle_manifest(_table(), "x")
    assert parsed.files["a"] == BundleFile(size_bytes=3, sha256="4", crc32=5)
    backwards = BundleManifest(format=1, model="m", mingc="0", files=dict(reversed(parsed.files.items())))
    assert [*backwards.files] != [*parsed.files] and backwards.to_bytes() == parsed.to_bytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not readable"),
        (b"[" * 100_000, "not readable"),
        (b"[]", "bundle format None"),
        (_table(format="1"), "bundle format '1'"),
        (_table(files={"a": {"size_bytes": 1, "sha256": "0"}}), "crc32"),
        (_table(files={BUNDLE_FILE: {"size_bytes": 1, "sha256": "0", "crc32": 0}}), "cannot list itself"),
        (_table(invented=1), "invented"),
    ],
)
def test_a_table_that_is_no_bundle_json_is_refused_by_what_is_wrong(content: bytes, says: str) -> None:
    with pytest.raises(ManifestError, match=says) as raised:
        parse_bundle_manifest(content, "here")
    assert raised.value.where is not None and raised.value.where.startswith("here") and raised.value.fix


@pytest.mark.parametrize("cut", [1, 45, 46, 50])
def test_an_index_that_is_cut_off_is_damaged(cut: int) -> None:
    placed = place([("name", 3)])
    entries = central_directory(placed, [7])[: 46 + 4 + 28]
    (member,) = read_directory(entries) or ()
    assert (member.name, member.size_bytes, member.crc32) == ("name", 3, 7)
    assert read_directory(entries[:cut]) is None and read_directory(b"XX" + entries[2:]) is None
    assert read_directory(entries[:46] + b"\xff\xff\xff\xff" + entries[50:]) is None


def test_a_copy_in_the_cache_is_private_made_once_and_never_left_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bundle").write_bytes(b"before" + b"engine")
    region = FileRegion(tmp_path / "bundle", "engines/step.pt2", 6, 6)
    copy = file_copy(region, region.sha256())
    assert copy.parent == cache_folder() / "files" and copy.suffix == ".pt2" and copy.stem == region.sha256()
    assert copy.read_bytes() == b"engine" and copy.parent.stat().st_mode & 0o777 == 0o700
    first = copy.stat()
    assert file_copy(region, region.sha256()) == copy and copy.stat().st_ino == first.st_ino
    copy.write_bytes(b"engin")
    assert file_copy(region, region.sha256()).read_bytes() == b"engine"
    with pytest.raises(IntegrityError, match=r"engines/step\.pt2: sha256 differs"):
        file_copy(region, "0" * 64)
    assert [*copy.parent.iterdir()] == [copy]


def test_the_cache_is_below_the_home_folder_unless_an_absolute_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == tmp_path / ".cache" / "mingc"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/mingc")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(ConfigError, match="no home folder"):
        cache_folder()
