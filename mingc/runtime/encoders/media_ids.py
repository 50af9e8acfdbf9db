"""Identity of media tokens for caches: a hash of the medium, and the token's position in it.

The placeholders of all images of a prompt have the same token id, so token ids alone do not distinguish images.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.prompts.prompt_writer import MediaFeatures
from mingc.prompts.thinker_prompt import AUDIO, VISION

_DIGEST_BYTES = 32


class MediaDigests(NamedTuple):
    """The `content_digest` of every item of `MediaFeatures`."""

    vision: tuple[bytes, ...]
    audio: tuple[bytes, ...]


def media_digests(media: MediaFeatures) -> MediaDigests:
    """The digests of all features. Hashing the patches of a large image takes milliseconds."""
    return MediaDigests(*(tuple(map(content_digest, items)) for items in (media.vision, media.audio)))


def content_digest(features: VisionFeatures | AudioFeatures) -> bytes:
    """32 bytes that differ for features with different embeddings: their `digest`, or a hash of their values."""
    if features.digest is not None:
        return features.digest
    digest = hashlib.sha256()  # processors have instructions for it: half the time of BLAKE2
    arrays: tuple[NDArray[np.generic], ...]
    if isinstance(features, AudioFeatures):
        arrays = (features.mel,)
        digest.update(f"audio {features.num_tokens}".encode())
    else:
        arrays = (features.patches,) if features.levels is None else (features.patches, features.levels)
        digest.update(f"vision {features.grid} {features.repeats}".encode())
    for array in arrays:
        digest.update(f" {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def media_ids(
    embed_kind: NDArray[np.int64], media: MediaFeatures, digests: MediaDigests, *, merge_size: int
) -> NDArray[np.uint8]:
    """`ThinkerPrompt.media_ids` (M, 40): for each media token the digest of its medium and its position in it.

    Positions continue from frame to frame of a video. The queries of a picture, behind all media, have no origin.
    """
    vision = [
        _ids(digest, item.num_tokens(merge_size))
        for item, digest in zip(media.vision, digests.vision, strict=True)
    ]
    audio = [_ids(digest, item.num_tokens) for item, digest in zip(media.audio, digests.audio, strict=True)]
    kinds = embed_kind[embed_kind > 0][: sum(map(len, (*vision, *audio)))]
    ids = np.zeros((len(kinds), _DIGEST_BYTES + 8), np.uint8)
    for kind, parts in ((VISION, vision), (AUDIO, audio)):
        if parts:
            ids[kinds == kind] = np.concatenate(parts)
    return ids


def _ids(digest: bytes, num_tokens: int) -> NDArray[np.uint8]:
    """(num_tokens, 40): the digest, then the number of the token in eight bytes."""
    digests = np.tile(np.frombuffer(digest, np.uint8), (num_tokens, 1))
    places = np.arange(num_tokens, dtype="<i8").view(np.uint8).reshape(num_tokens, 8)
    return np.concatenate([digests, places], axis=1)
