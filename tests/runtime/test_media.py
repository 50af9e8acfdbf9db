"""Allowed and refused sources of media; every error names its field."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import logging
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_service import INFO

from mingc.errors import ConfigError, RequestError
from mingc.prompts.conversation import MediaKind, MediaPart, Message, TextPart
from mingc.server.http.media import MediaLoader
from mingc.server.http.parsing import parse_chat
from mingc.server.http.public_addresses import is_public
from mingc.server.options import ServeOptions

PARAM = "messages[0].content[0].image_url.url"


def read(
    source: str, options: ServeOptions | None = None, *, kind: MediaKind = "image", is_base64: bool = False
) -> bytes:
    part = MediaPart(kind=kind, data=source, where=PARAM, is_base64=is_base64)
    message = Message(role="user", parts=(TextPart(text="a"), part))
    (read,) = asyncio.run(MediaLoader(options or ServeOptions()).load([message]))
    assert read.parts[0] == TextPart(text="a")
    media = read.parts[1]
    assert isinstance(media, MediaPart)
    assert (media.kind, media.where) == (kind, PARAM)
    assert isinstance(media.data, bytes | memoryview)
    return bytes(media.data)


def refused(source: str, options: ServeOptions | None = None, **how: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(source, options, **how)  # type: ignore[arg-type]
    assert caught.value.param == PARAM
    return caught.value


class Site(BaseHTTPRequestHandler):
    """`/ok`, redirects, and faulty pages. Records the requests that arrive."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        if path == "/ok":
            self._answer(200, b"picture")
        elif path.startswith("/hops/"):
            left = int(path.removeprefix("/hops/"))
            location = f"/hops/{left - 1}" if left > 1 else "/ok?signature=SECRET"
            self._answer(302, b"", ("Location", location), ("Set-Cookie", "visited=yes; Path=/"))
        elif path == "/to-password":
            address = f"http://user:SECRET@127.0.0.1:{self.server.server_port}/ok"  # type: ignore[attr-defined]
            self._answer(302, b"", ("Location", address))
        elif path == "/to-metadata":
            self._answer(302, b"", ("Location", "http://169.254.169.254/latest/meta-data"))
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
        elif path.startswith("/status/"):
            self._answer(int(path.removeprefix("/status/")), b"secret part")
        elif path == "/zip":
            self._answer(200, b"x", ("Content-Encoding", "gzip"))
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 5000)
        elif path == "/declared":
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.server.release.wait(30)  # type: ignore[attr-defined]
        elif path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(b"x")
                if self.server.release.wait(0.05):  # type: ignore[attr-defined]
                    break
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


class SiteServer(ThreadingHTTPServer):
    """`seen`: path and headers of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Site)
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.release = threading.Event()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


@pytest.fixture
def server() -> Iterator[SiteServer]:
    server = SiteServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def site(server: SiteServer) -> str:
    """`127.0.0.1:port` of a small HTTP server."""
    return f"127.0.0.1:{server.server_port}"


class Network:
    """Names and connections of this process: nothing leaves the machine, and what would have is recorded.

    `names`: addresses of a host name, one list for each time that it is asked for; the last one repeats. `routes`:
    public addresses that lead to a port of this machine. `silent`: addresses that drop every packet. `connects`:
    (address, port) of every attempt.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.routes: dict[str, int] = {}
        self.silent: set[str] = set()
        self.connects: list[tuple[str, int]] = []

    def getaddrinfo(self, host: Any, port: Any, *args: Any, **how: Any) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name not in self.names:
            how["flags"] = socket.AI_NUMERICHOST  # an address, in any of its forms; a name is an error
            return REAL_GETADDRINFO(host, port, *args[:3], **how)
        answers = self.names[name]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            entry for each in addresses for entry in REAL_GETADDRINFO(each, port, type=socket.SOCK_STREAM)
        ]

    async def sock_connect(self, loop: Any, sock: socket.socket, address: Any) -> None:
        host, port = address[:2]
        self.connects.append((host, port))
        if host in self.silent:
            await asyncio.Event().wait()
        if host in self.routes:
            address = ("127.0.0.1", self.routes[host])
        elif host != "127.0.0.1":
            raise OSError(errno.ENETUNREACH, "this test has no network")
        await REAL_CONNECT(loop, sock, address)


