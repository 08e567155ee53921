"""The keys of a config.json: those that are used, have no effect, or change what some architecture computes.

Each key belongs to one group, and the group determines what happens:

| group | effect |
|---|---|
| `FIELDS`, `SPECIAL` | the value is used |
| `IRRELEVANT` | ignored: the key never affects a model's results |
| `NEUTRAL` | some architecture computes with the key: ignored with one of the listed values, an error with any other |
| all other keys | ignored with a warning, as transformers does without one |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxgen.errors import shown
from jaxgen.model.config_fields import Field, flag, fraction, list_of, one_of, positive, whole
from jaxgen.model.families import FULL, SLIDING

# The name of the jax.nn function for each `hidden_act`, and its options. Using names avoids importing jax here.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu", {}),
    "relu": ("relu", {}),
    "gelu": ("gelu", {"approximate": False}),
    "gelu_new": ("gelu", {"approximate": True}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": True}),
}

# Keys that become fields of a `ModelConfig`. `Family.defaults` has the defaults that depend on the family.
FIELDS: dict[str, Field] = {
    "vocab_size": whole(1),
    "hidden_size": whole(1),
    "intermediate_size": whole(1),
    "num_hidden_layers": whole(1, most=10_000),  # limits the program's size if a config.json is damaged
    "num_attention_heads": whole(1),
    "num_key_value_heads": whole(1, None),
    "head_dim": whole(1, None),
    "hidden_act": one_of(ACTIVATIONS),
    "max_position_embeddings": whole(1),
    "rms_norm_eps": positive(),
    "tie_word_embeddings": flag(),
    "attention_bias": flag(False),
    "mlp_bias": flag(False),
    "use_sliding_window": flag(False),
    "sliding_window": whole(1, None),
    "max_window_layers": whole(0, None),
    "layer_types": list_of((FULL, SLIDING)),
    "initializer_range": fraction(0.02),
    "attention_dropout": fraction(0.0),
}

# Keys that are read separately
DUAL_CHUNK = "dual_chunk_attention_config"
SPECIAL = frozenset(
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters "
    f"original_max_position_embeddings {DUAL_CHUNK}".split()
)

IRRELEVANT = frozenset(
    # bookkeeping, and settings for running the model in torch
    "_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash attn_implementation "
    "transformers_version use_cache pretraining_tp torchscript use_bfloat16 return_dict output_attentions "
    "output_hidden_states keys_to_ignore_at_inference chunk_size_feed_forward tokenizer_class name_or_path "
    # keys for other heads and tasks
    "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tf_legacy_loss "
    # encoder-decoder models
    "decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder "
    # special tokens and generation defaults, which GenerationConfig reads
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id max_length min_length do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens".split()
)


def _each(names: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), (None, *values))


# Keys with which some class in transformers (up to 5.24), published custom code or a quantized format changes a model's
# results, by the values with which it does not (null never does). A key that only adds weights, such as biases, needs
# no entry: the checkpoint's tensors must be exactly those of the model.
_BY_NEUTRAL_VALUE: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (1,),
        # factors of Granite, Cohere, Falcon-H1, MiniCPM, MiniMax, GLM, GPT-NeoX, ...
        "embedding_multiplier residual_multiplier logits_scaling logit_scale lm_head_multiplier key_multiplier "
        "attention_in_multiplier attention_out_multiplier output_multiplier full_attn_alpha_factor "
        "full_attn_beta_factor mlp_alpha_factor mlp_beta_factor scale_emb attention_value_scale qk_scale_factor "
        "rope_ratio partial_rotary_factor rotary_pct rotary_emb_fraction",
    ),
    (
        (),
        # factors whose neutral value depends on the model; other RoPEs; quantized weights
        "attention_multiplier query_pre_attn_scalar softmax_scale attn_scale scale_depth dim_model_base rotary_dim "
        "mlp_multipliers embedding_scale rope_local_base_freq global_rope_theta local_rope_theta "
        "quantization_config compression_config quantization",
    ),
    (
        (0,),
        # soft caps and limits of Gemma 2, Grok, DBRX, OLMo, gpt-oss, ...
        "attn_logit_softcapping final_logit_softcapping logits_soft_cap output_logit_soft_cap gate_soft_cap "
        "attention_logit_cap mlp_gate_softcap mlp_up_softcap qk_l2_clip_threshold clip_qkv swiglu_limit swiglu_alpha "
        # local attention and layers without RoPE: Llama 4, Gemma 3, SmolLM3, ...
        "no_rope_layer_interval num_kv_shared_layers attention_chunk_size attention_window_size local_attention "
        "sliding_window_pattern sliding_window_size global_attn_every_n_layers full_attention_interval "
        # experts, compressed keys and values, additional streams: Mixtral, DeepSeek, Gemma 3n, ...
        "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts moe_num_experts "
        "moe_num_shared_experts zero_expert_num kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim "
        "v_head_dim index_topk hidden_size_per_layer_input altup_num_inputs laurel_rank hc_mult n_recurrent_loops",
    ),
    (
        ([],),
        # layers that differ from each other: Llama 4, Qwen2-MoE, LFM2, ...
        "no_rope_layers mlp_only_layers mlp_layer_types moe_layers layers_block_type block_types attn_layer_indices "
        "full_attn_idxs attention_types cross_attention_layers activation_sparsity_pattern rope_scaling_layers "
        "num_attention_heads_per_layer layer_rope_theta kv_source_layers swiglu_limits",
    ),
    (
        (False,),
        # switches of GPT-2, Falcon, Cohere, Gemma, Llama 4, ...
        "alibi use_alibi learned_pos_emb scale_embedding scale_attn_by_inverse_layer_idx mup_enabled parallel_attn "
        "use_parallel_residual new_decoder_architecture use_qk_norm qk_layernorm qk_layer_norms use_post_norm "
        "use_sandwich_norm apply_residual_connection_post_layernorm norm_after use_attention_gate attention_k_eq_v "
        "attn_temperature_tuning use_double_wide_mlp use_clipped_linears enable_moe_block is_moe rope_interleaved "
        "rope_interleave use_mrope use_mem_rope use_bidirectional_attention prefix_lm cross_attn_all_layers "
        "is_encoder_decoder add_cross_attention",
    ),
    ((True,), "is_causal do_layer_norm_before scale_attn_weights"),
    ((False, True), "is_decoder"),
    (({},), "pruned_heads text_config vision_config audio_config"),
    (("rope", "rotary"), "position_embedding_type"),
)
NEUTRAL = {key: (None, *values) for values, keys in _BY_NEUTRAL_VALUE for key in keys.split()}


def refused(config: Mapping[str, Any]) -> list[str]:
    """List the keys in `NEUTRAL` whose values are not neutral."""
    given = [key for key in NEUTRAL if key in config and not any(_same(config[key], value) for value in NEUTRAL[key])]
    return [f"{key}={shown(config[key])} is not implemented" for key in given]


def unknown(config: Mapping[str, Any]) -> list[str]:
    """Return the keys that are in no group, sorted."""
    return sorted(set(map(str, config)) - FIELDS.keys() - SPECIAL - IRRELEVANT - NEUTRAL.keys())


def _same(value: Any, known: Any) -> bool:
    return value == known and isinstance(value, bool) == isinstance(known, bool)
