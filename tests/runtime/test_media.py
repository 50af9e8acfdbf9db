"""Allowed and refused sources of media; every error names its field."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mingc.errors import ConfigError, RequestError
from mingc.runtime.http.media import MediaLoader
from mingc.runtime.http.messages import MediaKind, MediaSource
from mingc.runtime.http.options import ServeOptions
from mingc.runtime.request import MediaPart, Message, TextPart

PARAM = "messages[0].content[0].image_url.url"


def read(
    source: str, options: ServeOptions | None = None, *, kind: MediaKind = "image", is_base64: bool = False
) -> bytes:
    part = MediaSource(kind=kind, source=source, param=PARAM, is_base64=is_base64)
    message = Message(role="user", parts=(TextPart(text="a"), part))
    (read,) = asyncio.run(MediaLoader(options or ServeOptions()).load([message]))
    assert read.parts[0] == TextPart(text="a")
    media = read.parts[1]
    assert isinstance(media, MediaPart)
    assert (media.kind, media.where) == (kind, PARAM)
    return media.data


def refused(source: str, options: ServeOptions | None = None, **how: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(source, options, **how)  # type: ignore[arg-type]
    assert caught.value.param == PARAM
    return caught.value


class Site(BaseHTTPRequestHandler):
    """`/ok`, redirects, and faulty pages."""

    def do_GET(self) -> None:
        path = self.path
        if path == "/ok":
            self._answer(200, b"picture")
        elif path == "/hop":
            self._answer(302, b"", ("Location", "/ok"))
        elif path == "/away":
            self._answer(302, b"", ("Location", "http://localhost:1/ok"))
        elif path == "/file":
            self._answer(302, b"", ("Location", "file:///etc/passwd"))
        elif path == "/loop":
            self._answer(302, b"", ("Location", "/loop"))
        elif path == "/big":
            self._answer(200, b"x" * 5000)
        elif path == "/zip":
            self._answer(200, b"x", ("Content-Encoding", "gzip"))
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 5000)
        elif path == "/slow":
            self.server.release.wait(30)  # type: ignore[attr-defined]
            self._answer(200, b"late")
        else:
            self._answer(404, b"secret page")

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    """`127.0.0.1:port` of a small HTTP server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.release = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.release.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_data_urls_and_base64() -> None:
    data = base64.b64encode(b"\x89PNG data").decode()
    assert read(f"data:image/png;base64,{data}") == b"\x89PNG data"
    assert read(f"data:;base64,{data}") == b"\x89PNG data"
    assert read(f"DATA:image/png;charset=x;BASE64,{data}") == b"\x89PNG data"
    assert read(data, kind="audio", is_base64=True) == b"\x89PNG data"
    assert read(f"data:audio/wav;base64,{data}", kind="audio", is_base64=True) == b"\x89PNG data"
    assert read(f"data:video/mp4;base64,{data}", kind="audio") == b"\x89PNG data"
    assert read("\n".join([data[:4], data[4:], ""]), kind="audio", is_base64=True) == b"\x89PNG data"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("data:image/png,abc", "invalid_data_url"),
        ("data:image/png;base64", "invalid_data_url"),
        ("data:audio/wav;base64,YWJj", "invalid_data_url"),
        ("data:text/html;base64,YWJj", "invalid_data_url"),
        ("data:image/png;base64,", "empty_media"),
        ("data:image/png;base64,Y", "invalid_base64"),
        ("data:image/png;base64,Y*Jj", "invalid_base64"),
        ("data:image/png;base64,Zm9v=Zm9v", "invalid_base64"),
        ("data:image/png;base64,äöüß", "invalid_base64"),
        ("ftp://example.com/a.png", "invalid_value"),
        ("gopher:a", "invalid_value"),
    ],
)
def test_bad_sources(source: str, code: str) -> None:
    assert refused(source).code == code


def test_raw_base64_is_never_read_as_a_url_or_path() -> None:
    assert refused("http://example.com/a.wav", kind="audio", is_base64=True).code == "invalid_base64"
    assert refused("/etc/passwd", kind="audio", is_base64=True).code == "invalid_base64"
    assert refused("", kind="audio", is_base64=True).code == "empty_media"


def test_the_budget_is_shared_by_all_parts() -> None:
    options = ServeOptions(max_media_bytes=100)
    encoded = base64.b64encode(b"x" * 60).decode()
    parts = tuple(
        MediaSource(kind="audio", source=encoded, param=f"audios[{i}]", is_base64=True) for i in range(2)
    )
    with pytest.raises(RequestError) as caught:
        asyncio.run(MediaLoader(options).load([Message(role="user", parts=parts)]))
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        413,
        "audios[1]",
        "media_too_large",
    )