REAL_GETADDRINFO = socket.getaddrinfo
REAL_CONNECT = asyncio.selector_events.BaseSelectorEventLoop.sock_connect


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(socket, "getaddrinfo", network.getaddrinfo)
    monkeypatch.setattr(
        asyncio.selector_events.BaseSelectorEventLoop,
        "sock_connect",
        lambda loop, sock, address: network.sock_connect(loop, sock, address),
    )
    return network


def test_data_urls_and_base64() -> None:
    data = base64.b64encode(b"\x89PNG data").decode()
    assert read(f"data:image/png;base64,{data}") == b"\x89PNG data"
    assert read(f"data:;base64,{data}") == b"\x89PNG data"
    assert read(f"DATA:image/png;charset=x;BASE64,{data}") == b"\x89PNG data"
    assert read(data, kind="audio", is_base64=True) == b"\x89PNG data"
    assert read(f"data:audio/wav;base64,{data}", kind="audio", is_base64=True) == b"\x89PNG data"
    assert read(f"data:video/mp4;base64,{data}", kind="audio") == b"\x89PNG data"
    assert read("\n".join([data[:4], data[4:], ""]), kind="audio", is_base64=True) == b"\x89PNG data"


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize(
    "url",
    [
        "data:binary/octet-stream;base64,{}", "data:undefined;base64,{}", "data:image/gif;base64,{}",
        "data:text/plain;charset=utf-8;base64,{}", "data:audio/x-wav; base64,{}", " data:;base64,{}",
        "\n data:video/mp4;base64, {} ", "data:;base64,\n{}\n",
    ],
)  # fmt: skip
def test_a_data_url_is_decoded_whatever_its_type_says(url: str, size: int) -> None:
    data = (bytes(range(256)) * 400)[:size]
    source = url.format(base64.b64encode(data).decode())
    body = json.dumps({"messages": [{"role": "user", "content": ""}], "videos": [source]})
    (message,) = parse_chat(body.encode(), INFO, ServeOptions()).request.messages
    (loaded,) = asyncio.run(MediaLoader(ServeOptions()).load([message]))
    assert [part.data for part in loaded.parts if isinstance(part, MediaPart)] == [data]


@pytest.mark.parametrize("size", [10, 11, 100_000])
@pytest.mark.parametrize(
    "write",
    [
        lambda text: text.rstrip("="),
        lambda text: urllib.parse.quote(text, safe=""),
        lambda text: (
            "".join(f"%{ord(character):02x}" for character in text) + "%0A"
        ),  # also between two steps
        lambda text: text.replace("+", "-").replace("/", "_").rstrip("=") + "\n",
    ],
    ids=["without padding", "escaped", "all escaped", "url-safe"],
)
def test_base64_is_decoded_as_clients_write_it(write: Callable[[str], str], size: int) -> None:
    """WHATWG Fetch, "data: URLs": the body is percent-decoded, its base64 may lack padding; RFC 4648 §5."""
    data = (bytes(range(256)) * 400)[-size:]
    source = "data:image/png;base64," + write(base64.b64encode(data).decode())
    body = json.dumps({"messages": [{"role": "user", "content": ""}], "videos": [source]})
    (message,) = parse_chat(body.encode(), INFO, ServeOptions()).request.messages
    (loaded,) = asyncio.run(MediaLoader(ServeOptions()).load([message]))
    assert [part.data for part in loaded.parts if isinstance(part, MediaPart)] == [data]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("data:image/png;base64,Zm9v%", "invalid_base64"),
        ("data:image/png;base64,Zm9v%zz", "invalid_base64"),
        ("data:image/png;base64,Zm9v\\n", "invalid_base64"),  # escapes of JSON are gone from a short string
        ("data:image/png,abc", "invalid_data_url"),
        ("data:image/png;base64", "invalid_data_url"),
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
    assert read("/etc/passwd", kind="audio", is_base64=True) == base64.b64decode("/etc/passwd=")
    assert refused("", kind="audio", is_base64=True).code == "empty_media"


