"""The audio VAE's offline decoder in numpy float64, written from the specification alone (talker.md §8.1)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Floats = NDArray[np.float64]


class ReferenceVae:
    """Decodes all latents of a segment at once, for comparison with what a server streams."""

    def __init__(self, checkpoint: Path) -> None:
        folder = checkpoint / "talker" / "vae"
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._backbone = config["dec_kwargs"]["backbone"]
        self._hop: int = config["dec_kwargs"]["output_dim"]
        self._frames_per_latent: int = config["patch_size"]
        tensors = load_file(folder / "model.safetensors").items()
        self._tensors = {name: value.astype(np.float64) for name, value in tensors}

    def decode(self, latents: NDArray[np.float32]) -> Floats:
        """Samples (n,) of latents (L, 64)."""
        frames = self._upsample(self._linear("decoder.fc1", latents.astype(np.float64)))
        for index in range(self._backbone["num_hidden_layers"]):
            frames = self._layer(f"decoder.decoder.layers.{index}.", frames)
        spectrum = self._linear("decoder.head.out", self._norm("decoder.decoder.norm", frames))
        log_magnitude, phase = np.split(spectrum, 2, axis=1)
        return self._inverse_stft(np.minimum(np.exp(log_magnitude), 100.0) * np.exp(1j * phase))

    def _linear(self, name: str, x: Floats) -> Floats:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0.0)

    def _norm(self, name: str, x: Floats) -> Floats:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self._backbone["rms_norm_eps"]) * self._tensors[f"{name}.weight"]

    def _upsample(self, latents: Floats) -> Floats:
        """Linear interpolation at half-pixel centres; the edges are held."""
        factor, count = self._frames_per_latent, len(latents)
        place = np.clip((np.arange(factor * count) + 0.5) / factor - 0.5, 0, count - 1)
        below = np.minimum(place.astype(int), count - 1)
        above = np.minimum(below + 1, count - 1)
        share = (place - below)[:, None]
        return latents[below] * (1 - share) + latents[above] * share

    def _layer(self, name: str, x: Floats) -> Floats:
        normed = self._norm(name + "input_layernorm", x)
        num_heads, num_kv_heads = self._backbone["num_attention_heads"], self._backbone["num_key_value_heads"]
        q, k, v = (self._linear(f"{name}self_attn.{part}_proj", normed) for part in "qkv")
        queries, keys, values = (
            np.split(part, count, axis=1)
            for part, count in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads))
        )
        shared = num_heads // num_kv_heads  # query heads per key head
        heads = [
            self._attend(query, keys[head // shared], values[head // shared])
            for head, query in enumerate(queries)
        ]
        x = x + self._linear(name + "self_attn.o_proj", np.concatenate(heads, axis=1))
        normed = self._norm(name + "post_attention_layernorm", x)
        gate, up = (self._linear(f"{name}mlp.{part}_proj", normed) for part in ("gate", "up"))
        return x + self._linear(name + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """One head: a frame sees itself and the W - 1 frames before it."""
        age = np.arange(len(q))[:, None] - np.arange(len(k))
        scores = self._rotate(q) @ self._rotate(k).T / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights *= (age >= 0) & (age < self._backbone["sliding_window"])
        return weights @ v / weights.sum(axis=1, keepdims=True)

    def _rotate(self, x: Floats) -> Floats:
        half = x.shape[1] // 2
        frequencies = self._backbone["rope_theta"] ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def _inverse_stft(self, spectrum: NDArray[np.complex128]) -> Floats:
        """Overlap-add of "same" padding, divided by the overlapped squared window."""
        window, hop = self._tensors["decoder.head.istft.window"], self._hop
        frames = np.fft.irfft(spectrum, len(window), axis=1) * window
        samples, envelope = np.zeros((2, hop * (len(frames) - 1) + len(window)))
        for index, frame in enumerate(frames):
            samples[index * hop :][: len(window)] += frame
            envelope[index * hop :][: len(window)] += window**2
        edge = (len(window) - hop) // 2
        return samples[edge:-edge] / envelope[edge:-edge]
