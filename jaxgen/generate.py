"""generate(): check the request, prepare it, run one decoder, shape the output.

Called eagerly, it rounds prompt width and length up to buckets, so that few programs serve all requests, and gives the
numbers of the config to the program as arguments. Called inside the caller's own `jax.jit` it is traced with the
shapes that it is given.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.decoding import loop
from jaxgen.decoding.sample import sequence_keys
from jaxgen.errors import ConfigError, InputError, NotBuiltYetError
from jaxgen.generation_config import WARPERS, GenerationConfig, eos_list, warn, warn_unused
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import param_shapes

_STREAM_CHUNK = 4  # tokens per call of the compiled loop when streaming


class Streamer(Protocol):
    """What `streamer` must have: `BaseStreamer` of transformers."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompts, int32[B, P], then the next token of each row, int32[rows], over and over."""

    def end(self) -> None:
        """Take note that nothing more comes."""


@flax.struct.dataclass
class GenerateOutput:
    """What `generate` returns. Rows are in transformers' order: the R sequences of prompt 0, then of prompt 1.

    Attributes:
        sequences: int32[B*R, P + N], the prompt as given, the generated tokens, then the pad id; N is
            `max_new_tokens`, the largest where there is one per prompt.
        lengths: int32[B*R], generated tokens per row, eos included.
        sequences_scores: float32[B*R], of beam search; else None.
        beam_indices: int32[B*R, N], of beam search; else None.
        scores: float32[N, B*R, V], what the token of each step was chosen from, with `output_scores`; zeros in
            steps after the last one.
        logits: float32[N, B*R, V], what the model gave, with `output_logits`.
        attentions: None as yet.
        hidden_states: None as yet.
        cache: keys and values of all tokens but the last chosen one of each row.
        prompt_width: P, static.
    """

    sequences: jax.Array
    lengths: jax.Array
    sequences_scores: jax.Array | None = None
    beam_indices: jax.Array | None = None
    scores: jax.Array | None = None
    logits: jax.Array | None = None
    attentions: Any = None
    hidden_states: Any = None
    cache: KVCache | None = None
    prompt_width: int = flax.struct.field(pytree_node=False, default=0)


def generate(
    params,
    ids,
    key,
    cfg: GenerationConfig,
    *,
    attention_mask=None,
    inputs_embeds=None,
    cache=None,
    logits_processor=None,
    stopping_criteria=None,
    prefix_allowed_tokens_fn=None,
    negative_prompt_ids=None,
    negative_prompt_attention_mask=None,
    streamer: Streamer | None = None,
    tokenizer=None,
    assistant=None,
    hook=None,
    **options,
) -> GenerateOutput:
    """Continue the prompts: transformers' `generate()` as a pure function.

    >>> out = generate(params, batch.ids, jax.random.key(0), cfg, attention_mask=batch.attention_mask)  # doctest: +SKIP

    Args:
        params: the parameters, a tree with Hugging Face's names, as `convert.load_hf` gives.
        ids: int32[B, P], the prompts, padded to one width.
        key: None for greedy decoding; for sampling one `jax.random.key`, or `key[B]`, one per prompt. With one
            key, prompt b uses `fold_in(key, b)`.
        cfg: what to do; `cfg.model` says for which model. Options are set with `cfg.replace`.
        attention_mask: `[B, P]`, 0 where ids is padding, on whichever side. Left out, it follows from the pad id as
            in transformers: pad tokens are padding unless the pad id is an eos id too.
        streamer: its `put` gets the prompts and then each step's tokens, `end` is called at last.
        inputs_embeds, cache, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, negative_prompt_ids,
            negative_prompt_attention_mask, tokenizer, assistant, hook: not built yet.
        **options: refused; a typo or an option of the config.

    Raises:
        InputError: ids, mask or key that do not fit the model, each other or the config.
        ConfigError: an option that cannot be honoured.
        NotBuiltYetError: an option that jaxgen knows and cannot do yet.
        TypeError: an argument of the wrong type.

    Gradients do not flow through it: tokens are integers. Use `CausalLM` for a differentiable forward pass.
    """
    _refuse_options(options)
    unbuilt = {
        "inputs_embeds": inputs_embeds,
        "cache": cache,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "tokenizer": tokenizer,
        "assistant": assistant,
        "hook": hook,
    }
    if given := [name for name, value in unbuilt.items() if value is not None]:
        raise NotBuiltYetError(f"not built yet: {', '.join(given)}")
    if not isinstance(cfg, GenerationConfig):
        raise TypeError(f"cfg must be a jaxgen.GenerationConfig, got {type(cfg).__name__}")
    _refuse_unbuilt(cfg)
    if cfg.model is None:
        raise ConfigError("cfg.model is None: set it to the checkpoint's ModelConfig (convert.load_hf does)")
    _check_params(params, cfg)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, ids, attention_mask, key, cfg))):
        if streamer is not None:
            raise InputError("streamer needs the host and cannot be used under jit: call generate outside of it")
        return _generate_traced(params, ids, attention_mask, key, cfg)
    return _generate_eager(params, ids, attention_mask, key, cfg, streamer)