def test_the_budget_is_shared_by_all_parts() -> None:
    options = ServeOptions(max_media_bytes=100)
    encoded = base64.b64encode(b"x" * 60).decode()
    parts = tuple(
        MediaPart(kind="audio", data=encoded, where=f"audios[{i}]", is_base64=True) for i in range(2)
    )
    with pytest.raises(RequestError) as caught:
        asyncio.run(MediaLoader(options).load([Message(role="user", parts=parts)]))
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        413,
        "audios[1]",
        "media_too_large",
    )


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_base64_may_fill_the_budget_and_no_more(prefix: str) -> None:
    """Base64 counts in threes: the exact size is known after decoding only."""
    options = ServeOptions(max_media_bytes=99)
    for size in (97, 98, 99):
        assert read(prefix + base64.b64encode(b"x" * size).decode(), options) == b"x" * size
    for size in (100, 101, 102, 103, 1000):
        assert refused(prefix + base64.b64encode(b"x" * size).decode(), options).code == "media_too_large"


def test_an_international_host_is_allowed_by_its_encoded_name(network: Network, server: SiteServer) -> None:
    """RFC 3490: bücher.example is xn--bcher-kva.example; names do not depend on upper case."""
    network.names["xn--bcher-kva.example"] = [["127.0.0.1"]]
    for entry in ("xn--bcher-kva.example", "XN--BCHER-KVA.example"):
        options = ServeOptions(allow_media_hosts=(f"{entry}:{server.server_port}",))
        for host in ("bücher.example", "BÜCHER.example", "xn--bcher-kva.example", "Xn--bcher-kva.Example"):
            assert read(f"http://{host}:{server.server_port}/ok", options) == b"picture"


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
        ("/status/202", "media_fetch_failed", "status 202"),  # not ready yet
        ("/status/206", "media_fetch_failed", "status 206"),  # a part of the file
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


def test_a_body_that_is_declared_too_large_is_not_waited_for(site: str) -> None:
    options = ServeOptions(allow_media_hosts=(site,), max_media_bytes=1000, media_timeout_s=2.0)
    assert refused(f"http://{site}/declared", options).code == "media_too_large"


def test_a_host_that_sends_now_and_then_gets_no_more_time(site: str) -> None:
    """Each byte comes in time; the whole body does not."""
    options = ServeOptions(allow_media_hosts=(site,), media_timeout_s=0.5)
    error = refused(f"http://{site}/drip", options)
    assert (error.code, "took over 0.5 s" in error.message) == ("media_fetch_failed", True)


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


def test_a_url_with_a_password_is_not_fetched(network: Network, server: SiteServer, site: str) -> None:
    options = ServeOptions(allow_media_hosts=(site,))
    error = refused(f"http://user:SECRET@{site}/ok", options)
    assert (error.code, network.connects, server.seen) == ("invalid_value", [], [])
    assert "SECRET" not in error.message
    error = refused(f"http://{site}/to-password", options)
    assert (error.code, server.paths) == ("invalid_value", ["/to-password"])
    assert len(network.connects) == 1
    assert "SECRET" not in error.message


def test_another_port_of_an_allowed_host_is_not_connected_to(
    network: Network, server: SiteServer, site: str
) -> None:
    for allowed in ("127.0.0.1", "127.0.0.1:1", "*"):
        error = refused(f"http://{site}/ok", ServeOptions(allow_media_hosts=(allowed,)))
        assert (error.code, network.connects, server.seen) == ("media_host_not_allowed", [], [])


