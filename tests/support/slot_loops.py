"""Copies of caches in a program that decodes in slots, read off XLA's text."""

import math
import re

import jax

from benchmarks import hlo
from benchmarks.targets import compile_generate
from jaxgen import GenerationConfig
from tests.support.models import model_config

SLOTS, PLACES, WIDTH, NEW = 5, 3, 768, 768  # of which no two products are equal
MODEL = {
    **{"vocab_size": 4000, "hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 2},
    "max_position_embeddings": 2048,
}
COPY = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?\w+\[([\d,]*)\](.*) (?:copy|copy-start|transpose|convert|pad)\(")
ON_CHIP = "S(1)"  # a TPU's compiler moves arrays that are small enough to the memory on the chip, and back
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def config(dtype: str) -> GenerationConfig:
    """The options of the programs that are looked at."""
    return GenerationConfig(
        **{"model": model_config(torch_dtype=dtype, **MODEL), "prefill_chunk_size": 512 // PLACES},
        **{"max_new_tokens": NEW, "do_sample": True, "eos_token_id": 1, "pad_token_id": 0},
    )


def copied_caches(device: jax.Device, dtype: str) -> dict[str, list[str]]:
    """Return the copies of caches inside the loops of `generate` with slots; see `copies`."""
    cfg = config(dtype).replace(slots=SLOTS, num_return_sequences=2)
    return copies(compile_generate(cfg, device, rows=7, width=WIDTH).as_text(), cfg)


def copies(program: str, cfg: GenerationConfig) -> dict[str, list[str]]:
    """Return the copies inside loops that are as large as a layer's cache of the slots, or of the prompts' pool.

    Moves to and from the memory on a chip are not counted.
    """
    model = cfg.model
    head = model.num_key_value_heads * model.head_dim
    sizes = {"slots": SLOTS * (WIDTH + NEW) * head, "pool": PLACES * WIDTH * head}
    found = {name: [] for name in sizes}
    assert re.search(rf"\[{SLOTS},2,{WIDTH + NEW},{model.head_dim}\]", program), "the program has no cache of slots"
    assert re.search(rf"\[{PLACES},2,{WIDTH},{model.head_dim}\]", program), "the program has no cache of the pool"
    for line in _in_loops(program):
        if (match := COPY.match(line)) and ON_CHIP not in match[2]:
            size = math.prod(map(int, filter(None, match[1].split(","))))
            for name in sizes:
                found[name] += [line.strip()[:160]] * (size == sizes[name])
    return found


def _in_loops(program: str) -> list[str]:
    """Return the instructions of all loops' bodies and of what they call, but not those that are fused."""
    computations = hlo.parse(program)
    waiting = [re.search(r"body=%?([\w.\-]+)", line)[1] for line in program.splitlines() if " while(" in line]
    assert len(waiting) >= 4, "the loops over rounds, of reading, entering and decoding"
    names = set()
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        for line in computations.get(name, []):
            if " fusion(" not in line:
                waiting += CALLED.findall(line)
                waiting += [branch for group in BRANCHES.findall(line) for branch in re.findall(r"[\w.\-]+", group)]
    return [line for name in names for line in computations.get(name, [])]
