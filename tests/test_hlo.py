"""Arrays that the compiled program must not contain, found in XLA's text: copies of the cache or of the weights, and
scores of all pairs of tokens."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig, KVCache
from jaxgen.buckets import cache_slots
from jaxgen.core.config.availability import normal_form
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.request import Request
from jaxgen.core.decoding.run import Run
from jaxgen.core.model.int8 import Int8
from jaxgen.core.request.driver import run_whole
from tests.support.models import model_config, slow
from tests.support.slot_loops import copied_caches

# These sizes identify arrays: prompt slots, new slots, key blocks and the sides of weights all have different sizes.
# The prompt is too long for a CPU to compute all scores of a block of queries at once.
PROMPT, NEW, ROWS = 832, 736, 2
MODEL = {
    "vocab_size": 4000, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 352, "max_position_embeddings": 2048,
}  # fmt: skip
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<dtype>\w+)\[(?P<dims>[\d,]*)\]\S* (?P<op>[\w\-]+)\(")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@functools.cache
def compile_loop(
    copies: int,
    dtype: str,
    do_sample: bool,
    beams: int = 1,
    candidates: int = 0,
    int8: bool = False,
    cache_dtype: str | None = None,
):
    model = model_config(torch_dtype=dtype, **MODEL)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1} if do_sample else {}
    cfg = GenerationConfig(
        **{"model": model, "do_sample": do_sample, "num_return_sequences": copies, "num_beams": beams},
        **{"max_new_tokens": 8, "eos_token_id": 1, "cache_dtype": cache_dtype, **options},
    )
    if candidates:
        cfg = cfg.replace(penalty_alpha=0.6, top_k=candidates)
    params = jax.eval_shape(lambda: CausalLM(model).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    if int8:
        params = jax.tree.map(quantized, params)
    ids = np.zeros((ROWS, PROMPT), np.int32)
    budget, key = np.full(ROWS, 8, np.int32), jax.random.key(0) if do_sample else None
    shared, options = normal_form(cfg).split()
    run = Run(params, shared, Extensions(), ROWS, NEW, mode_of(cfg).needs(cfg))
    traced = run_whole.trace(run, Request(ids, ids == 0, budget, options, key=key), mode=mode_of(cfg))
    return traced.lower().compile(), params


def quantized(leaf: jax.ShapeDtypeStruct):
    if leaf.ndim != 2:
        return leaf
    struct = jax.ShapeDtypeStruct
    return Int8(struct(leaf.shape, jnp.int8), struct(leaf.shape[:1], jnp.float32), leaf.dtype)  # pyright: ignore


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


def loop_bodies(computations, carries: str) -> list[str]:
    """Return the bodies of the outermost loops that carry an array of this shape."""
    bodies = {
        re.search(r"body=%?([\w.\-]+)", line)[1]
        for lines in computations.values()
        for line in lines
        if re.search(r"\bwhile\(", line) and re.search(carries, line)
    }
    inside = {body: reachable(computations, body, set(), into_branches=True) - {body} for body in bodies}
    return [body for body in bodies if not any(body in others for others in inside.values())]


def own_slots(copies: int) -> int:
    """Return the slots per row of the cache that the loop writes, which includes the prompt if `copies` is 1."""
    return cache_slots(PROMPT + NEW) if copies == 1 else NEW


def decode_loop(computations, into_branches: bool, slots: int = NEW) -> list[str]:
    """Return the lines of the loop over tokens, which carries the cache of new tokens, and of its callees."""
    (body,) = loop_bodies(computations, rf"\[\d+,2,{slots},32\]")
    names = reachable(computations, body, set(), into_branches)
    return [line for name in names for line in computations.get(name, [])]


def results_of_size(lines, sizes) -> list[str]:
    """Return the instructions whose result has one of these sizes, except in-place updates."""
    in_place = {"dynamic-update-slice", "scatter", "fusion", "call", "while", "conditional"}  # callees are checked too
    nothing = {"parameter", "get-tuple-element", "tuple", "bitcast"}
    found = []
    for line in lines:
        match = INSTRUCTION.match(line)
        if not match or match["op"] in in_place | nothing:
            continue
        if math.prod(int(d) for d in match["dims"].split(",") if d) in sizes:
            found.append(line.strip()[:160])
    return found


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


def made_in_branches(computations, slots: int, sizes) -> list[str]:
    """Return the instructions with results of these sizes that are in branches inside the loop over tokens."""
    found = []
    for name in branches_of(decode_loop(computations, into_branches=False, slots=slots)):
        for line in computations[name]:
            match = INSTRUCTION.match(line)
            if match and match["op"] not in ("parameter", "get-tuple-element"):
                size = math.prod(int(d) for d in match["dims"].split(",") if d)
                found += [line.strip()[:160]] * (size in sizes)
    return found


def second_copies(computations, params) -> list[str]:
    """Return the instructions with results of a weight's shape that are outside all loops."""
    entry = next(lines for name, lines in computations.items() if name.startswith("main"))
    wanted = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    made = [(line, match) for line in entry if (match := INSTRUCTION.match(line))]
    made = [(line, match) for line, match in made if match["op"] not in ("parameter", "get-tuple-element", "bitcast")]
    return [line for line, match in made if tuple(int(d) for d in match["dims"].split(",") if d) in wanted]


