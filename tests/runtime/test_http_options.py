"""Options of the HTTP server: values that cannot work are refused by name before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from mingc.errors import ConfigError
from mingc.runtime.http.options import ServeOptions

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
    assert f"is {value}" in refused(**{name: value}) or f" {value} " in refused(**{name: value})
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
