"""API keys: from a file that is reread when it changes, and from the environment; compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mingc.errors import ConfigError, RequestError

log = logging.getLogger("mingc.http")

VARIABLE = "MINGC_API_KEYS"
_KEY_SUBPROTOCOL = "openai-insecure-api-key."
_CHECK_S = 1.0  # minimum interval between checks of the file


class ApiKeys:
    """The accepted keys. Only their hashes are kept."""

    def __init__(self, file: Path | None, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            file: one key per line; empty lines and lines that begin with `#` are skipped.
            environment: where MINGC_API_KEYS may hold keys, separated by commas; None: this process's.

        Raises:
            ConfigError: if the file cannot be read or holds no key; without a file, if the variable is set and holds no
                key.
        """
        self._file = file
        value = (os.environ if environment is None else environment).get(VARIABLE)
        self._fixed = _digests((value or "").replace("\n", ",").split(","))
        if file is None and value is not None and not self._fixed:
            raise ConfigError(
                f"{VARIABLE} is set and holds no key, which would let everyone in",
                where=VARIABLE,
                fix="put keys into it, or unset it to serve without keys",
            )
        self._checked_at = time.monotonic()
        self._version: tuple[int, int, int] | None = None
        self._from_file: tuple[bytes, ...] = ()
        if file is not None:
            try:
                self._read(file)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"no API keys in {file}: {getattr(error, 'strerror', None) or error}",
                    where="--api-key-file",
                    fix="write one key per line into a file that this user may read",
                ) from error

    @property
    def is_required(self) -> bool:
        """Whether requests need a key."""
        return self._file is not None or bool(self._fixed)

    def accepts(self, key: str) -> bool:
        """Whether `key` is one of the keys, in constant time."""
        self._reread()
        (given,) = _digests([key]) or (b"",)
        matches = [hmac.compare_digest(given, known) for known in (*self._fixed, *self._from_file)]
        return any(matches)

    def _reread(self) -> None:
        now = time.monotonic()
        if self._file is None or now - self._checked_at < _CHECK_S:
            return
        self._checked_at = now
        try:
            if self._read(self._file):
                log.info("read %d API keys from %s", len(self._from_file), self._file)
        except (OSError, ValueError) as error:
            log.warning("the API keys in %s are not usable, earlier ones stay: %s", self._file, error)

    def _read(self, file: Path) -> bool:
        """Read the file if it has changed. Raises: OSError, ValueError."""
        status = file.stat()
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version == self._version:
            return False
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # editors of Windows begin with a mark
        keys = _digests(line for line in lines if not line.strip().startswith("#"))
        if not keys:
            raise ValueError("the file holds no key")
        self._from_file, self._version = keys, version
        return True


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.strip().encode()).digest() for key in keys if key.strip())


class ApiKeyCheck:
    """ASGI middleware that refuses requests and WebSockets without a valid key, before a body or a message is read.

    Pages cannot set headers of a WebSocket; they offer the key as a subprotocol, as OpenAI's SDKs do. A URL has no key,
    because URLs are logged.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_paths: frozenset[str],
        answer: Callable[[HTTPConnection, Exception], Response],
    ) -> None:
        """`open_paths` need no key; `answer` creates the response of an error."""
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and scope["path"] in self._open_paths
        if scope["type"] in ("http", "websocket") and self._keys.is_required and not is_open:
            try:
                key = self._check(
                    Headers(scope=scope).get("authorization", ""), scope.get("subprotocols", ())
                )
            except RequestError as error:
                await self._answer(HTTPConnection(scope), error)(scope, receive, send)
                return
            scope.setdefault("state", {})["api_key"] = key
        await self._app(scope, receive, send)

    def _check(self, header: str, subprotocols: Iterable[str]) -> bytes:
        """The hash of the key. Raises: RequestError (401)."""
        scheme, _, key = header.partition(" ")
        if not header:
            offered = [each for each in subprotocols if each.startswith(_KEY_SUBPROTOCOL)]
            scheme, key = "bearer", offered[0].removeprefix(_KEY_SUBPROTOCOL) if offered else ""
        if scheme.lower() != "bearer" or not key.strip():
            raise _Unauthorized("You did not provide an API key: send 'Authorization: Bearer KEY'.")
        if not self._keys.accepts(key):
            raise _Unauthorized("Incorrect API key provided.")
        return _digests([key])[0]


class _Unauthorized(RequestError):
    """401, in OpenAI's form."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, code="invalid_api_key")
        self.headers = {"WWW-Authenticate": "Bearer"}
