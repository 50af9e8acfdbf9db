"""Model parameters that the runtime needs beyond tensor shapes: one frozen dataclass per built-in stage. No torch.

Export writes them from the checkpoint's configs into the manifest, so the runtime holds no model constants. A stage
from outside the package has its own dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionParameters:
    """Image and video preprocessing and the grids of the vision encoder (spec: vision.md §1, §2, §4)."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    in_channels: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    position_grid_size: int  # side of the learned position table
    hidden_size: int  # of the embeddings handed to the thinker
    video_min_pixels: int
    video_total_pixels: int
    video_fps: float
    video_max_frames: int
    max_patches: int  # the largest bucket: a frame with more patches is refused
    # Loading fits an image to these sizes before the encoder's rule applies; no file of the checkpoint has them.
    load_factor: int = 32
    load_min_pixels: int = 4 * 32 * 32
    load_max_pixels: int = 16384 * 32 * 32


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioParameters:
    """Log-mel front end and length rules of the audio encoder (spec: audio.md §1, §2, §5)."""

    sample_rate: int
    num_mels: int
    fft_size: int
    hop_samples: int
    max_frames: int  # mel frames of the longest clip
    frames_per_token: int  # mel frames of one embedding; a clip of T frames gives ⌈T / this⌉
    hidden_size: int  # of the embeddings handed to the thinker


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkerParameters:
    """Decoder geometry, token ids and chat format (spec: thinker.md §1, §4, §6)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    page_size: int
    chunk_alignment: int  # a prompt's tokens begin at a multiple of this many rows of a chunk
    shared_rows: int  # of the longest chunk that may hold tokens of several prompts
    stop_token_ids: tuple[int, ...]
    image_patch_token: int
    frame_patch_token: int
    audio_patch_token: int
    image_start_token: int
    image_end_token: int
    video_start_token: int
    video_end_token: int
    audio_start_token: int
    audio_end_token: int
    temporal_position_scale: int  # `t` positions of one grid advance by this much a frame
    default_system_text: str
    thinking_suffix: str  # appended to the system text; {state} is on or off


@dataclass(frozen=True, kw_only=True, slots=True)
class TalkerParameters:
    """Speech LLM geometry and prompt (spec: talker.md §4, §5)."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    slot_tokens: int  # KV rows a slot holds: prompt + patches
    min_stop_step: int  # the stop head counts only at steps beyond this one (zero-based)
    max_steps: int
    stop_threshold: float
    default_voice: str | None
    max_segment_length: int
    chunk_alignment: int  # the first row of each prompt of a prefill chunk is a multiple of this
    # A segment is cut off after this much speech a character, but not before the least length (talker.md §5).
    cap_seconds_per_character: float = 5818 / 16000
    cap_min_seconds: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CfmParameters:
    """Flow matching sampler (spec: talker.md §6)."""

    num_steps: int
    latents_per_patch: int
    history_latents: int
    latent_dim: int
    speaker_dim: int  # of the speaker network's output
    guidance: float
    sigma: float
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeParameters:
    """AudioVAE geometry (spec: talker.md §8)."""

    sample_rate: int
    hop_samples: int
    frames_per_latent: int
    latent_dim: int
    samples_per_latent: int
    lookahead_frames: int  # frames at the end of a patch that need the next latent
    tail_samples: int  # samples a finished patch adds beyond samples_per_latent × latents


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConditionParameters:
    """Learned queries of a picture's prompt and the rows made of their hidden rows (spec: imagegen.md §1).

    The stage's weight `queries` has the learned rows of all scales, (sum of `num_queries`, thinker's width).
    """

    num_queries: tuple[int, ...]  # of each scale; the last ones are the condition
    width: int  # of a row of the condition


@dataclass(frozen=True, kw_only=True, slots=True)
class GlyphParameters:
    """Text that a picture shall show (spec: imagegen.md §2.2)."""

    max_length: int  # ids of a text, and rows made of them
    width: int  # of a row
    added_tokens: tuple[str, ...]  # behind those of ByT5, in the order of their ids


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageDitParameters:
    """Tokens, positions and schedule of the sampler of pictures (spec: imagegen.md §4, §5)."""

    latent_channels: int
    patch_size: int  # latent rows and columns of one token
    token_multiple: int  # tokens of picture and caption are padded to multiples of this
    caption_width: int  # of the rows before they are embedded
    hidden_size: int
    feed_forward_size: int
    max_positions: tuple[int, int, int]  # caption rows and frames, rows, columns; positions are less
    num_train_steps: int
    shift: float
    is_shift_dynamic: bool  # whether the shift depends on the tokens of the picture
    dynamic_tokens: tuple[int, int]
    dynamic_shifts: tuple[float, float]
    num_steps: int
    guidance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageVaeParameters:
    """Geometry of the VAE of pictures (spec: imagegen.md §6)."""

    latent_channels: int
    block_channels: tuple[int, ...]  # of the decoder's blocks, the finest first

    @property
    def scale(self) -> int:
        """Pixels of a picture's side for one of its latents."""
        return 1 << (len(self.block_channels) - 1)


BUILT_IN: Mapping[str, type[Any]] = MappingProxyType(
    {
        "vision_encoder": VisionParameters,
        "audio_encoder": AudioParameters,
        "thinker": ThinkerParameters,
        "talker": TalkerParameters,
        "cfm": CfmParameters,
        "audio_vae": VaeParameters,
        "image_condition": ImageConditionParameters,
        "glyph": GlyphParameters,
        "image_dit": ImageDitParameters,
        "image_vae": ImageVaeParameters,
    }
)
"""Parameters of the built-in stages, which are decoded and checked when a manifest is read."""
