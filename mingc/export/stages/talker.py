"""Speech LLM: prompt tokens and patch embeddings → the hidden state that conditions the next patch.

Keys and values are in contiguous KV slots, one per request (spec: talker.md §4, §5). The stage `cfm` samples latents;
the runtime assembles prompts and applies the stop rule.

Shape letters: B requests, T chunk tokens of at most R requests, D hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.artifacts.parameters import TalkerParameters
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import Edge
from mingc.dtypes import dtype_name
from mingc.errors import CheckpointError
from mingc.export.assets.voices import find_voices
from mingc.export.checkpoint import Checkpoint
from mingc.export.config_fields import TALKER, check_fields
from mingc.export.layers.batch_buckets import doubling_buckets
from mingc.export.layers.qwen2 import Qwen2Config, Qwen2Stack, qwen2_weights
from mingc.export.layers.speech_llm import MAX_SLOTS, MAX_STEPS, read_llm_config
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, TokenizerSource, WeightSource
from mingc.export.weights.mapping import stored
from mingc.kernels.chunk_layout import SLOT_CHUNK_ALIGNMENT
from mingc.kernels.contiguous_kv_attention import contiguous_kv_attention
from mingc.kernels.contiguous_kv_prefill_attention import contiguous_kv_prefill_attention

_PART = "talker"
# The reference's constants (spec: talker.md §2.2, §5): cache rows, stop rule, segment length.
_SLOT_TOKENS = 2048
_MIN_STOP_STEP = 10
_STOP_THRESHOLD = 0.5
_MAX_SEGMENT_LENGTH = 50
_PREFERRED_VOICE = "DB30"
_MAX_PROMPTS = 16  # of a chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class TalkerConfig:
    """Geometry of the speech LLM and its KV slots."""

    llm: Qwen2Config
    vocab_size: int
    slot_tokens: int
    default_voice: str | None


class Talker(nn.Module):
    """Word embedding and Qwen2 stack over KV slots; `slots` are k and v of layer 0, then of layer 1, …"""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Parameter(torch.empty(config.vocab_size, config.llm.hidden_size))
        self.stack = Qwen2Stack(config.llm)

    def prefill(
        self,
        input_ids: Tensor,
        embeds: Tensor,
        use_embed: Tensor,
        segment: Tensor,
        index: Tensor,
        slots: Tensor,
        last: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor]:
        """Prefill a chunk (T) of the prompts of R requests → hidden states (R, D) of chunk tokens `last` (R).

        `segment`, `index`, `slots`: as in `contiguous_kv_prefill_attention`.
        """
        words = F.embedding(input_ids, self.word_embeddings)
        x = torch.where(use_embed.unsqueeze(1), embeds, words)
        cos, sin = self.stack.rope(index)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            keys, values = state[2 * layer : 2 * layer + 2]
            window = self.config.llm.windows[layer]
            return contiguous_kv_prefill_attention(qkv, cos, sin, keys, values, slots, segment, index, window)

        return (self.stack(x, attend, kept=last),)

    def step(self, embeds: Tensor, slot: Tensor, lengths: Tensor, *slots: Tensor) -> tuple[Tensor]:
        """Decode one token of each of B requests: embeds (B, D) → hidden states (B, D)."""
        cos, sin = self.stack.rope(lengths)

        def attend(index: int, qkv: Tensor) -> Tensor:
            keys, values = slots[2 * index : 2 * index + 2]
            return contiguous_kv_attention(
                qkv, cos, sin, keys, values, slot, lengths, self.config.llm.windows[index]
            )

        return (self.stack(embeds, attend),)


class TalkerStage(Stage):
    """The stage `talker`: prefill and step of the speech LLM."""

    name = "talker"
    policy = "autoregressive"
    edges = (Edge("talker", "cfm", "condition"),)
    quantizations = ("fp8",)
    options = ("prefill_chunk_size",)
    tokenizer = TokenizerSource(
        file="talker/llm/tokenizer.json",
        byte_fallback=(
            "<|im_start|>",
            "<|im_end|>",
            "<|vision_start|>",
            "<|vision_pad|>",
            "<|vision_end|>",
            "<audio>",
            "<audioPatch>",
        ),
    )

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.talker is not None

    def config(self, checkpoint: Checkpoint) -> TalkerConfig:
        llm = read_llm_config(checkpoint)
        part = checkpoint.talker
        assert part is not None, "read_llm_config refuses a checkpoint without a talker"
        embedding = part.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError("tensor model.embed_tokens.weight is missing", where=f"talker: {part.root}")
        check_fields(part.config, TALKER, str(part.root / "config.json"))
        return TalkerConfig(
            llm=llm,
            vocab_size=embedding.shape[0],
            slot_tokens=min(_SLOT_TOKENS, llm.max_positions),
            default_voice=_default_voice(checkpoint),
        )

    def build(self, config: TalkerConfig, shard: Shard) -> nn.Module:
        return Talker(config)

    def weights(self, config: TalkerConfig, shard: Shard) -> Sequence[WeightSource]:
        return [
            stored(
                "word_embeddings",
                "model.embed_tokens.weight",
                config.vocab_size,
                config.llm.hidden_size,
                part=_PART,
            ),
            *qwen2_weights(config.llm, part=_PART, source="model.", target="stack."),
        ]

    def graphs(self, config: TalkerConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        return [_prefill_graph(config, options), _step_graph(config, options)]

    def parameters(self, config: TalkerConfig, options: StageOptions) -> TalkerParameters:
        return TalkerParameters(
            hidden_size=config.llm.hidden_size,
            num_layers=config.llm.num_layers,
            vocab_size=config.vocab_size,
            slot_tokens=config.slot_tokens,
            min_stop_step=_MIN_STOP_STEP,
            max_steps=MAX_STEPS,
            stop_threshold=_STOP_THRESHOLD,
            default_voice=config.default_voice,
            max_segment_length=_MAX_SEGMENT_LENGTH,
            chunk_alignment=SLOT_CHUNK_ALIGNMENT,
        )

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        return (("lm_head.", "the speech LLM's logits are not used"),)


def _default_voice(checkpoint: Checkpoint) -> str | None:
    """The reference's default voice if the checkpoint has its waveform, else the first voice that has one."""
    names = [voice.name for voice in find_voices(checkpoint, [])]
    return _PREFERRED_VOICE if _PREFERRED_VOICE in names else next(iter(names), None)


