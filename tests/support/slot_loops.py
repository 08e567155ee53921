"""Copies of caches and tables in programs that decode in slots, found in the text of the compiled programs."""

import math
import re
from collections.abc import Mapping

import jax
import numpy as np

from benchmarks import hlo
from benchmarks.targets import compile_generate, lower_for, shapes
from jaxgen import GenerationConfig, ModelConfig
from jaxgen.core.config.generation_config import model_of
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.grammar.token_automaton import Capacity
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions
from jaxgen.core.request.running.automaton_tables import GrammarTable
from jaxgen.core.request.running.device_loop import Loop, trace
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.request.running.prefix_index import Prefixes
from jaxgen.core.request.running.schedule import Schedule
from tests.support.models import model_config

SLOTS, PLACES, WIDTH, NEW = 5, 3, 768, 768  # with these sizes, each kind of cache has a size of its own
GRAMMARS = Capacity(states=1501, transitions=7001, classes=512, automata=3)
MODEL = {
    **{"vocab_size": 4000, "hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 2},
    "max_position_embeddings": 2048,
}
COPY = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \(?\w+\[([\d,]*)\](.*) (?:copy|copy-start|transpose|convert|pad)\(")
ON_CHIP = "S(1)"  # a TPU's compiler moves small arrays to on-chip memory and back
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def config(dtype: str) -> GenerationConfig:
    """Return the config of these programs."""
    return GenerationConfig(
        **{"model": model_config(torch_dtype=dtype, **MODEL), "prefill_chunk_size": 512 // PLACES},
        **{"max_new_tokens": NEW, "do_sample": True, "eos_token_id": 1, "pad_token_id": 0},
    )


def copied_caches(device: jax.Device, dtype: str) -> dict[str, list[str]]:
    """Return the instructions that copy caches in the loops of `generate` with slots; see `copies`."""
    cfg = config(dtype).replace(slots=SLOTS, num_return_sequences=2)
    return copies(compile_generate(cfg, device, rows=7, width=WIDTH).as_text(), cfg)


def copied_by_an_engine(device: jax.Device, dtype: str) -> dict[str, list[str]]:
    """Return the instructions that copy caches or the table of grammars in the loops of an engine's program."""
    cfg = config(dtype)
    model = model_of(cfg)
    options, prefixes = PromptOptions(cfg, WIDTH), Prefixes.of(cfg, EngineSizes(slots=SLOTS, prompt_width=WIDTH))
    loop = Loop(options, Extensions(), SLOTS, "threefry2x32", prefixes.capacity)
    tables = {"allowed": GrammarTable(model.vocab_size, GRAMMARS)}
    arrivals = Schedule(
        PromptReader(options), tables, loop.queue_capacity, SLOTS, np.zeros(2, np.uint32), prefixes
    ).no_arrivals()
    traced = trace(loop, shapes(model, device), arrivals, {name: table.joint for name, table in tables.items()})
    table = tables["allowed"].joint
    grammars = {name: getattr(table, name).size for name in ("classes", "low", "part")}
    program = lower_for(device, traced).compile().as_text()
    return copies(program, cfg, {"store": prefixes.capacity * prefixes.block * _head(model), **grammars})


def _head(model: ModelConfig) -> int:
    return model.num_key_value_heads * model.head_dim


def copies(program: str, cfg: GenerationConfig, more: Mapping[str, int] | None = None) -> dict[str, list[str]]:
    """Return the instructions inside loops that copy exactly one layer's cache, of the slots and of the pool.

    `more` contains the sizes of other arrays that must not be copied. Moves to and from on-chip memory do not count.
    """
    model = model_of(cfg)
    head = _head(model)
    sizes = {"slots": SLOTS * (WIDTH + NEW) * head, "pool": PLACES * WIDTH * head, **(more or {})}
    assert len(set(sizes.values())) == len(sizes)
    found = {name: [] for name in sizes}
    assert re.search(rf"\[{SLOTS},2,{WIDTH + NEW},{model.head_dim}\]", program), "the program has no cache of the slots"
    assert re.search(rf"\[{PLACES},2,{WIDTH},{model.head_dim}\]", program), "the program has no cache of the pool"
    for line in _in_loops(program):
        if (match := COPY.match(line)) and ON_CHIP not in match[2]:
            size = math.prod(map(int, filter(None, match[1].split(","))))
            for name in sizes:
                found[name] += [line.strip()[:160]] * (size == sizes[name])
    return found


def _in_loops(program: str) -> list[str]:
    """Return the instructions of loop bodies and of the computations that they call, except those of fusions."""
    computations = hlo.parse(program)
    waiting = [re.search(r"body=%?([\w.\-]+)", line)[1] for line in program.splitlines() if " while(" in line]
    assert len(waiting) >= 4, "the loops over rounds, reading, entering and decoding are missing"
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
