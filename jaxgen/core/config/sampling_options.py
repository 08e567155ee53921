"""Options for sampling and for the length of the generated text; see generation_options.py."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxgen.core.config.kinds import Flags, Integer, Number, Real, Seconds, StaticInteger, Text
from jaxgen.core.config.option import CHOICE, CONTRASTIVE, LENGTH, SAMPLE, WARP, declare
from jaxgen.core.config.tables import TokenIds

_length = functools.partial(declare, group=LENGTH)
_choice = functools.partial(declare, group=CHOICE)
_warper = functools.partial(declare, group=CHOICE, stage=WARP, modes=(SAMPLE,), command=True)


@dataclasses.dataclass(frozen=True, eq=False)
class SamplingOptions:
    """The first fields of `GenerationOptions`."""

    # Length and end
    max_new_tokens: Number | None = _length(
        Integer(above=0),
        "the maximum number of tokens to generate; takes precedence over max_length",
        hf="MaxLengthCriteria",
        host=True,
        command=" (default: the checkpoint's, or 256)",
        instead_of="max_length",
        examples=(5, 7),
    )
    max_length: int = _length(
        StaticInteger(20, least=1, optional=True),
        "the maximum number of tokens of prompt and answer together",
        hf="MaxLengthCriteria",
        differs="padding is not counted",
        host=True,
        command=True,
        instead_of="max_new_tokens",
    )
    max_time: float | None = _length(
        Seconds(),
        "the number of seconds after which no more tokens are generated",
        hf="MaxTimeCriteria",
        differs="checked every few tokens; compilation counts",
        host=True,
        command=True,
    )
    stop_strings: str | tuple[str, ...] | tuple[tuple[str, ...] | None, ...] | None = _length(
        Text(),
        "strings that end a row once the row's newest token completes one of them",
        hf="StopStringCriteria",
        differs="generate() needs tokenizer=; bytes are compared, so characters made of several tokens are found too, "
        "as in later releases",
        of_tokens=True,
        host=True,
        command="; can be given several times",
        examples=(["\n"], ["END", "."]),
    )
    eos_token_id: Any = _length(
        TokenIds(),
        "the id that ends a row, or a list of such ids",
        hf="EosTokenCriteria",
        command=True,
        examples=([1, 2], [3]),
    )
    # Choosing a token
    do_sample: Any = _choice(
        Flags(),
        "draw tokens; otherwise the most likely one is chosen",
        differs="may have one value per prompt; one value for all prompts is static",
        command=True,
        examples=([True], [False]),
    )
    num_return_sequences: int = _choice(
        StaticInteger(1, least=1),
        "the number of sequences to draw per prompt",
        differs="the prompt is computed once",
        command="; several are printed at the end, separated by blank lines",
    )
    temperature: Number = _warper(
        Real(1.0, above=0, hint="for greedy decoding set do_sample=False"),
        "divide the scores by this; values above 1 flatten the distribution",
        hf="TemperatureLogitsWarper",
        examples=(0.5, 1.5),
    )
    top_h: Number | None = _warper(
        Real(above=0, most=1),
        "draw from the most likely tokens that make up this share of the entropy",
        hf="TopHLogitsWarper",
        since="5",
        examples=(0.9, 0.95),
    )
    top_k: Number | None = _warper(
        Integer(0, least=0),
        "draw from the k most likely tokens, ties included; 0 for all. In contrastive search, the number of candidates "
        "per step",
        hf="TopKLogitsWarper",
        differs="in contrastive search, one number for all prompts is static",
        default=50,
        modes=(SAMPLE, CONTRASTIVE),
        examples=(40, 80),
    )
    top_p: Number = _warper(
        Real(1.0, least=0, most=1),
        "draw from the most likely tokens that together reach this probability",
        hf="TopPLogitsWarper",
        differs="in a tie the highest ids are kept, as in a stable sort",
        examples=(0.9, 0.95),
    )
    min_p: Number | None = _warper(
        Real(also_off=0.0, least=0, most=1),
        "draw from tokens at least this fraction as likely as the most likely token",
        hf="MinPLogitsWarper",
        examples=(0.001, 0.01),
    )
    typical_p: Number = _warper(
        Real(1.0, above=0, most=1),
        "draw from the tokens whose surprise is closest to the expected surprise; together they reach this probability",
        hf="TypicalLogitsWarper",
        examples=(0.9, 0.95),
    )
    epsilon_cutoff: Number = _warper(
        Real(0.0, least=0, below=1),
        "draw from tokens at least this likely",
        hf="EpsilonLogitsWarper",
        examples=(1e-4, 1e-3),
    )
    eta_cutoff: Number = _warper(
        Real(0.0, least=0, below=1),
        "draw from tokens at least this likely; the limit is lower if the entropy is high",
        hf="EtaLogitsWarper",
        examples=(1e-4, 1e-3),
    )
