"""The keys of a config.json: those that are used, have no effect, or change what some architecture computes.

Each key belongs to one group, and the group determines what happens:

| group | effect |
|---|---|
| `FIELDS`, `SPECIAL` | the value is used |
| `IRRELEVANT` | ignored: the key never affects a model's results |
| `NEUTRAL`, `_PATTERNS` | some architecture computes with the key: an error, unless the value is neutral |
| `_OF_MODEL` | another name for a value of the model: an error, unless the values are equal |
| all other keys | ignored with a warning, as transformers does without one |
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxgen.core.model.config_fields import FULL, SLIDING, Field, flag, fraction, list_of, one_of, positive, whole
from jaxgen.errors import shown

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
    "model_type architectures dtype torch_dtype rope_theta rope_scaling rope_parameters quantization_config "
    f"original_max_position_embeddings {DUAL_CHUNK}".split()
)

IRRELEVANT = frozenset(
    # bookkeeping, and settings for running the model in torch
    "_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash attn_implementation "
    "transformers_version use_cache cache_implementation pretraining_tp torchscript use_bfloat16 return_dict "
    "output_attentions output_hidden_states keys_to_ignore_at_inference chunk_size_feed_forward tokenizer_class "
    "name_or_path "
    # keys for other heads and tasks
    "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tf_legacy_loss "
    # encoder-decoder models
    "decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder "
    # special tokens and generation defaults, which GenerationConfig reads
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id max_length min_length do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    # numbers from which a trainer computed intermediate_size
    "ffn_dim_multiplier ffn_multipliers multiple_of".split()
)


# Keys with which some class in transformers (up to 5.24), published custom code or a quantized format changes a model's
# results, by the values with which it does not (null never does). A key that only adds weights, such as biases, needs
# no entry: the checkpoint's tensors must be exactly those of the model. A list is neutral if all its elements are; so
# is an empty list.
_BY_NEUTRAL_VALUE: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (1,),
        # factors of Granite, Cohere, Falcon-H1, MiniCPM, MiniMax, GLM, GPT-NeoX, ...
        "full_attn_alpha_factor full_attn_beta_factor mlp_alpha_factor mlp_beta_factor scale_emb attention_value_scale "
        "qk_scale_factor rope_ratio partial_rotary_factor rotary_emb_fraction rope_pct "
        # passes through the same layers: Ouro, HRM, ...
        "loop_num_passes total_ut_steps H_cycles L_cycles",
    ),
    (
        (),
        # factors whose neutral value depends on the model; other RoPEs
        "attn_scale scale_depth dim_model_base rotary_dim embedding_scale rope_local_base_freq global_rope_theta "
        "local_rope_theta long_factor short_factor long_mscale short_mscale log_scaling_n_floor floor_scale",
    ),
    (
        (0, False),
        # limits of Grok, DBRX, OLMo, gpt-oss, ...; scores that grow with the position: Ministral 3, ...
        "attention_logit_cap qk_l2_clip_threshold clip_qkv swiglu_limit swiglu_limits swiglu_alpha "
        "activation_sparsity_pattern llama_4_scaling_beta log_scaling_alpha "
        # local attention and layers without RoPE: Llama 4, Gemma 3, SmolLM3, ...
        "no_rope_layer_interval num_kv_shared_layers attention_chunk_size attention_window_size local_attention "
        "sliding_window_size window_size "
        # experts, compressed keys and values, additional streams: Mixtral, DeepSeek, Gemma 3n, ...
        "num_experts num_local_experts n_routed_experts n_shared_experts num_shared_experts moe_num_experts "
        "moe_num_shared_experts zero_expert_num kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim "
        "v_head_dim index_topk hidden_size_per_layer_input altup_num_inputs laurel_rank hc_mult n_recurrent_loops "
        "n_recurrent_layers",
    ),
    (
        (0, False, 1),
        # each n-th layer attends to the whole text
        "sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers full_attention_interval",
    ),
    (
        (),
        # layers that differ from each other: Llama 4, Qwen2-MoE, LFM2, ...
        "mlp_only_layers moe_layers attn_layer_indices full_attn_idxs attention_types cross_attention_layers "
        "rope_scaling_layers num_attention_heads_per_layer layer_rope_theta kv_source_layers mrope_section",
    ),
    ((1,), "no_rope_layers"),  # 1 for each layer with RoPE
    (("dense",), "mlp_layer_types"),
    (("attention", "full_attention", "global"), "layers_block_type block_types attention_layers"),
    (("full", "full_attention", "global", "causal"), "attention_type"),
    (
        (False,),
        # switches of GPT-2, Falcon, Cohere, Gemma, Llama 4, ...
        "learned_pos_emb scale_embedding rescale_embeddings scale_attn_by_inverse_layer_idx parallel_attn "
        "use_parallel_residual new_decoder_architecture use_post_norm rotary_value use_logn_attn use_dynamic_ntk "
        "use_sandwich_norm apply_residual_connection_post_layernorm norm_after use_attention_gate attention_k_eq_v "
        "attn_temperature_tuning use_double_wide_mlp use_clipped_linears enable_moe_block is_moe "
        "use_mem_rope use_bidirectional_attention prefix_lm cross_attn_all_layers "
        "is_encoder_decoder add_cross_attention",
    ),
    ((True,), "is_causal do_layer_norm_before scale_attn_weights"),
    ((False, True), "is_decoder"),
    (
        ({},),
        "pruned_heads compression_config quantization quant_config attn_config llama_4_scaling "
        "text_config vision_config audio_config language_config llm_config speech_config thinker_config",
    ),
    (("rope", "rotary"), "position_embedding_type"),
)
NEUTRAL = {key: (None, *values) for values, keys in _BY_NEUTRAL_VALUE for key in keys.split()}

# The same for names in published custom code, which are too many to list. The first pattern that fits counts.
_PATTERNS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("mup_*", (1, False)),
    ("*_multiplier", (1,)),
    ("*_multipliers", (1,)),
    ("*logit*_scal*", (1,)),
    ("rotary_p*", (1,)),  # rotary_pct, rotary_percent, ...
    ("*softcap*", (0, False)),
    ("*soft_cap*", (0, False)),
    ("*interleave*", (False,)),
    ("*mrope*", (False,)),
    ("*alibi*", (False,)),
    ("*bidirectional*", (False,)),
    ("*unit_offset*", (False,)),
    ("*qk*norm*", (False,)),
    ("*attention_sink*", (False,)),
)

# Keys that mean the same as a value of the model: its name, the value, and the keys. Null is always neutral.
_BY_VALUE_OF_MODEL: tuple[tuple[str, Callable[[Mapping[str, Any]], Any], str], ...] = (
    ("hidden_act", lambda model: model["hidden_act"], "hidden_activation activation_function"),
    (
        "rms_norm_eps",
        lambda model: model["rms_norm_eps"],
        "norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon layernorm_eps layernorm_epsilon rms_norm_epsilon",
    ),
    ("rope_theta", lambda model: model["rope_theta"], "rotary_emb_base rotary_base rope_base rope_freq_base"),
    ("num_attention_heads", lambda model: model["num_attention_heads"], "n_head n_heads num_heads"),
    ("num_key_value_heads", lambda model: model["num_key_value_heads"], "n_kv_heads num_kv_heads n_head_kv"),
    ("vocab_size", lambda model: model["vocab_size"], "unpadded_vocab_size"),
    ("head_dim", lambda model: model["head_dim"], "query_pre_attn_scalar v_head_dim head_size kv_channels"),
    ("head_dim**-0.5", lambda model: model["head_dim"] ** -0.5, "attention_multiplier softmax_scale attention_scale"),
    ("qk_norm", lambda model: model["qk_norm"], "use_qk_norm qk_norm qk_layernorm qk_layer_norms"),
)
_OF_MODEL = {key: (name, read) for name, read, keys in _BY_VALUE_OF_MODEL for key in keys.split()}


def neutral(key: str) -> tuple[Any, ...] | None:
    """Return the neutral values of a key if some architecture computes with it; otherwise None."""
    if key in NEUTRAL:
        return NEUTRAL[key]
    found = (values for pattern, values in _PATTERNS if fnmatch.fnmatchcase(key, pattern))
    return next(((None, *values) for values in found if not _is_known(key)), None)


def is_neutral(value: Any, values: tuple[Any, ...]) -> bool:
    """Return True if a value, or each element of a list (if any), is one of `values`."""
    if isinstance(value, list | tuple):
        return all(is_neutral(element, values) for element in value)
    return any(_same(value, known) for known in values)


def refused(config: Mapping[str, Any], model: Mapping[str, Any] | None, own: Collection[str] = ()) -> list[str]:
    """List the keys whose values are not neutral, except `own`, the keys that the model's family reads.

    `model` has the model's values by name, and is None if they are unknown.
    """
    problems = []
    for key, value in config.items():
        if key in own:
            continue
        name, read = _OF_MODEL.get(key, ("", None))
        values = (None,) if read is not None and key not in NEUTRAL else neutral(str(key))
        if values is None or is_neutral(value, values):
            continue
        if read is None:
            problems.append(f"{key}={shown(value)} is not implemented")
        elif model is not None and not _same(value, read(model)):
            problems.append(f"{key}={shown(value)} is not implemented: it must equal {name}={shown(read(model))}")
    return problems


def unknown(config: Mapping[str, Any], own: Collection[str] = ()) -> list[str]:
    """Return the keys that are in no group and not in `own`, sorted."""
    names = set(map(str, config)) - set(own)
    return sorted(key for key in names if not _is_known(key) and key not in _OF_MODEL and not neutral(key))


def _is_known(key: str) -> bool:
    return key in FIELDS or key in SPECIAL or key in IRRELEVANT


def _same(value: Any, known: Any) -> bool:
    if isinstance(value, float) and isinstance(known, float):
        return math.isclose(value, known, rel_tol=1e-6)  # factors such as head_dim**-0.5 are rounded in files
    return value == known and isinstance(value, bool) == isinstance(known, bool)
