"""Sizes of the pictures that the model draws (spec: imagegen.md §7, §8). A size is (height, width) in pixels."""

from __future__ import annotations

import math
from typing import Final

Size = tuple[int, int]

MAX_ASPECT: Final = 4  # of a size that is asked for
RESOLUTIONS: Final = (512, 672, 1024)
DEFAULT_RESOLUTION: Final = 1024
_LEAST_HEIGHT = 512  # of the size that a picture without a reference is asked in


def _table(rows: str) -> tuple[tuple[float, Size], ...]:
    """`height/width:height×width …` → rows in order."""
    found = []
    for row in rows.split():
        ratio, _, size = row.partition(":")
        height, _, width = size.partition("×")
        found.append((float(ratio), (int(height), int(width))))
    return tuple(found)


_512 = _table(
    "0.25:256×1024 0.26:256×992 0.27:256×960 0.28:256×928 0.32:288×896 0.33:288×864 0.35:288×832 0.4:320×800 "
    "0.42:320×768 0.48:352×736 0.5:352×704 0.52:352×672 0.57:384×672 0.6:384×640 0.68:416×608 0.72:416×576 "
    "0.78:448×576 0.82:448×544 0.88:480×544 0.94:480×512 1.0:512×512 1.07:512×480 1.13:544×480 1.21:544×448 "
    "1.29:576×448 1.38:576×416 1.46:608×416 1.67:640×384 1.75:672×384 2.0:704×352 2.09:736×352 2.4:768×320 "
    "2.5:800×320 2.89:832×288 3.0:864×288 3.11:896×288 3.62:928×256 3.75:960×256 3.88:992×256 4.0:1024×256"
)
# By resolution: the ratios, as the release prints them, and the sizes that the sampler works in.
_TABLES = {
    512: _512,
    672: _table(
        "0.28:352×1280 0.32:384×1184 0.38:416×1088 0.44:448×1024 0.52:480×928 0.57:512×896 0.65:544×832 0.75:576×768 "
        "0.83:608×736 0.91:640×704 1.00:672×672 1.10:704×640 1.21:736×608 1.33:768×576 1.39:800×576 1.53:832×544 "
        "1.69:864×512 1.75:896×512 1.93:928×480 2.00:960×480 2.21:992×448 2.29:1024×448 2.54:1056×416 2.62:1088×416 "
        "2.69:1120×416 3.00:1152×384 3.08:1184×384 3.17:1216×384 3.55:1248×352 3.64:1280×352"
    ),
    1024: tuple((ratio, (2 * height, 2 * width)) for ratio, (height, width) in _512),
}


def sizes(resolution: int) -> tuple[Size, ...]:
    """The sizes that the sampler works in for one of `RESOLUTIONS`."""
    return tuple(size for _, size in _TABLES[resolution])


def bucket(asked: Size, resolution: int = DEFAULT_RESOLUTION) -> Size:
    """The size that the sampler works in for a picture of the size `asked`."""
    ratio = asked[0] / asked[1]
    return min(_TABLES[resolution], key=lambda row: abs(row[0] - ratio))[1]


def drawn_size(asked: Size, bucket: Size) -> Size:
    """The size that a picture of the size `bucket` is stretched to: the ratio of `asked`, near the bucket."""
    (height, width), (bucket_height, bucket_width) = asked, bucket
    if bucket_height / height > bucket_width / width:
        return bucket_height, int(width * bucket_height / height)
    return int(height * bucket_width / width), bucket_width


def size_of_aspect(aspect: float | None) -> Size:
    """The size asked for by an aspect ratio (width / height) without a reference."""
    return _LEAST_HEIGHT, int(_LEAST_HEIGHT * (1.0 if aspect is None else aspect))


def crop_size(picture: Size, aspect: float | None) -> Size:
    """The largest centred part of a reference that has the aspect ratio (width / height); None: all of it.

    Only its size counts: the model gets the whole picture, stretched.
    """
    height, width = picture
    if aspect is None:
        return picture
    if width / height >= aspect:
        return height, max(1, int(aspect * height))
    return max(1, int(width / aspect)), width


def resolution_of(size: Size) -> int | None:
    """The resolution at which a picture that is asked for in `size` has exactly that size; None: there is none."""
    if max(size) > MAX_ASPECT * min(size):
        return None
    found = (each for each in RESOLUTIONS[::-1] if drawn_size(size, bucket(size, each)) == size)
    return next(found, None)


def nearest_size(size: Size) -> Size:
    """A size that can be drawn, of about the shape of `size`, and of these the nearest in area."""
    area = math.prod(size)
    made = {drawn_size(size, bucket(size, each)) for each in RESOLUTIONS}
    able = [each for each in made if resolution_of(each)]
    return min(able, key=lambda each: abs(math.log(math.prod(each) / area)), default=bucket(size))
