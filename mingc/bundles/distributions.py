"""Python distributions that mingc needs, read from its own metadata: pyproject.toml states them once."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mingc.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OWN = "mingc"


def requirements(name: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Direct requirements of the installed distribution `name` with `extras` that apply to this Python and platform.

    Raises: PackageNotFoundError.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        raise ConfigError(
            "requirements of distributions are read with packaging, which is not installed",
            where="python environment",
            fix="pip install packaging",
        ) from error
    listed = map(Requirement, importlib.metadata.requires(name) or ())
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [each for each in listed if each.marker is None or any(map(each.marker.evaluate, environments))]


def distributions(extras: Iterable[str]) -> list[str]:
    """Installed distributions that mingc with `extras` needs, directly or not: mingc first, the others by name.

    Raises: ConfigError when mingc itself is not installed as a distribution.
    """
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(OWN, frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        key = canonicalize_name(name)
        if (key, wanted) in seen:
            continue
        seen.add((key, wanted))
        try:
            waiting += [(each.name, frozenset(each.extras)) for each in requirements(name, wanted)]
        except importlib.metadata.PackageNotFoundError:
            if name == OWN:
                raise not_installed() from None
            continue  # an optional part of a library that is not installed
        found.add(key)
    return sorted(found, key=lambda each: (each != OWN, each))


def not_installed() -> ConfigError:
    """The error for a mingc that runs from its sources."""
    return ConfigError(
        "mingc runs from its sources, so the packages that it needs are unknown",
        where="python environment",
        fix="pip install -e 'CHECKOUT[serve,sign]'",
    )
