"""Loading the bytes of a request's media: data URLs and base64, allowed hosts, allowed folders.

Media are not decoded here. Limits: total bytes per request, time per URL, number of redirects.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import stat
import string
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

import httpx

from mingc.errors import RequestError
from mingc.runtime.http.body_decoder import shorten
from mingc.runtime.http.messages import MediaSource
from mingc.runtime.http.options import ServeOptions
from mingc.runtime.request import MediaPart, Message, TextPart

MAX_REDIRECTS = 3
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 1 << 20


class MediaLoader:
    """Loads media within the limits of `ServeOptions`. Keeps no connection between requests; may be shared."""

    def __init__(self, options: ServeOptions) -> None:
        self._max_bytes = options.max_media_bytes
        self._timeout_s = options.media_timeout_s
        self._hosts = frozenset(_host_and_port(entry) for entry in options.allow_media_hosts)
        self._root = None if options.media_root is None else options.media_root.resolve()

    async def load(self, messages: Sequence[Message[MediaSource]]) -> tuple[Message[MediaPart], ...]:
        """Replace the sources in `messages` by their bytes, one after the other.

        Raises:
            RequestError: with `param` naming the field of the source.
        """
        left = self._max_bytes
        read = []
        for message in messages:
            parts: list[TextPart | MediaPart] = []
            for part in message.parts:
                if isinstance(part, TextPart):
                    parts.append(part)
                    continue
                data = await self._read(part, left)
                left -= len(data)
                parts.append(MediaPart(kind=part.kind, data=data, where=part.param))
            read.append(Message(role=message.role, parts=tuple(parts)))
        return tuple(read)

    async def _read(self, media: MediaSource, max_bytes: int) -> bytes:
        scheme = _SCHEME.match(media.source[:64])
        name = scheme.group(1).lower() if scheme else ""
        if name == "data":
            data = self._decode_data_url(media, max_bytes)
        elif media.is_base64:
            data = self._decode_base64(media.source, media, max_bytes)
        elif name in _DEFAULT_PORTS:
            data = await self._fetch(media, max_bytes)
        elif name in ("", "file"):
            data = await asyncio.to_thread(self._read_file, media, max_bytes)
        else:
            _refuse(media, f"{shorten(media.source)} is not a data:, http: or https: URL", "invalid_value")
        if not data:
            _refuse(media, f"The {media.kind} holds no bytes", "empty_media")
        return data

    def _decode_data_url(self, media: MediaSource, max_bytes: int) -> bytes:
        header, comma, payload = media.source.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            _refuse(media, "A data URL must read 'data:<type>;base64,<data>'", "invalid_data_url")
        mime = header[len("data:") :].split(";")[0].strip().lower()
        main_type = mime.partition("/")[0]
        # mp4 and webm clips often say video/… for audio; ogg and octet-stream say application/…
        fitting = {media.kind, "application", ""} | ({"video"} if media.kind == "audio" else set())
        if main_type not in fitting:
            _refuse(media, f"A data URL of type {shorten(mime)} is no {media.kind}", "invalid_data_url")
        return self._decode_base64(payload, media, max_bytes)

    def _decode_base64(self, text: str, media: MediaSource, max_bytes: int) -> bytes:
        if len(text) * 3 // 4 > max_bytes + 3:
            self._too_large(media)
        try:
            encoded = text.encode("ascii")
            if len(text) % 4 or "\n" in text or " " in text:  # the command `base64` breaks lines
                encoded = encoded.translate(None, string.whitespace.encode())
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            _refuse(media, f"The {media.kind} is not valid base64: {error}", "invalid_base64", error)
        if len(data) > max_bytes:
            self._too_large(media)
        return data

    async def _fetch(self, media: MediaSource, max_bytes: int) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(media, max_bytes)
        except TimeoutError as error:
            _refuse(
                media, f"{shorten(media.source)} took over {self._timeout_s:g} s", "media_fetch_failed", error
            )
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            why = str(error) or type(error).__name__
            _refuse(media, f"{shorten(media.source)} cannot be fetched: {why}", "media_fetch_failed", error)

    async def _follow(self, media: MediaSource, max_bytes: int) -> bytes:
        url = httpx.URL(media.source)
        self._check_host(url, media)
        # trust_env off: no proxy, and no password of this host's .netrc is sent to a host that a client chose
        async with httpx.AsyncClient(trust_env=False, timeout=self._timeout_s) as client:
            for _ in range(MAX_REDIRECTS + 1):
                # identity: a compressed body could expand to many times the counted bytes
                async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
                    location = response.headers.get("location")
                    if response.is_redirect and location:
                        url = url.join(location)
                        self._check_host(url, media)
                        continue
                    if response.status_code != 200:
                        why = f"{shorten(media.source)} answered with status {response.status_code}"
                        _refuse(media, why, "media_fetch_failed")
                    if response.headers.get("content-encoding", "identity") != "identity":
                        _refuse(
                            media, f"{shorten(media.source)} sends a compressed body", "media_fetch_failed"
                        )
                    return await self._read_response(response, media, max_bytes)
        _refuse(
            media, f"{shorten(media.source)} redirects more than {MAX_REDIRECTS} times", "media_fetch_failed"
        )

    async def _read_response(self, response: httpx.Response, media: MediaSource, max_bytes: int) -> bytes:
        declared = response.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
            self._too_large(media)
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > max_bytes:
                self._too_large(media)
        return bytes(data)

    def _check_host(self, url: httpx.URL, media: MediaSource) -> None:
        """Refuse a host that is not allowed. The URL is httpx's, which also connects, so both see the same host."""
        if url.scheme not in _DEFAULT_PORTS or url.userinfo:
            _refuse(media, f"{shorten(str(url))} is not a plain http: or https: URL", "invalid_value")
        host = url.raw_host.decode("ascii").lower()
        default_port = _DEFAULT_PORTS[url.scheme]
        port = url.port or default_port
        if (host, port) not in self._hosts and not (port == default_port and (host, None) in self._hosts):
            shown = url.netloc.decode("ascii")
            _refuse(
                media,
                f"Media may not be fetched from {shorten(shown)}: send a data: URL, or have the server started with "
                f"--allow-media-host {shorten(shown).strip(chr(34))}",
                "media_host_not_allowed",
            )

    def _read_file(self, media: MediaSource, max_bytes: int) -> bytes:
        if self._root is None:
            why = (
                "Local paths are not allowed: send a data: URL, or have the server started with --media-root"
            )
            _refuse(media, f"{shorten(media.source)} is a path. {why}", "local_media_not_allowed")
        text = media.source
        if text[:5].lower() == "file:":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                _refuse(media, f"{shorten(text)} names another host", "local_media_not_allowed")
            text = unquote(parts.path)
        try:
            path = (self._root / text).resolve()
            # the same message whether or not the path exists, so files outside the root cannot be probed
            if not path.is_relative_to(self._root):
                _refuse(
                    media, f"{shorten(media.source)} is not under --media-root", "local_media_not_allowed"
                )
            return self._read_regular(path, media, max_bytes)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a cycle of links
            why = (error.strerror if isinstance(error, OSError) else None) or "not a path"
            _refuse(media, f"{shorten(media.source)} cannot be read: {why}", "media_not_found", error)

    def _read_regular(self, path: Path, media: MediaSource, max_bytes: int) -> bytes:
        # NONBLOCK: opening a pipe must not wait for a writer; NOFOLLOW: `path` is resolved, a link is a swap
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                _refuse(media, f"{shorten(media.source)} is not a file", "media_not_found")
            data = bytearray()
            while chunk := file.read(_READ_BYTES):
                data += chunk
                if len(data) > max_bytes:
                    self._too_large(media)
            return bytes(data)

    def _too_large(self, media: MediaSource) -> NoReturn:
        raise RequestError(
            f"The media of this request are larger than {self._max_bytes} bytes.",
            status=413,
            param=media.param,
            code="media_too_large",
        )


def _host_and_port(entry: str) -> tuple[str, int | None]:
    """`[::1]:80` → ("::1", 80); `example.com` → ("example.com", None). The entry was checked by ServeOptions."""
    parts = urlsplit(f"//{entry}")
    return (parts.hostname or "").lower(), parts.port


def _refuse(media: MediaSource, message: str, code: str, cause: Exception | None = None) -> NoReturn:
    raise RequestError(f"{message}.", param=media.param, code=code) from cause