def test_proxies_and_passwords_of_the_environment_are_not_used(
    network: Network, server: SiteServer, site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login user password SECRET\ndefault login user password SECRET\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://203.0.113.9:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert read(f"http://{site}/hops/1", ServeOptions(allow_media_hosts=(site,))) == b"picture"
    assert set(network.connects) == {("127.0.0.1", server.server_port)}
    headers = {name.lower() for _, headers in server.seen for name in headers}
    assert not headers & {"authorization", "proxy-authorization", "cookie"}


def test_three_redirects_are_followed_and_no_fourth(server: SiteServer, site: str) -> None:
    options = ServeOptions(allow_media_hosts=(site,))
    assert read(f"http://{site}/hops/3", options) == b"picture"
    assert len(server.seen) == 4
    server.seen.clear()
    assert refused(f"http://{site}/hops/4", options).code == "media_fetch_failed"
    assert server.paths == ["/hops/4", "/hops/3", "/hops/2", "/hops/1"]


def test_no_compressed_body_is_asked_for(server: SiteServer, site: str) -> None:
    read(f"http://{site}/hops/1", ServeOptions(allow_media_hosts=(site,)))
    for _, headers in server.seen:
        assert {name.lower(): value for name, value in headers.items()}["accept-encoding"] == "identity"


def test_urls_are_not_logged(
    server: SiteServer, site: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("httpx", "httpcore"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    read(f"http://{site}/hops/1?signature=SECRET", ServeOptions(allow_media_hosts=(site,)))
    assert server.paths == ["/hops/1?signature=SECRET", "/ok?signature=SECRET"]
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://{site}/missing/a.png?signature=SECRET", "/missing/a.png"),
        ("http://{site}/zip?signature=SECRET#SECRET", "/zip"),
        ("http://user:SECRET@{site}/a.png", "/a.png"),
        ("ftp://user:SECRET@{site}/a.png?SECRET", "/a.png"),
        ("http://user:SECRET@other.example/a.png?SECRET", "other.example"),
        ("http://other.example/a.png?x=SECRET", "other.example"),
    ],
)
def test_error_messages_hold_no_signature_or_password(site: str, url: str, shown: str) -> None:
    error = refused(url.format(site=site), ServeOptions(allow_media_hosts=(site,)))
    assert shown in error.message
    assert "SECRET" not in str(error)


PUBLIC = "93.184.216.34"
NOT_PUBLIC = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:168.63.129.16",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "fec0::1",
    "64:ff9b:1::a00:1",
    "::127.0.0.1",
    "5f00::1",
    "3fff::1",
]
# By hand from the registries: the first and last address of blocks, and their neighbours.
SPECIAL = """
    0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 127.255.255.255 169.254.255.255 172.16.0.0
    172.31.255.255 192.0.0.1 192.0.0.9 192.0.0.255 192.0.2.1 192.31.196.1 192.52.193.1 192.88.99.1 192.168.255.255
    192.175.48.1 198.18.0.0 198.19.255.255 198.51.100.1 203.0.113.255 239.255.255.255 240.0.0.1 254.1.1.1 ::2
    ::8.8.8.8 ::ffff:8.8.8.8 ::ffff:0:808:808 64:ff9b::808:808 64:ff9b:1:ffff::1 100::1 100:0:0:1::1 200::1
    1fff:ffff::1 2001::1 2001:1::1 2001:1::3 2001:2::1 2001:3::1 2001:4:112::1 2001:10::1 2001:20::1 2001:30::1
    2001:1ff:ffff::1 2001:db8::1 2001:db8:ffff::1 2001:1000::1 2001:6000::1 2001:c000::1 2002:808:808::1
    2003:4000::1 2420::1 2620:4f:8000::1 2620:200::1 2640::1 2a20::1 2d00::1 3000::1 3ffe::1 3fff:fff:ffff::1
    3fff:1000::1 4000::1 8000::1 fbff::1 fdff::1 fe80::1%1 febf::1 feff::1 ff0e::1 ffff::1
"""
ALLOCATED = """
    1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.0.0.1 128.0.0.1 168.63.129.15 169.253.1.1
    172.15.255.255 172.32.0.0 192.0.1.1 192.0.3.1 192.167.1.1 192.169.1.1 198.17.255.255 198.20.0.0 203.0.114.1
    223.255.255.255 2001:200::1 2001:4860:4860::8888 2001:bff::1 2001:da8::1 2001:db7::1 2001:db9::1 2001:fff::1
    2001:5fff::1 2001:bfff::1 2003::1 2003:3fff::1 2400:cb00::1 2410::1 241f:ffff::1
    2606:2800:220:1:248:1893:25c8:1946 2610::1 2620:fe::fe 2620:4f:8001::1 2630::1 263f::1 2800::1 2a00:1450:4001::1
    2a10::1 2a1f::1 2c0f:fb50::1
"""