def _generate_eager(params, ids, attention_mask, key, cfg: GenerationConfig, streamer) -> GenerateOutput:
    ids = _host_ids(ids, cfg)
    mask = _host_mask(attention_mask, ids, cfg)
    _check_knobs(cfg, ids.shape[0])
    warn_unused(cfg)
    budget = _budget(cfg, mask.sum(axis=-1, dtype=np.int32))
    new_tokens = int(budget.max())
    cfg = _normal_form(cfg)
    key = _check_key(key, cfg, ids.shape[0])
    capacity = _capacity(new_tokens, recorded=cfg.output_scores or bool(cfg.output_logits))
    padding = ((0, 0), (_prompt_bucket(ids.shape[1]) - ids.shape[1], 0))
    request = (params, cfg, np.pad(ids, padding), np.pad(mask, padding), budget, key)
    if streamer is None:
        state = _run(*request, capacity)
    else:
        state = _stream(request, capacity, ids, streamer)
    return _output(state, ids, new_tokens)


def _generate_traced(params, ids, attention_mask, key, cfg: GenerationConfig) -> GenerateOutput:
    ids = jnp.asarray(ids)
    _check_ids_shape(ids)
    ids = ids.astype(jnp.int32)
    if attention_mask is None:
        mask = _inferred_mask(ids, cfg)
    else:
        mask = jnp.asarray(attention_mask).astype(bool)
        _check_mask_shape(mask, ids)
    _check_knobs(cfg, ids.shape[0])
    key = _check_key(key, cfg, ids.shape[0])
    capacity, budget = _traced_budget(cfg, ids.shape[1], mask)
    cfg = jax.tree.map(jnp.asarray, cfg)  # what is concrete in the config, as if it had been an argument
    state = _run_traced(params, cfg, ids, mask, budget, key, capacity)
    return _output(state, ids, capacity)


def _run_traced(params, cfg, ids, mask, budget, key, capacity: int) -> loop.State:
    keys = None if key is None else sequence_keys(key, ids.shape[0], cfg.num_return_sequences)
    state = loop.start(params, cfg, loop.Prompt.align(ids, mask), budget, keys, capacity)
    return loop.finish(loop.advance(params, cfg, state, jnp.int32(capacity)))


_run = jax.jit(_run_traced, static_argnums=6)


@functools.partial(jax.jit, static_argnums=6)
def _start(params, cfg, ids, mask, budget, key, capacity: int):
    keys = None if key is None else sequence_keys(key, ids.shape[0], cfg.num_return_sequences)
    state = loop.start(params, cfg, loop.Prompt.align(ids, mask), budget, keys, capacity)
    return state, _progress(state)


@functools.partial(jax.jit, donate_argnums=2)
def _advance(params, cfg, state: loop.State):
    state = loop.advance(params, cfg, state, state.history.step + _STREAM_CHUNK)
    return state, _progress(state)


