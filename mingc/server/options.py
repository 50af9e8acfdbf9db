"""Options of the HTTP server: address, limits, allowed sources of media.

Engines and memory pools have their own options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mingc.options import BYTES, MOST_BYTES, MOST_SECONDS, SECONDS, check, option, options_of

_ORIGIN = re.compile(r"https?://[^/\s]+")
ANY_PUBLIC_HOST = "*"  # entry of `allow_media_hosts`
_ADDRESS, _ACCESS, _LIMITS, _TIMES, _MEDIA, _SPEECH, _END = (
    "Address", "Access", "Limits of requests", "Timeouts of connections", "Media", "Speech", "Shutdown",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of the HTTP server, validated on construction."""

    host: str = option(
        "127.0.0.1", "--host", metavar="ADDRESS", group=_ADDRESS, help="Address or host name to listen on."
    )
    port: int = option(
        8000, "--port", least=0, most=65535, group=_ADDRESS, help="TCP port; 0 lets the system choose one."
    )
    api_key_file: Path | None = option(
        None, "--api-key-file", group=_ACCESS,
        help="File of accepted API keys, one per line, reread when it changes; MINGC_API_KEYS adds more (with commas). "
        "Without keys, none is needed.",
    )  # fmt: skip
    has_open_metrics: bool = option(
        False, "--open-metrics/--no-open-metrics", group=_ACCESS, help="Answer /metrics without an API key."
    )
    has_ui: bool = option(
        True,
        "--ui/--no-ui",
        group=_ACCESS,
        help="Serve a page to try the model at /; it needs no API key, its requests do.",
    )
    cors_origins: tuple[str, ...] = option(
        (), "--cors-origin", repeats=True, metavar="ORIGIN", group=_ACCESS,
        help="Let pages of this origin call the server; may be given several times; `*`: all.",
    )  # fmt: skip
    max_concurrent_requests: int = option(
        256, "--max-concurrent-requests", least=1, most=10**6, group=_LIMITS,
        help="Requests for text, speech and pictures inside the server (read, queued or generated) before a 503.",
    )  # fmt: skip
    max_connections: int | None = option(
        None, "--max-connections", least=1, most=1 << 20, group=_LIMITS, shown_default="by `ulimit -n`, at most 4096",
        help="Open connections; a further one closes the connection that has been idle longest.",
    )  # fmt: skip
    max_body_bytes: int = option(
        128 << 20,
        "--max-body-bytes",
        unit=BYTES,
        least=1,
        most=MOST_BYTES,
        group=_LIMITS,
        help="Largest request body.",
    )
    max_total_body_bytes: int = option(
        512 << 20, "--max-total-body-bytes", unit=BYTES, least=1, most=MOST_BYTES, group=_LIMITS,
        help="Bodies and media of all requests together before a 503.",
    )  # fmt: skip
    max_total_answer_bytes: int = option(
        4 << 30, "--max-total-answer-bytes", unit=BYTES, least=1 << 20, most=MOST_BYTES, group=_LIMITS,
        help="Speech of all answers that are not streamed, or FLAC, and pictures, before a 503. Speech is kept in the "
        "folder TMPDIR, pictures in memory.",
    )  # fmt: skip
    max_speech_characters: int = option(
        32_768,
        "--max-speech-characters",
        least=1,
        most=10**7,
        group=_LIMITS,
        help="Longest `input` of a speech request.",
    )
    voice_aliases: tuple[str, ...] = option(
        (), "--voice-alias", repeats=True, metavar="NAME=VOICE", group=_SPEECH,
        help="Let requests call a voice by another name, such as one of OpenAI's (`alloy=DB30`); may be given several "
        "times.",
    )  # fmt: skip
    max_instructions_characters: int = option(
        1000, least=1, most=10**6, help="Longest `instructions` of a speech request."
    )
    key_max_requests: int | None = option(
        None, "--key-max-requests", least=1, most=10**6, group=_LIMITS, shown_default="no limit",
        help="Requests that each API key may have in flight before a 429.",
    )  # fmt: skip
    key_max_tokens: int | None = option(
        None, "--key-max-tokens", least=1, most=10**9, group=_LIMITS, shown_default="no limit",
        help="Tokens that each API key may have in flight: `max_tokens` of chats, one for 16 × 16 pixels of pictures "
        "to draw, and one for 4 bytes of text in prompts.",
    )  # fmt: skip
    key_max_audio_seconds: int | None = option(
        None, "--key-max-audio-seconds", least=1, most=10**9, group=_LIMITS, shown_default="no limit",
        help="Speech that each API key may have in flight, at 0.08 s for a byte of text; a token of `max_tokens` "
        "counts as 4 bytes.",
    )  # fmt: skip
    header_timeout_s: float = option(
        10.0, "--header-timeout", unit=SECONDS, above=0, most=MOST_SECONDS, group=_TIMES,
        help="Time for the headers of a request, from the connection or the end of the previous response.",
    )  # fmt: skip
    body_timeout_s: float = option(
        60.0,
        "--body-timeout",
        unit=SECONDS,
        above=0,
        most=MOST_SECONDS,
        group=_TIMES,
        help="Time for the body of a request.",
    )
    body_idle_timeout_s: float = option(
        15.0,
        "--body-idle-timeout",
        unit=SECONDS,
        above=0,
        most=MOST_SECONDS,
        group=_TIMES,
        help="Time between two parts of a body.",
    )
    write_timeout_s: float = option(
        60.0, "--write-timeout", unit=SECONDS, above=0, most=MOST_SECONDS, group=_TIMES,
        help="Time in which nothing of a response can be delivered to its client, before the connection is closed.",
    )  # fmt: skip
    max_session_s: float = option(
        3600.0, "--max-session-seconds", unit=SECONDS, above=0, most=MOST_SECONDS, group=_TIMES,
        help="Time that a WebSocket may stay open.",
    )  # fmt: skip
    allow_media_hosts: tuple[str, ...] = option(
        (), "--allow-media-host", repeats=True, metavar="HOST[:PORT]", group=_MEDIA,
        help="Fetch http(s) media from this host, without PORT from the default port of the scheme only; may be given "
        "several times. `*`: from every public address.",
    )  # fmt: skip
    media_root: Path | None = option(
        None, "--media-root", group=_MEDIA, help="Read local media under this folder."
    )
    max_media_bytes: int = option(
        96 << 20, "--max-media-bytes", unit=BYTES, least=1, most=MOST_BYTES, group=_MEDIA,
        help="Total size of the media files of one request.",
    )  # fmt: skip
    max_image_pixels: int | None = option(
        None, "--max-image-pixels", least=1, most=1 << 30, group=_MEDIA, shown_default="as the model requires it",
        help="Scale images down to so many pixels; a request may ask for fewer.",
    )  # fmt: skip
    media_timeout_s: float = option(
        30.0, "--media-timeout", unit=SECONDS, above=0, most=MOST_SECONDS, group=_MEDIA,
        help="Time to fetch one media URL, redirects included.",
    )  # fmt: skip
    retry_after_s: int = option(
        1, unit=SECONDS, least=0, most=MOST_SECONDS, help="`Retry-After` header of a 429 or 503."
    )
    drain_s: float = option(
        2.0, "--drain-seconds", unit=SECONDS, least=0, most=MOST_SECONDS, group=_END,
        help="Time that the port stays open after SIGTERM, while /ready answers 503 and requests are served.",
    )  # fmt: skip
    shutdown_timeout_s: float = option(
        5.0, "--shutdown-timeout", unit=SECONDS, least=0, most=MOST_SECONDS, group=_END,
        help="Time that running requests may continue after the port is closed or a rank is lost.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        problems = []
        for host in self.allow_media_hosts:
            if host != ANY_PUBLIC_HOST and not _is_host_entry(host):
                problems.append(f"--allow-media-host {host!r}: is not `host`, `host:port` or `*`")
        if self.media_root is not None and not self.media_root.is_dir():
            problems.append(f"--media-root {self.media_root}: is not a folder")
        if self.max_total_body_bytes < self.max_body_bytes:
            one, all_ = BYTES.text(self.max_body_bytes), BYTES.text(self.max_total_body_bytes)
            problems.append(
                f"--max-total-body-bytes {all_}: is below --max-body-bytes {one}"
                if self.max_body_bytes == options_of(ServeOptions)["max_body_bytes"].default
                else f"--max-body-bytes {one}: is above --max-total-body-bytes {all_}; raise that as well"
            )
        for alias in self.voice_aliases:
            name, is_pair, voice = alias.partition("=")
            if not (name and is_pair and voice):
                problems.append(f"--voice-alias {alias}: is not `name=voice`")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                problems.append(f"--cors-origin {origin}: is not `scheme://host[:port]` or `*`")
        check(self, *problems, where="options of the HTTP server", fix="see `mingc serve --help`")

    @property
    def aliases_of_voices(self) -> dict[str, str]:
        """The voice of every alias."""
        return dict(alias.split("=", 1) for alias in self.voice_aliases)


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
