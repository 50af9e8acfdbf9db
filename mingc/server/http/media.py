"""Loading the bytes of a request's media: data URLs and base64, allowed hosts, allowed folders.

Media are not decoded here. Limits: total bytes per request, time per URL, number of redirects.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

import httpx

from mingc.errors import RequestError
from mingc.host import large_arrays
from mingc.prompts.conversation import MediaPart, Message
from mingc.server.http.body import LongString, decode_base64, decode_plain
from mingc.server.http.field_errors import shorten
from mingc.server.http.public_addresses import is_public
from mingc.server.options import ANY_PUBLIC_HOST, ServeOptions

MAX_REDIRECTS = 3
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.\-]*):")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 1 << 20
_INLINE_BYTES = 1 << 20  # of a request's base64 that are decoded faster than they are handed to a thread
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_MAX_PATH = 4096  # bytes; PATH_MAX of Linux
_MAX_ADDRESSES = 4  # of one host that are tried


class MediaLoader:
    """Loads media within the limits of `ServeOptions`. Keeps no connection between requests; may be shared."""

    def __init__(self, options: ServeOptions) -> None:
        self._max_bytes = options.max_media_bytes
        self._timeout_s = options.media_timeout_s
        self._allows_public = ANY_PUBLIC_HOST in options.allow_media_hosts
        named = (entry for entry in options.allow_media_hosts if entry != ANY_PUBLIC_HOST)
        self._hosts = frozenset(_host_and_port(entry) for entry in named)
        self._root = None if options.media_root is None else options.media_root.resolve()
        # They log whole URLs at INFO and DEBUG; a URL of a medium often carries a signature that grants access.
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)

    async def load(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Replace the references in `messages` by their bytes, one after another.

        Raises:
            RequestError: with `param` naming the field of the reference.
        """
        left = self._max_bytes
        loaded = []
        for message in messages:
            parts = list(message.parts)
            for index, part in enumerate(parts):
                if isinstance(part, MediaPart) and isinstance(part.data, str):
                    data = await self._read(part, part.data, left)
                    left -= len(data)
                    parts[index] = replace(part, data=data)
            loaded.append(replace(message, parts=tuple(parts)))
        return tuple(loaded)

    async def load_one(self, part: MediaPart, max_bytes: int) -> bytes:
        """The bytes of one reference, at most `max_bytes`. Raises: RequestError."""
        assert isinstance(part.data, str), "a reference"
        data = await self._read(part, part.data, self._max_bytes)
        if len(data) > max_bytes:
            raise _too_large(part, f"The {part.kind} is", max_bytes)
        return bytes(data)

    async def _read(self, media: MediaPart, source: str, max_bytes: int) -> memoryview:
        if not isinstance(source, LongString):
            source = source.strip()
        scheme = _SCHEME.match(source[:64])
        name = scheme.group(1).lower() if scheme else ""
        if name == "data" or media.is_base64:
            data = await self._decode(media, source, max_bytes)
        elif name and isinstance(source, LongString):
            _refuse(media, f"{_shown(source)} is too long for a URL", "invalid_value")
        elif name in _DEFAULT_PORTS:
            data = await self._fetch(media, source, max_bytes)
        elif name == "" and self._is_bare_base64(source):
            data = await self._decode(media, source, max_bytes)
        elif name in ("", "file"):
            data = await asyncio.to_thread(self._read_file, media, source, max_bytes)
        else:
            _refuse(media, f"{_shown(source)} is not a data:, http: or https: URL", "invalid_value")
        if not data:
            _refuse(media, f"The {media.kind} holds no bytes", "empty_media")
        return data

    async def _decode(self, media: MediaPart, source: str, max_bytes: int) -> memoryview:
        """Decode base64 or a data URL: on a thread if it is long or has more than plain base64."""
        if not isinstance(source, LongString):
            return decode_data(media, source, max_bytes, self._max_bytes)
        encoded = _encoded(media, source, max_bytes, self._max_bytes)
        if self._max_bytes - max_bytes + len(encoded) <= _INLINE_BYTES:
            data = decode_plain(encoded)
            if data is not None and len(data) <= max_bytes:
                return memoryview(data)
        return await asyncio.to_thread(decode_data, media, source, max_bytes, self._max_bytes)

    def _is_bare_base64(self, source: str) -> bool:
        """Whether a source without a scheme is base64; a path wins if its name exists under the media root."""
        if len(source) > _MAX_PATH or isinstance(source, LongString):
            return True
        if not _BASE64.fullmatch(source) or len("".join(source.split())) % 4:
            return False
        if self._root is None:
            return True
        # compared by name only: nothing outside the root is looked up
        path = Path(os.path.normpath(self._root / source))
        return not (path.is_relative_to(self._root) and os.path.lexists(path))

    async def _fetch(self, media: MediaPart, source: str, max_bytes: int) -> memoryview:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(media, source, max_bytes)
        except TimeoutError as error:
            _refuse(media, f"{_shown(source)} took over {self._timeout_s:g} s", "media_fetch_failed", error)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError) as error:
            why = str(error) or type(error).__name__
            _refuse(media, f"{_shown(source)} cannot be fetched: {why}", "media_fetch_failed", error)

    async def _follow(self, media: MediaPart, source: str, max_bytes: int) -> memoryview:
        url = httpx.URL(source)
        # trust_env off: no proxy, and no password of this host's .netrc is sent to a host that a client chose
        context = await asyncio.to_thread(_tls_context)
        async with httpx.AsyncClient(trust_env=False, verify=context) as client:
            for _ in range(MAX_REDIRECTS + 1):
                is_named = self._check_host(url, media)
                addresses = await _resolve(url)
                if not is_named:
                    _check_public(addresses, url, media)
                client.cookies.clear()  # they would be kept by address, for other hosts there
                async with self._get(client, url, addresses[:_MAX_ADDRESSES]) as response:
                    location = response.headers.get("location")
                    if response.is_redirect and location:
                        url = url.join(location)
                        continue
                    if response.status_code != 200:
                        why = f"{_shown(source)} answered with status {response.status_code}"
                        _refuse(media, why, "media_fetch_failed")
                    if response.headers.get("content-encoding", "identity") != "identity":
                        why = f"{_shown(source)} sends a compressed body"
                        _refuse(media, why, "media_fetch_failed")
                    return await self._read_response(response, media, max_bytes)
        why = f"{_shown(source)} redirects more than {MAX_REDIRECTS} times"
        _refuse(media, why, "media_fetch_failed")

    @asynccontextmanager
    async def _get(
        self, client: httpx.AsyncClient, url: httpx.URL, addresses: Sequence[str]
    ) -> AsyncIterator[httpx.Response]:
        """Send `GET url` to the first of `addresses` that accepts a connection.

        The connection goes to the address itself, so a name that resolves to another one a moment later changes
        nothing; the certificate is checked against the name.
        """
        for index, address in enumerate(addresses):
            request = client.build_request(
                "GET",
                url.copy_with(host=address),
                headers={
                    "host": url.netloc.decode("ascii"),
                    # a compressed body could expand to many times the counted bytes
                    "accept-encoding": "identity",
                },
                timeout=httpx.Timeout(self._timeout_s, connect=self._timeout_s / len(addresses)),
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            )
            try:
                response = await client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if index + 1 == len(addresses):
                    raise
                continue
            try:
                yield response
            finally:
                await response.aclose()
            return

    async def _read_response(self, response: httpx.Response, media: MediaPart, max_bytes: int) -> memoryview:
        declared = response.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
            self._too_large(media)
        parts: list[bytes] = []
        size = 0
        async for chunk in response.aiter_raw():
            parts.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                self._too_large(media)
        return await asyncio.to_thread(large_arrays.join, parts)  # 100 MB take tens of milliseconds

    def _check_host(self, url: httpx.URL, media: MediaPart) -> bool:
        """Refuse a host that is not allowed; True if it is allowed by name, False if it is allowed as a public host.

        The URL is parsed by httpx, which also connects, so both see the same host.
        """
        if url.scheme not in _DEFAULT_PORTS or url.userinfo:
            _refuse(media, f"{_shown(str(url))} is not a plain http: or https: URL", "invalid_value")
        host = url.raw_host.decode("ascii").lower()
        default_port = _DEFAULT_PORTS[url.scheme]
        port = url.port or default_port
        if (host, port) in self._hosts or (port == default_port and (host, None) in self._hosts):
            return True
        if not (self._allows_public and host and port == default_port):
            shown = url.netloc.decode("ascii")
            _refuse(
                media,
                f"Media may not be fetched from {shorten(shown)}: send a data: URL, or have the server started with "
                f"--allow-media-host {shorten(shown).strip(chr(34))}",
                "media_host_not_allowed",
            )
        return False

    def _read_file(self, media: MediaPart, source: str, max_bytes: int) -> memoryview:
        if self._root is None:
            why = "Local paths are not allowed: send base64, or have the server started with --media-root"
            _refuse(media, f"{shorten(source)} is a path. {why}", "local_media_not_allowed")
        text = source
        if text[:5].lower() == "file:":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost"):
                _refuse(media, f"{shorten(text)} names another host", "local_media_not_allowed")
            text = unquote(parts.path)
        try:
            path = (self._root / text).resolve()
            # the same message whether or not the path exists, so files outside the root cannot be probed
            if not path.is_relative_to(self._root):
                _refuse(media, f"{shorten(source)} is not under --media-root", "local_media_not_allowed")
            return self._read_regular(path, media, source, max_bytes)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a cycle of links
            why = (error.strerror if isinstance(error, OSError) else None) or "not a path"
            _refuse(media, f"{shorten(source)} cannot be read: {why}", "media_not_found", error)

    def _read_regular(self, path: Path, media: MediaPart, source: str, max_bytes: int) -> memoryview:
        # NONBLOCK: opening a pipe must not wait for a writer; NOFOLLOW: `path` is resolved, a link is a swap
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                _refuse(media, f"{shorten(source)} is not a file", "media_not_found")
            parts: list[bytes] = []
            size = 0
            while chunk := file.read(_READ_BYTES):
                parts.append(chunk)
                size += len(chunk)
                if size > max_bytes:
                    self._too_large(media)
            return large_arrays.join(parts)

    def _too_large(self, media: MediaPart) -> NoReturn:
        raise _too_large(media, "The media of this request are", self._max_bytes)


