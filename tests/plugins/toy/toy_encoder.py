"""A stage outside mingc that takes the place of the audio encoder: same ports, graph and parameters, other layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mingc.artifacts.parameters import AudioParameters
from mingc.artifacts.stage_graph import Edge
from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.stages import find


class ToyEncoder(nn.Module):
    """mel (N, T4, 4, M) → embeddings (N, T4, D), one linear layer."""

    def __init__(self, values: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, values))

    def encode(self, mel: Tensor, lengths: Tensor) -> tuple[Tensor]:
        is_real = torch.arange(mel.shape[1]) * mel.shape[2] < lengths.unsqueeze(1)
        return (torch.where(is_real.unsqueeze(2), mel.flatten(2) @ self.weight.T, 0.0),)


class ToyEncoderStage(Stage):
    """The stage `toy_encoder`; its sizes are those of the built-in encoder."""

    name = "toy_encoder"
    policy = "once"
    edges = (Edge("toy_encoder", "thinker", "audio"),)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return find("audio_encoder").is_present(checkpoint)

    def config(self, checkpoint: Checkpoint) -> object:
        return find("audio_encoder").config(checkpoint)

    def build(self, config: object, shard: Shard) -> nn.Module:
        given = self.parameters(config, StageOptions())
        return ToyEncoder(given.num_mels * given.frames_per_token, given.hidden_size)

    def weights(self, config: object, shard: Shard) -> Sequence[WeightSource]:
        given = self.parameters(config, StageOptions())
        shape = (given.hidden_size, given.num_mels * given.frames_per_token)
        generator = torch.Generator().manual_seed(0)
        weight = WeightSource(
            name="weight",
            part="main",
            tensors=(),
            shapes=(),
            compute=lambda: torch.randn(shape, generator=generator),
        )
        return (weight,)

    def graphs(self, config: object, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        return find("audio_encoder").graphs(config, shard, options)

    def parameters(self, config: object, options: StageOptions) -> AudioParameters:
        made: AudioParameters = find("audio_encoder").parameters(config, options)
        return made


STAGE = ToyEncoderStage()
