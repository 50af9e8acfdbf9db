"""Python distributions that mingc needs, read from its own metadata: pyproject.toml states them once."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import mingc
from mingc.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OWN = "mingc"


def requirements(name: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Direct requirements of the installed distribution `name` with `extras` that apply to this Python and platform.

    Raises: PackageNotFoundError.
    """
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [
        each
        for each in _parsed(importlib.metadata.requires(name) or ())
        if each.marker is None or any(map(each.marker.evaluate, environments))
    ]


def own_requirements(extra: str = "") -> list[Requirement]:
    """Direct requirements of mingc with `extra`, the first one on Python itself. When mingc runs from its sources they
    are read from pyproject.toml beside the package.

    Raises: ConfigError with neither metadata nor pyproject.toml.
    """
    try:
        python = importlib.metadata.metadata(OWN)["Requires-Python"]
        return [*_parsed([f"python{python}"]), *requirements(OWN, (extra,))]
    except importlib.metadata.PackageNotFoundError:
        file = Path(mingc.__file__).parents[1] / "pyproject.toml"
        if not file.is_file():
            raise not_installed() from None
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    of_extra = project["optional-dependencies"][extra] if extra else ()
    return _parsed([f"python{project['requires-python']}", *project["dependencies"], *of_extra])


def _parsed(lines: Iterable[str]) -> list[Requirement]:
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        raise ConfigError(
            "requirements of distributions are read with packaging, which is not installed",
            where="python environment",
            fix="pip install packaging",
        ) from error
    return [*map(Requirement, lines)]


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