def decode_data(media: MediaPart, source: str, max_bytes: int, limit: int | None = None) -> memoryview:
    """Decode base64 or a data URL, whatever its type says: decoders detect formats from the bytes.

    `limit`: what an error calls the limit, if `max_bytes` is what is left of it. May be called from any thread, which
    holds Python's lock for 2 ms at a time.

    Raises: RequestError.
    """
    limit = max_bytes if limit is None else limit
    try:
        encoded = _encoded(media, source, max_bytes, limit)
        data = decode_base64(encoded, is_escaped=isinstance(source, LongString))
    except (binascii.Error, UnicodeEncodeError) as error:
        _refuse(media, f"The {media.kind} is not valid base64: {error}", "invalid_base64", error)
    if len(data) > max_bytes:
        raise _too_large(media, "The media of this request are", limit)
    return data


def _encoded(media: MediaPart, source: str, max_bytes: int, limit: int) -> memoryview:
    """The base64 of a source. Raises: RequestError, UnicodeEncodeError."""
    start = 0
    if source[:64].lstrip()[:5].lower() == "data:":
        header, comma, _ = source.partition(",")
        if not comma or header.lower().rpartition(";")[2].strip() != "base64":
            _refuse(media, "A data URL must read 'data:<type>;base64,<data>'", "invalid_data_url")
        start = len(header) + 1
        if isinstance(source, LongString):  # its header may have escaped slashes
            start = bytes(source.data[:1024]).index(b",") + 1
    size = len(source.data if isinstance(source, LongString) else source) - start
    if size * 3 // 4 > max_bytes + 3:
        raise _too_large(media, "The media of this request are", limit)
    if isinstance(source, LongString):
        return source.data[start:]
    return memoryview(source.encode("ascii")[start:])


