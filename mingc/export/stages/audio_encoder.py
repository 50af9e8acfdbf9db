"""Audio encoder: log-mel clips → embeddings of the thinker's width (spec: audio.md §3–§5).

One graph, `encode`: Whisper encoder and projector. Clips of a batch do not attend to each other or to padding. The
runtime computes log-mel features on the host.

Shape suffixes: N clips, T tokens of the longest clip, G mel frames of a token, F = T·G mel frames, C mel
bands, L encoder positions (F/2), W encoder width, H heads, d head width, D thinker width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingc.artifacts.parameters import AudioParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.dtypes import dtype_name
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import AUDIO, ROOT, check_fields
from mingc.export.layers.residual import add_norm
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.weights.mapping import layer_norm, linear, stored
from mingc.kernels.varlen_attention import Segments, make_segments, varlen_attention

_NORM_EPS = 1e-5  # spec: audio.md §3; not in the config
_UNIT_EPS = 1e-12  # spec: audio.md §4
_CONV_KERNEL = 3  # of both convolutions of the encoder
_CONV_STRIDE = 2  # of the second one
_MLP_RATIO = 4  # Whisper's

# Whisper's front end, which no config file holds (spec: audio.md §1, §2).
_SAMPLE_RATE = 16000
_FFT_SIZE = 400
_HOP_SAMPLES = 160

# 1, 2, 4, 8, 10, 15, 30, 60, 120 and 300 seconds at 25 tokens per second.
_TOKEN_BUCKETS = (25, 50, 100, 200, 250, 375, 750, 1500, 3000, 7500)
# On CUDA ten engines take one clip and eleven take several: four clips of up to 30 s, or sixteen of up to 8 s. A single
# clip of 15 s fills an H200 (benchmarks/NOTES-encoders.md), so larger calls would only delay the first clip.
_STATIC_CLIPS = (1, 4, 16)
_MAX_STATIC_TOKENS = 3200  # of all clips of a call together


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioConfig:
    """Geometry of encoder and projector, from the main `config.json`."""

    num_layers: int
    width: int
    num_heads: int
    num_mels: int
    num_positions: int
    downsample_kernel: int
    downsample_stride: int
    is_normalised: bool
    hidden_size: int  # of the thinker
    projector_depth: int  # including the convolution

    @property
    def frames_per_token(self) -> int:
        """Mel frames per embedding."""
        return _CONV_STRIDE * self.downsample_stride

    @property
    def max_frames(self) -> int:
        """Mel frames of the longest clip: two per row of the position table."""
        return _CONV_STRIDE * self.num_positions

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest clip."""
        return -(-self.max_frames // self.frames_per_token)

    @property
    def table_rows(self) -> int:
        """Rows of the position table: the checkpoint's rows, then zeros up to a whole token."""
        return self.max_tokens * self.downsample_stride


class AudioAttention(nn.Module):
    """Bidirectional attention within each clip; the key part of the packed bias is zero, as Whisper has none."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_NLW: Tensor, clips: Segments) -> Tensor:
        """x: (N, L, W); clips: one key range per clip. Returns (N, L, W)."""
        num_clips, length, width = x_NLW.shape
        qkv_NL3Hd = self.qkv(x_NLW).view(num_clips, length, 3, self.num_heads, width // self.num_heads)
        q_NLHd, k_NLHd, v_NLHd = qkv_NL3Hd.unbind(2)
        out_NLHd = varlen_attention(q_NLHd, k_NLHd, v_NLHd, clips)
        mixed: Tensor = self.out(out_NLHd.reshape(num_clips, length, width))
        return mixed


class AudioBlock(nn.Module):
    """Whisper's pre-norm residual block."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.attention = AudioAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.fc1 = nn.Linear(config.width, _MLP_RATIO * config.width)
        self.fc2 = nn.Linear(_MLP_RATIO * config.width, config.width)

    def forward(self, x_NLW: Tensor, update_NLW: Tensor | None, clips: Segments) -> tuple[Tensor, Tensor]:
        """Shapes as in `AudioAttention`; `update_NLW` is first added to the residual stream `x_NLW`.

        Returns the stream before the last update, and this update: the next norm adds it.
        """
        x_NLW, normed_NLW = add_norm(x_NLW, update_NLW, self.attention_norm)
        x_NLW, normed_NLW = add_norm(x_NLW, self.attention(normed_NLW, clips), self.mlp_norm)
        return x_NLW, self.fc2(F.gelu(self.fc1(normed_NLW)))


class RowConvolution(nn.Linear):
    """Convolution over rows with an odd kernel, padded by half of it, as one GEMM over the joined rows of each window.

    The vendor's convolutions convert every input and result to another layout and back. Weight: (W, kernel · C).
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int) -> None:
        super().__init__(kernel * channels, width)
        self.kernel = kernel
        self.stride = stride

    def forward(self, x_NLC: Tensor) -> Tensor:
        """x: (N, L, C). Returns (N, ⌈L / stride⌉, W)."""
        half, length = self.kernel // 2, x_NLC.shape[1]
        padded_NLC = F.pad(x_NLC, (0, 0, half, half))
        rows = [padded_NLC[:, place : place + length : self.stride] for place in range(self.kernel)]
        return super().forward(torch.cat(rows, dim=-1))


class AudioProjector(nn.Module):
    """Downsampling convolution, followed by GELU and linear layers."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.conv = RowConvolution(
            config.width, config.hidden_size, config.downsample_kernel, config.downsample_stride
        )
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.projector_depth - 1)
        )

    def forward(self, x_NLW: Tensor) -> Tensor:
        """x: (N, L, W), zero beyond each clip. Returns (N, T, D)."""
        x_NTD: Tensor = self.conv(x_NLW)
        for layer in self.layers:
            x_NTD = layer(F.gelu(x_NTD))
        return x_NTD


