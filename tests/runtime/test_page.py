"""The page at `/`: its files, their headers, who may have them. `tests/clients/page.mjs` tries it in Chromium."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_thread import fake_server

import mingc

FOLDER = Path(mingc.__file__).parent / "server" / "page"
PYPROJECT = FOLDER.parents[2] / "pyproject.toml"
TYPES = {
    "/": "text/html",
    "/page/page.css": "text/css",
    "/page/page.js": "text/javascript",
    "/page/audio.js": "text/javascript",
}
NAMES = {"/": "index.html"}


def source(path: str) -> str:
    return (FOLDER / NAMES.get(path, Path(path).name)).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a server that needs a key, which the client does not send."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    with (
        fake_server(api_key_file=keys) as (url, _),
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("path", TYPES)
def test_files_are_open_and_may_load_nothing_from_elsewhere(client: httpx.Client, path: str) -> None:
    got = client.get(path)
    assert (got.status_code, got.text) == (200, source(path))
    assert got.headers["content-type"] == f"{TYPES[path]}; charset=utf-8"
    policy = dict(each.strip().split(" ", 1) for each in got.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'self'",
        "connect-src": "'self' ws: wss:",
        "img-src": "'self' data: blob:",
        "media-src": "'self' blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert got.headers["x-content-type-options"] == "nosniff"
    head = client.head(path)
    same = ("content-length", "content-type", "content-security-policy")
    assert (head.status_code, head.content) == (200, b"")
    assert [head.headers[name] for name in same] == [got.headers[name] for name in same]


def test_the_page_opens_nothing_else_of_the_server(client: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/audio/voices", "/page", "/page/files.py", "/page/%2e%2e/options.py"):
        assert client.get(path).status_code == 401, path
    assert client.post("/").status_code == 405


def test_no_ui_takes_it_away() -> None:
    with fake_server(has_ui=False) as (url, _):
        for path in TYPES:
            assert httpx.get(url + path, trust_env=False).status_code == 404, path


def test_files_name_each_other_and_no_other_host() -> None:
    for path in TYPES:
        assert not re.search(r"(https?:|wss?:)?//[a-z0-9]", re.sub(r"(?m)(^|\s)// .*$", "", source(path))), (
            path
        )
    html, script = source("/"), source("/page/page.js")
    loaded = {
        *re.findall(r'(?:src|href)="([^"#][^"]*)"', html),
        *re.findall(r'new URL\("([^"]+\.js)"', script),
    }
    assert loaded == {"data:,", "page/page.css", "page/page.js", "audio.js"}
    assert not re.search(r"<style|style=|<script(?! type=\"module\" src)|\son\w+=", html), (
        "refused by the policy"
    )


def test_every_name_exists() -> None:
    """Elements that the script and the style use, labels, and worklets."""
    html, script, style = source("/"), source("/page/page.js"), source("/page/page.css")
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"\bui\.(\w+)", script))
    used |= set(re.findall(r"#([a-z]\w+)(?=[^;]*\{)", style))
    for attribute in ("for", "aria-labelledby", "aria-describedby"):
        used |= {name for value in re.findall(rf'\s{attribute}="([^"]+)"', html) for name in value.split()}
    assert used <= set(ids), used - set(ids)
    assert set(re.findall(r'AudioWorkletNode\([\w.]+, "(\w+)"', script)) == set(
        re.findall(r'registerProcessor\("(\w+)"', source("/page/audio.js"))
    )


def test_the_wheel_has_all_files() -> None:
    patterns = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in patterns["mingc.server.page"] for path in FOLDER.glob(pattern)}
    assert packed == {path for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()}
