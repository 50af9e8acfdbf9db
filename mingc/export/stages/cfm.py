"""Flow-matching sampler: LLM hidden state → latents of one patch, next LLM input and stop probability.

One graph runs all sampler steps, the aggregator and the stop head (spec: talker.md §6, §7). ODE state, times and noise
are float32; the networks run in the recipe's dtype.

Shape letters: B requests, H history latents, P latents a patch, C latent channels, D LLM width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mingc.artifacts.parameters import CfmParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.dtypes import dtype_name
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import TALKER, check_fields
from mingc.export.layers.dit import DitConfig, LatentTransformer, latent_transformer_weights, read_dit_config
from mingc.export.layers.flow_times import flow_times, time_embeddings
from mingc.export.layers.speech_llm import read_llm_config
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels import flow_sampler

_PART = "talker"
# Default arguments of the reference's sampler, which never reads the config's `cfg_strength`.
_GUIDANCE = 2.0
_SIGMA = 0.25
_TEMPERATURE = 0.0
_MAX_VOICE_PATCHES = 128  # patches of a voice prompt per call of the aggregator


@dataclass(frozen=True, kw_only=True, slots=True)
class CfmConfig:
    """Geometry of the sampler and both transformers."""

    num_steps: int
    latents_per_patch: int
    history_latents: int
    llm_hidden_size: int
    speaker_dim: int
    dit: DitConfig
    aggregator: DitConfig


class Cfm(nn.Module):
    """DiT, aggregator, stop head and speaker projection."""

    time_embeddings: Tensor
    step_sizes: Tensor

    def __init__(self, config: CfmConfig) -> None:
        super().__init__()
        self.config = config
        self.dit = LatentTransformer(config.dit)
        self.condition = nn.Linear(config.llm_hidden_size, config.dit.hidden_size)
        self.aggregator = LatentTransformer(config.aggregator)
        self.aggregator_query = nn.Parameter(torch.empty(1, config.aggregator.hidden_size))
        self.stop_head = nn.Linear(config.llm_hidden_size, 2)
        self.speaker_head = nn.Linear(config.speaker_dim, config.llm_hidden_size)
        steps = config.num_steps
        self.register_buffer(
            "time_embeddings", torch.empty(steps, config.dit.hidden_size, dtype=torch.float32)
        )
        self.register_buffer("step_sizes", torch.empty(steps, dtype=torch.float32))

    def sample(
        self,
        hidden: Tensor,
        history: Tensor,
        noise: Tensor,
        step_noise: Tensor,
        guidance: Tensor,
        sigma: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample one patch of each of B requests; inputs and outputs as in the graph's spec."""
        weights = self.patch_weights()
        if flow_sampler.takes_patch(noise, weights):
            inputs = flow_sampler.PatchInputs(
                hidden, history, noise, step_noise, guidance, sigma, temperature
            )
            latents, aggregated, stop = flow_sampler.sample(inputs, weights)
            next_embeds = self.aggregator.project_rows(
                aggregated.view(noise.shape[0], -1, aggregated.shape[1])[:, 0]
            )
        else:
            latents = self.trajectory(hidden, history, noise, step_noise, guidance, sigma, temperature)[-1]
            stop = self.stop_head(hidden).float().softmax(-1)[:, 1]
            next_embeds = self.aggregate(latents)[0]
        next_history = torch.cat((history, latents), dim=1)[:, latents.shape[1] :]
        return latents, next_embeds, next_history, stop

    def trajectory(
        self,
        hidden: Tensor,
        history: Tensor,
        noise: Tensor,
        step_noise: Tensor,
        guidance: Tensor,
        sigma: Tensor,
        temperature: Tensor,
    ) -> list[Tensor]:
        """ODE states, each (B, P, C) float32: the initial noise and the state after each step."""
        prefix, history_tokens = self.prefix(hidden, history)
        guidance = guidance[:, None, None]
        added_noise = self.scaled_noise(step_noise, sigma, temperature)
        states = [noise]
        for step in range(self.config.num_steps):
            state = states[-1]
            velocities = self.velocity(prefix[:, step : step + 1], history_tokens, state)
            conditional, unconditional = velocities.view(2, *state.shape).unbind(0)
            velocity = conditional + guidance * (conditional - unconditional)
            # As in the reference, noise is also added after the last step.
            states.append(state + velocity * self.step_sizes[step] + added_noise[:, step])
        return states

    def scaled_noise(self, step_noise: Tensor, sigma: Tensor, temperature: Tensor) -> Tensor:
        """Scaled noise (B, steps, P, C) float32 that each step adds."""
        spread = (sigma * temperature.sqrt())[:, None, None, None] * self.step_sizes.sqrt()[:, None, None]
        return step_noise * spread

    def patch_weights(self) -> flow_sampler.PatchWeights:
        """Parameters for the fused kernel: all but the projections of speaker and aggregator."""
        return flow_sampler.PatchWeights(
            dit=self.dit.weights(),
            project=self.dit.project.weight,
            project_bias=self.dit.project.bias,
            aggregator=self.aggregator.weights(),
            query=self.aggregator_query,
            condition=self.condition.weight,
            condition_bias=self.condition.bias,
            times=self.time_embeddings,
            step_sizes=self.step_sizes,
            stop=self.stop_head.weight,
            stop_bias=self.stop_head.bias,
        )

    def prefix(self, hidden: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs that all steps share: first tokens (2B, steps, width) and history tokens (2B, H, width).

        The first half of the batch is conditional. The second, unconditional half has a zero condition vector, to which
        the bias is still added.
        """
        condition = self.condition(torch.cat((hidden, torch.zeros_like(hidden)))).float()
        first = (condition.unsqueeze(1) + self.time_embeddings).to(hidden.dtype)
        return first, self.dit.embed_latents(history).repeat(2, 1, 1)

    def velocity(self, first: Tensor, history_tokens: Tensor, state: Tensor) -> Tensor:
        """DiT output (2B, P, C) float32 for tokens `first` (2B, 1, width) and ODE state (B, P, C)."""
        patch = self.dit.embed_latents(state).repeat(2, 1, 1)
        tokens = torch.cat((first, history_tokens, patch), dim=1)
        out: Tensor = self.dit(tokens, slice(tokens.shape[1] - patch.shape[1], None)).float()
        return out

    def aggregate(self, latents: Tensor) -> tuple[Tensor]:
        """Aggregate patches (N, P, C) float32 → LLM inputs (N, D)."""
        tokens = self.aggregator.embed_latents(latents)
        query = self.aggregator_query.expand(tokens.shape[0], 1, -1)
        return (self.aggregator(torch.cat((query, tokens), dim=1), slice(0, 1)).squeeze(1),)

    def speaker(self, vectors: Tensor) -> tuple[Tensor]:
        """Project speaker network outputs (N, speaker_dim) float32 → LLM inputs (N, D)."""
        return (self.speaker_head(vectors.to(self.speaker_head.weight.dtype)),)


class CfmStage(Stage):
    """The stage `cfm`: sampler, aggregator and speaker projection of the talker."""

    name = "cfm"
    policy = "loop"
    edges = (Edge("cfm", "audio_vae", "latents"), Edge("cfm", "talker", "patch_embedding"))
    quantizations = ("fp8",)

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.talker is not None

    def config(self, checkpoint: Checkpoint) -> CfmConfig:
        part = checkpoint.talker
        if part is None:
            raise CheckpointError("the checkpoint has no talker/ folder", where=str(checkpoint.root))
        where = str(part.root / "config.json")
        check_fields(part.config, TALKER, where)
        patch, history = int(part.require("patch_size")), int(part.require("history_patch_size"))
        steps = int(part.require("steps"))
        if min(patch, history, steps) < 1:
            raise CheckpointError(
                f"patch_size {patch}, history_patch_size {history}, steps {steps}: each must be at least 1",
                where=where,
            )
        hidden = read_llm_config(checkpoint).hidden_size
        condition = part.require("flowmodel").get("llm_cond_dim")
        if condition not in (None, hidden):
            raise CheckpointError(
                f"flowmodel.llm_cond_dim is {condition}, but the speech LLM's hidden_size is {hidden}",
                where=where,
            )
        speaker = part.tensors.get("spk_head.weight")
        if speaker is None or len(speaker.shape) != 2:
            raise CheckpointError(
                "tensor spk_head.weight is missing or not a matrix", where=f"talker: {part.root}"
            )
        return CfmConfig(
            num_steps=steps,
            latents_per_patch=patch,
            history_latents=history,
            llm_hidden_size=hidden,
            speaker_dim=speaker.shape[1],
            dit=read_dit_config(
                part.require("flowmodel"),
                f"{where}: flowmodel",
                num_tokens=1 + history + patch,
                out_size=None,
            ),
            aggregator=read_dit_config(
                part.require("aggregator"), f"{where}: aggregator", num_tokens=1 + patch, out_size=hidden
            ),
        )

    def build(self, config: CfmConfig, shard: Shard) -> nn.Module:
        return Cfm(config)

    def weights(self, config: CfmConfig, shard: Shard) -> Sequence[WeightSource]:
        hidden, width, steps = config.llm_hidden_size, config.dit.hidden_size, config.num_steps
        time = "cfm.model.t_embedder.time_mlp."
        copy = partial(stored, part=_PART)
        return [
            *latent_transformer_weights(config.dit, part=_PART, source="cfm.model.", target="dit."),
            *latent_transformer_weights(
                config.aggregator, part=_PART, source="aggregator.", target="aggregator."
            ),
            copy("condition.weight", "cfm.model.c_embedder.cond_embedder.weight", width, hidden),
            copy("condition.bias", "cfm.model.c_embedder.cond_embedder.bias", width),
            copy("aggregator_query", "aggregator.word_embedder.weight", 1, config.aggregator.hidden_size),
            copy("stop_head.weight", "stop_head.weight", 2, hidden),
            copy("stop_head.bias", "stop_head.bias", 2),
            copy("speaker_head.weight", "spk_head.weight", hidden, config.speaker_dim),
            copy("speaker_head.bias", "spk_head.bias", hidden),
            WeightSource(
                name="time_embeddings",
                part=_PART,
                tensors=(time + "0.weight", time + "0.bias", time + "2.weight", time + "2.bias"),
                shapes=((width, 256), (width,), (width, width), (width,)),
                compute=lambda *mlp: time_embeddings(steps, *mlp),
                dtype=torch.float32,
            ),
            WeightSource(
                name="step_sizes",
                part=_PART,
                compute=lambda: flow_times(steps).diff(),
                dtype=torch.float32,
            ),
        ]

    def graphs(self, config: CfmConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        return [
            _sample_graph(config, options),
            _aggregate_graph(config, options),
            _speaker_graph(config, options),
        ]

    def parameters(self, config: CfmConfig, options: StageOptions) -> CfmParameters:
        return CfmParameters(
            num_steps=config.num_steps,
            latents_per_patch=config.latents_per_patch,
            history_latents=config.history_latents,
            latent_dim=config.dit.latent_dim,
            speaker_dim=config.speaker_dim,
            guidance=_GUIDANCE,
            sigma=_SIGMA,
            temperature=_TEMPERATURE,
        )

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        reason = "RoPE tables are computed in float32"
        return (("cfm.model.rotary_embed.", reason), ("aggregator.rotary_embed.", reason))


def _sample_graph(config: CfmConfig, options: StageOptions) -> GraphDef:
    dtype, hidden = dtype_name(options.dtype), config.llm_hidden_size
    patch = (config.latents_per_patch, config.dit.latent_dim)
    history = (config.history_latents, config.dit.latent_dim)

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        batch = dims["B"]

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, generator=generator)

        return {
            "hidden": normal(hidden).to(options.dtype),
            "history": normal(*history),
            "noise": normal(*patch),
            "step_noise": normal(config.num_steps, *patch),
            "guidance": torch.full((batch,), _GUIDANCE),
            "sigma": torch.full((batch,), _SIGMA),
            "temperature": torch.arange(batch).float(),
        }

    spec = GraphSpec(
        name="sample",
        inputs=(
            TensorSpec(name="hidden", dtype=dtype, shape=("B", hidden)),
            TensorSpec(name="history", dtype="float32", shape=("B", *history)),
            TensorSpec(name="noise", dtype="float32", shape=("B", *patch)),
            TensorSpec(name="step_noise", dtype="float32", shape=("B", config.num_steps, *patch)),
            TensorSpec(name="guidance", dtype="float32", shape=("B",)),
            TensorSpec(name="sigma", dtype="float32", shape=("B",)),
            TensorSpec(name="temperature", dtype="float32", shape=("B",)),
        ),
        outputs=(
            TensorSpec(name="latents", dtype="float32", shape=("B", *patch)),
            TensorSpec(name="next_embeds", dtype=dtype, shape=("B", hidden)),
            TensorSpec(name="next_history", dtype="float32", shape=("B", *history)),
            TensorSpec(name="stop_probability", dtype="float32", shape=("B",)),
        ),
        dims=(Dim(name="B", minimum=1, maximum=options.max_batch, buckets=options.batch_sizes),),
    )
    return GraphDef(
        spec=spec,
        method="sample",
        example=example,
        trace_dims={"B": min(3, options.max_batch)},
        check_dims={"B": min(2, options.max_batch)},
        compile_cost=3,  # the unrolled solver
    )


def _row_graph(
    name: str, source: TensorSpec, config: CfmConfig, options: StageOptions, maximum: int
) -> GraphDef:
    """A graph from N rows of `source` to N LLM inputs; one bucket, as it only runs when a voice is registered."""
    spec = GraphSpec(
        name=name,
        inputs=(source,),
        outputs=(
            TensorSpec(name="embeds", dtype=dtype_name(options.dtype), shape=("N", config.llm_hidden_size)),
        ),
        dims=(Dim(name="N", minimum=1, maximum=maximum, buckets=(maximum,)),),
    )

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        return {source.name: torch.randn(source.shape_at(dims), generator=generator)}

    return GraphDef(
        spec=spec,
        method=name,
        example=example,
        trace_dims={"N": min(3, maximum)},
        check_dims={"N": min(2, maximum)},
    )


def _aggregate_graph(config: CfmConfig, options: StageOptions) -> GraphDef:
    shape = ("N", config.latents_per_patch, config.dit.latent_dim)
    source = TensorSpec(name="latents", dtype="float32", shape=shape)
    return _row_graph("aggregate", source, config, options, _MAX_VOICE_PATCHES)


def _speaker_graph(config: CfmConfig, options: StageOptions) -> GraphDef:
    source = TensorSpec(name="vectors", dtype="float32", shape=("N", config.speaker_dim))
    return _row_graph("speaker", source, config, options, 8)


STAGE = CfmStage()