@pytest.mark.parametrize("dtype", slow("bfloat16", "float32"))
def test_beams_move_no_cache(dtype):
    compiled, _ = compile_loop(2, dtype, do_sample=False, beams=3)
    lines = decode_loop(parse(compiled.as_text()), into_branches=True, slots=3 * NEW)
    assert results_of_size(lines, {ROWS * 2 * PROMPT * 32, 3 * ROWS * 2 * PROMPT * 32, ROWS * 2 * 3 * NEW * 32}) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_no_loop_copies_a_cache_of_slots(dtype):
    assert copied_caches(jax.devices("cpu")[0], dtype) == {"slots": [], "pool": []}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_contrastive_search_moves_no_cache_and_no_hidden_states(dtype):
    compiled, _ = compile_loop(1, dtype, do_sample=False, candidates=3)
    lines = decode_loop(parse(compiled.as_text()), into_branches=True, slots=3 * NEW)
    caches = {ROWS * 2 * PROMPT * 32, ROWS * 2 * 3 * NEW * 32}
    assert results_of_size(lines, caches | {ROWS * (PROMPT + NEW) * MODEL["hidden_size"]}) == []


@pytest.mark.parametrize(("copies", "do_sample"), [(3, True), *slow((1, False), (1, True))])
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_the_loop_moves_no_cache_and_no_weight(copies, dtype, do_sample):
    compiled, params = compile_loop(copies, dtype, do_sample=do_sample)
    computations, slots = parse(compiled.as_text()), own_slots(copies)
    caches = {ROWS * 2 * PROMPT * 32, ROWS * copies * 2 * slots * 32}
    assert results_of_size(decode_loop(computations, into_branches=True, slots=slots), caches) == []

    weights = {leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    assert big_operations(decode_loop(computations, into_branches=False, slots=slots), weights) == []
    # In 16 bits, look-ups and products of one or two rows are in branches, which must not store converted weights.
    assert made_in_branches(computations, slots, weights) == []
    assert second_copies(computations, params) == []


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 3, 8])
def test_quantized_weights_are_not_stored_in_a_different_form(copies):
    compiled, params = compile_loop(copies, "bfloat16", do_sample=copies > 1, int8=True)
    computations = parse(compiled.as_text())
    weights = {leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    slots = own_slots(copies)
    # With 6 rows, products are computed in 8 bits. With 2 rows, the products in a branch convert the weight themselves,
    # without a copy. With 16 rows, branches convert one weight at a time.
    assert big_operations(decode_loop(computations, copies == 3, slots), weights) == []
    if copies == 1:
        assert made_in_branches(computations, slots, weights) == []
    assert second_copies(computations, params) == []


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 3])
def test_8_bit_cache_is_written_in_place(copies):
    compiled, _ = compile_loop(copies, "bfloat16", do_sample=True, cache_dtype="int8")
    computations, slots = parse(compiled.as_text()), own_slots(copies)
    caches = {ROWS * 2 * PROMPT * 32, ROWS * copies * 2 * slots * 32}
    assert results_of_size(decode_loop(computations, into_branches=True, slots=slots), caches) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.slow
def test_memory_besides_weights_is_little_more_than_the_cache(dtype):
    compiled, params = compile_loop(1, dtype, do_sample=False)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    cache = 2 * 2 * ROWS * 2 * (PROMPT + NEW) * 32 * jnp.dtype(dtype).itemsize
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes < weights + 100_000
    prefill = 4 * ROWS * PROMPT * (2 * 352 + 2 * 192)  # activations in float32
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2 * cache + 1.5 * prefill
    assert 2 * cache + 1.5 * prefill < weights + 2 * cache + prefill  # so a copy of the weights would exceed the limit


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_scores_of_all_pairs_are_never_computed_for_a_long_prompt(dtype):
    compiled, _ = compile_loop(3, dtype, do_sample=True)
    shapes = re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(int(d) for d in dims.split(",")) for dims in shapes if f"{PROMPT}" in dims.split(","))
    assert largest < ROWS * PROMPT * PROMPT  # the scores of one of the six heads


def steps_of(step, cache: KVCache, *arguments) -> list[str]:
    """Compile a loop over `cache = step(cache, *arguments)`; return the lines of the loop and its callees."""

    def run(cache, *arguments):
        return jax.lax.fori_loop(0, 10, lambda _, cache: step(cache, *arguments), cache)

    computations = parse(jax.jit(run).lower(cache, *arguments).compile().as_text())
    (body,) = loop_bodies(computations, rf"\[\d+,2,{NEW},32\]")
    names = reachable(computations, body, set(), into_branches=True)
    return [line for name in names for line in computations[name]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_selecting_rows_copies_nothing_of_the_prefix(dtype):
    model = model_config(**MODEL)
    cache = jax.eval_shape(lambda: KVCache.create(model, ROWS, PROMPT, dtype).fork(3, NEW))
    rows = jax.ShapeDtypeStruct((3 * ROWS,), jnp.int32)
    lines = steps_of(KVCache.select, cache, rows)
    assert results_of_size(lines, {ROWS * 2 * PROMPT * 32}) == []
    moved = results_of_size(lines, {3 * ROWS * 2 * NEW * 32})
    arrays = 2 * model.num_hidden_layers
    assert arrays <= len(moved) <= 2 * arrays, moved  # new slots are gathered, then copied into the loop's state


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inserting_rows_moves_only_those_rows(dtype):
    model = model_config(**MODEL)
    cache, source = (jax.eval_shape(lambda n=n: KVCache.create(model, 1, PROMPT, dtype).fork(n, NEW)) for n in (5, 2))
    lines = steps_of(KVCache.insert, cache, source, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert results_of_size(lines, {2 * PROMPT * 32, 5 * 2 * NEW * 32}) == []


@pytest.mark.slow
def test_no_weight_is_a_constant_of_the_program():
    compiled, _ = compile_loop(1, "float32", do_sample=True)
    for line in compiled.as_text().splitlines():
        match = INSTRUCTION.match(line)
        if match and match["op"] == "constant":
            assert math.prod(int(d) for d in match["dims"].split(",") if d) < 5000, line[:200]