def _state(config: TalkerConfig, options: StageOptions) -> tuple[TensorSpec, ...]:
    shape = ("S", config.slot_tokens, config.llm.num_kv_heads, config.llm.head_dim)
    return tuple(
        TensorSpec(name=f"{letter}_slots.{index}", dtype=dtype_name(options.dtype), shape=shape)
        for index in range(config.llm.num_layers)
        for letter in "kv"
    )


def _example_state(
    config: TalkerConfig, options: StageOptions, num_slots: int, generator: torch.Generator
) -> dict[str, Tensor]:
    return {
        spec.name: torch.randn(spec.shape_at({"S": num_slots}), generator=generator).to(options.dtype)
        for spec in _state(config, options)
    }


def _prefill_graph(config: TalkerConfig, options: StageOptions) -> GraphDef:
    dtype, hidden = dtype_name(options.dtype), config.llm.hidden_size
    maximum = min(options.prefill_chunk_size, config.slot_tokens)

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        tokens = dims["T"]
        # Two prompts if there is room, and padding behind the last one.
        begin = tokens // 2 // SLOT_CHUNK_ALIGNMENT * SLOT_CHUNK_ALIGNMENT if dims["S"] > 2 else 0
        place, padding = torch.arange(tokens), min(1, tokens - 1)
        segment = torch.where(place < tokens - padding, (place >= begin).long() if begin else 0, -1)
        rows = (torch.where(segment > 0, place - begin, place) + 5) % config.slot_tokens
        slots, last = (torch.zeros(_MAX_PROMPTS, dtype=torch.int64) for _ in range(2))
        slots[:2] = torch.tensor([dims["S"] - 1, 1 if begin else 0])
        last[:2] = torch.tensor([begin - 1, tokens - 1 - padding] if begin else [tokens - 1 - padding, 0])
        return {
            "input_ids": torch.randint(config.vocab_size, (tokens,), generator=generator),
            "embeds": torch.randn(tokens, hidden, generator=generator).to(options.dtype),
            "use_embed": torch.arange(tokens) % 3 == 2,
            "segment": segment,
            "index": rows,
            "slots": slots,
            "last": last,
            **_example_state(config, options, dims["S"], generator),
        }

    spec = GraphSpec(
        name="prefill",
        inputs=(
            TensorSpec(name="input_ids", dtype="int64", shape=("T",)),
            TensorSpec(name="embeds", dtype=dtype, shape=("T", hidden)),
            TensorSpec(name="use_embed", dtype="bool", shape=("T",)),
            TensorSpec(name="segment", dtype="int64", shape=("T",)),
            TensorSpec(name="index", dtype="int64", shape=("T",)),
            TensorSpec(name="slots", dtype="int64", shape=(_MAX_PROMPTS,)),
            TensorSpec(name="last", dtype="int64", shape=(_MAX_PROMPTS,)),
        ),
        outputs=(TensorSpec(name="hidden", dtype=dtype, shape=(_MAX_PROMPTS, hidden)),),
        state=_state(config, options),
        dims=(
            Dim(name="T", minimum=1, maximum=maximum, buckets=doubling_buckets(min(32, maximum), maximum)),
            Dim(name="S", minimum=2, maximum=MAX_SLOTS),
        ),
    )
    return GraphDef(
        spec=spec,
        method="prefill",
        slots="slots",
        example=example,
        trace_dims={"T": min(7, maximum), "S": 3},
        check_dims={"T": min(32, maximum), "S": 3},
        compile_cost=2,
    )