_finish = jax.jit(loop.finish, donate_argnums=0)


def _progress(state: loop.State):
    return state.tokens, state.history.step, jnp.all(state.done)


def _stream(request, capacity: int, ids: np.ndarray, streamer: Streamer) -> loop.State:
    """Run the loop in chunks, each dispatched before the tokens of the one before are read."""
    params, cfg = request[:2]
    streamer.put(ids)
    state, progress = _start(*request, capacity)
    shown, finished = 0, False
    while not finished:
        state, following = _advance(params, cfg, state)
        tokens, step, finished = jax.device_get(progress)
        for column in range(shown, int(step)):
            streamer.put(tokens[:, column])
        shown, progress = int(step), following
    streamer.end()
    return _finish(state)


def _output(state: loop.State, ids, new_tokens: int) -> GenerateOutput:
    """Shape the result. When eager, numpy cuts what the buckets added: each slice of a jax array would compile."""
    eager = isinstance(ids, np.ndarray)
    xp, to_array = (np, jax.device_put) if eager else (jnp, jnp.asarray)

    def cut(record, axis: int):
        if record is None or record.shape[axis] == new_tokens:
            return record
        return to_array((np.asarray(record) if eager else record)[(slice(None),) * axis + (slice(new_tokens),)])

    tokens = cut(state.tokens, axis=1)
    prompts = xp.repeat(ids, tokens.shape[0] // ids.shape[0], axis=0)
    sequences = xp.concatenate([prompts, np.asarray(tokens) if eager else tokens], axis=1)
    return GenerateOutput(
        sequences=to_array(sequences),
        lengths=state.lengths,
        scores=cut(state.scores, axis=0),
        logits=cut(state.logits, axis=0),
        cache=state.cache,
        prompt_width=ids.shape[1],
    )


def _prompt_bucket(width: int) -> int:
    """Round a prompt's width up: to a power of two, from 256 on to the half between two of them as well."""
    power = max(32, 1 << (width - 1).bit_length())
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def _capacity(new_tokens: int, recorded: bool) -> int:
    """Round the number of new tokens up; less where scores of the whole vocabulary are kept for each."""
    return -(-new_tokens // 16) * 16 if recorded else _prompt_bucket(max(new_tokens, 128))


def _normal_form(cfg: GenerationConfig) -> GenerationConfig:
    """Drop what no longer matters, so that it makes no difference to which program runs."""
    defaults = GenerationConfig.__dataclass_fields__
    unused: dict[str, Any] = {name: defaults[name].default for name in _UNUSED_BY_THE_LOOP}
    if not cfg.do_sample:
        unused |= {name: None for name in WARPERS}
    if cfg.pad_token_id is None:  # as in the loop, here so that the program is that of a given pad id
        unused["pad_token_id"] = (eos_list(cfg.eos_token_id) or [0])[0]
    return cfg.replace(**unused)


# What is settled before the loop, or belongs to modes that are not built.
_UNUSED_BY_THE_LOOP = (
    "max_length max_new_tokens return_dict_in_generate bos_token_id early_stopping length_penalty diversity_penalty "
    "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size cache_implementation"
).split()


# --- What can be asked for ---------------------------------------------------------------------------------------

_BUILT = frozenset(
    "max_length max_new_tokens min_length min_new_tokens do_sample temperature top_k top_p min_p repetition_penalty "
    "output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id num_return_sequences "
    "cache_implementation use_cache model num_assistant_tokens num_assistant_tokens_schedule "
    "max_matching_ngram_size early_stopping length_penalty diversity_penalty".split()
)
_OF_OTHER_MODES = frozenset("typical_p epsilon_cutoff eta_cutoff".split())  # looked at when sampling only
_NEVER = {
    "decoder_start_token_id": "is for encoder-decoder models: leave it out",
    "low_memory": "is not offered: rows share the prompt's cache already; leave it out",
    "generation_kwargs": "is not looked at by anything: leave it out",
}


def _refuse_unbuilt(cfg: GenerationConfig) -> None:
    if cfg.use_cache is not True:
        raise ConfigError("use_cache=False is not offered: generation always uses the cache; leave it out")
    if cfg.cache_implementation not in (None, "static"):
        raise ConfigError(f"cache_implementation={cfg.cache_implementation!r} is not offered: use 'static' or leave it out")
    unbuilt = []
    for name in GenerationConfig.__dataclass_fields__:
        value = getattr(cfg, name)
        if name in _BUILT or (name in _OF_OTHER_MODES and not cfg.do_sample) or _is_default(cfg, name):
            continue
        if name in _NEVER:
            raise ConfigError(f"{name} {_NEVER[name]}")
        unbuilt.append(f"{name}={value!r}")
    if unbuilt:
        raise NotBuiltYetError(f"not built yet: {', '.join(unbuilt)}")


def _is_default(cfg: GenerationConfig, name: str) -> bool:
    value, default = getattr(cfg, name), GenerationConfig.__dataclass_fields__[name].default
    if isinstance(value, np.ndarray | jax.Array):
        return False
    return value is None or value is False or value == default or value in ((), {})


def _refuse_options(options: dict[str, Any]) -> None:
    for name in options:
        if name in GenerationConfig.__dataclass_fields__:
            raise TypeError(f"generate() takes {name} from the config: use cfg.replace({name}=...)")
        if name in ("synced_gpus", "position_ids"):
            raise TypeError(f"generate() does not offer {name}: leave it out")
        if name == "assistant_model":
            raise TypeError("generate() takes an assistant as assistant=(params, cfg), not assistant_model")
        GenerationConfig().replace(**{name: None})  # an unknown name: raises and offers the nearest


def _check_params(params, cfg: GenerationConfig) -> None:
    assert cfg.model is not None
    if not isinstance(params, dict):
        raise TypeError(f"params must be the dict of parameters, got {type(params).__name__}")
    given = flax.traverse_util.flatten_dict(params, sep=".")
    wanted = param_shapes(cfg.model)
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {list(given[name].shape)}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in given and given[name].shape != shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"params do not fit cfg.model: {'; '.join(problems[:4])}{more}")


# --- What the request holds ---------------------------------------------------------------------------------------


def _check_ids_shape(ids) -> None:
    if ids.ndim != 2 or 0 in ids.shape:
        raise InputError(f"ids must have shape [B, P] with B and P at least 1, got {list(ids.shape)}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}")


def _host_ids(ids, cfg: GenerationConfig) -> np.ndarray:
    assert cfg.model is not None
    if ids is None:
        raise NotBuiltYetError("not built yet: generation without ids")
    try:
        ids = np.asarray(ids)
    except ValueError as error:
        raise InputError("ids must be one array [B, P]: pad the prompts on the left and give attention_mask") from error
    _check_ids_shape(ids)
    if ids.min() < 0 or ids.max() >= cfg.model.vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"ids has the token {wrong}, the vocabulary goes from 0 to {cfg.model.vocab_size - 1}")
    return ids.astype(np.int32)


