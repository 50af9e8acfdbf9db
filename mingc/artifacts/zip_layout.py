"""The bytes around the files of a packed bundle: ZIP64 without compression, each file at a multiple of 4,096 bytes.

The layout depends only on names, sizes and CRC-32; it has no times, attributes or comments. So a reader can recompute
it and compare: every byte of a bundle is checked, and two packs of the same files are identical.
PKWARE APPNOTE.TXT 6.3.10, section 4.3; the padding is an extra field as Android's zipalign writes it (0xD935).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 4096
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_ZIP64_ID, _PADDING_ID = 0x0001, 0xD935
_VERSION = 45  # ZIP64
_UTF8 = 1 << 11
_DATE = 0x21  # 1 January 1980, the earliest date that ZIP can store
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
TAIL_BYTES = _END64.size + _LOCATOR.size + _END.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One stored file."""

    name: str
    size_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Position of a member: its local header starts at `header_at`, its content at `data_at`."""

    name: str
    size_bytes: int
    header_at: int
    data_at: int

    @property
    def end(self) -> int:
        return self.data_at + self.size_bytes


def place(sizes: Sequence[tuple[str, int]], start: int = 0) -> list[Placed]:
    """Place the members (name, bytes) one after another from byte `start` on."""
    placed = []
    for name, size in sizes:
        fixed = _LOCAL.size + len(name.encode()) + 20 + 4
        data = -(-(start + fixed) // ALIGNMENT) * ALIGNMENT
        placed.append(Placed(name=name, size_bytes=size, header_at=start, data_at=data))
        start = data + size
    return placed


def local_header(place: Placed, crc32: int) -> bytes:
    """The bytes from `header_at` to `data_at`."""
    name = place.name.encode()
    extra = struct.pack("<2H2Q", _ZIP64_ID, 16, place.size_bytes, place.size_bytes)
    padding = place.data_at - place.header_at - _LOCAL.size - len(name) - len(extra) - 4
    extra += struct.pack("<2H", _PADDING_ID, padding) + bytes(padding)
    fields = (_VERSION, _UTF8, 0, 0, _DATE, crc32, _FULL32, _FULL32, len(name), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + name + extra


def central_directory(placed: Sequence[Placed], crcs: Sequence[int]) -> bytes:
    """The index at the end of the file, with the end records after it."""
    entries = bytearray()
    for each, crc in zip(placed, crcs, strict=True):
        name = each.name.encode()
        extra = struct.pack("<2H3Q", _ZIP64_ID, 24, each.size_bytes, each.size_bytes, each.header_at)
        made_by = 3 << 8 | _VERSION  # Unix: attributes are a mode
        fields = (made_by, _VERSION, _UTF8, 0, 0, _DATE, crc, _FULL32, _FULL32, len(name), len(extra))
        entries += _CENTRAL.pack(b"PK\1\2", *fields, 0, 0, 0, 0o100644 << 16, _FULL32) + name + extra
    start, count = placed[-1].end if placed else 0, len(placed)
    end64 = _END64.pack(
        b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(entries), start
    )
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1)
    end = _END.pack(b"PK\5\6", 0, 0, _FULL16, _FULL16, _FULL32, _FULL32, 0)
    return bytes(entries) + end64 + locator + end


def directory_place(tail: bytes) -> tuple[int, int] | None:
    """Offset and bytes of the index, from the last `TAIL_BYTES` of a file; None when they are not end records."""
    if len(tail) != TAIL_BYTES or tail[:4] != b"PK\6\6":
        return None
    fields = _END64.unpack_from(tail)
    return fields[9], fields[8]


def read_directory(entries: bytes) -> list[Member] | None:
    """The members of an index without its end records; None when it is damaged."""
    members, at = [], 0
    while at < len(entries):
        if len(entries) - at < _CENTRAL.size:
            return None
        fields = _CENTRAL.unpack_from(entries, at)
        crc32, name_bytes, extra_bytes = fields[7], fields[10], fields[11]
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_bytes
        at = extra_at + extra_bytes
        if fields[0] != b"PK\1\2" or at > len(entries) or extra_bytes != 28:
            return None
        try:
            name = entries[name_at:extra_at].decode()
        except UnicodeDecodeError:
            return None
        size = struct.unpack_from("<Q", entries, extra_at + 4)[0]
        members.append(Member(name=name, size_bytes=size, crc32=crc32))
    return members