def _step_graph(config: TalkerConfig, options: StageOptions) -> GraphDef:
    dtype, hidden = dtype_name(options.dtype), config.llm.hidden_size

    def example(dims: dict[str, int], generator: torch.Generator) -> dict[str, Tensor]:
        batch, num_slots = dims["B"], dims["S"]
        return {
            "embeds": torch.randn(batch, hidden, generator=generator).to(options.dtype),
            # Distinct slots while there are enough; the rest is padding, which shares slot 0.
            "slots": torch.where(torch.arange(batch) + 1 < num_slots, torch.arange(batch) + 1, 0),
            "lengths": torch.arange(batch) * 37 % config.slot_tokens,
            **_example_state(config, options, num_slots, generator),
        }

    spec = GraphSpec(
        name="step",
        inputs=(
            TensorSpec(name="embeds", dtype=dtype, shape=("B", hidden)),
            TensorSpec(name="slots", dtype="int64", shape=("B",)),
            TensorSpec(name="lengths", dtype="int64", shape=("B",)),
        ),
        outputs=(TensorSpec(name="hidden", dtype=dtype, shape=("B", hidden)),),
        state=_state(config, options),
        dims=(
            Dim(name="B", minimum=1, maximum=options.max_batch, buckets=options.batch_sizes),
            Dim(name="S", minimum=2, maximum=MAX_SLOTS),
        ),
    )
    return GraphDef(
        spec=spec,
        method="step",
        slots="slots",
        example=example,
        trace_dims={"B": min(3, options.max_batch), "S": 5},
        check_dims={"B": min(2, options.max_batch), "S": 3},
        compile_cost=1,
    )


STAGE = TalkerStage()
