"""Traditional to simplified characters: the common ones."""

from __future__ import annotations

SIMPLIFIED: dict[int, str] = {}
