"""Identity of media tokens: a hash of what an encoder computes from, and the place in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from preprocess_data import audio_parameters, vision_parameters

from mingc.media.decoding import digest_of, with_digest
from mingc.prompts.conversation import VideoParams
from mingc.prompts.features import AudioFeatures, VideoFeatures, VisionFeatures
from mingc.prompts.media_decoder import MediaTask
from mingc.prompts.prompt_writer import MediaFeatures
from mingc.prompts.thinker_prompt import AUDIO, VISION, WORD
from mingc.runtime.encoders.media_ids import content_digest, media_digests, media_ids

RANDOM = np.random.default_rng(0)
IMAGE = VisionFeatures(
    patches=RANDOM.integers(0, 255, (16, 12), np.uint8),
    grid=(1, 4, 4),
    levels=RANDOM.random((3, 256), np.float32),
    repeats=2,
)
FILE = bytes(range(256)) * 1000
CLIP = AudioFeatures(mel=RANDOM.random((9, 8), np.float32), num_tokens=3)


def bumped(array: Any) -> Any:
    copy = array.copy()
    copy.flat[-1] += 1
    return copy


@pytest.mark.parametrize(
    "other",
    [
        replace(IMAGE, patches=bumped(IMAGE.patches)),
        replace(IMAGE, levels=bumped(IMAGE.levels)),
        replace(IMAGE, levels=None),
        replace(IMAGE, grid=(1, 2, 8)),
        replace(IMAGE, repeats=1),
        replace(IMAGE, patches=IMAGE.patches.reshape(8, 24)),
        replace(IMAGE, patches=IMAGE.patches.view(np.int8)),
        CLIP,
        replace(CLIP, mel=bumped(CLIP.mel)),
        replace(CLIP, num_tokens=2),
        replace(CLIP, mel=CLIP.mel.reshape(8, 9)),
    ],
    ids=str,
)
def test_other_features_have_another_digest(other: VisionFeatures | AudioFeatures) -> None:
    mine = CLIP if isinstance(other, AudioFeatures) and other is not CLIP else IMAGE
    assert content_digest(other) != content_digest(mine)
    assert content_digest(other) == content_digest(replace(other)), "of the content, not of the object"


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_file_has_another_digest_when_its_features_may_differ(
    kind: Literal["image", "video", "audio"],
) -> None:
    """Not when only limits, names in errors or settings of other media do."""
    vision, audio = (None, audio_parameters()) if kind == "audio" else (vision_parameters(), None)
    task = MediaTask(kind=kind, where="a", max_bytes=1 << 20, vision=vision, audio=audio)
    tasks = [task, replace(task, kind="image" if kind == "video" else "video")]
    if vision is not None:
        tasks.append(replace(task, vision=replace(vision, patch_size=vision.patch_size + 1)))
    if audio is not None:
        tasks.append(replace(task, audio=replace(audio, fft_size=audio.fft_size + 1)))
    slower = replace(task, video=VideoParams(fps=0.5))
    if kind == "video":
        tasks.append(slower)
    else:
        assert digest_of(slower, FILE) == digest_of(task, FILE)
    elsewhere = replace(task, where="b", max_bytes=1, max_tokens=2)
    assert digest_of(elsewhere, FILE) == digest_of(task, FILE)
    digests = {digest_of(each, data) for each in tasks for data in (FILE, FILE[:-1] + b"f", FILE[:-1])}
    assert len(digests) == 3 * len(tasks) and {len(each) for each in digests} == {32}


def test_a_known_digest_is_that_of_the_features() -> None:
    video = VideoFeatures(vision=IMAGE, timestamps=(0.0,))
    for features in (IMAGE, CLIP, video):
        found = with_digest(features, b"known")
        assert content_digest(found.vision if isinstance(found, VideoFeatures) else found) == b"known"


def test_a_view_has_the_digest_of_its_copy() -> None:
    wide = RANDOM.integers(0, 255, (32, 12), np.uint8)
    view = wide[::2]
    assert not view.flags.c_contiguous
    both = [content_digest(replace(IMAGE, patches=patches)) for patches in (view, view.copy())]
    assert both[0] == both[1]


def test_tokens_are_known_by_their_medium_and_their_place_in_it() -> None:
    """In the order of the prompt, whatever the order of the kinds; the merged tokens of two images are four each.

    The queries of a picture, which follow all media, have no origin.
    """
    other = replace(IMAGE, patches=bumped(IMAGE.patches))
    kinds = [
        WORD,
        AUDIO,
        AUDIO,
        AUDIO,
        WORD,
        *(4 * [VISION]),
        WORD,
        *(4 * [VISION]),
        *(4 * [VISION]),
        AUDIO,
        AUDIO,
    ]
    kinds += [AUDIO, WORD, *(5 * [VISION]), WORD]
    media = MediaFeatures(spans=(), vision=(IMAGE, other, IMAGE), audio=(CLIP, CLIP))
    ids = media_ids(np.array(kinds), media, media_digests(media), merge_size=2)
    expected = [
        (content_digest(item), place)
        for item, count in ((CLIP, 3), (IMAGE, 4), (other, 4), (IMAGE, 4), (CLIP, 3))
        for place in range(count)
    ]
    assert [(row[:32].tobytes(), int.from_bytes(row[32:].tobytes(), "little")) for row in ids] == expected
