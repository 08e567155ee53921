"""What the compiled loop must not do, read from XLA's program: copy the cache, or make another copy of the weights."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig
from jaxgen.config.availability import normal_form
from jaxgen.decoding.extensions import Rules
from jaxgen.decoding.prompt import Request, Sizes
from jaxgen.generation import _run
from tests.support.models import model_config, slow

# Sizes that tell the arrays apart: prompt slots, generated slots and the weights' sides are all different.
PROMPT, NEW, ROWS = 160, 224, 2
MODEL = {
    "vocab_size": 4000, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 352, "max_position_embeddings": 1024,
}  # fmt: skip
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<dtype>\w+)\[(?P<dims>[\d,]*)\]\S* (?P<op>[\w\-]+)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def compile_loop(copies: int, dtype: str, do_sample: bool):
    model = model_config(torch_dtype=dtype, **MODEL)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1} if do_sample else {}
    cfg = GenerationConfig(
        model=model, do_sample=do_sample, num_return_sequences=copies, max_new_tokens=8, eos_token_id=1, **options
    )
    params = jax.eval_shape(lambda: CausalLM(model).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    ids = np.zeros((ROWS, PROMPT), np.int32)
    budget, key = np.full(ROWS, 8, np.int32), jax.random.key(0) if do_sample else None
    lowered = _run.lower(params, normal_form(cfg), Rules(), Request(ids, ids == 0, budget, key), sizes=Sizes(NEW))
    return lowered.compile(), params


def parse(program: str) -> dict[str, list[str]]:
    computations, current = {}, None
    for line in program.splitlines():
        if match := COMPUTATION.match(line):
            current = computations.setdefault(match[1], [])
        elif current is not None:
            current.append(line)
    return computations


def branches_of(lines) -> list[str]:
    return [name for line in lines for group in BRANCHES.findall(line) for name in re.findall(r"[\w.\-]+", group)]


def reachable(computations, name, found, into_branches):
    if name not in found:
        found.add(name)
        for line in computations.get(name, []):
            for inner in CALLED.findall(line) + (branches_of([line]) if into_branches else []):
                reachable(computations, inner, found, into_branches)
    return found


def decode_loop(computations, into_branches: bool) -> list[str]:
    """The lines of the loop over tokens, of what it calls too: it is the one whose state holds the generated cache."""
    loops = [
        (line, re.search(r"body=%?([\w.\-]+)", line)[1])
        for lines in computations.values()
        for line in lines
        if re.search(r"\bwhile\(", line) and re.search(rf"\[\d+,2,{NEW},32\]", line)
    ]
    assert len({body for _, body in loops}) == 1
    names = reachable(computations, loops[0][1], set(), into_branches)
    return [line for name in names for line in computations.get(name, [])]


def big_operations(lines, sizes) -> list[str]:
    moved = {"copy", "convert", "transpose", "bitcast-convert", "concatenate", "pad", "slice", "reverse"}
    found = []
    for line in lines:
        match = INSTRUCTION.match(line)
        if match and match["op"] in moved:
            size = math.prod(int(d) for d in match["dims"].split(",") if d)
            if size in sizes:
                found.append(line.strip()[:160])
    return found


@pytest.mark.parametrize(("copies", "do_sample"), [(3, True), *slow((1, False), (1, True))])
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_the_loop_moves_no_cache_and_no_weight(copies, dtype, do_sample):
    compiled, params = compile_loop(copies, dtype, do_sample)
    computations = parse(compiled.as_text())
    caches = {ROWS * 2 * PROMPT * 32, ROWS * copies * 2 * NEW * 32}
    assert big_operations(decode_loop(computations, into_branches=True), caches) == []

    weights = {leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    assert big_operations(decode_loop(computations, into_branches=False), weights) == []
    # The embedding look-up of 16-bit floats is in a branch; there the conversion must be fused with the gather.
    for name in branches_of(decode_loop(computations, into_branches=False)):
        for line in computations[name]:
            match = INSTRUCTION.match(line)
            if match and match["op"] not in ("parameter", "get-tuple-element"):
                assert math.prod(int(d) for d in match["dims"].split(",") if d) not in weights, line
    # Nothing of a weight's size is made outside of the loop either: it would be a second copy of the weight.
    entry = next(lines for name, lines in computations.items() if name.startswith("main"))
    wanted = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    for line in entry:
        match = INSTRUCTION.match(line)
        if match and match["op"] not in ("parameter", "get-tuple-element", "bitcast"):
            assert tuple(int(d) for d in match["dims"].split(",") if d) not in wanted, line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_beside_the_weights_is_the_cache_and_little_more(dtype):
    compiled, params = compile_loop(1, dtype, do_sample=False)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    cache = 2 * 2 * ROWS * 2 * (PROMPT + NEW) * 32 * 4
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes < weights + 100_000
    prefill = 4 * ROWS * PROMPT * (6 * PROMPT + 4 * 352)  # scores and activations in float32
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2 * cache + 1.5 * prefill
    assert 2 * cache + 1.5 * prefill < weights + 2 * cache + prefill  # a copy of the weights would be seen


@pytest.mark.slow
def test_no_weight_is_a_constant_of_the_program():
    compiled, _ = compile_loop(1, "float32", do_sample=True)
    for line in compiled.as_text().splitlines():
        match = INSTRUCTION.match(line)
        if match and match["op"] == "constant":
            assert math.prod(int(d) for d in match["dims"].split(",") if d) < 5000, line[:200]
