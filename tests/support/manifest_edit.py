"""Edits of an artifact's manifest, with or without the hash that an export would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mingc.artifacts.manifest import FILE_NAME, content_hash


def read_document(artifact: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((artifact / FILE_NAME).read_text(encoding="utf-8"))
    return document


def edit_manifest(artifact: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the manifest as if it had been exported so: the hash is that of the new content."""
    document = read_document(artifact)
    change(document)
    document["sha256"] = content_hash(document)
    (artifact / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