class AudioEncoder(nn.Module):
    """Whisper's encoder without the 30 s window, and the projector; method `encode` is the graph.

    Source: openai-whisper `AudioEncoder` and the official `linear_proj_audio` (spec: audio.md §3–§6). The result of a
    clip does not depend on the rest of the batch: values beyond its end are zeroed before every convolution, which
    equals the padding of a convolution at the end of a single clip.
    """

    positions: Tensor

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.frames_per_token = config.frames_per_token
        self.is_normalised = config.is_normalised
        self.num_heads = config.num_heads
        self.conv1 = RowConvolution(config.num_mels, config.width, _CONV_KERNEL, stride=1)
        self.conv2 = RowConvolution(config.width, config.width, _CONV_KERNEL, stride=_CONV_STRIDE)
        self.register_buffer("positions", torch.empty(config.table_rows, config.width, dtype=torch.float32))
        self.blocks = nn.ModuleList(AudioBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.projector = AudioProjector(config)

    def encode(self, mel_NTGC: Tensor, lengths_N: Tensor) -> tuple[Tensor]:
        """Embed N clips independently.

        Args:
            mel_NTGC: (N, T, G, C) log-mel in the compute dtype; any finite value beyond a clip's end.
            lengths_N: (N,) int64 mel frames of each clip; 0 for padding of the batch.

        Returns:
            (N, T, D) in the compute dtype, unit vectors if the config normalizes; rows from ⌈length / G⌉ on are zero.
        """
        positions_N = _ceil_divide(lengths_N, _CONV_STRIDE)
        mel_NFC = _zero_beyond(mel_NTGC.flatten(1, 2), lengths_N)
        x_NFW = _zero_beyond(F.gelu(self.conv1(mel_NFC)), lengths_N)
        x_NLW = F.gelu(self.conv2(x_NFW))
        x_NLW = (x_NLW + self.positions[: x_NLW.shape[1]]).to(x_NLW.dtype)
        # An empty clip keeps one key, so that its softmax is not empty; its rows are zeroed at the end.
        ends_N = positions_N.clamp(min=1)
        bounds_N12 = torch.stack((torch.zeros_like(ends_N), ends_N), dim=-1).unsqueeze(1)
        clips = make_segments(bounds_N12, x_NLW, self.num_heads)
        update_NLW: Tensor | None = None
        for block in self.blocks:
            x_NLW, update_NLW = block(x_NLW, update_NLW, clips)
        _, normed_NLW = add_norm(x_NLW, update_NLW, self.norm)
        x_NTD = self.projector(_zero_beyond(normed_NLW, positions_N))
        if self.is_normalised:
            x_NTD = F.normalize(x_NTD.float(), dim=-1, eps=_UNIT_EPS).to(x_NTD.dtype)
        return (_zero_beyond(x_NTD, _ceil_divide(lengths_N, self.frames_per_token)),)


def _ceil_divide(lengths_N: Tensor, divisor: int) -> Tensor:
    return (lengths_N + divisor - 1) // divisor


def _zero_beyond(x_NLW: Tensor, lengths_N: Tensor) -> Tensor:
    """`x_NLW` with rows from each clip's length on set to zero."""
    index_L = torch.arange(x_NLW.shape[1], device=x_NLW.device)
    return x_NLW.masked_fill((index_L >= lengths_N.unsqueeze(1)).unsqueeze(-1), 0.0)


class AudioEncoderStage(Stage):
    """The stage `audio_encoder`, which is not sharded."""

    name = "audio_encoder"
    policy = "once"
    edges = (Edge("audio_encoder", "thinker", "audio"),)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return any(name.startswith("audio.") for name in checkpoint.main.tensors)

    def config(self, checkpoint: Checkpoint) -> AudioConfig:
        part = checkpoint.main
        where = str(part.root / "config.json")
        audio, whisper = ("audio_config",), ("audio_config", "whisper_encoder_config")
        check_fields(part.config, ROOT, where)
        check_fields(part.require(*audio), AUDIO, f"{where}: audio_config")
        width, num_heads = part.require("n_state", *whisper), part.require("n_head", *whisper)
        if width % num_heads:
            raise CheckpointError(f"n_state {width} is not a multiple of n_head {num_heads}", where=where)
        kernel = part.require("ds_kernel_size", *audio)
        if kernel % 2 == 0:
            # The length ⌈length / stride⌉ (spec: audio.md §5) holds for odd kernels padded by half of their size.
            raise CheckpointError(f"ds_kernel_size {kernel} is even; it must be odd", where=where)
        projector_depth = part.require("mlp_depth")
        if projector_depth < 1:
            raise CheckpointError(f"mlp_depth is {projector_depth}; it must be at least 1", where=where)
        return AudioConfig(
            num_layers=part.require("n_layer", *whisper),
            width=width,
            num_heads=num_heads,
            num_mels=part.require("n_mels", *whisper),
            num_positions=part.require("n_ctx", *whisper),
            downsample_kernel=kernel,
            downsample_stride=part.require("ds_stride", *audio),
            is_normalised=part.require("norm_query_embeds", *audio),
            hidden_size=part.require("hidden_size", "llm_config"),
            projector_depth=projector_depth,
        )

    def build(self, config: AudioConfig, shard: Shard) -> AudioEncoder:
        return AudioEncoder(config)

    def weights(self, config: AudioConfig, shard: Shard) -> Sequence[WeightSource]:
        width, mlp_width, hidden_size = config.width, _MLP_RATIO * config.width, config.hidden_size
        extra_rows = config.table_rows - config.num_positions
        sources = [
            *_convolution("conv1", "audio.conv1", width, config.num_mels, _CONV_KERNEL),
            *_convolution("conv2", "audio.conv2", width, width, _CONV_KERNEL),
            WeightSource(
                name="positions",
                part="main",
                # The stored rows are rounded to bf16, unlike a recomputed sinusoid (spec: audio.md §7).
                tensors=("audio.positional_embedding",),
                shapes=((config.num_positions, width),),
                compute=lambda table: F.pad(table, (0, 0, 0, extra_rows)),
                dtype=torch.float32,
            ),
        ]
        for index in range(config.num_layers):
            target, source = f"blocks.{index}", f"audio.blocks.{index}"
            sources += layer_norm(f"{target}.attention_norm", f"{source}.attn_ln", width)
            sources += _packed_qkv(f"{target}.attention.qkv", f"{source}.attn", width)
            sources += linear(f"{target}.attention.out", f"{source}.attn.out", width, width)
            sources += layer_norm(f"{target}.mlp_norm", f"{source}.mlp_ln", width)
            sources += linear(f"{target}.fc1", f"{source}.mlp.0", mlp_width, width)
            sources += linear(f"{target}.fc2", f"{source}.mlp.2", width, mlp_width)
        sources += layer_norm("norm", "audio.ln_post", width)
        kernel = config.downsample_kernel
        sources += _convolution("projector.conv", "linear_proj_audio.0", hidden_size, width, kernel)
        for index in range(config.projector_depth - 1):
            # The stored sequence is convolution, transpose, then (GELU, linear) pairs.
            target, source = f"projector.layers.{index}", f"linear_proj_audio.{3 + 2 * index}"
            sources += linear(target, source, hidden_size, hidden_size)
        return sources

    def graphs(self, config: AudioConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        dtype = dtype_name(options.dtype)
        mel_shape = ("N", "T4", config.frames_per_token, config.num_mels)
        spec = GraphSpec(
            name="encode",
            inputs=(
                TensorSpec(name="mel", dtype=dtype, shape=mel_shape),
                TensorSpec(name="lengths", dtype="int64", shape=("N",)),
            ),
            outputs=(TensorSpec(name="embeddings", dtype=dtype, shape=("N", "T4", config.hidden_size)),),
            dims=(_clip_dim(options), _token_dim(config)),
        )

        def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
            return _example(config, dims["N"], dims["T4"], options.dtype, generator)

        longest = config.max_tokens
        # With an engine for each size, the check runs one for several clips, and always the one for a single clip.
        several = spec.dim("N").buckets[1:2] if options.static_buckets else ()
        graph = GraphDef(
            spec=spec,
            method="encode",
            example=example,
            trace_dims={"N": 2, "T4": min(12, longest)},
            check_dims={"N": (*several, 2)[0], "T4": min(25, longest)},
            sizes=tuple(
                size
                for size in spec.bucket_sizes()
                if size["N"] == 1 or size["N"] * size["T4"] <= _MAX_STATIC_TOKENS
            ),
        )
        return (graph,)

    def parameters(self, config: AudioConfig, options: StageOptions) -> AudioParameters:
        return AudioParameters(
            sample_rate=_SAMPLE_RATE,
            num_mels=config.num_mels,
            fft_size=_FFT_SIZE,
            hop_samples=_HOP_SAMPLES,
            max_frames=config.max_frames,
            frames_per_token=config.frames_per_token,
            hidden_size=config.hidden_size,
        )


STAGE = AudioEncoderStage()


def _convolution(name: str, stored_name: str, width: int, channels: int, kernel: int) -> list[WeightSource]:
    """Weight and bias of a `RowConvolution`, whose windows have the channels of a row next to each other."""
    return [
        WeightSource(
            name=f"{name}.weight",
            part="main",
            tensors=(f"{stored_name}.weight",),
            shapes=((width, channels, kernel),),
            compute=lambda weight: weight.transpose(1, 2).flatten(1),
        ),
        stored(f"{name}.bias", f"{stored_name}.bias", width),
    ]


def _packed_qkv(name: str, stored_name: str, width: int) -> list[WeightSource]:
    """Pack query, key and value rows in this order; Whisper's keys have no bias."""
    names = tuple(f"{stored_name}.{part}.weight" for part in ("query", "key", "value"))
    return [
        WeightSource(
            name=f"{name}.weight",
            part="main",
            tensors=names,
            shapes=((width, width),) * 3,
            compute=lambda query, key, value: torch.cat((query, key, value)),
        ),
        WeightSource(
            name=f"{name}.bias",
            part="main",
            tensors=(f"{stored_name}.query.bias", f"{stored_name}.value.bias"),
            shapes=((width,),) * 2,
            compute=lambda query, value: torch.cat((query, torch.zeros_like(query), value)),
        ),
    ]


def _clip_dim(options: StageOptions) -> Dim:
    """Dim N: the recipe's batch sizes; with static buckets the sizes of `_STATIC_CLIPS` up to the largest batch."""
    if options.static_buckets:
        sizes = tuple(size for size in _STATIC_CLIPS if size <= options.max_batch)
        return Dim(name="N", minimum=1, maximum=sizes[-1], buckets=sizes)
    # At least 2: torch.export treats a dim with a single size as static.
    return Dim(name="N", minimum=1, maximum=max(2, options.max_batch), buckets=options.batch_sizes)


def _token_dim(config: AudioConfig) -> Dim:
    longest = config.max_tokens
    buckets = (*(size for size in _TOKEN_BUCKETS if size < longest), longest)
    return Dim(name="T4", minimum=1, maximum=longest, buckets=buckets)


def _example(
    config: AudioConfig, num_clips: int, num_tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    """Random log-mel in Whisper's range of about [-1.5, 1.5]; the first clip is the longest."""
    frames = min(num_tokens * config.frames_per_token, config.max_frames)
    lengths = [max(1, frames - 1 - clip * frames // (2 * num_clips)) for clip in range(num_clips)]
    mel = torch.rand(num_clips, num_tokens, config.frames_per_token, config.num_mels, generator=generator)
    return {"mel": (3 * mel - 1.5).to(dtype), "lengths": torch.tensor(lengths)}