def _check_mask_shape(mask, ids) -> None:
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {list(mask.shape)}")


def _host_mask(attention_mask, ids: np.ndarray, cfg: GenerationConfig) -> np.ndarray:
    if attention_mask is None:
        mask = np.asarray(_inferred_mask(ids, cfg, np))
        pad = cfg.pad_token_id
        if pad is not None and ids.shape[1] > 1 and np.any(ids[:, 0] == pad) and np.all(mask):
            warn(
                f"attention_mask is missing and the pad id {pad} is an eos id too, so padding in ids counts as "
                "text: give attention_mask"
            )
    else:
        mask = np.asarray(attention_mask)
        _check_mask_shape(mask, ids)
        if not np.all((mask == 0) | (mask == 1)):
            raise InputError("attention_mask must hold 0 for padding and 1 for tokens only")
        mask = mask != 0
    if not np.all(mask.any(axis=-1)):
        row = int(np.argmin(mask.any(axis=-1)))
        raise InputError(f"prompt {row} is empty, all of it is padding: give it a token, the BOS for example")
    return mask


def _inferred_mask(ids, cfg: GenerationConfig, xp=jnp):
    """Pad tokens are padding unless the pad id is an eos id: `_prepare_attention_mask_for_generation`."""
    if cfg.pad_token_id is None:
        return xp.ones(ids.shape, bool)
    mask = ids != cfg.pad_token_id
    if cfg.eos_token_id is None:
        return mask
    eos = xp.atleast_1d(xp.asarray(cfg.eos_token_id))
    return mask | xp.any(eos == cfg.pad_token_id)


