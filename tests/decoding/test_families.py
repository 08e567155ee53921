"""Decode modes and features with models of several families."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import (
    GenerationConfig,
    StepHook,
    embed,
    fuse_projections,
    generate,
    prefill,
    score,
    warmup,
)
from jaxgen.core.model.causal_lm import forward
from jaxgen.engine.engine import Engine
from jaxgen.export.generate import export_generate
from tests.support.families import CONFIGS, family_config
from tests.support.models import all_generated, last_logits, left_pad, model_config, random_params, slow

MODELS = {name: family_config(name) for name in CONFIGS}
PARAMS = {name: random_params(model) for name, model in MODELS.items()}
ROWS = [[5, 17, 9, 33, 60, 2, 71, 8, 44], [12, 3, 50], [90, 41, 41, 7, 66]]
IDS, MASK = left_pad(ROWS)
NEW = 8
KEY = jax.random.key(4)
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(3))
ASSISTANT = model_config()
MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "assisted": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "DoLa": {"dola_layers": "high", "repetition_penalty": 1.2},
}
SAME_AS_GREEDY = ("assisted", "prompt lookup", "early exit")
each_family = pytest.mark.parametrize("family", CONFIGS)
# A row cannot change from the short to the long factors, so prompts in pieces and programs for several lengths are
# refused.
each_family_in_pieces = pytest.mark.parametrize("family", [name for name in CONFIGS if name != "phi3-long"])


def config(family, **fields):
    return GenerationConfig(model=MODELS[family], max_new_tokens=NEW, pad_token_id=0, **fields)


def run(family, mode="greedy", rows=(0, 1, 2), params=None, **given):
    own = {name: value for name, value in given.items() if name in GenerationConfig.__dataclass_fields__}
    more = {name: value for name, value in given.items() if name not in own}
    if mode == "assisted":
        more["assistant"] = (random_params(ASSISTANT), GenerationConfig(model=ASSISTANT))
    rows = np.asarray(rows)
    cfg = config(family, **MODES[mode], **own)
    inputs = more.pop("ids", IDS[rows]), KEYS[rows] if cfg.do_sample else None, cfg
    mask = more.pop("attention_mask", MASK[rows])
    return generate(PARAMS[family] if params is None else params, *inputs, attention_mask=mask, **more)


def check_equal(out, expected):
    assert all_generated(out) == all_generated(expected)


def embeddings(family, ids=IDS):
    """Return what `inputs_embeds` must be: in Gemma's models, the rows of the table times the root of their size."""
    factor = 32**0.5 if family.startswith("gemma") else 1
    return np.asarray(PARAMS[family]["model"]["embed_tokens"]["weight"])[ids] * np.float32(factor)


@pytest.mark.parametrize("family", ["gemma3", *slow("gemma2", "phi3", "phi3-long", "granite", "smollm3", "olmo3")])
def test_greedy_tokens_are_those_without_a_cache(family):
    for row, tokens in enumerate(all_generated(run(family))):
        text = list(ROWS[row])
        for token in tokens:
            logits = last_logits(MODELS[family], PARAMS[family], embeddings(family, np.asarray(text)))
            assert int(jnp.argmax(logits)) == token
            text.append(token)


# Three families for each mode, so that each family has three modes or more.
MIXED = [(family, mode) for m, mode in enumerate(MODES) for f, family in enumerate(CONFIGS) if (f - 3 * m) % 7 < 3]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), MIXED)
def test_rows_do_not_depend_on_others(family, mode):
    out = run(family, mode)
    copies = out.lengths.shape[0] // 3
    for row in range(3):
        alone = run(family, mode, [row], ids=[ROWS[row]], attention_mask=None)
        assert all_generated(alone) == all_generated(out)[row * copies : (row + 1) * copies]
    if mode in SAME_AS_GREEDY:
        check_equal(out, run(family))


@pytest.mark.slow
@each_family_in_pieces
def test_slots_and_chunks(family):
    mode = "DoLa" if family in ("granite", "gemma3") else "sampled"
    expected = run(family, mode)
    check_equal(run(family, mode, slots=2), expected)
    check_equal(run(family, mode, slots=2, prefill_chunk_size=4), expected)
    check_equal(run(family, mode, prefill_chunk_size=3), expected)


