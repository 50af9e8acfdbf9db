"""AudioVAE: latents → 44.1 kHz waveform, whole or in streamed patches, and waveform → latents for voice prompts.

The networks run in the recipe's dtype, spectrum and inverse Fourier transform in float32 (spec: talker.md §8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mingc.artifacts.parameters import VaeParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import CLIENT, Edge
from mingc.dtypes import dtype_name, torch_dtype
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import VAE, check_fields
from mingc.export.layers.qwen2 import read_qwen2_config
from mingc.export.layers.speech_llm import MAX_SLOTS, MAX_STEPS
from mingc.export.layers.vae_decoder import VaeDecoder, VaeDecoderConfig, vae_decoder_weights
from mingc.export.layers.vae_encoder import ENCODER_LAYERS, VaeEncoder, VaeEncoderConfig, vae_encoder_weights
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource

_PART = "vae"
_DECODE_BUCKETS = (16, 64, 256)  # latents per call; longer audio is streamed
_ENCODE_BUCKETS = (32, 128, 512)  # latents of a voice prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioVaeConfig:
    """Geometry of encoder and decoder, and the sample rate."""

    sample_rate: int
    encoder: VaeEncoderConfig
    decoder: VaeDecoderConfig


class AudioVae(nn.Module):
    """Encoder and decoder; each method is a graph."""

    def __init__(self, config: AudioVaeConfig) -> None:
        super().__init__()
        self.encoder = VaeEncoder(config.encoder)
        self.decoder = VaeDecoder(config.decoder)

    def decode(self, latents: Tensor) -> tuple[Tensor]:
        """See `VaeDecoder.decode`."""
        return self.decoder.decode(latents)

    def stream(self, latents: Tensor, slots: Tensor, patch_index: Tensor, *state: Tensor) -> tuple[Tensor]:
        """See `VaeDecoder.stream`."""
        return self.decoder.stream(latents, slots, patch_index, *state)

    def encode(self, waveform: Tensor, num_frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `VaeEncoder.encode`."""
        return self.encoder.encode(waveform, num_frames, noise)


class AudioVaeStage(Stage):
    """The stage `audio_vae`: decode, streaming decode and encode."""

    name = "audio_vae"
    policy = "stream"
    edges = (Edge("audio_vae", CLIENT, "speech"),)
    quantizations = ("fp8",)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.vae is not None and checkpoint.talker is not None

    def config(self, checkpoint: Checkpoint) -> AudioVaeConfig:
        part, talker = checkpoint.vae, checkpoint.talker
        if part is None or talker is None:
            raise CheckpointError("the checkpoint has no talker/vae/ folder", where=str(checkpoint.root))
        where = str(part.root / "config.json")
        check_fields(part.config, VAE, where)
        frames_per_latent = int(part.require("patch_size"))
        patch = int(talker.require("patch_size"))
        hop, encoder_hop = (
            int(part.require("output_dim", "dec_kwargs")),
            int(part.require("hop_size", "enc_kwargs")),
        )
        if min(frames_per_latent, patch) < 1:
            raise CheckpointError(
                f"patch_size {frames_per_latent} is not supported, it must be positive", where=where
            )
        if part.require("input_dim", "enc_kwargs") != encoder_hop or hop % 2:
            raise CheckpointError(
                f"frames that overlap or have an odd length are not supported: input_dim "
                f"{part.require('input_dim', 'enc_kwargs')}, hop_size {encoder_hop}, output_dim {hop}",
                where=where,
            )
        encoder = VaeEncoderConfig(
            stack=read_qwen2_config(
                part.require("backbone", "enc_kwargs"),
                f"{where}: enc_kwargs.backbone",
                max_layers=ENCODER_LAYERS,
            ),
            latent_dim=int(part.require("latent_dim", "enc_kwargs")),
            frames_per_latent=frames_per_latent,
            hop=encoder_hop,
        )
        decoder = VaeDecoderConfig(
            stack=read_qwen2_config(part.require("backbone", "dec_kwargs"), f"{where}: dec_kwargs.backbone"),
            latent_dim=int(part.require("latent_dim", "dec_kwargs")),
            frames_per_latent=frames_per_latent,
            hop=hop,
            latents_per_patch=patch,
            max_frames=MAX_STEPS * patch * frames_per_latent,
        )
        return AudioVaeConfig(sample_rate=int(part.require("sample_rate")), encoder=encoder, decoder=decoder)

    def build(self, config: AudioVaeConfig, shard: Shard) -> nn.Module:
        return AudioVae(config)

    def weights(self, config: AudioVaeConfig, shard: Shard) -> Sequence[WeightSource]:
        return [
            *vae_encoder_weights(config.encoder, part=_PART, source="encoder.", target="encoder."),
            *vae_decoder_weights(config.decoder, part=_PART, source="decoder.", target="decoder."),
        ]

    def graphs(self, config: AudioVaeConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        return [
            _decode_graph(config.decoder),
            _stream_graph(config.decoder, options),
            _encode_graph(config.encoder),
        ]

    def parameters(self, config: AudioVaeConfig, options: StageOptions) -> VaeParameters:
        decoder = config.decoder
        return VaeParameters(
            sample_rate=config.sample_rate,
            hop_samples=decoder.hop,
            frames_per_latent=decoder.frames_per_latent,
            latent_dim=decoder.latent_dim,
            samples_per_latent=decoder.frames_per_latent * decoder.hop,
            lookahead_frames=decoder.lookahead_frames,
            tail_samples=decoder.tail_samples,
        )

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        unused = "the stack's inputs are embeddings"
        names = checkpoint.vae.tensors if checkpoint.vae else ()
        training = sorted({name.split(".")[0] for name in names} - {"encoder", "decoder"})
        layers = {name.split(".")[3] for name in names if name.startswith("encoder.encoder.layers.")}
        surplus = sorted(int(layer) for layer in layers if int(layer) >= ENCODER_LAYERS)
        return (
            ("encoder.norm.", "saved by the reference but never applied"),
            *((f"{stack}.embed_tokens.", unused) for stack in ("encoder.encoder", "encoder.aggregator")),
            ("decoder.decoder.embed_tokens.", unused),
            *((f"encoder.encoder.layers.{layer}.", "the reference runs 4 layers") for layer in surplus),
            *((f"{name}.", "used in training only") for name in training),
        )


def _decode_graph(config: VaeDecoderConfig) -> GraphDef:
    samples = config.frames_per_latent * config.hop

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"latents": torch.randn(1, dims["L"], config.latent_dim, generator=generator)}

    spec = GraphSpec(
        name="decode",
        inputs=(TensorSpec(name="latents", dtype="float32", shape=(1, "L", config.latent_dim)),),
        # One row per latent, as dims of a spec cannot be products.
        outputs=(TensorSpec(name="waveform", dtype="float32", shape=("L", samples)),),
        dims=(Dim(name="L", minimum=1, maximum=_DECODE_BUCKETS[-1], buckets=_DECODE_BUCKETS),),
    )
    return GraphDef(
        spec=spec, method="decode", example=example, trace_dims={"L": 5}, check_dims={"L": _DECODE_BUCKETS[0]}
    )


