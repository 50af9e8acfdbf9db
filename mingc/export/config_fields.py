"""The fields of every config file: which are obeyed, which have values that are implemented, which change nothing.

A field with a value that is not implemented is refused by name; a field that nobody knows, or that the reference itself
does not obey, is named in a note. Source: spec checkpoint.md §2, thinker.md §1, talker.md §0 and §8.1, vision.md §6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class _Only:
    """The values that are implemented; null and an absent field count as the first."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Inert:
    """A field that has no effect in the reference; another value than `usual` is named with the reason."""

    usual: Any
    reason: str


_Rule = _Only | _Inert | Mapping[str, Any] | None
"""None: read, or without effect on what is computed. A mapping: the fields of a nested object."""

_QUANTIZED = "a quantized checkpoint is not read: pass the bfloat16 one, and quantize with --quantize fp8"


def _fields(words: str) -> dict[str, _Rule]:
    return dict.fromkeys(words.split())


# Bookkeeping, training, and the generation defaults that transformers writes into every config.
_COMMON = _fields(
    "_attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures "
    "attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id "
    "length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix problem_type "
    "pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings "
    "tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache"
) | {"quantization_config": _Only((None,))}

# Bookkeeping of diffusers.
_DIFFUSERS = _fields("_class_name _diffusers_version _name_or_path")

ROOT = (
    _COMMON | _fields("mlp_depth llm_config vision_config audio_config") | {"use_deepstack": _Only((False,))}
)
"""Sections of `config.json` have tables of their own."""

LLM = (
    _COMMON
    | _fields(
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps rope_theta partial_rotary_factor max_position_embeddings num_experts num_shared_experts "
        "num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group "
        "moe_router_topk_scaling_factor routed_scaling_factor image_patch_token video_patch_token image_start_token "
        "image_end_token audio_patch_token audio_start_token audio_end_token "
        "embedding_dropout output_dropout pretraining_tp output_router_logits tokens_per_second"
    )
    | {
        "hidden_act": _Only(("silu",)),
        "use_bias": _Only((False,)),
        "use_qkv_bias": _Only((False,)),
        "attention_bias": _Only((False,)),
        "mlp_bias": _Only((False,)),
        "use_qk_norm": _Only((True,)),
        "use_sliding_window": _Only((False,)),
        "rope_scaling": {
            "type": _Only(("video_rope",)),
            "rope_type": _Only(("video_rope",)),
            "factor": _Only((None, 1)),
            "mrope_section": _Only((None, [8, 12, 12])),
        },
        "router_type": _Only(("MultiRouter",)),
        "score_function": _Only(("sigmoid",)),
        "scoring_func": _Only(("sigmoid",)),
        "norm_topk_prob": _Only((True,)),
        "use_expert_bias": _Only((True,)),
        "moe_router_enable_expert_bias": _Only((True,)),
        "norm_head": _Only((False,)),
        "norm_softmax": _Only((False,)),
        "use_interleaved_frame_timestamp": _Only((True,)),
        "use_deepstack": _Only((False,)),
        "spatial_merge_size": _Only((2,)),
        "num_nextn_predict_layers": _Only((0,)),
        "video_start_token": None,  # in the release the id of another token
    }
)

VISION = (
    _COMMON
    | _fields(
        "depth hidden_size intermediate_size num_heads patch_size temporal_patch_size spatial_merge_size in_channels "
        "out_hidden_size num_position_embeddings hidden_act deepstack_visual_indexes"
    )
    | {"use_deepstack": _Only((False,))}
)

AUDIO = (
    _COMMON
    | _fields("ds_kernel_size ds_stride norm_query_embeds")
    | {"whisper_encoder_config": _fields("n_mels n_ctx n_state n_head n_layer")}
)

DIT = _fields("depth hidden_size num_heads in_channels mlp_ratio llm_cond_dim attn_backend dropout") | {
    "attn_mask_enabled": _Only((False,)),
    "qk_norm": _Only((None,)),
    "pe_attn_head": _Only((None,)),
}