@pytest.mark.slow
@each_family_in_pieces
def test_engine(family):
    cfg = config(family, **MODES["sampled"])
    with Engine(PARAMS[family], cfg, KEY, slots=2, prompt_width=16) as engine:
        handles = [engine.submit({"ids": row, "key": key}) for row, key in zip(ROWS, KEYS, strict=True)]
        found = [handle.result(300)[0].tokens for handle in handles]
    assert found == all_generated(run(family, "sampled"))


@pytest.mark.slow
@each_family_in_pieces
def test_caches(family):
    expected = run(family)
    cache = prefill(PARAMS[family], [ROWS[0][:5]], config(family))
    check_equal(run(family, rows=[0], ids=[ROWS[0][5:]], attention_mask=None, cache=cache), run(family, rows=[0]))
    tails = left_pad([[3, 4], [9], [1, 2, 3]])
    shared = run(family, ids=tails[0], attention_mask=tails[1], cache=cache)
    whole, mask = left_pad([ROWS[0][:5] + tail for tail in ([3, 4], [9], [1, 2, 3])])
    check_equal(shared, run(family, ids=whole, attention_mask=mask))
    narrow = run(family, cache_dtype="int8")
    for row in range(3):
        alone = run(family, rows=[row], ids=[ROWS[row]], attention_mask=None, cache_dtype="int8")
        assert all_generated(alone)[0] == all_generated(narrow)[row]
    more = run(family, ids=[[5]] * 3, attention_mask=None, cache=expected.cache)
    whole, mask = left_pad([row + new + [5] for row, new in zip(ROWS, all_generated(expected), strict=True)])
    check_equal(more, run(family, ids=whole, attention_mask=mask))


class Doubled(StepHook):
    def before(self, state, history, inputs):
        return inputs.replace(inputs_embeds=inputs.inputs_embeds * 2.0), state


@pytest.mark.slow
@each_family
def test_guidance_embeddings_and_hooks(family):
    check_equal(run(family, inputs_embeds=embeddings(family)), run(family))
    same = {"negative_prompt_ids": IDS, "negative_prompt_attention_mask": MASK}
    check_equal(run(family, guidance_scale=3.0, **same), run(family))
    guided = run(family, guidance_scale=3.0, negative_prompt_ids=[[7, 7, 7]] * 3)  # enough tokens for long factors
    assert all_generated(guided) != all_generated(run(family))
    hooked = run(family, hook=Doubled())
    first = forward(MODELS[family], PARAMS[family], None, inputs_embeds=2 * embeddings(family, np.asarray([ROWS[0]])))
    assert all_generated(hooked)[0][0] == int(jnp.argmax(first.logits[0, -1]))
    check_equal(run(family, params=fuse_projections(PARAMS[family])), run(family))


@pytest.mark.slow
@each_family
def test_scores_and_vectors(family):
    model, params, cfg = MODELS[family], PARAMS[family], config(family)
    out = run(family, "sampled", output_logprobs="logits")
    texts, mask = left_pad([row + new for row, new in zip(ROWS, all_generated(out), strict=True)])
    scored = np.asarray(score(params, texts, cfg, attention_mask=mask).logprobs)
    np.testing.assert_allclose(scored[:, -NEW:], out.logprobs, atol=2e-4)
    states = forward(model, params, jnp.asarray([ROWS[1]]), output_hidden_states=True).hidden_states
    assert states is not None
    last = np.asarray(states[-1][0, -1])
    vectors = np.asarray(embed(params, IDS, cfg, attention_mask=MASK))
    np.testing.assert_allclose(vectors[1], last / np.linalg.norm(last), atol=1e-5)


@pytest.mark.slow
@each_family_in_pieces
def test_exported_and_warmed_up_programs(family):
    cfg = config(family)
    programs = export_generate(PARAMS[family], cfg, batch=3, prompt_width=IDS.shape[1])
    inputs = programs.inputs | {"ids": IDS, "attention_mask": MASK.astype(bool)}
    found = jax.jit(programs.programs["generate"].call)(programs.params(PARAMS[family]), inputs)
    np.testing.assert_array_equal(found["sequences"], run(family).sequences)
    if family != "phi3":  # warmup rounds lengths up, here beyond the context or the short factors' length
        assert warmup(PARAMS[family], cfg, [IDS.shape[1]], [NEW], prompts=3) == 1
