"""Inverse short-time Fourier transform as GEMMs: spectrum head → windowed frames → overlap-add.

The inverse real DFT of n points runs in two stages of n1 × n2 = n (Cooley–Tukey), as float32 GEMMs with tables of a few
tens of KiB. This avoids complex dtypes, which Inductor leaves to eager kernels, and FFT libraries, whose plans must be
created before a CUDA graph is captured. Source: spec: talker.md §8.1, items 4 and 5.
Shape letters: N frames, D hidden, k bins, t samples of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.stage import WeightSource
from mingc.export.weights.mapping import stored

_MAX_MAGNITUDE = 100.0
_MIN_ENVELOPE = 1e-11  # the reference asserts a larger envelope for emitted samples


class IstftHead(nn.Module):
    """Hidden states (…, D) → windowed time frames (…, n_fft / hop, hop) of `n_fft` samples.

    Rows of the head are stored in the order of the first DFT stage, padded with zero rows to a full rectangle.
    """

    weight: Tensor
    bias: Tensor
    bin_scale: Tensor
    column_dft: Tensor
    twiddle_cos: Tensor
    twiddle_sin: Tensor
    row_dft: Tensor
    window: Tensor

    def __init__(self, hidden_size: int, n_fft: int, hop: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.columns, self.rows, self.stage_bins = dft_factors(n_fft)
        rectangle = 2 * self.rows * self.stage_bins
        self.weight = nn.Parameter(torch.empty(rectangle, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(rectangle, dtype=torch.float32))
        for name, shape in self._buffer_shapes().items():
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32))

    def _buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "bin_scale": (self.rows, self.stage_bins),
            "column_dft": (2 * self.stage_bins, 2 * self.columns),
            "twiddle_cos": (self.rows, self.columns),
            "twiddle_sin": (self.rows, self.columns),
            "row_dft": (2 * self.rows, self.rows),
            "window": (self.n_fft,),
        }

    def forward(self, hidden: Tensor) -> Tensor:
        leading = hidden.shape[:-1]
        flat = F.linear(hidden.float(), self.weight, self.bias).view(-1, 2, self.rows, self.stage_bins)
        magnitude = flat[:, 0].exp().clamp(max=_MAX_MAGNITUDE) * self.bin_scale
        phase = flat[:, 1]
        spectrum = torch.stack((magnitude * phase.cos(), magnitude * phase.sin()), dim=2)
        partial = spectrum.flatten(2) @ self.column_dft  # (N, rows, 2 columns)
        real, imaginary = partial.chunk(2, dim=-1)
        turned = torch.stack(
            (
                real * self.twiddle_cos - imaginary * self.twiddle_sin,
                real * self.twiddle_sin + imaginary * self.twiddle_cos,
            ),
            dim=1,
        )  # (N, 2, rows, columns)
        samples = turned.permute(0, 3, 1, 2).flatten(2) @ self.row_dft  # (N, columns, rows)
        frames = samples.transpose(1, 2).reshape(*leading, self.n_fft) * self.window
        return frames.view(*leading, self.n_fft // self.hop, self.hop)

    def envelope(self, exists: Tensor) -> Tensor:
        """Overlap-added squared window (B, T + n_fft/hop - 1, hop) of the frames where `exists` (B, T) is true."""
        squared = self.window.square().view(self.n_fft // self.hop, self.hop)
        return overlap_add(exists.float()[:, :, None, None] * squared).clamp(min=_MIN_ENVELOPE)


def overlap_add(frames: Tensor) -> Tensor:
    """Overlap-add frames (B, T, m, hop) with a stride of one hop → blocks (B, T + m - 1, hop)."""
    parts = frames.shape[2]
    total = F.pad(frames[:, :, 0], (0, 0, 0, parts - 1))
    for part in range(1, parts):
        total = total + F.pad(frames[:, :, part], (0, 0, part, parts - 1 - part))
    return total


def dft_factors(n: int) -> tuple[int, int, int]:
    """Factors (columns, rows, half): columns × rows = n, near square; bins up to n/2 fill `half` columns."""
    columns = max(size for size in range(1, math.isqrt(n) + 1) if n % size == 0)
    rows = n // columns
    return columns, rows, n // 2 // rows + 1


def istft_weights(
    hidden_size: int, n_fft: int, *, part: str, head: str, window: str, target: str
) -> list[WeightSource]:
    """Sources of an `IstftHead` named `target`; `head` and `window` are names in the checkpoint."""
    columns, rows, half = dft_factors(n_fft)
    bins = n_fft // 2 + 1
    # Position [row][half] of the rectangle holds bin half * rows + row, or zeros beyond the last bin.
    order = (torch.arange(half) * rows + torch.arange(rows).unsqueeze(1)).flatten()

    def arrange(value: Tensor) -> Tensor:
        log_magnitude, phase = value[:bins], value[bins:]
        padding = value.new_zeros(half * rows - bins, *value.shape[1:])
        return torch.cat([torch.cat((each, padding))[order] for each in (log_magnitude, phase)])

    def angles(first: int, second: int, period: int) -> Tensor:
        # Integer products are reduced modulo the period first: tables are exact in float64 and rounded once.
        products = torch.arange(first).unsqueeze(1) * torch.arange(second) % period
        return products.double() * (2 * math.pi / period)

    def bin_scale() -> Tensor:
        scale = torch.full((half * rows,), 2.0 / n_fft, dtype=torch.float64)
        scale[0] = scale[bins - 1] = 1.0 / n_fft
        scale[bins:] = 0
        return scale[order].view(rows, half)

    def column_dft() -> Tensor:
        angle = angles(half, columns, columns)
        return torch.cat(
            (torch.cat((angle.cos(), angle.sin()), dim=1), torch.cat((-angle.sin(), angle.cos()), dim=1))
        )

    def row_dft() -> Tensor:
        angle = angles(rows, rows, rows)
        return torch.cat((angle.cos(), -angle.sin()))

    tables: dict[str, Callable[[], Tensor]] = {
        "bin_scale": bin_scale,
        "column_dft": column_dft,
        "twiddle_cos": lambda: angles(rows, columns, n_fft).cos(),
        "twiddle_sin": lambda: angles(rows, columns, n_fft).sin(),
        "row_dft": row_dft,
    }

    def arranged(name: str, *shape: int) -> WeightSource:
        return WeightSource(
            name=target + name,
            part=part,
            tensors=(f"{head}.{name}",),
            shapes=(shape,),
            compute=arrange,
            dtype=torch.float32,
        )

    return [
        arranged("weight", 2 * bins, hidden_size),
        arranged("bias", 2 * bins),
        stored(target + "window", window, n_fft, part=part, dtype=torch.float32),
        *(
            WeightSource(name=target + name, part=part, compute=compute, dtype=torch.float32)
            for name, compute in tables.items()
        ),
    ]
