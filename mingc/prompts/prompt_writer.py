"""Writer of the thinker's prompt: lays out text and media blocks as token ids.

Special tokens and media blocks are written as ids; the text between them is tokenized separately and, by default,
without recognising special tokens. The ids equal the ids of the whole text, because special tokens split a text first
(spec: thinker.md §6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mingc.artifacts.parameters import ThinkerParameters
from mingc.prompts.conversation import MediaKind
from mingc.prompts.features import AudioFeatures, Features, Grid, VideoFeatures, VisionFeatures
from mingc.prompts.positions import VisionSpan
from mingc.prompts.thinker_prompt import ThinkerPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSpan:
    """Tokens [start, start + length) whose embeddings come from an encoder."""

    kind: MediaKind
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaFeatures:
    """Decoded media of one prompt, the inputs of the encoders.

    The embeddings of all items of `vision` (and of `audio`), concatenated, fill the tokens of their kind in order.
    """

    spans: tuple[MediaSpan, ...]
    vision: tuple[VisionFeatures, ...]
    audio: tuple[AudioFeatures, ...]


class PreparedPrompt(NamedTuple):
    """A conversation ready for the engines: the prompt without media embeddings, and the encoders' inputs for them."""

    tokens: ThinkerPrompt
    media: MediaFeatures


class PicturePrompt(NamedTuple):
    """A prompt for a picture, and what it says: all of it as text, a placeholder for each medium, no queries."""

    prepared: PreparedPrompt
    text: str


class PromptWriter:
    """Collects token ids, media spans, grids and ends of messages in prompt order. Call `close` before reading them.

    `encode` gives the token ids of a text. `said` has what was written, in order: texts, token ids, and placeholders of
    media.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        thinker: ThinkerParameters,
        *,
        merge_size: int,
    ) -> None:
        self._encode = encode
        self._thinker = thinker
        self._merge_size = merge_size
        self._pending = ""
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.spans: list[MediaSpan] = []
        self.grids: list[VisionSpan] = []
        self.vision: list[VisionFeatures] = []
        self.audio: list[AudioFeatures] = []
        self.said: list[str | Sequence[int]] = []
        self.queries: tuple[int, int] | None = None

    def text(self, text: str) -> None:
        """Append text."""
        self.said.append(text)
        self._pending += text

    def mark(self) -> None:
        """Note that a message ends here, in `ends`."""
        self.close()
        self.ends.append(len(self.ids))

    def close(self) -> None:
        """Tokenize the pending text."""
        if self._pending:
            self.ids += self._encode(self._pending)
            self._pending = ""

    def media(self, item: Features) -> None:
        """Append the block of one image, clip or video, with its newline."""
        match item:
            case VisionFeatures():
                self.said.append("<IMAGE>")
                self._image(item)
            case VideoFeatures():
                self.said.append("<VIDEO>")
                self._video(item)
            case AudioFeatures():
                self.said.append("<AUDIO>")
                self._audio_clip(item)

    def query_block(self, num_queries: int) -> None:
        """Append a block of `num_queries` learned rows, which the model reads as an image of one row."""
        self._vision_span(
            "image",
            self._thinker.image_patch_token,
            (1, self._merge_size, self._merge_size * num_queries),
        )
        last = self.spans[-1]
        self.queries = (last.start, last.start + last.length)

    def token(self, token_id: int) -> None:
        """Append a special token."""
        self.tokens((token_id,))

    def tokens(self, ids: Sequence[int]) -> None:
        """Append tokens as they are. The text before them and after them is tokenized separately."""
        self.said.append(ids)
        self._add(ids)

    def _add(self, ids: Sequence[int]) -> None:
        self.close()
        self.ids += ids

    def _patches(self, kind: MediaKind, token_id: int, length: int) -> None:
        self.spans.append(MediaSpan(kind=kind, start=len(self.ids), length=length))
        self.ids += [token_id] * length

    def _vision_span(self, kind: MediaKind, patch_token: int, grid: Grid) -> None:
        """Append the patch tokens of one grid between its start and end tokens."""
        self._add((self._thinker.image_start_token,))
        self.grids.append(VisionSpan(start=len(self.ids), grid=grid))
        self._patches(kind, patch_token, grid[0] * grid[1] * grid[2] // self._merge_size**2)
        self._add((self._thinker.image_end_token,))

    def _image(self, image: VisionFeatures) -> None:
        self.vision.append(image)
        self._vision_span("image", self._thinker.image_patch_token, image.grid)
        self._pending += "\n"

    def _video(self, video: VideoFeatures) -> None:
        """Append a video: every pair of frames is a separate grid, after its time."""
        self.vision.append(video.vision)
        _, height, width = video.vision.grid
        self._add((self._thinker.video_start_token,))
        for seconds in video.timestamps:
            self._pending += f"<{seconds:.1f} seconds>"
            self._vision_span("video", self._thinker.frame_patch_token, (1, height, width))
        self._add((self._thinker.video_end_token,))

    def _audio_clip(self, clip: AudioFeatures) -> None:
        self.audio.append(clip)
        self._add((self._thinker.audio_start_token,))
        self._patches("audio", self._thinker.audio_patch_token, clip.num_tokens)
        self._add((self._thinker.audio_end_token,))
