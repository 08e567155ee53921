"""Printing of answers to one prompt."""

from __future__ import annotations

from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.generation import generate
from jaxgen.output import GenerateOutput
from jaxgen.text.streaming import TextStreamer
from jaxgen.text.tokenizer import Tokenizer


def generate_and_print(
    params, ids, key, cfg: GenerationConfig, stats: Stats, *, tokenizer: Tokenizer, **more
) -> GenerateOutput:
    """Print the answers to one prompt: a single one as it is generated, unless it comes from beams.

    Arguments are those of `generate`; `stats` is told how long it took.
    """
    if cfg.num_return_sequences == 1 and cfg.num_beams == 1:
        streamer = stats.watch(TextStreamer(tokenizer, skip_prompt=True))
        return generate(params, ids, key, cfg, tokenizer=tokenizer, streamer=streamer, **more)
    with stats.generating() as generated:
        out = generate(params, ids, key, cfg, tokenizer=tokenizer, **more)
        generated(out.lengths)
    print("\n\n".join(tokenizer.decode_batch(out)), flush=True)
    return out