TALKER = (
    _COMMON
    | _fields("steps patch_size history_patch_size")
    | {
        "cfg_strength": _Inert(2.0, "the reference samples with 2.0, whatever the config says"),
        "flowmodel": DIT,
        "aggregator": DIT,
    }
)

QWEN2 = (
    _COMMON
    | _fields(
        "hidden_size intermediate_size num_attention_heads num_hidden_layers num_key_value_heads head_dim rms_norm_eps "
        "rope_theta rope_scaling rope_parameters max_position_embeddings use_sliding_window sliding_window "
        "max_window_layers layer_types vocab_size"
    )
    | {
        "hidden_act": _Only(("silu",)),
        "attention_bias": _Inert(
            None, "the projections of queries, keys and values have biases in the reference"
        ),
        "is_causal": _Inert(True, "attention is causal in the reference, whatever the config says"),
    }
)

VAE = (
    _COMMON
    | _fields("sample_rate patch_size init_method semantic_module_kwargs")
    | {
        "enc_kwargs": _fields("input_dim hop_size latent_dim") | {"backbone": QWEN2},
        "dec_kwargs": _fields("output_dim latent_dim") | {"backbone": QWEN2},
    }
)

IMAGE_MLP = _fields("img_gen_scales diffusion_c_input_dim") | {
    "dit_type": _Only(("zimage",)),
    "use_identity_mlp": _Only((True,)),
    "text_encoder_norm": _Only((True,)),
}

BYT5 = _fields("byt5_max_length") | {
    "byt5_config": _fields("byt5_name byt5_ckpt_path font_ann_path color_ann_path")
    | {
        "special_token": _Only((True,)),
        "color_special_token": _Only((True,)),
        "font_special_token": _Only((True,)),
        "multilingual": _Only((True,)),
    },
    "byt5_mapper_type": _Only(("T5EncoderBlockByT5Mapper",)),
    "byt5_mapper_config": _fields("num_layers sdxl_channels"),
}

T5 = (
    _COMMON
    | _fields(
        "d_model d_ff d_kv num_heads num_layers num_decoder_layers vocab_size layer_norm_epsilon dropout_rate "
        "relative_attention_num_buckets relative_attention_max_distance classifier_dropout initializer_factor"
    )
    | {
        "feed_forward_proj": _Only(("gated-gelu",)),
        "dense_act_fn": _Only(("gelu_new",)),
        "is_gated_act": _Only((True,)),
    }
)

IMAGES = _fields(
    "auto_map min_pixels max_pixels patch_size temporal_patch_size merge_size image_mean image_std image_token "
    "video_token audio_token image_processor_type feature_extractor_type processor_class chunk_length dither "
    "feature_size frame_length frame_shift inverse_norm lfr_m lfr_n n_samples num_audio_tokens up_sample "
    "return_attention_mask padding_side padding_value wav_frontend_args"
) | {
    "use_interleaved_frame_timestamp": _Only((True,)),
    "sampling_rate": _Only((16000,)),
    "whisper_frontend_args": _fields("n_mels"),
    "do_normalize": _Only((True,)),
    "do_rescale": _Only((True,)),
    "do_resize": _Only((True,)),
}

IMAGE_DIT = _DIFFUSERS | {
    **_fields(
        "dim n_layers n_refiner_layers n_heads n_kv_heads in_channels cap_feat_dim norm_eps rope_theta axes_dims "
        "axes_lens t_scale all_patch_size"
    ),
    "qk_norm": _Only((True,)),
    "all_f_patch_size": _Only(([1],)),
    "siglip_feat_dim": _Only((None,)),
}

SCHEDULER = _DIFFUSERS | {
    **_fields("shift use_dynamic_shifting base_shift max_shift base_image_seq_len max_image_seq_len"),
    "_class_name": _Only(("FlowMatchEulerDiscreteScheduler",)),
    "num_train_timesteps": _Only((1000,)),
    "time_shift_type": _Only(("exponential",)),
    "shift_terminal": _Only((None,)),
    **dict.fromkeys(
        (
            "invert_sigmas",
            "stochastic_sampling",
            "use_beta_sigmas",
            "use_exponential_sigmas",
            "use_karras_sigmas",
        ),
        _Only((False,)),
    ),
}

