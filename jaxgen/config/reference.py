"""What every option of the config means: the command's help and, by `python -m jaxgen.config.reference`, OPTIONS.md."""

from __future__ import annotations

from typing import NamedTuple

from jaxgen.config.availability import NEVER, UNBUILT, UNUSED_BY_THE_LOOP
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.options import TRACED, Decay, Knob, Watermark
from jaxgen.config.tables import Biases, IdSet, Sequences


class Option(NamedTuple):
    """An option: what it does, the class of transformers 4.41.1 that does it there, and what is other here."""

    text: str
    hf: str = ""
    differs: str = ""


_LENGTH = {
    "max_new_tokens": Option("the most tokens to generate; wins over max_length", "MaxLengthCriteria"),
    "max_length": Option(
        "the most tokens of prompt and answer together", "MaxLengthCriteria", "padding is not counted"
    ),
    "min_new_tokens": Option("no end before so many generated tokens", "MinNewTokensLengthLogitsProcessor"),
    "min_length": Option(
        "no end before so many tokens of prompt and answer together; min_new_tokens takes its place",
        "MinLengthLogitsProcessor",
        "padding is not counted",
    ),
    "max_time": Option(
        "seconds after which no more tokens are begun",
        "MaxTimeCriteria",
        "looked at after every few tokens; compiling counts",
    ),
    "stop_strings": Option(
        "texts that end a row when they end in its newest token; generate() needs tokenizer=",
        "StopStringCriteria",
        "bytes are compared, so characters of several tokens are found too, as in later releases",
    ),
    "eos_token_id": Option("the id that ends a row, or a list of them", "EosTokenCriteria"),
}
_CHOICE = {
    "do_sample": Option("draw tokens; otherwise the likeliest is taken"),
    "num_return_sequences": Option("sequences to draw per prompt", "", "the prompt is computed once"),
    "temperature": Option("divide the scores by this; above 1 is wilder", "TemperatureLogitsWarper"),
    "top_h": Option("draw from the likeliest tokens that make up this share of the entropy", "of release 5"),
    "top_k": Option("draw from the k likeliest tokens, ties included; 0 for all", "TopKLogitsWarper"),
    "top_p": Option(
        "draw from the likeliest tokens that make up this mass",
        "TopPLogitsWarper",
        "of a tie the highest ids are kept, as in a stable sort",
    ),
    "min_p": Option("draw from tokens at least this fraction as likely as the likeliest", "MinPLogitsWarper"),
    "typical_p": Option(
        "draw from the tokens nearest to the expected surprise that make up this mass", "TypicalLogitsWarper"
    ),
    "epsilon_cutoff": Option("draw from tokens at least this likely", "EpsilonLogitsWarper"),
    "eta_cutoff": Option("draw from tokens at least this likely, less where all are unlikely", "EtaLogitsWarper"),
}
_SCORES = {
    "guidance_scale": Option(
        "classifier-free guidance: how far to go from what follows the negative prompt, 1 is not at all",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "a negative prompt per prompt, or one for all; its padding is invisible",
    ),
    "sequence_bias": Option(
        "add a bias to tokens and to the last tokens of sequences, {(id, ...): bias}",
        "SequenceBiasLogitsProcessor",
        "a sequence as long as what there is, the token to come included, is biased too, as in later releases",
    ),
    "encoder_repetition_penalty": Option(
        "above 1 encourages the prompt's tokens",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "every sequence of a prompt gets it, as in later releases",
    ),
    "repetition_penalty": Option(
        "above 1 discourages tokens that were there before",
        "RepetitionPenaltyLogitsProcessor",
        "padding is not penalised",
    ),
    "no_repeat_ngram_size": Option("no sequence of so many tokens twice", "NoRepeatNGramLogitsProcessor"),
    "encoder_no_repeat_ngram_size": Option(
        "no sequence of so many tokens that the prompt has", "EncoderNoRepeatNGramLogitsProcessor"
    ),
    "bad_words_ids": Option(
        "sequences of ids that must not be said", "NoBadWordsLogitsProcessor", "as with sequence_bias"
    ),
    "forced_bos_token_id": Option("the token after a prompt of one token", "ForcedBOSTokenLogitsProcessor"),
    "forced_eos_token_id": Option(
        "the token, or one of those, that the last one must be", "ForcedEOSTokenLogitsProcessor"
    ),
    "remove_invalid_values": Option(
        "take NaN for 0 and infinities for the largest numbers", "InfNanRemoveLogitsProcessor"
    ),
    "exponential_decay_length_penalty": Option(
        "(start, factor): the longer after start tokens, the likelier an end",
        "ExponentialDecayLengthPenalty",
        "a banned end stays banned, as in later releases",
    ),
    "suppress_tokens": Option("ids that are never said", "SuppressTokensLogitsProcessor"),
    "begin_suppress_tokens": Option("ids that are not said first", "SuppressTokensAtBeginLogitsProcessor"),
    "forced_decoder_ids": Option(
        "[[position, id], ...]: the tokens at positions of the row, the prompt's counted", "ForceTokensLogitsProcessor"
    ),
    "watermarking_config": Option(
        "a WatermarkingConfig: mark the text statistically",
        "WatermarkLogitsProcessor",
        "a keyed hash of our own in place of torch's random numbers; jaxgen.WatermarkDetector finds it; its scheme and "
        "context are static",
    ),
    "renormalize_logits": Option("make the scores log-probabilities at the end", "LogitNormalization"),
}
_OUTPUT = {
    "output_scores": Option("keep what each token was chosen from: steps * rows * V * 4 bytes"),
    "output_logits": Option("keep what the model gave: as much"),
    "output_logprobs": Option(
        "'logits' or 'scores': keep the log-probability of each chosen token under the model's distribution, or under "
        "the one that it was chosen from"
    ),
    "top_logprobs": Option("and those of the n likeliest tokens"),
    "output_hidden_states": Option("keep the hidden states of all layers"),
    "output_attentions": Option("keep the attention weights of all layers"),
    "return_dict_in_generate": Option("nothing: there always is a GenerateOutput"),
    "pad_token_id": Option("the id behind a row's end; the first eos id where there is none"),
    "bos_token_id": Option("what to begin with where there is no prompt"),
    "prefill_chunk_size": Option("run the prompts in pieces of so many tokens, to save memory", "of later releases"),
    "use_cache": Option("True is all there is"),
    "cache_implementation": Option("'static' is all there is"),
}
_BEAMS = {
    "num_beams": Option("beams of beam search", "BeamSearchScorer"),
    "num_beam_groups": Option("groups of beams that shall differ"),
    "diversity_penalty": Option("how much groups shall differ", "HammingDiversityLogitsProcessor"),
    "length_penalty": Option("the exponent of the length in a beam's score"),
    "early_stopping": Option("when beam search ends"),
    "penalty_alpha": Option("how much contrastive search shuns repetition"),
    "num_assistant_tokens": Option("tokens that an assistant drafts"),
    "num_assistant_tokens_schedule": Option("how that number changes"),
    "max_matching_ngram_size": Option("tokens that a prompt lookup compares"),
}
GROUPS = {
    "Length and end": _LENGTH,
    "Choosing a token": _CHOICE,
    "Scores, in the order in which they are applied": _SCORES,
    "Output and input": _OUTPUT,
    "Of modes that are not built yet: a value that chooses such a mode is refused, others do nothing": _BEAMS,
}
OPTIONS = {name: option for group in GROUPS.values() for name, option in group.items()}