def test_public_is_what_the_registries_allocate_for_global_unicast() -> None:
    assert [address for address in ALLOCATED.split() if not is_public(address)] == []
    assert [address for address in NOT_PUBLIC + SPECIAL.split() if is_public(address)] == []


def test_any_public_host_can_be_allowed(network: Network, server: SiteServer) -> None:
    network.names["cdn.example"] = [[PUBLIC]]
    network.routes[PUBLIC] = server.server_port
    assert read("http://cdn.example/ok", ServeOptions(allow_media_hosts=("*",))) == b"picture"
    assert network.connects == [(PUBLIC, 80)]
    ((_, headers),) = server.seen
    assert {name.lower(): value for name, value in headers.items()}["host"] == "cdn.example"


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_no_other_address_is_connected_to(network: Network, address: str) -> None:
    options = ServeOptions(allow_media_hosts=("*",))
    network.names["inside.example"] = [[address]]
    network.names["mixed.example"] = [[PUBLIC, address]]
    literal = f"[{address}]" if ":" in address else address
    for host in ("inside.example", "mixed.example", literal, f"{PUBLIC}:8080"):
        error = refused(f"http://{host}/ok", options)
        assert error.code == "media_host_not_allowed"
    assert network.connects == []


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "%31%32%37.0.0.1"])
def test_other_spellings_of_an_address_are_not_connected_to(network: Network, host: str) -> None:
    error = refused(f"http://{host}/ok", ServeOptions(allow_media_hosts=("*",)))
    assert error.code in ("media_host_not_allowed", "media_fetch_failed")
    assert network.connects == []


def test_a_public_host_cannot_redirect_inside(network: Network, server: SiteServer) -> None:
    network.names["cdn.example"] = [[PUBLIC]]
    network.routes[PUBLIC] = server.server_port
    error = refused("http://cdn.example/to-metadata", ServeOptions(allow_media_hosts=("*",)))
    assert error.code == "media_host_not_allowed"
    assert network.connects == [(PUBLIC, 80)]


def test_a_name_that_changes_its_address_is_connected_to_at_the_checked_one(
    network: Network, server: SiteServer
) -> None:
    network.names["rebinding.example"] = [[PUBLIC], ["127.0.0.1"]]
    network.routes[PUBLIC] = server.server_port
    assert read("http://rebinding.example/ok", ServeOptions(allow_media_hosts=("*",))) == b"picture"
    assert network.connects == [(PUBLIC, 80)]
    network.names["rebinding.example"] = [[PUBLIC], ["127.0.0.1"]]
    error = refused("http://rebinding.example/hops/1", ServeOptions(allow_media_hosts=("*",)))
    assert error.code == "media_host_not_allowed"
    assert set(network.connects) == {(PUBLIC, 80)}


def test_the_next_address_of_a_host_is_tried(network: Network, server: SiteServer) -> None:
    network.names["cdn.example"] = [["93.184.216.33", PUBLIC]]
    network.routes[PUBLIC] = server.server_port
    assert read("http://cdn.example/ok", ServeOptions(allow_media_hosts=("cdn.example",))) == b"picture"
    assert network.connects == [("93.184.216.33", 80), (PUBLIC, 80)]


def test_an_address_that_drops_packets_leaves_time_for_the_next(network: Network, server: SiteServer) -> None:
    network.names["cdn.example"] = [["93.184.216.33", PUBLIC]]
    network.silent.add("93.184.216.33")
    network.routes[PUBLIC] = server.server_port
    options = ServeOptions(allow_media_hosts=("cdn.example",), media_timeout_s=2.0)
    assert read("http://cdn.example/ok", options) == b"picture"


