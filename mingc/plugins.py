"""Discover extensions: files in a folder of mingc, and entry points of other distributions.

An extension is imported when it is loaded, not before. Child processes find the same extensions, because entry points
are looked up on the import path.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mingc.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionPoint:
    """One kind of extension.

    Attributes:
        noun: for error messages: stage, backend, engine.
        package: its files are extensions, each named after its file.
        attribute: name of the extension object in its file.
        group: entry points of this group are extensions as well; each names the object itself.
    """

    noun: str
    package: str
    attribute: str
    group: str

    def names(self) -> list[str]:
        """Names of all extensions, sorted. Raises: ConfigError when two have the same name."""
        return sorted({*self._files(), *self._entry_points()})

    def load(self, name: str) -> Any:
        """Import the extension `name` and return its object.

        Raises: KeyError when there is none of this name, ConfigError when it cannot be imported from its distribution
            or two have the same name.
        """
        entry = self._entry_points().get(name)
        if entry is None:
            if name not in self._files():
                raise KeyError(name)
            return getattr(importlib.import_module(f"{self.package}.{name}"), self.attribute)
        try:
            return entry.load()
        except (Exception, SystemExit) as error:  # whatever the module raises while it is imported
            raise ConfigError(
                f"{self.noun} {name} cannot be loaded: {type(error).__name__}: {error}",
                where=f"entry point {entry.name} = {entry.value} of {_distribution(entry)}",
                fix="repair or uninstall that distribution",
            ) from error

    def find(self, name: str, kind: type[Any], *, option: str) -> Any:
        """The extension `name`, which is an instance of `kind` and has this name.

        Raises: ConfigError, which names `option` and the known extensions when there is none of this name.
        """
        try:
            found = self.load(name)
        except KeyError:
            known = ", ".join(self.names())
            raise ConfigError(
                f"unknown {self.noun} {name}", where=option, fix=f"choose from {known}"
            ) from None
        if not isinstance(found, kind) or getattr(found, "name", None) != name:
            raise ConfigError(
                f"{name} is not a {self.noun} of this name: {found!r}",
                where=self.group,
                fix=f"provide an instance of {kind.__module__}.{kind.__name__} whose `name` is that of its file or "
                "entry point",
            )
        return found

    def _files(self) -> set[str]:
        spec = importlib.util.find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations is not None, self.package
        return {
            file.stem
            for folder in spec.submodule_search_locations
            for file in Path(folder).glob("*.py")
            if file.stem != "__init__"
        }

    def _entry_points(self) -> Mapping[str, importlib.metadata.EntryPoint]:
        found: dict[str, importlib.metadata.EntryPoint] = {}
        files = self._files()
        for entry in _installed(self.group, tuple(sys.path)):
            if entry.name in files or entry.name in found:
                others = "mingc" if entry.name in files else _distribution(found[entry.name])
                raise ConfigError(
                    f"two {self.noun}s are called {entry.name}: of {others} and of {_distribution(entry)}",
                    where=f"entry points of {self.group}",
                    fix="uninstall one of them",
                )
            found[entry.name] = entry
        return found


@cache
def _installed(group: str, path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """Entry points on the import path `path`; reading them takes 20 ms, and an export finds a hundred extensions."""
    return importlib.metadata.entry_points(group=group)


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return "an unnamed distribution" if entry.dist is None else entry.dist.name
