"""Goldens of preprocessing, and the parameters of the tiny checkpoint."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file

from mingc.artifacts.parameters import AudioParameters, ThinkerParameters, VisionParameters
from mingc.prompts.tokenizer import TextTokenizer

DATA = Path(__file__).parent.parent / "data"
CHECKPOINT = DATA / "tiny-ming"


@cache
def tensors(name: str) -> dict[str, NDArray[Any]]:
    return load_file(DATA / f"{name}.safetensors")


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@cache
def config(path: str) -> dict[str, Any]:
    return json.loads((CHECKPOINT / path).read_text(encoding="utf-8"))


@cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(CHECKPOINT)


@cache
def talker_tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(CHECKPOINT / "talker" / "llm")


@cache
def vision_parameters() -> VisionParameters:
    image, vision = config("preprocessor_config.json"), config("config.json")["vision_config"]
    return VisionParameters(
        patch_size=vision["patch_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        merge_size=vision["spatial_merge_size"],
        in_channels=vision["in_channels"],
        min_pixels=image["min_pixels"],
        max_pixels=image["max_pixels"],
        image_mean=tuple(image["image_mean"]),
        image_std=tuple(image["image_std"]),
        position_grid_size=round(vision["num_position_embeddings"] ** 0.5),
        hidden_size=vision["out_hidden_size"],
        video_min_pixels=128 * 32 * 32,
        video_total_pixels=96 * 128 * 32 * 32,
        video_fps=2.0,
        video_max_frames=170,
        max_patches=4096,
    )


@cache
def audio_parameters() -> AudioParameters:
    audio = config("config.json")["audio_config"]["whisper_encoder_config"]
    return AudioParameters(
        sample_rate=16000,
        num_mels=audio["n_mels"],
        fft_size=400,
        hop_samples=160,
        max_frames=2 * audio["n_ctx"],
        frames_per_token=4,
        hidden_size=config("config.json")["llm_config"]["hidden_size"],
    )


@cache
def thinker_parameters() -> ThinkerParameters:
    llm, token = config("config.json")["llm_config"], tokenizer().token_id
    return ThinkerParameters(
        vocab_size=llm["vocab_size"],
        hidden_size=llm["hidden_size"],
        num_layers=llm["num_hidden_layers"],
        max_positions=llm["max_position_embeddings"],
        page_size=64,
        chunk_alignment=64,
        shared_rows=1024,
        stop_token_ids=(llm["eos_token_id"],),
        image_patch_token=token("<imagePatch>"),
        frame_patch_token=token("<framePatch>"),
        audio_patch_token=token("<audioPatch>"),
        image_start_token=token("<image>"),
        image_end_token=token("</image>"),
        video_start_token=token("<video>"),
        video_end_token=token("</video>"),
        audio_start_token=token("<audio>"),
        audio_end_token=token("</audio>"),
        temporal_position_scale=2,
        default_system_text="你是一个友好的AI助手。",
        thinking_suffix="\n\ndetailed thinking {state}",
    )


def png(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def wav(samples: NDArray[Any], rate: int, *, subtype: str = "FLOAT") -> bytes:
    """`samples` (n,) or (n, channels)."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype=subtype)
    return file.getvalue()


def noise_image(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def greys(pixels: np.ndarray, grid: tuple[int, int, int]) -> list[int]:
    """Grey level of each frame of a video of flat frames."""
    parameters = vision_parameters()
    rows = pixels.reshape(grid[0], -1, 3, parameters.temporal_patch_size, parameters.patch_size**2)
    level = rows[:, 0, 0, :, 0].reshape(-1) * parameters.image_std[0] + parameters.image_mean[0]
    return [round(float(value) * 255) for value in level]