def test_a_certificate_is_checked_against_the_name(
    network: Network, server: SiteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def wrap_bio(context: ssl.SSLContext, *args: Any, server_hostname: str | bytes = "", **how: Any) -> Any:
        name = server_hostname.decode() if isinstance(server_hostname, bytes) else server_hostname
        names.append((name, context.check_hostname, context.verify_mode))
        return real(context, *args, server_hostname=server_hostname, **how)

    real = ssl.SSLContext.wrap_bio
    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", wrap_bio)
    network.names["cdn.example"] = [[PUBLIC]]
    network.routes[PUBLIC] = server.server_port  # speaks no TLS
    error = refused("https://cdn.example/ok", ServeOptions(allow_media_hosts=("*",)))
    assert error.code == "media_fetch_failed"
    assert names == [("cdn.example", True, ssl.CERT_REQUIRED)]
    assert network.connects == [(PUBLIC, 443)]


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


def test_the_root_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert read("a b.png", ServeOptions(media_root=link)) == b"inside"
    assert refused("../outside.png", ServeOptions(media_root=link)).code == "local_media_not_allowed"


@pytest.mark.parametrize("data", [b"\x89PNG data", b"\xff\xd8\xff\xe0 JPEG", b"x" * 90, b"x" * 5000])
def test_base64_needs_no_scheme(root: Path, data: bytes) -> None:
    """Raw base64 in `images`, `audios`, `videos` and URL fields, as the README says."""
    encoded = base64.b64encode(data).decode()
    wrapped = "\n".join(encoded[start : start + 76] for start in range(0, len(encoded), 76))
    for options in (ServeOptions(), ServeOptions(media_root=root)):
        assert read(encoded, options) == data
        assert read(wrapped, options) == data


def test_a_file_over_the_limit_is_refused(root: Path) -> None:
    options = ServeOptions(media_root=root, max_media_bytes=5)
    assert refused("a b.png", options).code == "media_too_large"
    assert read("good", options) == b"deep"


def test_a_file_under_the_root_is_preferred_to_base64_of_its_name(root: Path) -> None:
    (root / "good1234").write_bytes(b"file")
    assert read("good1234", ServeOptions(media_root=root)) == b"file"
    assert read("good1235", ServeOptions(media_root=root)) == base64.b64decode("good1235")


def test_no_path_outside_the_root_is_looked_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may read as base64: it is then decoded, whether or not such a file exists."""
    looked_up: list[str] = []
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **how: (looked_up.append(str(path)), real(path, **how))[1])
    assert read("/etc/hostname123", ServeOptions(media_root=root)) == base64.b64decode("/etc/hostname123")
    assert not [path for path in looked_up if path.startswith("/etc")]


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
        ("x." * 1000, "media_not_found"),
        ("empty", "empty_media"),
    ],
)
def test_paths_that_are_refused(root: Path, source: str, code: str) -> None:
    error = refused(source, ServeOptions(media_root=root))
    assert error.code == code
    assert str(root) not in error.message


def test_a_folder_whose_name_begins_like_the_root_is_outside(root: Path) -> None:
    private = root.with_name("media-private")
    private.mkdir()
    (private / "a.png").write_bytes(b"private")
    for source in ("../media-private/a.png", str(private / "a.png"), (private / "a.png").as_uri()):
        assert refused(source, ServeOptions(media_root=root)).code == "local_media_not_allowed"


def test_a_file_url_of_another_host_is_not_this_host_s_file(root: Path) -> None:
    local = (root / "a b.png").as_uri()
    options = ServeOptions(media_root=root)
    assert read(local.replace("file://", "file://localhost"), options) == b"inside"
    error = refused(local.replace("file://", "file://elsewhere.example"), options)
    assert (error.code, "names another host" in error.message) == ("local_media_not_allowed", True)


def test_no_path_is_allowed_by_default(root: Path) -> None:
    error = refused(str(root / "a b.png"))
    assert error.code == "local_media_not_allowed"
    assert "--media-root" in error.message


@pytest.mark.parametrize(
    "host", ["http://example.com", "a/b", "*:80", "*.a", "", "example.com:", "a:99999", "a:b"]
)
def test_invalid_host_entries(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-media-host"):
        ServeOptions(allow_media_hosts=(host,))


def test_all_invalid_options_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeOptions(port=70000, media_root=tmp_path / "none", max_body_bytes=0)
    assert all(word in str(caught.value) for word in ("--port 70000", "--media-root", "--max-body-bytes"))
    ServeOptions(allow_media_hosts=("example.com", "127.0.0.1:80", "[::1]", "[::1]:8080", "localhost"))
