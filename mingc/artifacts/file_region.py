"""A file of an artifact: a whole file of its folder, or a range of bytes of a packed bundle."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 4 << 20
# Linux counts a private writable mapping as memory that it may have to provide; weights are never written.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True)
class FileRegion:
    """`size_bytes` bytes of the file `path`, from `offset` on. `name` is the file's name inside its artifact."""

    path: Path
    name: str
    offset: int
    size_bytes: int
    is_whole: bool = False  # the region is the whole file, so libraries may open it by its path

    def __str__(self) -> str:
        return str(self.path) if self.is_whole else f"{self.path}: {self.name}"

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """The content from byte `start` of the region on; ends early where the file does."""
        with self.path.open("rb") as stream:
            stream.seek(self.offset + start)
            left = self.size_bytes - start
            while left > 0 and (chunk := stream.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk

    def read(self) -> bytes:
        """The whole content."""
        return b"".join(self.chunks())

    def sha256(self) -> str:
        """sha256 of the content, in hexadecimal."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def mapped(self) -> memoryview:
        """Map the content into memory. Some libraries ask for writable memory; writes stay in this process."""
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        skipped = self.offset - begin
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            mapping = mmap.mmap(
                descriptor,
                skipped + self.size_bytes,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=begin,
            )
        finally:
            os.close(descriptor)
        return memoryview(mapping)[skipped:]