def reference() -> str:
    """Return the reference of all options as Markdown."""
    lines = [
        "# Options",
        "",
        "The fields of `GenerationConfig`, by transformers' names. The value of a *traced* option is an argument of",
        "the compiled program: changing it compiles nothing (lists of ids have room for 4, 8, 16, ... of them). A",
        "*static* one shapes the program, and so does whether a traced one is on; what is *host* is settled by the",
        "call itself, before or between runs of the program.",
        "*Per prompt* is how to give each of two prompts a value of its own; in arrays of ids -1 stands for none. This",
        "page is made by `python -m jaxgen.config.reference`.",
    ]
    for title, options in GROUPS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| option | type | default | per prompt | kind | what | transformers |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_line(name, option) for name, option in options.items()]
    lines += ["", "## Refused by name", "", "| option | why |", "|---|---|"]
    lines += [f"| `{name}` | not built yet |" for name in UNBUILT]
    lines += [f"| `{name}` | {text} |" for name, text in NEVER.items()]
    return "\n".join(lines) + "\n"


def _line(name: str, option: Option) -> str:
    field = GenerationConfig.__dataclass_fields__[name]
    traced = TRACED.get(name)
    kind = "traced" if traced or name == "stop_strings" else "static"
    if name in UNUSED_BY_THE_LOOP and name not in ("stop_strings", "max_new_tokens"):
        kind = "host"
    source = f"`{option.hf}`" if option.hf and " " not in option.hf else option.hf
    source += f"; {option.differs}" if option.differs and source else option.differs
    default = "" if field.default is None else f"`{field.default!r}`"
    per_prompt = _PER_PROMPT.get(type(traced), "") if getattr(traced, "per_prompt", True) else ""
    return f"| `{name}` | {_type(name)} | {default} | {per_prompt} | {kind} | {option.text} | {source} |"


def _type(name: str) -> str:
    traced = TRACED.get(name)
    if isinstance(traced, Knob):
        return traced.dtype.__name__
    if traced is not None:
        return _TYPES[type(traced)]
    annotation = str(GenerationConfig.__dataclass_fields__[name].type)
    return annotation.removesuffix(" | None").replace("tuple[str, ...]", "list").replace(" | ", " or ")


_TYPES = {
    IdSet: "id or ids",
    Sequences: "lists of ids",
    Biases: "dict",
    Decay: "(int, float)",
    Watermark: "WatermarkingConfig or dict",
}


_PER_PROMPT = {
    Knob: "`[1, 2]`",
    IdSet: "`[[1, 2], [3]]`",
    Sequences: "`[[[1, 2]], [[3, 4], [5, 6]]]`",
    Biases: "`[{(1,): 0.5}, {(1, 2): -1.0}]`",
    Decay: "`([1, 2], [1.5, 2.0])`",
}


if __name__ == "__main__":
    print(reference(), end="")
