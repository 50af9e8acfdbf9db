"""Thinker: tensor-parallel MoE decoder from text and media embeddings to text.

Prefill graphs process a chunk of one or several requests, decode graphs one token of several requests; both share the
weights and one page pool per layer. The runtime allocates pages, of which page 0 is reserved for padding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.parameters import ThinkerParameters
from mingc.artifacts.stage_graph import CLIENT, Edge
from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks.quantization_error import decoder_quantization_error
from mingc.export.config_fields import LLM, ROOT, check_fields
from mingc.export.layers.decoder import PAGE_SIZE, Decoder, DecoderConfig
from mingc.export.layers.decoder_graphs import thinker_graphs
from mingc.export.layers.decoder_weights import decoder_weights
from mingc.export.stage import (
    ExpertDims,
    GraphDef,
    Load,
    LoadRanks,
    Shard,
    Stage,
    StageOptions,
    TokenizerSource,
    WeightSource,
)
from mingc.kernels.chunk_layout import CHUNK_ALIGNMENT, SHARED_ROWS

_HEAD = "model.lm_head.weight"
_DEFAULT_SYSTEM_TEXT = "你是一个友好的AI助手。"
_THINKING_SUFFIX = "\n\ndetailed thinking {state}"
_TEMPORAL_POSITION_SCALE = 2
# Offset of each token id from `image_patch_token` in the released vocabulary (spec: thinker.md §6.3), for tokens that
# the config does not name when the folder has no tokenizer.
_TOKEN_OFFSETS = {
    "<image>": 1,
    "</image>": 2,
    "<video>": 3,
    "</video>": 4,
    "<audioPatch>": 11,
    "<audio>": 12,
    "</audio>": 13,
    "<framePatch>": 18,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkerConfig:
    """Settings from `llm_config` and the tokenizer."""

    decoder: DecoderConfig
    is_tied: bool  # lm_head is the word embedding
    max_positions: int
    stop_token_ids: tuple[int, ...]
    token_ids: dict[str, int]  # special tokens by text


class ThinkerStage(Stage):
    """The stage `thinker`."""

    name = "thinker"
    policy = "autoregressive"
    edges = (Edge("thinker", CLIENT, "text"), Edge("thinker", "talker", "text"))
    quantizations = ("fp8", "int4")
    options = ("world_size", "max_model_len", "prefill_chunk_size")
    tokenizer = TokenizerSource(file="tokenizer.json", byte_fallback=("<role>", "</role>", "<|role_end|>"))
    is_sharded = True

    def is_present(self, checkpoint: Checkpoint) -> bool:
        return "model.model.word_embeddings.weight" in checkpoint.main.tensors

    def config(self, checkpoint: Checkpoint) -> ThinkerConfig:
        check_fields(checkpoint.main.config, ROOT, str(checkpoint.main.root / "config.json"))
        get = _Reader(checkpoint)
        get.check_fields()
        hidden_size, num_heads = get.integer("hidden_size"), get.integer("num_attention_heads")
        head_dim = get.integer("head_dim", hidden_size // num_heads)
        expert_intermediate_size = get.integer("moe_intermediate_size")
        num_experts = get.integer("num_experts")
        num_groups = get.integer("n_group", 1)
        if num_experts % num_groups:
            raise get.error(f"{num_experts} experts cannot form {num_groups} equal groups")
        decoder = DecoderConfig(
            vocab_size=get.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=get.integer("num_hidden_layers"),
            num_dense_layers=get.integer("first_k_dense_replace"),
            num_heads=num_heads,
            num_kv_heads=get.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * get.number("partial_rotary_factor", 1.0)),
            rope_theta=get.number("rope_theta"),
            norm_eps=get.number("rms_norm_eps"),
            dense_intermediate_size=get.integer("intermediate_size"),
            num_experts=num_experts,
            expert_intermediate_size=expert_intermediate_size,
            shared_intermediate_size=expert_intermediate_size * get.integer("num_shared_experts", 0),
            num_experts_per_token=get.integer("num_experts_per_tok"),
            num_expert_groups=num_groups,
            num_kept_groups=get.integer("topk_group", num_groups),
            # The release writes the scale under the second key; the authors' code reads the first.
            routed_scale=get.number(
                "routed_scaling_factor", get.number("moe_router_topk_scaling_factor", 2.5)
            ),
        )
        stops = (get.integer("eos_token_id"), get.integer("pad_token_id", get.integer("eos_token_id")))
        return ThinkerConfig(
            decoder=decoder,
            is_tied=get.is_tied(),
            max_positions=get.integer("max_position_embeddings"),
            stop_token_ids=tuple(dict.fromkeys(stops)),
            token_ids=get.token_ids(),
        )

    def build(self, config: ThinkerConfig, shard: Shard) -> nn.Module:
        return Decoder(config.decoder, shard.world_size)

    def weights(self, config: ThinkerConfig, shard: Shard) -> Sequence[WeightSource]:
        return decoder_weights(config.decoder, shard, is_tied=config.is_tied)

    def graphs(self, config: ThinkerConfig, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        return thinker_graphs(config.decoder, shard, options)

    def quantization_error(self, config: ThinkerConfig, exact: Load, stored: LoadRanks) -> QuantizationError:
        return decoder_quantization_error(config.decoder, exact, stored)

    def experts(self, config: ThinkerConfig, shard: Shard) -> ExpertDims | None:
        decoder = config.decoder
        if decoder.num_dense_layers >= decoder.num_layers:
            return None
        return ExpertDims(
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.local_width(decoder.expert_intermediate_size, shard.world_size),
            shared_intermediate_size=decoder.local_width(decoder.shared_intermediate_size, shard.world_size),
            num_experts=decoder.num_experts,
            num_groups=decoder.num_expert_groups,
            num_kept_groups=decoder.num_kept_groups,
            top_k=decoder.num_experts_per_token,
        )

    def parameters(self, config: ThinkerConfig, options: StageOptions) -> ThinkerParameters:
        ids, decoder = config.token_ids, config.decoder
        return ThinkerParameters(
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            num_layers=decoder.num_layers,
            max_positions=config.max_positions,
            page_size=PAGE_SIZE,
            chunk_alignment=CHUNK_ALIGNMENT,
            shared_rows=SHARED_ROWS,
            stop_token_ids=config.stop_token_ids,
            image_patch_token=ids["<imagePatch>"],
            frame_patch_token=ids["<framePatch>"],
            audio_patch_token=ids["<audioPatch>"],
            image_start_token=ids["<image>"],
            image_end_token=ids["</image>"],
            video_start_token=ids["<video>"],
            video_end_token=ids["</video>"],
            audio_start_token=ids["<audio>"],
            audio_end_token=ids["</audio>"],
            temporal_position_scale=_TEMPORAL_POSITION_SCALE,
            default_system_text=_DEFAULT_SYSTEM_TEXT,
            thinking_suffix=_THINKING_SUFFIX,
        )


class _Reader:
    """Typed access to `llm_config`; errors name the file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._part = checkpoint.main

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(message, where=f"{self._part.root / 'config.json'}: llm_config")

    def value(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` if it is absent or null; a key without a default is required."""
        section = self._part.require("llm_config")
        found = section.get(key) if isinstance(section, dict) else None
        if found is not None:
            return found
        return self._part.require(key, "llm_config") if default is None else default

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self.error(f"{key} is {found!r}, expected a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self.error(f"{key} is {found!r}, expected a number")
        return float(found)

    def check_fields(self) -> None:
        """Check the settings that would change the maths. Raises: CheckpointError that lists all unsupported ones."""
        section = self._part.require("llm_config")
        if not isinstance(section, dict):
            raise self.error(f"is {type(section).__name__}, expected an object")
        check_fields(section, LLM, f"{self._part.root / 'config.json'}: llm_config")
        scaling = self.value("rope_scaling", {})
        if not {"type", "rope_type"} & {*scaling} and scaling:
            raise self.error(f"rope_scaling {scaling} has no type")

    def is_tied(self) -> bool:
        """Whether the head is the word embedding. Raises: CheckpointError when the tensors say otherwise."""
        found, tensors = self.value("tie_word_embeddings", False), self._part.tensors
        if not isinstance(found, bool):
            raise self.error(f"tie_word_embeddings is {found!r}, expected true or false")
        if tensors and found == (_HEAD in tensors):
            raise CheckpointError(
                f"tie_word_embeddings is {json.dumps(found)}, but {_HEAD} is {'' if found else 'not '}stored",
                where=f"{self._part.root / 'config.json'}: llm_config",
                fix="set tie_word_embeddings to false to use the stored head, or remove the tensor"
                if found
                else "download the shard that holds it; if the head is the embedding, set tie_word_embeddings to true",
            )
        return found

    def token_ids(self) -> dict[str, int]:
        """Ids of the media tokens, from the tokenizer beside the weights or by their order in the release."""
        base = self.integer("image_patch_token")
        ids = {"<imagePatch>": base} | {text: base + offset for text, offset in _TOKEN_OFFSETS.items()}
        file = self._part.root / "tokenizer.json"
        if file.is_file():
            try:
                added = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
                ids |= {token["content"]: token["id"] for token in added if token["content"] in ids}
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"not a tokenizer file: {error}", where=str(file)) from error
        # The config's `video_start_token` is not read: in the release it is the id of `</image>`.
        named = {
            "image_patch_token": "<imagePatch>",
            "video_patch_token": "<framePatch>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "audio_patch_token": "<audioPatch>",
            "audio_start_token": "<audio>",
            "audio_end_token": "</audio>",
        }
        for key, text in named.items():
            if self.integer(key, ids[text]) != ids[text]:
                raise self.error(f"{key} is {self.integer(key)}, but {text} is token {ids[text]}")
        return ids


STAGE = ThinkerStage()
