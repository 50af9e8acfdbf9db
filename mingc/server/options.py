"""Options of the HTTP server: address, limits, allowed sources of media.

Engines and memory pools have their own options.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from mingc.errors import ConfigError

MIB = 1024 * 1024
_ORIGIN = re.compile(r"https?://[^/\s]+")
ANY_PUBLIC_HOST = "*"  # entry of `allow_media_hosts`
# Command-line names of the options that have one.
_OPTIONS = {
    "max_connections": "--max-connections",
    "max_concurrent_requests": "--max-concurrent-requests",
    "max_body_bytes": "--max-body-bytes",
    "max_total_body_bytes": "--max-total-body-bytes",
    "max_media_bytes": "--max-media-bytes",
    "max_speech_characters": "--max-speech-characters",
    "header_timeout_s": "--header-timeout",
    "body_timeout_s": "--body-timeout",
    "body_idle_timeout_s": "--body-idle-timeout",
    "write_timeout_s": "--write-timeout",
    "media_timeout_s": "--media-timeout",
    "shutdown_timeout_s": "--shutdown-timeout",
    "drain_s": "--drain-seconds",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of the HTTP server, validated on construction.

    Attributes:
        host: address or host name to listen on.
        port: TCP port; 0 lets the system choose one.
        allow_media_hosts: `host` or `host:port` entries that media may be fetched from. An entry without a port
            allows the default port of the scheme only. `*` allows every host whose addresses are all public, at the
            default ports. Empty: http(s) URLs are refused.
        media_root: folder under which local paths may be read. None: local paths are refused.
        max_connections: open connections; None derives it from the limit on file descriptors.
        max_body_bytes: largest request body.
        max_total_body_bytes: bodies, and then the media, of all requests together; further ones get a 503.
        max_media_bytes: largest total of the decoded media of one request, in bytes.
        max_concurrent_requests: chat and speech requests inside the server (body being read, queued or generating);
            further ones get a 503.
        max_speech_characters: longest `input` of a speech request.
        max_instructions_characters: longest `instructions`.
        media_timeout_s: time to fetch one URL, redirects included.
        header_timeout_s: time from the connection, or the end of the previous response, to the end of the request
            headers.
        body_timeout_s: time a client has to send its body.
        body_idle_timeout_s: time between two parts of a body.
        write_timeout_s: time that a client may go without reading a pending response.
        retry_after_s: `Retry-After` header of a 503.
        drain_s: time that the port stays open after SIGTERM, while `/ready` answers 503 and requests are served.
        shutdown_timeout_s: time that running requests may continue after that, or after SIGINT.
        api_key_file: file of accepted API keys, besides those of the environment; without any, none is needed.
        has_open_metrics: whether `/metrics` needs no key.
        cors_origins: origins whose pages may call the server; `*`: all. Empty: no CORS headers are sent.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allow_media_hosts: tuple[str, ...] = ()
    media_root: Path | None = None
    max_connections: int | None = None
    max_body_bytes: int = 128 * MIB
    max_total_body_bytes: int = 512 * MIB
    max_media_bytes: int = 96 * MIB
    max_concurrent_requests: int = 256
    max_speech_characters: int = 32_768
    max_instructions_characters: int = 1000
    media_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    body_idle_timeout_s: float = 15.0
    write_timeout_s: float = 60.0
    retry_after_s: int = 1
    drain_s: float = 2.0
    shutdown_timeout_s: float = 5.0
    api_key_file: Path | None = None
    has_open_metrics: bool = False
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.port <= 65535:
            problems.append(f"--port {self.port} is not between 0 and 65535")
        for host in self.allow_media_hosts:
            if host != ANY_PUBLIC_HOST and not _is_host_entry(host):
                problems.append(f"--allow-media-host {host!r} is not `host`, `host:port` or `*`")
        if self.media_root is not None and not self.media_root.is_dir():
            problems.append(f"--media-root {str(self.media_root)!r} is not a folder")
        for name in ("max_body_bytes", "max_total_body_bytes", "max_media_bytes", "max_concurrent_requests",
                     "max_speech_characters", "max_instructions_characters", "media_timeout_s",
                     "header_timeout_s", "body_timeout_s", "body_idle_timeout_s", "write_timeout_s"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"{_OPTIONS.get(name, name)} is {getattr(self, name)}, which is not above 0")
        if self.max_connections is not None and self.max_connections <= 0:
            problems.append(f"--max-connections is {self.max_connections}, which is not above 0")
        if self.max_total_body_bytes < self.max_body_bytes:
            problems.append(
                f"--max-total-body-bytes {self.max_total_body_bytes} is below --max-body-bytes "
                f"{self.max_body_bytes}"
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                problems.append(f"--cors-origin {origin!r} is not `scheme://host[:port]` or `*`")
        for name in ("shutdown_timeout_s", "drain_s", "retry_after_s"):
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
