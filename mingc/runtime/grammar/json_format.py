"""How constrained answers write JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The value of `x-guidance` in a schema of llguidance: as `json.dumps` writes. With free white space, a weak model may
# never end.
JSON_FORMAT: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
