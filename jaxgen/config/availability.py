"""Which options generate() offers, and what it says of the others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxgen.config.generation_config import WARPERS, GenerationConfig
from jaxgen.config.options import TRACED
from jaxgen.config.tables import TABLES, eos_list
from jaxgen.errors import ConfigError, InputError, NotBuiltYetError

_MODES = ("greedy_search", "sample")
# Options of modes that come with them, and what is not built yet at all.
UNBUILT = (
    "constraints force_words_ids prompt_lookup_num_tokens dola_layers token_healing assistant_confidence_threshold "
    "assistant_early_exit assistant_lookbehind target_lookbehind is_assistant"
).split()
NEVER = {
    "decoder_start_token_id": "is for encoder-decoder models: leave it out",
    "low_memory": "is not offered: rows share the prompt's cache already; leave it out",
    "generation_kwargs": "is not looked at by anything: leave it out",
    "cache_config": "is not offered: the cache has no settings; leave it out",
    "compile_config": "is not offered: everything is compiled by XLA; leave it out",
    "disable_compile": "is not offered: use jax.disable_jit() to look at single steps; leave it out",
    "max_cache_len": "is not offered: the cache is as long as the request needs; leave it out",
    "return_legacy_cache": "is not offered: GenerateOutput.to_hf() gives tuples; leave it out",
}
# What is settled before the loop, or belongs to other modes.
UNUSED_BY_THE_LOOP = (
    "max_length max_new_tokens return_dict_in_generate bos_token_id early_stopping length_penalty diversity_penalty "
    "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size cache_implementation stop_strings "
    "max_time penalty_alpha"
).split()


def refuse_unbuilt(cfg: GenerationConfig) -> None:
    """Raise for an option that does not work, by its name."""
    if cfg.use_cache is not True:
        raise ConfigError("use_cache=False is not offered: generation always uses the cache; leave it out")
    if cfg.cache_implementation not in (None, "static"):
        raise ConfigError(
            f"cache_implementation={cfg.cache_implementation!r} is not offered: use 'static' or leave it out"
        )
    for name, text in NEVER.items():
        if not _is_default(cfg, name):
            raise ConfigError(f"{name} {text}")
    unbuilt = [f"{name}={getattr(cfg, name)!r}" for name in UNBUILT if not _is_default(cfg, name)]
    if not unbuilt and cfg.mode not in _MODES:
        name = "penalty_alpha" if cfg.mode == "contrastive_search" else "num_beams"
        unbuilt.append(f"{name}={getattr(cfg, name)!r}, {cfg.mode}")
    if unbuilt:
        raise NotBuiltYetError(f"not built yet: {', '.join(unbuilt)}")
    if cfg.prefill_chunk_size is not None:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(cfg, name):
                raise ConfigError(f"{name} needs the prompt in one piece: leave out prefill_chunk_size")


def _is_default(cfg: GenerationConfig, name: str) -> bool:
    value, default = getattr(cfg, name), GenerationConfig.__dataclass_fields__[name].default
    if isinstance(value, np.ndarray | jax.Array):
        return False
    return value is None or value is False or value == default or value in ((), {})


def refuse_options(options: dict[str, Any]) -> None:
    """Raise for keyword arguments that `generate` does not have."""
    for name in options:
        if name in GenerationConfig.__dataclass_fields__:
            raise TypeError(f"generate() takes {name} from the config: use cfg.replace({name}=...)")
        if name in ("synced_gpus", "position_ids"):
            raise TypeError(f"generate() does not offer {name}: leave it out")
        if name == "assistant_model":
            raise TypeError("generate() takes an assistant as assistant=(params, cfg), not assistant_model")
        if name == "past_key_values":
            raise TypeError("generate() takes a cache as cache=, with the new tokens only as ids")
        GenerationConfig().replace(**{name: None})  # an unknown name: raises and offers the nearest


def check_options(cfg: GenerationConfig, prompts: int) -> None:
    """Raise where an option has values for another number of prompts, or ids that the vocabulary does not have."""
    assert cfg.model is not None
    for name, option in TRACED.items():
        given = option.prompts(getattr(cfg, name))
        if given is not None and given != prompts:
            raise InputError(f"{name} has {given} values for {prompts} prompts: give one per prompt or one for all")
    if cfg.prefill_chunk_size is not None and cfg.model.rope.type == "dynamic":
        raise ConfigError("prefill_chunk_size is not offered with dynamic RoPE, which looks at the length of the whole")
    if cfg.on("exponential_decay_length_penalty") and not cfg.on("eos_token_id"):
        raise ConfigError("exponential_decay_length_penalty makes an end likelier: give eos_token_id too")
    vocab = cfg.model.vocab_size
    if cfg.top_logprobs > vocab:
        raise ConfigError(f"top_logprobs={cfg.top_logprobs} is more than the {vocab} tokens of the vocabulary")
    for name in ("forced_bos_token_id", *TABLES):
        value = getattr(cfg, name)
        if name == "eos_token_id" or value is None or any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
            continue
        ids = np.ravel(value) if name == "forced_bos_token_id" else TABLES[name].tokens(value)
        if name == "forced_decoder_ids":
            ids = ids[1::2]  # pairs of a position and a token
        largest = max(map(int, ids), default=0)
        if largest >= vocab:
            raise ConfigError(f"{name} has the token {largest}, the vocabulary goes from 0 to {vocab - 1}")


def normal_form(cfg: GenerationConfig) -> GenerationConfig:
    """Drop what no longer matters, so that it makes no difference to which program runs."""
    defaults = GenerationConfig.__dataclass_fields__
    unused: dict[str, Any] = {name: defaults[name].default for name in UNUSED_BY_THE_LOOP}
    if not cfg.do_sample:
        unused |= dict.fromkeys(WARPERS)
    if cfg.pad_token_id is None and not isinstance(cfg.eos_token_id, Tracer):
        # As in the loop; here too, so that the program is that of a given pad id.
        unused["pad_token_id"] = (eos_list(cfg.eos_token_id) or [0])[0]
    return cfg.replace(**unused)
