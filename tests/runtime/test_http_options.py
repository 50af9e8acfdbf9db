"""Options of the HTTP server: values that cannot work are refused by name before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mingc.errors import ConfigError
from mingc.server.options import ServeOptions

NUMBERS = [
    each.name
    for each in fields(ServeOptions)
    if type(each.default) in (int, float)
    and each.name not in ("port", "drain_s", "retry_after_s", "shutdown_timeout_s")
]


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ServeOptions(**given)
    return caught.value.message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_limits_are_numbers_above_zero(name: str, value: float) -> None:
    assert ": must be " in refused(**{name: value})
    defaults = ServeOptions()
    assert getattr(ServeOptions(**{name: getattr(defaults, name)}), name) == getattr(defaults, name)


@pytest.mark.parametrize("port", [-1, 65_536, 70_000])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    assert f"--port {port}" in refused(port=port)
    assert (ServeOptions(port=0).port, ServeOptions(port=65_535).port) == (0, 65_535)


@pytest.mark.parametrize(
    "entry",
    ["http://example.com", "https://example.com:443", "a/b", "a b", "*.a", "user@a", "", "a:0", "a:b"],
)
def test_a_media_host_is_a_name_or_address_with_an_optional_port(entry: str) -> None:
    assert "--allow-media-host" in refused(allow_media_hosts=("good.example", entry))
    good = ("example.com", "Example.com:8080", "127.0.0.1:80", "[::1]:8080", "*")
    assert ServeOptions(allow_media_hosts=good).allow_media_hosts == good


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("max_connections", "--max-connections"),
        ("max_concurrent_requests", "--max-concurrent-requests"),
        ("max_body_bytes", "--max-body-bytes"),
        ("max_total_body_bytes", "--max-total-body-bytes"),
        ("max_media_bytes", "--max-media-bytes"),
        ("max_speech_characters", "--max-speech-characters"),
        ("header_timeout_s", "--header-timeout"),
        ("body_timeout_s", "--body-timeout"),
        ("body_idle_timeout_s", "--body-idle-timeout"),
        ("write_timeout_s", "--write-timeout"),
        ("media_timeout_s", "--media-timeout"),
    ],
)
def test_a_limit_is_named_by_its_option(name: str, option: str) -> None:
    message = refused(**{name: -3}, port=65_536)
    assert f"{option} -3" in message
    assert "--port 65536: must be from 0 to 65535" in message.splitlines(), "all problems at once"


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("shutdown_timeout_s", "--shutdown-timeout"),
        ("drain_s", "--drain-seconds"),
        ("retry_after_s", "retry_after_s"),
    ],
)
def test_times_that_may_be_zero(name: str, option: str) -> None:
    assert getattr(ServeOptions(**{name: 0}), name) == 0
    assert refused(**{name: -1}) == f"{option} -1s: must be from 0s to 1000h"
    for value in (math.inf, math.nan):
        assert refused(**{name: value}) == f"{option} {value}: must be a finite number, from 0s to 1000h"


def test_limits_that_depend_on_another(tmp_path: Path) -> None:
    assert ServeOptions(max_body_bytes=9, max_total_body_bytes=9).max_total_body_bytes == 9
    assert refused(max_body_bytes=3 << 29) == (
        "--max-body-bytes 1536MiB: is above --max-total-body-bytes 512MiB; raise that as well"
    )
    assert refused(max_total_body_bytes=8) == "--max-total-body-bytes 8B: is below --max-body-bytes 128MiB"
    assert ServeOptions(max_connections=1, media_root=tmp_path, cors_origins=("*",)).max_connections == 1
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "none"):
        assert refused(media_root=path) == f"--media-root {path}: is not a folder"
