"""Names the format of bytes that no decoder takes, so that an error can say what was sent."""

from __future__ import annotations

import re

from mingc.errors import RequestError
from mingc.media.limits import undecodable
from mingc.prompts.conversation import MediaKind

_SENDABLE: dict[MediaKind, str] = {
    "image": "JPEG, PNG, WebP or GIF",
    "audio": "WAV, FLAC, MP3 or Ogg",
    "video": "MP4 (H.264) or WebM (VP9)",
}
_ARTICLE: dict[MediaKind, str] = {"image": "an image", "audio": "audio", "video": "a video"}
_VIDEO: tuple[MediaKind, ...] = ("audio", "video")
# Pattern at the start of a file, name, and the kinds of media that the format may hold.
_FORMATS: tuple[tuple[bytes, str, tuple[MediaKind, ...]], ...] = (
    (rb"....ftyp(hei|hev|mif1|msf1)", "HEIC", ()),
    (rb"....ftypavi[fs]", "AVIF", ("image",)),
    (rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI |FLV\x01|\0\0\x01\xba", "video", _VIDEO),
    (rb"\x89PNG", "PNG", ("image",)),
    (rb"\xff\xd8\xff", "JPEG", ("image",)),
    (rb"RIFF....WEBP", "WebP", ("image",)),
    (rb"GIF8", "GIF", ("image", "video")),
    (rb"II\*\0|MM\0\*", "TIFF", ("image",)),
    (rb"RIFF....WAVE|fLaC|ID3|FORM....AIF", "sound", ("audio",)),
    (rb"OggS", "Ogg", _VIDEO),
    (rb"%PDF", "PDF", ()),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "PostScript", ()),
    (rb"8BPS", "Photoshop", ()),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL", ()),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "JPEG 2000", ()),
    (rb"icns|\0\0[\1\2]\0", "icon", ()),
    (rb"MThd", "MIDI", ()),
    (rb"#EXTM3U", "HLS playlist", ()),
    (rb"PK\x03\x04", "ZIP or Office", ()),
    (rb"\x1f\x8b", "gzip", ()),
    (rb"version https://git-lfs", "Git LFS pointer", ()),
    (rb"(?i)\s*(<\?xml[^>]*>|<!--.*?-->|<!doctype svg[^>]*>|\s)*<svg", "SVG", ()),
    (rb"(?i)\s*(<!doctype html|<html)", "HTML", ()),
    (rb"\s*<\?xml", "XML", ()),
)
_START = 4096


def undecodable_file(data: bytes, kind: MediaKind, where: str, *, what: str = "", fix: str) -> RequestError:
    """The error for bytes that are no `kind`: with the name of their format if it is none of that kind, else `what`."""
    start = data[:_START].removeprefix(b"\xef\xbb\xbf")
    for pattern, name, kinds in _FORMATS:
        if re.match(pattern, start, re.DOTALL):
            if kind not in kinds:
                message = f"{name} files cannot be decoded as {_ARTICLE[kind]}"
                return undecodable(message, where, f"send {_SENDABLE[kind]}")
            break
    return undecodable(what or f"{len(data)} bytes cannot be decoded as {_ARTICLE[kind]}", where, fix)