def test_an_allowed_host_is_fetched_and_redirects_are_followed(site: str) -> None:
    options = ServeOptions(allow_media_hosts=(site,))
    assert read(f"http://{site}/ok", options) == b"picture"
    assert read(f"HTTP://{site}/hop", options) == b"picture"


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/away", "media_host_not_allowed", "localhost:1"),
        ("/file", "invalid_value", "file:"),
        ("/loop", "media_fetch_failed", "redirects more than 3"),
        ("/missing", "media_fetch_failed", "status 404"),
        ("/zip", "media_fetch_failed", "compressed"),
    ],
)
def test_refused_responses(site: str, path: str, code: str, words: str) -> None:
    error = refused(f"http://{site}{path}", ServeOptions(allow_media_hosts=(site,)))
    assert error.code == code
    assert words in error.message
    assert "secret" not in error.message


@pytest.mark.parametrize("path", ["/big", "/endless"])
def test_a_body_over_the_limit_is_dropped(site: str, path: str) -> None:
    options = ServeOptions(allow_media_hosts=(site,), max_media_bytes=1000)
    assert refused(f"http://{site}{path}", options).code == "media_too_large"


def test_a_host_that_does_not_answer_in_time(site: str) -> None:
    options = ServeOptions(allow_media_hosts=(site,), media_timeout_s=0.3)
    assert refused(f"http://{site}/slow", options).code == "media_fetch_failed"


def test_an_unreachable_host() -> None:
    options = ServeOptions(allow_media_hosts=("127.0.0.1:1",))
    assert refused("http://127.0.0.1:1/a", options).code == "media_fetch_failed"


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a.png",
        "http://good.example.evil.example/a.png",
        "http://good.example:8080/a.png",
        "http://evil.example#@good.example/a.png",
        "http://evil.example\\@good.example/a.png",
        "http://good.example@evil.example/a.png",
        "http://user:secret@good.example/a.png",
        "http:///a.png",
        "http://[::1/a.png",
    ],
)
def test_hosts_outside_the_list(url: str) -> None:
    error = refused(url, ServeOptions(allow_media_hosts=("good.example",)))
    assert error.code in ("media_host_not_allowed", "invalid_value", "media_fetch_failed")
    assert "fetch" in error.message or "plain" in error.message


def test_no_host_is_allowed_by_default() -> None:
    error = refused("https://example.com/a.png")
    assert error.code == "media_host_not_allowed"
    assert "--allow-media-host example.com" in error.message


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root with a file, and a secret file outside it."""
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "a b.png").write_bytes(b"inside")
    (root / "sub" / "c.png").write_bytes(b"deep")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "good").symlink_to(root / "sub" / "c.png")
    (root / "loop").symlink_to(root / "loop")
    (root / "empty").write_bytes(b"")
    os.mkfifo(root / "pipe")
    return root


def test_files_under_the_root(root: Path) -> None:
    options = ServeOptions(media_root=root)
    assert read("a b.png", options) == b"inside"
    assert read(str(root / "a b.png"), options) == b"inside"
    assert read((root / "a b.png").as_uri(), options) == b"inside"
    assert read("sub/../sub/c.png", options) == b"deep"
    assert read("good", options) == b"deep"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("../secret", "local_media_not_allowed"),
        ("../missing", "local_media_not_allowed"),
        ("/etc/passwd", "local_media_not_allowed"),
        ("file:///etc/passwd", "local_media_not_allowed"),
        ("file://host/etc/passwd", "local_media_not_allowed"),
        ("file:///%2e%2e/secret", "local_media_not_allowed"),
        ("link", "local_media_not_allowed"),
        ("missing.png", "media_not_found"),
        ("loop", "media_not_found"),
        ("sub", "media_not_found"),
        ("pipe", "media_not_found"),
        ("a\x00b", "media_not_found"),
        ("x" * 5000, "media_not_found"),
        ("empty", "empty_media"),
    ],
)
def test_paths_that_are_refused(root: Path, source: str, code: str) -> None:
    error = refused(source, ServeOptions(media_root=root))
    assert error.code == code
    assert str(root) not in error.message


def test_no_path_is_allowed_by_default(root: Path) -> None:
    error = refused(str(root / "a b.png"))
    assert error.code == "local_media_not_allowed"
    assert "--media-root" in error.message


@pytest.mark.parametrize("host", ["http://example.com", "a/b", "*", "", "example.com:", "a:99999", "a:b"])
def test_invalid_host_entries(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-media-host"):
        ServeOptions(allow_media_hosts=(host,))


def test_all_invalid_options_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeOptions(port=70000, media_root=tmp_path / "none", max_body_bytes=0)
    assert all(word in str(caught.value) for word in ("--port 70000", "--media-root", "--max-body-bytes"))
    ServeOptions(allow_media_hosts=("example.com", "127.0.0.1:80", "[::1]", "[::1]:8080", "localhost"))