IMAGE_VAE = _DIFFUSERS | {
    **_fields(
        "block_out_channels layers_per_block norm_num_groups latent_channels scaling_factor shift_factor "
        "down_block_types up_block_types use_quant_conv use_post_quant_conv sample_size force_upcast"
    ),
    "act_fn": _Only(("silu",)),
    "in_channels": _Only((3,)),
    "out_channels": _Only((3,)),
    "mid_block_add_attention": _Only((True,)),
    "latents_mean": _Only((None,)),
    "latents_std": _Only((None,)),
}

_PICTURES = {
    "mlp": IMAGE_MLP,
    "connector": QWEN2,
    "byt5": BYT5,
    "transformer": IMAGE_DIT,
    "scheduler": SCHEDULER,
    "image_vae": IMAGE_VAE,
}

_TRAINING = ("lambda_", "disc", "loss", "mpd", "msd", "mrd")  # beginnings of fields of the VAE's training


def check_fields(raw: Mapping[str, Any], rules: Mapping[str, Any], where: str) -> None:
    """Refuse the object `raw` of a config file. Raises: CheckpointError that names all fields not implemented."""
    problems = [line for kind, line in _compare(raw, rules, "") if kind == "problem"]
    if problems:
        is_quantized = any(line.startswith("quantization_config") for line in problems)
        raise CheckpointError(
            f"not implemented: {'; '.join(problems)}",
            where=where,
            fix=_QUANTIZED if is_quantized else "pass a checkpoint with these values, or leave the stage out",
        )


def field_notes(checkpoint: Checkpoint) -> list[str]:
    """A note for each field of the configs that is not known, or that has no effect in the reference either."""
    main = checkpoint.main.config
    sections: list[tuple[str, Any, Mapping[str, Any]]] = [
        ("config.json", main, ROOT),
        ("config.json: llm_config", main.get("llm_config"), LLM),
        ("config.json: vision_config", main.get("vision_config"), VISION),
        ("config.json: audio_config", main.get("audio_config"), AUDIO),
        ("preprocessor_config.json", _read(checkpoint.root / "preprocessor_config.json"), IMAGES),
    ]
    if checkpoint.talker is not None:
        sections += [
            ("talker/config.json", checkpoint.talker.config, TALKER),
            ("talker/llm/config.json", _read(checkpoint.talker.root / "llm" / "config.json"), QWEN2),
        ]
    if checkpoint.vae is not None:
        sections.append(("talker/vae/config.json", checkpoint.vae.config, VAE))
    sections += [
        (str(part.config_file.relative_to(checkpoint.root)), part.config, _PICTURES[part.name])
        for part in checkpoint.parts.values()
        if part.name in _PICTURES
    ]
    return [
        f"{where}: {line}"
        for where, raw, rules in sections
        if isinstance(raw, dict)
        for kind, line in _compare(raw, rules, "")
        if kind == "note"
    ]


def _read(file: Path) -> Any:
    """The JSON of a file; None where there is none, which whoever needs it reports."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _compare(raw: Mapping[str, Any], rules: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """("problem" or "note", one line) for each field of `raw` that the rules do not accept."""
    for key, value in raw.items():
        name, rule = f"{prefix}{key}", rules.get(key)
        if isinstance(rule, Mapping):
            if isinstance(value, dict):
                yield from _compare(value, rule, f"{name}.")
            elif value is not None:
                yield "problem", f"{name}={value!r}, expected an object"
        elif isinstance(rule, _Only):
            if value is not None and not any(_is_equal(value, each) for each in rule.values):
                yield "problem", f"{name}={value!r}, only {' or '.join(map(json.dumps, rule.values))} is"
        elif isinstance(rule, _Inert):
            if value is not None and not _is_equal(value, rule.usual):
                yield "note", f"{name} {_short(value)} has no effect: {rule.reason}"
        elif key not in rules and value not in (None, False, 0, "", [], {}) and not key.startswith(_TRAINING):
            yield "note", f"{name} {_short(value)} is not known and has no effect"


def _is_equal(value: Any, wanted: Any) -> bool:
    """Equal as JSON values: `true` is not 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
