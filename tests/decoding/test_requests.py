"""Requests are self-contained: any subset of a run's prompts, in any order, generates the same tokens as the run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, History, StepHook, StopReason, TokenAutomaton
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.extensions import Extensions, as_pytree
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.generation import extensions_of
from jaxgen.core.request.driver import prefill_only, run_whole
from jaxgen.core.request.prepare import CallInputs, Prepared, prepare
from tests.support.byte_model import IDS, MASK, MODEL, PARAMS
from tests.support.models import slow
from tests.support.tokenizers import byte_level

CFG = GenerationConfig(model=MODEL, max_new_tokens=6, pad_token_id=0, eos_token_id=[1, 2])
CHOSEN = [4, 1, 3]
"""The prompts that are selected, in this order."""

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constraints": {"num_beams": 3, "force_words_ids": [[45, 47]]},
    "contrastive": {"penalty_alpha": [0.6, 0.5, 0.4, 0.3, 0.2, 0.1], "top_k": 4},
    "dola": {"dola_layers": [0], "repetition_penalty": 1.2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1, "assistant_confidence_threshold": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]},
}


def per_prompt_options() -> dict[str, dict]:
    """Return the per-prompt options that sampling uses, with a different value for each prompt."""
    found = {}
    for name, option in OPTIONS.items():
        if (
            option.kind.per_prompt
            and option.stage
            and not option.refused
            and (option.modes is None or "sample" in option.modes)
        ):
            values = [option.examples[number % len(option.examples)] for number in range(len(IDS))]
            found[name] = {name: option.kind.per_prompt_value(values)}
    return found


def call(cfg: GenerationConfig, extensions: Extensions | None = None, **inputs) -> Prepared:
    key = jax.random.key(3) if cfg.do_sample else None
    given = CallInputs(IDS, key, attention_mask=MASK, **inputs)
    return prepare(PARAMS, cfg, given, extensions or Extensions(), eager=True, more_prompts=False)


def check(cfg: GenerationConfig, extensions: Extensions | None = None, **inputs) -> None:
    """Check that the chosen prompts give the same results alone as in the whole run."""
    prepared, mode = call(cfg, extensions, **inputs), mode_of(cfg)
    whole = run_whole(prepared.run, prepared.request, mode=mode)
    request = jax.tree.map(lambda x: x[np.array(CHOSEN)], prepared.request.complete())
    run = dataclasses.replace(prepared.run, prompts=len(CHOSEN))
    part = run_whole(run, request, mode=mode)
    copies = len(whole.tokens) // len(IDS)
    rows = np.concatenate([np.arange(prompt * copies, (prompt + 1) * copies) for prompt in CHOSEN])
    for name in ("tokens", "lengths", "reasons"):
        np.testing.assert_array_equal(getattr(part, name), np.asarray(getattr(whole, name))[rows], err_msg=name)
    assert np.asarray(part.lengths).max() > 1, "nothing is compared"


@pytest.mark.parametrize("name", ["greedy", *slow(*[name for name in MODES if name != "greedy"])])
def test_selected_prompts_are_answered_the_same(name):
    check(CFG.replace(**MODES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", per_prompt_options())
def test_selected_prompts_with_own_values(name):
    check(CFG.replace(do_sample=True, **per_prompt_options()[name]))


@pytest.mark.slow
def test_selected_prompts_with_several_own_values():
    temperatures, ends = [0.7, 0.8, 0.9, 1.0, 1.1, 1.2], [[1], [2], [3, 4], [1, 2], [60], [70, 80]]
    check(CFG.replace(do_sample=True, temperature=temperatures, eos_token_id=ends, max_new_tokens=[3, 4, 5, 6, 5, 4]))


OWN_STRINGS = [["b", "ca"], ["de", "ff"], None, ["3", "7"], None, ["Q", "AB"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "strings"),
    [
        ({}, OWN_STRINGS),
        *slow(
            ({}, ["zz", "QQ", "3"]),
            (MODES["beams"] | {"do_sample": False}, OWN_STRINGS),
            (MODES["lookup"], OWN_STRINGS),
        ),
    ],
    ids=["own", "shared", "beams", "lookup"],
)
def test_selected_prompts_with_own_grammars_and_stop_strings(options, strings):
    tok = byte_level()
    patterns = ["[a-c]+", "[d-f]+x", "(yes|no)", "[0-9]{2,4}", "z+", "[A-Z]{3,8}"]
    automaton = TokenAutomaton.stack([TokenAutomaton.from_regex(p, tok, vocab_size=MODEL.vocab_size) for p in patterns])
    cfg = CFG.replace(**{"num_beams": 1, "do_sample": True, **options}, stop_strings=strings)
    extensions = dataclasses.replace(extensions_of(cfg, None, None, tok, None), allowed=automaton)
    check(cfg, extensions)


@pytest.mark.slow
def test_any_selection_of_prompts_with_own_inputs():
    """Any three prompts, in any order and even repeated, give the same results as in the whole run."""
    tok, rng = byte_level(), np.random.default_rng(5)
    patterns = ["[a-c]+", "[d-f]+x", "(yes|no)", "[0-9]{2,4}", "z+", "[A-Z]{3,8}"]
    automaton = TokenAutomaton.stack([TokenAutomaton.from_regex(p, tok, vocab_size=MODEL.vocab_size) for p in patterns])
    cfg = CFG.replace(
        do_sample=True,
        num_return_sequences=2,
        stop_strings=OWN_STRINGS,
        temperature=[0.7, 0.8, 0.9, 1.0, 1.1, 1.2],
        eos_token_id=[[1], [2], [3, 4], [1, 2], [60], [70, 80]],
        max_new_tokens=[6, 4, 5, 6, 5, 4],
    )
    extensions = dataclasses.replace(extensions_of(cfg, None, None, tok, None), allowed=automaton)
    prepared, mode = call(cfg, extensions), mode_of(cfg)
    whole = run_whole(prepared.run, prepared.request, mode=mode)
    assert StopReason.STOP_STRING in whole.reasons.tolist()
    complete = prepared.request.complete()
    for chosen in [rng.permutation(6)[:3] for _ in range(6)] + [rng.integers(0, 6, 3) for _ in range(4)]:
        part = run_whole(dataclasses.replace(prepared.run, prompts=3), complete.select(jnp.asarray(chosen)), mode=mode)
        rows = (chosen[:, None] * 2 + np.arange(2)).ravel()
        for name in ("tokens", "lengths", "reasons"):
            np.testing.assert_array_equal(getattr(part, name), np.asarray(getattr(whole, name))[rows], err_msg=name)


@pytest.mark.slow
def test_selected_prompts_with_guidance_and_extensions():
    class Sums(StepHook):
        def init(self, history: History):
            return jnp.zeros(history.length.shape, jnp.float32)

        def after(self, state, history, output):
            return dataclasses.replace(output, logits=output.logits + 0.1 * state[:, None]), state + 1

    def processor(history: History, scores):
        return scores - 0.01 * history.length[:, None].astype(jnp.float32)

    def criterion(history: History, scores):
        return history.last(1)[:, 0] > 300

    cfg = CFG.replace(do_sample=True, guidance_scale=[1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    functions = as_pytree(processor), as_pytree(criterion)
    extensions = Extensions((functions[0],), (functions[1],), hook=as_pytree(Sums()))
    negative = np.random.default_rng(1).integers(40, 120, (6, 4), np.int32)
    check(cfg, extensions, negative_prompt_ids=negative, negative_prompt_attention_mask=np.ones_like(negative))


@pytest.mark.slow
def test_selected_prompts_continue_their_own_caches():
    prepared = call(CFG)
    check(CFG, cache=prefill_only(prepared.run, prepared.request))
