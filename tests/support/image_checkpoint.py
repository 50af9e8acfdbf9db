"""The tiny checkpoint with the folders of image generation beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from mingc_command import DATA

IMAGE_DATA = DATA / "imagegen"


def lay_image_checkpoint(folder: Path) -> Path:
    """Make `folder` with links to the files of both; returns it."""
    for source in (DATA / "tiny-ming", IMAGE_DATA / "tiny-ming"):
        # Folders of its own: pathlib's `rglob` does not enter linked ones.
        shutil.copytree(source, folder, copy_function=_link, dirs_exist_ok=True)
    return folder


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