def _check_knobs(cfg: GenerationConfig, prompts: int) -> None:
    for leaf_name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_length", "min_new_tokens"):
        value = getattr(cfg, leaf_name)
        if np.ndim(value) == 1 and value.shape[0] != prompts:
            raise InputError(f"{leaf_name} has {value.shape[0]} values for {prompts} prompts: give one per prompt or one")


def _check_key(key, cfg: GenerationConfig, prompts: int):
    if not cfg.do_sample:
        return None
    if key is None:
        raise InputError("key is None and do_sample=True draws: give jax.random.key(seed), or one key per prompt")
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key must be a jax.random.key (not PRNGKey), got {getattr(key, 'dtype', type(key).__name__)}")
    if key.ndim and key.shape != (prompts,):
        raise InputError(f"key must be one key or one per prompt, [{prompts}], got shape {list(key.shape)}")
    return key


def _budget(cfg: GenerationConfig, lengths: np.ndarray) -> np.ndarray:
    """int32[B], the most new tokens per prompt; `max_new_tokens` wins over `max_length`, which counts the prompt."""
    if cfg.on("max_new_tokens"):
        budget = np.asarray(cfg.max_new_tokens, np.int32)
        if budget.ndim and budget.shape != lengths.shape:
            raise InputError(f"max_new_tokens has {budget.shape[0]} values for {lengths.shape[0]} prompts")
        return np.broadcast_to(budget, lengths.shape)
    if cfg.max_length == GenerationConfig.max_length:
        warn(f"neither max_new_tokens nor max_length is set: prompt and answer end at {cfg.max_length} tokens")
    if lengths.max() >= cfg.max_length:
        raise InputError(
            f"the longest prompt has {lengths.max()} tokens and max_length={cfg.max_length} counts them: raise it, "
            "or set max_new_tokens"
        )
    return (cfg.max_length - lengths).astype(np.int32)


def _traced_budget(cfg: GenerationConfig, width: int, mask) -> tuple[int, jax.Array]:
    """Return the capacity for new tokens, which must be static, and the budget per prompt under the caller's jit."""
    prompts = mask.shape[0]
    lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    if not cfg.on("max_new_tokens"):
        if width >= cfg.max_length:
            raise InputError(f"ids has {width} columns and max_length={cfg.max_length} counts them: raise it")
        return cfg.max_length - width, jnp.minimum(cfg.max_length - lengths, cfg.max_length - width)
    budget = cfg.max_new_tokens
    if np.ndim(budget) == 1 and np.shape(budget) != (prompts,):
        raise InputError(f"max_new_tokens has {np.shape(budget)[0]} values for {prompts} prompts")
    if isinstance(budget, jax.core.Tracer):
        if cfg.max_length == GenerationConfig.max_length or cfg.max_length <= width:
            raise ConfigError(
                "max_new_tokens is traced under jit, where the room for tokens must be static: set max_length to the "
                f"most that prompt and answer may have, more than the {width} columns of ids; "
                f"it is {cfg.max_length}"
            )
        capacity = cfg.max_length - width
    else:
        capacity = int(np.max(budget))
    return capacity, jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (prompts,))
