"""What `mingc` exports, pinned: a name more or less is a decision."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mingc

ROOT = Path(mingc.__file__).parents[1]


def test_public_names_are_pinned_and_load() -> None:
    assert mingc.__all__ == ["Artifact", "MingcError", "__version__", "open_artifact"]
    for name in mingc.__all__:
        assert getattr(mingc, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nosuch"):
        mingc.nosuch  # noqa: B018


def test_the_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert declared is not None
    assert mingc.__version__ == declared.group(1)
    assert f"## {mingc.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