def _too_large(media: MediaPart, what: str, max_bytes: int) -> RequestError:
    return RequestError(
        f"{what} larger than {max_bytes} bytes.", status=413, param=media.where, code="media_too_large"
    )


def _host_and_port(entry: str) -> tuple[str, int | None]:
    """`[::1]:80` → ("::1", 80); `example.com` → ("example.com", None). The entry was checked by ServeOptions."""
    parts = urlsplit(f"//{entry}")
    return (parts.hostname or "").lower(), parts.port


@cache
def _tls_context() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)  # reads all root certificates: 50 ms


async def _resolve(url: httpx.URL) -> list[str]:
    """Addresses of the URL's host in the order to try them. Raises: OSError when it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(
        url.raw_host.decode("ascii"), url.port or _DEFAULT_PORTS[url.scheme], type=socket.SOCK_STREAM
    )
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _check_public(addresses: Sequence[str], url: httpx.URL, media: MediaPart) -> None:
    """Refuse a host with an address that is not public."""
    for address in addresses:
        if not is_public(address):
            shown = shorten(url.netloc.decode("ascii"))
            _refuse(
                media,
                f"Media may not be fetched from {shown}: its address is not public. Send a data: URL",
                "media_host_not_allowed",
            )


def _shown(source: str) -> str:
    """Shorten a source for an error message: a URL loses user, query and fragment, which may contain secrets."""
    head, separator, rest = source.partition("://")
    if separator:
        authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
        rest = authority.rpartition("@")[2] + re.split(r"[?#]", rest[len(authority) :], maxsplit=1)[0]
    return shorten(head + separator + rest)


def _refuse(media: MediaPart, message: str, code: str, cause: Exception | None = None) -> NoReturn:
    raise RequestError(f"{message}.", param=media.where, code=code) from cause
