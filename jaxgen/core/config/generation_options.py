"""The record of every option of `GenerationConfig`; everything else about an option is derived from its record.

The options for length and for choosing tokens are in sampling_options.py; all others are here.

Options that have a `stage` are logits processors or warpers. Within a stage, they run in the order listed, as in
transformers. CONTRIBUTING.md shows how to add an option. kinds.py parses and checks the values, reference.py writes
docs/options.md, and cli/options.py creates the command's flags.

This module does not import jax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxgen.core.config.constraints import Constraints, ForcedWords, PhrasalConstraint
from jaxgen.core.config.kinds import (
    Anything,
    DecayPair,
    Flag,
    Integer,
    Kind,
    Layers,
    Number,
    OneOf,
    Real,
    StaticInteger,
    TokenId,
)
from jaxgen.core.config.option import (
    AFTER_GRAMMAR,
    ASSISTED,
    BEAMS,
    BEFORE_GRAMMAR,
    CONSTRAINED,
    CONTRASTIVE,
    DOLA,
    GREEDY,
    GROUP_BEAM,
    GUIDANCE,
    LENGTH,
    MODES,
    OUTPUT,
    PROMPT_LOOKUP,
    REFUSED,
    RENORMALIZE,
    SAMPLE,
    SCORES,
    Option,
    declare,
)
from jaxgen.core.config.sampling_options import SamplingOptions
from jaxgen.core.config.tables import PlacedTokens, SequenceBias, TokenIds, TokenSequences

_score = functools.partial(declare, group=SCORES, stage=BEFORE_GRAMMAR, command=True)
_late_score = functools.partial(declare, group=SCORES, stage=AFTER_GRAMMAR, command=True)
_output = functools.partial(declare, group=OUTPUT)
_beams = functools.partial(declare, group=MODES, modes=BEAMS)
_assisted = functools.partial(declare, group=MODES, modes=(ASSISTED,), command=True)
_refused = functools.partial(declare, Anything(), "", group=REFUSED)
_OTHER_TOKENIZER = "is for an assistant with a different tokenizer, which is not offered: leave it out"


class _Watermark(Kind):
    """A `WatermarkingConfig` or a dict of its fields. The program receives the config as a pytree."""

    traced = True
    type_name = "WatermarkingConfig or dict"

    def parse(self, name: str, value: Any) -> Any:
        from jaxgen.core.config.watermarking import WatermarkingConfig  # a pytree, so this import loads jax

        if isinstance(value, Mapping):
            return WatermarkingConfig.from_hf(value)
        if not isinstance(value, WatermarkingConfig):
            raise TypeError(f"{name} must be a WatermarkingConfig or a dict, got {type(value).__name__}")
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationOptions(SamplingOptions):
    """The options of `GenerationConfig`, in the order of the option reference."""

    # Logits processors, in the order in which they run
    guidance_scale: Number | None = _score(
        Real(1.0, optional=True),
        default=None,
        doc="classifier-free guidance: how far to move the scores away from those of the negative prompt; 1 is off",
        stage=GUIDANCE,
        hf="UnbatchedClassifierFreeGuidanceLogitsProcessor",
        differs="one negative prompt per prompt, or one for all; its padding is invisible",
        examples=(1.5, 0.5),
    )
    sequence_bias: Any = _score(
        SequenceBias(),
        "add a bias to tokens, and to the last token of sequences, {(id, ...): bias}",
        hf="SequenceBiasLogitsProcessor",
        differs="also applied if the sequence's other tokens are the whole row, as in later releases",
        of_tokens=True,
        command=", here [[[id, ...], bias], ...]",
        examples=({(11, 12): 0.5}, {(13,): -0.5, (14, 15): 1.0}),
    )
    diversity_penalty: Number = _score(
        Real(0.0, least=0),
        "subtract this from a token's score for each beam of an earlier group that chose it in the same step",
        hf="HammingDiversityLogitsProcessor",
        modes=(GROUP_BEAM,),
        examples=(0.5, 1.5),
    )
    encoder_repetition_penalty: Number = _score(
        Real(1.0, above=0),
        "above 1: encourage tokens of the prompt; below 1: discourage them",
        hf="EncoderRepetitionPenaltyLogitsProcessor",
        differs="applied to every sequence of a prompt, as in later releases",
        of_tokens=True,
        examples=(1.1, 1.3),
    )
    repetition_penalty: Number = _score(
        Real(1.0, above=0),
        "above 1: discourage tokens that occurred before, in the prompt or the answer",
        hf="RepetitionPenaltyLogitsProcessor",
        differs="padding is not penalized",
        of_tokens=True,
        examples=(1.1, 1.3),
    )
    frequency_penalty: Number = _score(
        Real(0.0),
        "subtract this from a token's score for each time that it was generated; OpenAI's range is -2 to 2",
        since="jaxgen",
        examples=(0.5, -0.5),
    )
    presence_penalty: Number = _score(
        Real(0.0),
        "subtract this from the score of every token that was generated before; OpenAI's range is -2 to 2",
        since="jaxgen",
        examples=(0.5, -0.5),
    )
    no_repeat_ngram_size: int = _score(
        StaticInteger(0, optional=True),
        "no n-gram of this size occurs twice in prompt and answer",
        hf="NoRepeatNGramLogitsProcessor",
        of_tokens=True,
        examples=(3,),
    )
    encoder_no_repeat_ngram_size: int = _score(
        StaticInteger(0, optional=True),
        "no n-gram of this size from the prompt occurs again",
        hf="EncoderNoRepeatNGramLogitsProcessor",
        of_tokens=True,
        examples=(3,),
    )
    bad_words_ids: Any = _score(
        TokenSequences(),
        "sequences of ids that are never generated",
        hf="NoBadWordsLogitsProcessor",
        differs="also applied if the sequence's other tokens are the whole row, as in later releases",
        of_tokens=True,
        examples=([[11], [12, 13]], [[14, 15]]),
    )
    min_length: Number = _score(
        Integer(0, least=0),
        "the minimum number of tokens of prompt and answer together before an eos token; ignored if min_new_tokens is "
        "set",
        group=LENGTH,
        hf="MinLengthLogitsProcessor",
        differs="padding is not counted",
        needs=("eos_token_id",),
        instead_of="min_new_tokens",
        examples=(1, 2),
    )
    min_new_tokens: Number | None = _score(
        Integer(least=0),
        "the minimum number of tokens to generate before an eos token",
        group=LENGTH,
        hf="MinNewTokensLengthLogitsProcessor",
        needs=("eos_token_id",),
        instead_of="min_length",
        examples=(1, 2),
    )
    forced_bos_token_id: Number | None = _late_score(
        TokenId(),
        "force this token after a one-token prompt",
        hf="ForcedBOSTokenLogitsProcessor",
        of_tokens=True,
        examples=(5, 6),
    )
    forced_eos_token_id: Any = _late_score(
        TokenIds(),
        "force the last token that the budget allows to be this id, or one of these",
        hf="ForcedEOSTokenLogitsProcessor",
        examples=([1, 2], [3, 4, 5]),
    )
    remove_invalid_values: bool = _late_score(
        Flag(),
        "replace NaN by 0 and infinities by the largest finite numbers",
        hf="InfNanRemoveLogitsProcessor",
        examples=(True,),
    )
    exponential_decay_length_penalty: tuple | None = _late_score(
        DecayPair(),
        "(start, factor): after start generated tokens, raise the eos scores exponentially",
        hf="ExponentialDecayLengthPenalty",
        differs="a banned eos stays banned, as in later releases",
        needs=("eos_token_id",),
        command=", here [start, factor]",
        examples=((2, 1.1), (3, 1.2)),
    )
    suppress_tokens: Any = _late_score(
        TokenIds(), "tokens that are never generated", hf="SuppressTokensLogitsProcessor", examples=([9], [8, 7])
    )
    begin_suppress_tokens: Any = _late_score(
        TokenIds(),
        "tokens that are never generated first",
        hf="SuppressTokensAtBeginLogitsProcessor",
        examples=([9], [8, 7]),
    )
    forced_decoder_ids: Any = _late_score(
        PlacedTokens(),
        "[[position, id], ...]: the tokens at these positions of the row, counted from the prompt's first token",
        hf="ForceTokensLogitsProcessor",
        of_tokens=True,
        examples=([[5, 20]], [[4, 21], [6, 22]]),
    )
    watermarking_config: Any = _late_score(
        _Watermark(),
        "mark the text statistically, with the parameters in a WatermarkingConfig",
        hf="WatermarkLogitsProcessor",
        differs="a keyed hash replaces torch's random numbers; jaxgen.WatermarkDetector finds the mark; scheme and "
        "context width are static",
        of_tokens=True,
        command=', such as {"bias": 2.5}',
        examples=({"bias": 1.0}, {"bias": 2.0, "greenlist_ratio": 0.5, "hashing_key": 7}),
    )
    renormalize_logits: bool = _score(
        Flag(),
        "normalize the final scores to log-probabilities",
        stage=RENORMALIZE,
        hf="LogitNormalization",
        examples=(True,),
    )
    # Output and input
    output_scores: bool = _output(
        Flag(), "return the scores that each token was chosen from: steps * rows * V * 4 bytes"
    )
    output_logits: bool | None = _output(Flag(None), "return the model's logits of each step (as large as the scores)")
    output_logprobs: str | None = _output(
        OneOf(None, "logits", "scores"),
        "return each chosen token's log-probability: with 'logits', under the model's distribution; with 'scores', "
        "under the distribution that the token was chosen from",
        since="jaxgen",
    )
    top_logprobs: int = _output(
        StaticInteger(0), "with output_logprobs, also return the n highest log-probabilities", since="jaxgen"
    )
    output_hidden_states: bool = _output(Flag(), "return the hidden states of all layers")
    output_attentions: bool = _output(Flag(), "return the attention weights of all layers")
    output_routed_experts: bool = _output(
        Flag(), "return the experts of each token in all layers with experts", since="jaxgen"
    )
    return_dict_in_generate: bool = _output(Flag(), "no effect: the result is always a GenerateOutput", host=True)
    pad_token_id: Number | None = _output(
        TokenId(per_prompt=False), "the id that pads a row after its end; by default the first eos id", examples=(0, 1)
    )
    bos_token_id: int | None = _output(StaticInteger(None), "the token to start from if no prompt is given", host=True)
    adapter: Any = _output(
        Integer(-1, least=-1),
        "the adapter that each prompt uses, by its index in load_adapter; -1 for none",
        since="jaxgen",
        examples=(0, 1),
    )
    slots: int | None = _output(
        StaticInteger(None, least=1),
        "decode at most this many sequences at a time; when one ends, the next one takes its place",
        since="jaxgen",
        modes=(GREEDY, SAMPLE, DOLA),
    )
    prefill_chunk_size: int | None = _output(
        StaticInteger(None, least=1),
        "process prompts in pieces of this many tokens, to save memory",
        since="later",
        command=True,
    )
    cache_dtype: str | None = _output(
        OneOf(None, "int8"),
        "store keys and values in 8 bits with a scale for each head and token: half the memory of 16 bits",
        since="jaxgen",
        command=True,
    )
    token_healing: bool | None = _output(
        Flag(None),
        "remove each prompt's last token and make the answer begin with that token's text, spelled with any tokens",
        since="later",
        differs="generate() needs tokenizer=; the search itself chooses these tokens, so no other text is possible",
        host=True,
        command="; for prompts without a chat template",
    )
    use_cache: bool = _output(
        Flag(True, optional=True),
        "only True is offered",
        refused="is not offered: generation always uses the cache; leave it out",
    )
    cache_implementation: str | None = _output(
        Anything(),
        "only 'static' is offered",
        host=True,
        refused="is not offered: use 'static' or leave it out",
        offered=("static",),
    )
    # Other decode modes
    num_beams: int = _beams(
        StaticInteger(1, least=1),
        "the number of beams: continuations of each prompt that are extended side by side",
        hf="BeamSearchScorer",
        command=True,
    )
    num_beam_groups: int = _beams(
        StaticInteger(1, least=1),
        "the number of groups that the beams are divided into; diversity_penalty keeps the groups apart",
        modes=(GROUP_BEAM,),
        command=True,
    )
    length_penalty: Number = _beams(
        Real(1.0),
        "a beam's score is the sum of its tokens' scores, divided by its length to this power; above 0 favors longer "
        "texts",
        command=True,
        examples=(0.5, 2.0),
    )
    early_stopping: bool | str = _beams(
        OneOf(False, True, "never"),
        "when to end a search that has num_beams ended beams: True, at once; False, once no running beam is better at "
        "its current length; 'never', once none can become better at any length",
        command=True,
    )
    constraints: Any = _beams(
        Constraints(),
        "a list of PhrasalConstraint and DisjunctiveConstraint that each text must meet; needs num_beams > 1",
        modes=(CONSTRAINED,),
        hf="ConstrainedBeamSearchScorer",
        differs="user-defined constraint classes are not supported",
        of_tokens=True,
        examples=([PhrasalConstraint([5, 6])], [PhrasalConstraint([7]), PhrasalConstraint([8, 9])]),
    )
    force_words_ids: Any = _beams(
        ForcedWords(),
        "phrases that each text must contain, [[id, ...], ...], or lists of alternatives, [[[id, ...], ...], ...]; "
        "needs num_beams > 1",
        modes=(CONSTRAINED,),
        hf="ConstrainedBeamSearchScorer",
        of_tokens=True,
        command=True,
        examples=([[5, 6]], [[7], [8, 9]]),
    )
    penalty_alpha: Number | None = declare(
        Real(also_off=0.0, least=0),
        "contrastive search, with top_k > 1: how much a token's similarity to earlier tokens counts against "
        "its probability; 0 is off, the paper uses 0.6",
        group=MODES,
        modes=(CONTRASTIVE,),
        command=" (with --no-do-sample)",
        examples=(0.6, 0.3),
    )
    prompt_lookup_num_tokens: int | None = _assisted(
        StaticInteger(None, least=1),
        "prompt lookup: find the first occurrence of the row's last tokens, and draft up to this many of the tokens "
        "that followed there",
        hf="PromptLookupCandidateGenerator",
        modes=(PROMPT_LOOKUP,),
    )
    max_matching_ngram_size: int | None = _assisted(
        StaticInteger(None, least=1),
        "prompt lookup: the length of the n-gram to look up, 2 by default; if it never occurs, shorter ones are tried",
        hf="PromptLookupCandidateGenerator",
        modes=(PROMPT_LOOKUP,),
    )
    num_assistant_tokens: int = _assisted(
        StaticInteger(5, least=1, optional=True),
        "the number of tokens that a draft model drafts at once",
        hf="AssistedCandidateGenerator",
        differs="taken from the call's config or, if not set there, from the assistant's",
    )
    num_assistant_tokens_schedule: str = _assisted(
        OneOf("heuristic", "heuristic_transient", "constant"),
        "with 'heuristic', num_assistant_tokens grows by 2 if all drafted tokens were accepted, and otherwise drops by "
        "1; with 'constant', it stays the same",
        hf="AssistedCandidateGenerator",
        differs="each row has its own number, which is reset in each call and at most doubles",
    )
    assistant_confidence_threshold: Number | None = _assisted(
        Real(also_off=0.0, least=0, most=1),
        "stop drafting after a token that the draft model finds less likely than this",
        hf="ConfidenceCriteria",
        since="later",
        examples=(0.3, 0.5),
    )
    assistant_early_exit: int | None = _assisted(
        StaticInteger(None, least=1), "draft with this many of the model's own first layers", since="later"
    )
    dola_layers: str | tuple[int, ...] | None = declare(
        Layers(),
        "DoLa: the layers that the last layer is contrasted with",
        group=MODES,
        modes=(DOLA,),
        since="4.43",
        differs="each row chooses its own layer",
        command=True,
    )
    # Options that are refused
    assistant_lookbehind: int | None = _refused(since="later", refused=_OTHER_TOKENIZER)
    target_lookbehind: int | None = _refused(since="later", refused=_OTHER_TOKENIZER)
    is_assistant: bool | None = _refused(
        since="later", refused="is not needed: pass assistant=(params, cfg) to generate; leave it out", offered=(False,)
    )
    decoder_start_token_id: int | None = declare(
        StaticInteger(None), "", group=REFUSED, refused="is for encoder-decoder models: leave it out"
    )
    low_memory: bool | None = _refused(
        refused="is not offered: rows already share the prompt's cache; leave it out", offered=(False,)
    )
    generation_kwargs: Mapping | None = _refused(refused="has no effect on anything: leave it out", offered=({},))
    cache_config: Any = _refused(since="later", refused="is not offered: the cache has no settings; leave it out")
    compile_config: Any = _refused(since="later", refused="is not offered: everything is compiled by XLA; leave it out")
    disable_compile: bool | None = _refused(
        since="later",
        refused="is not offered: use jax.disable_jit() to inspect single steps; leave it out",
        offered=(False,),
    )
    max_cache_len: int | None = _refused(
        since="5", refused="is not offered: the cache is as long as the request needs; leave it out"
    )
    return_legacy_cache: bool | None = _refused(
        since="later", refused="is not offered: GenerateOutput.to_hf() returns tuples; leave it out", offered=(False,)
    )


OPTIONS: dict[str, Option] = {
    field.name: Option(name=field.name, default=field.default, **field.metadata)
    for field in dataclasses.fields(GenerationOptions)
}
# Options that store values of each step, except log-probabilities
RECORDS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions", "output_routed_experts")
TRACED: dict[str, Option] = {name: option for name, option in OPTIONS.items() if option.kind.traced}


def of_stage(stage: str) -> list[Option]:
    """Return the processors of a stage, in the order in which they run."""
    return [option for option in OPTIONS.values() if option.stage == stage]
