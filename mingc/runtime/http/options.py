"""Options of the HTTP server: address, limits, allowed sources of media.

Engines and memory pools have their own options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mingc.errors import ConfigError

MIB = 1024 * 1024
# Command-line names of the options that have one.
_OPTIONS = {
    "max_concurrent_requests": "--max-concurrent-requests",
    "shutdown_timeout_s": "--shutdown-timeout",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of the HTTP server, validated on construction.

    Attributes:
        host: address or host name to listen on.
        port: TCP port; 0 lets the system choose one.
        allow_media_hosts: `host` or `host:port` entries that media may be fetched from. An entry without a port
            allows the default port of the scheme only. Empty: http(s) URLs are refused.
        media_root: folder under which local paths may be read. None: local paths are refused.
        max_body_bytes: largest request body.
        max_media_bytes: largest total of the decoded media of one request, in bytes.
        max_concurrent_requests: chat and speech requests inside the server (body being read, queued or generating);
            further ones get a 503.
        max_speech_characters: longest `input` of a speech request.
        max_instructions_characters: longest `instructions`.
        media_timeout_s: time to fetch one URL, redirects included.
        body_timeout_s: time a client has to send its body.
        retry_after_s: `Retry-After` header of a 503.
        shutdown_timeout_s: time that running requests may continue after the first SIGTERM or SIGINT.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allow_media_hosts: tuple[str, ...] = ()
    media_root: Path | None = None
    max_body_bytes: int = 128 * MIB
    max_media_bytes: int = 96 * MIB
    max_concurrent_requests: int = 256
    max_speech_characters: int = 32_768
    max_instructions_characters: int = 1000
    media_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    retry_after_s: int = 1
    shutdown_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.port <= 65535:
            problems.append(f"--port {self.port} is not between 0 and 65535")
        for host in self.allow_media_hosts:
            if not _is_host_entry(host):
                problems.append(f"--allow-media-host {host!r} is not `host` or `host:port`")
        if self.media_root is not None and not self.media_root.is_dir():
            problems.append(f"--media-root {str(self.media_root)!r} is not a folder")
        for name in ("max_body_bytes", "max_media_bytes", "max_concurrent_requests", "max_speech_characters",
                     "max_instructions_characters", "media_timeout_s", "body_timeout_s"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{_OPTIONS.get(name, name)} is {getattr(self, name)}, which is not above 0")
        for name in ("shutdown_timeout_s", "retry_after_s"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(
                    f"{_OPTIONS.get(name, name)} is {getattr(self, name)}, which is not 0 or above"
                )
        if problems:
            raise ConfigError(
                "; ".join(problems), where="options of the HTTP server", fix="see `mingc serve --help`"
            )


def _is_host_entry(entry: str) -> bool:
    """Whether `entry` is `name`, `1.2.3.4` or `[::1]`, with an optional `:port`; schemes, paths and `*` are invalid."""
    name, colon, port = entry.rpartition(":")
    if not colon or entry.endswith("]"):
        name, port = entry, "1"
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        return False
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789.-_") | (set(":") if bare is not name else set())
    return bool(bare) and set(bare.lower()) <= allowed
