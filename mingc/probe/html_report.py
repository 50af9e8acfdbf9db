"""The report of a probe as one HTML file: the JSON in a static template, whose script draws tables and charts."""

from __future__ import annotations

import html
import json
import math
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from mingc.artifacts.codec import encode
from mingc.errors import ConfigError
from mingc.probe.report import ProbeReport

_MARK = "{REPORT}"


def check_path(path: Path, option: str) -> None:
    """Raises: ConfigError when no file can be written at `path`; called before anything is measured."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = (
            "is a folder"
            if path.is_dir()
            else f"cannot be written: {folder} is no folder that this user may write"
        )
        raise ConfigError(
            f"{path} {why}", where=option, fix="pass the name of a file in a folder that exists"
        )


def write_html(report: ProbeReport, path: Path) -> None:
    """Write the page of `report` to `path`, atomically."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as file:
        try:
            file.write(page(report))
            file.flush()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def page(report: ProbeReport) -> str:
    """Write the HTML document."""
    template = resources.files("mingc.probe").joinpath("report.html").read_text(encoding="utf-8")
    figures = json.dumps(_finite(encode(report)), indent=1, allow_nan=False, ensure_ascii=False)
    # A file name that is not UTF-8 has lone surrogates, which no browser can show.
    return template.replace(_MARK, html.escape(figures.encode(errors="replace").decode()))


def _finite(value: Any) -> Any:
    """Replace figures that JSON cannot express by null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