def _stream_graph(config: VaeDecoderConfig, options: StageOptions) -> GraphDef:
    patch = (config.latents_per_patch, config.latent_dim)
    heads = (config.stack.num_kv_heads, config.stack.head_dim)
    state = (
        *(
            TensorSpec(
                name=f"{letter}_ring.{layer}",
                dtype=dtype_name(options.dtype),
                shape=("S", config.ring_rows(layer), *heads),
            )
            for layer in range(config.stack.num_layers)
            for letter in "kv"
        ),
        TensorSpec(name="last_latent", dtype="float32", shape=("S", config.latent_dim)),
        TensorSpec(name="overlap", dtype="float32", shape=("S", config.n_fft - config.hop)),
    )

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        batch, num_slots = dims["B"], dims["S"]
        tensors = {
            "latents": torch.randn(batch, *patch, generator=generator),
            # Distinct slots while there are enough; the rest is padding, which shares slot 0.
            "slots": torch.where(torch.arange(batch) + 1 < num_slots, torch.arange(batch) + 1, 0),
            "patch_index": torch.arange(batch) % 4,
        }
        for spec in state:
            noise = torch.randn(spec.shape_at(dims), generator=generator)
            tensors[spec.name] = noise.to(torch_dtype(spec.dtype))
        tensors["overlap"] *= 0.1
        return tensors

    length = config.patch_frames * config.hop + config.tail_samples
    spec = GraphSpec(
        name="stream",
        inputs=(
            TensorSpec(name="latents", dtype="float32", shape=("B", *patch)),
            TensorSpec(name="slots", dtype="int64", shape=("B",)),
            TensorSpec(name="patch_index", dtype="int64", shape=("B",)),
        ),
        outputs=(TensorSpec(name="samples", dtype="float32", shape=("B", length)),),
        state=state,
        dims=(
            Dim(name="B", minimum=1, maximum=options.max_batch, buckets=options.batch_sizes),
            Dim(name="S", minimum=2, maximum=MAX_SLOTS),
        ),
    )
    return GraphDef(
        spec=spec,
        method="stream",
        slots="slots",
        example=example,
        trace_dims={"B": min(3, options.max_batch), "S": 5},
        check_dims={"B": min(2, options.max_batch), "S": 3},
    )


def _encode_graph(config: VaeEncoderConfig) -> GraphDef:
    samples = config.frames_per_latent * config.hop

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        latents = dims["T"]
        return {
            "waveform": 0.1 * torch.randn(latents, samples, generator=generator),
            "num_frames": torch.tensor([max(1, latents * config.frames_per_latent - 1)]),
            "noise": torch.randn(latents, config.latent_dim, generator=generator),
        }

    def latent(name: str) -> TensorSpec:
        return TensorSpec(name=name, dtype="float32", shape=("T", config.latent_dim))

    spec = GraphSpec(
        name="encode",
        inputs=(
            TensorSpec(name="waveform", dtype="float32", shape=("T", samples)),
            TensorSpec(name="num_frames", dtype="int64", shape=(1,)),
            latent("noise"),
        ),
        outputs=(latent("latents"), latent("mean"), latent("std")),
        dims=(Dim(name="T", minimum=1, maximum=_ENCODE_BUCKETS[-1], buckets=_ENCODE_BUCKETS),),
    )
    return GraphDef(
        spec=spec, method="encode", example=example, trace_dims={"T": 5}, check_dims={"T": _ENCODE_BUCKETS[0]}
    )


STAGE = AudioVaeStage()
