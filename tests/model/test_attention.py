"""Each form of attention, compared with a NumPy reference that computes all pairs of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig, KVCache, generate
from jaxgen.core.model import attention as module, workarounds
from jaxgen.core.model.attention import attention
from jaxgen.core.model.cache import EMPTY, KeysValues
from jaxgen.core.model.cache_storage import as_numbers, as_stored
from jaxgen.core.model.context import NO_CONTEXT
from jaxgen.core.model.masks import Visibility
from jaxgen.core.scoring.compiled import continuation_logprobs
from tests.support.models import model_config, random_params, slow

ROWS, HEADS, KV_HEADS, SIZE = 4, 6, 2, 8


@pytest.fixture
def small_blocks(monkeypatch):
    """Compute inputs of more than four tokens in blocks of a few tokens."""
    sizes = {"AT_ONCE_QUERIES": 4, "AT_ONCE_SLOTS": 4, "FEW_QUERIES": 3, "QUERY_BLOCK": 4, "KEY_BLOCK": 5}
    sizes |= {"CPU_QUERY_BLOCK": 4, "CPU_KEY_BLOCK": 5}
    for name, size in (sizes | {"CAUSAL_BLOCK": 4, "ACCELERATOR_BLOCK": 8}).items():
        monkeypatch.setattr(module, f"_{name}", size)
    jax.clear_caches()
    yield
    jax.clear_caches()


@dataclasses.dataclass
class Case:
    """A batch in which each row has `steps` queries.

    The cache has `shared` slots for a prefix and `slots` for each row, unevenly filled.
    """

    steps: int
    slots: int
    shared: int = 0
    window: int | None = None
    segments: bool = False
    hidden: bool = False
    dtype: str = "float32"
    int8: bool = False
    start: int | None = None

    def make(self):
        rng = np.random.default_rng(self.steps * 31 + self.slots)
        q = jnp.asarray(rng.normal(size=(ROWS, HEADS, self.steps, SIZE)), self.dtype)
        before = np.asarray([0, 0, 3, 3]) if self.shared else np.zeros(ROWS, int)
        length = rng.integers(self.steps, self.slots + 1, ROWS)
        if self.start is not None:  # the last row is not padded
            length = self.start + np.append(rng.integers(1, self.steps, ROWS - 1), self.steps)
        slot = np.arange(self.slots)
        orders = [np.where(slot < length[:, None], before[:, None] + slot, EMPTY)]
        parts = [self._part(rng, ROWS, self.slots)]
        if self.shared:
            slot = np.arange(self.shared)
            orders.insert(0, np.where(slot < before[:, None], slot, EMPTY))
            parts.insert(0, self._part(rng, 2, self.shared))
        if self.hidden:
            orders = [np.where(rng.random(keys.shape) < 0.3, EMPTY, keys) for keys in orders]
        queries = (before + length - self.steps)[:, None] + np.arange(self.steps)
        queries[1, :2] = -1  # padding, which may see no key
        first = np.maximum(queries - 3, 0) if self.segments else None
        as_int = functools.partial(jnp.asarray, dtype=jnp.int32)
        first = None if first is None else as_int(first)
        seen = Visibility(as_int(queries), tuple(map(as_int, orders)), first, self.window, start=self.start)
        return q, tuple(parts), seen

    def _part(self, rng, rows: int, slots: int) -> KeysValues:
        keys, values = (
            as_stored(jnp.asarray(rng.normal(size=(rows, KV_HEADS, slots, SIZE))), self.dtype, self.int8) for _ in "kv"
        )
        return KeysValues(keys, values, self.dtype)


CASES = {
    "plain": Case(steps=13, slots=20),
    "window": Case(steps=13, slots=23, window=6),
    "prefix": Case(steps=9, slots=12, shared=7),
    "all": Case(steps=10, slots=22, shared=12, window=7, segments=True, hidden=True),
    "bfloat16": Case(steps=9, slots=12, shared=7, dtype="bfloat16"),
    "few": Case(steps=3, slots=29, shared=6, window=9, hidden=True),
    "one": Case(steps=1, slots=29),
    "8 bits": Case(steps=10, slots=22, shared=12, window=7, segments=True, hidden=True, int8=True),
    "start": Case(steps=10, slots=22, shared=12, window=7, segments=True, hidden=True, int8=True, start=3),
}
FORMS = {
    "at_once": lambda q, parts, seen: module._at_once(q, parts, seen)[0],
    "without_later_keys": module._without_later_keys,
    "over_keys": lambda q, parts, seen: module._over_keys(q, parts, seen, module._KEY_BLOCK),
    "over_rows_and_heads": module._over_rows_and_heads,
    "over_queries": module._over_queries,
    "on_accelerator": module._on_accelerator,
}


def plain(q, parts, seen):
    """Compute attention over all pairs in float64. Also return whether each query sees any key, bool[B, T]."""
    numbers = [[np.repeat(np.asarray(as_numbers(x, part.dtype), np.float64), ROWS // x.shape[0], axis=0)
                for x in (part.keys, part.values)] for part in parts]  # fmt: skip
    k, v = (np.repeat(np.concatenate(x, axis=2), HEADS // KV_HEADS, axis=1) for x in zip(*numbers, strict=True))
    mask = np.concatenate([seen.mask(index) for index in range(len(parts))], axis=2)
    scores = np.einsum("bnth,bnsh->bnts", np.asarray(q, np.float64), k) / SIZE**0.5
    weights = np.where(mask[:, None], np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bnsh->bnth", weights, v), mask.any(-1)


@functools.cache
def made(case: str):
    """Return a case's arrays and the results of `plain`, once for all tests: `small_blocks` frees compiled programs."""
    inputs = CASES[case].make()
    return *inputs, *plain(*inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case", ["all", "8 bits", *slow("bfloat16", "start", "few", "plain", "window", "prefix", "one")]
)
def test_every_form_equals_attention_over_all_pairs(small_blocks, form, case):
    q, parts, seen, wanted, sees = made(case)
    out = np.asarray(jax.jit(FORMS[form])(q, parts, seen), np.float32)
    tolerance = 2e-2 if q.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(out.swapaxes(1, 2)[sees], wanted.swapaxes(1, 2)[sees], atol=tolerance)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("case", ["all", *slow("plain", "window")])
def test_gradients_in_blocks_equal_those_of_one_pass(small_blocks, case):
    q, parts, seen, _, sees = made(case)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape) * sees[:, None, :, None], jnp.float32)

    def gradients(form):
        def loss(q, arrays):
            return jnp.sum(weight * form(q, tuple(KeysValues(*pair, "float32") for pair in arrays), seen))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(q, [(part.keys, part.values) for part in parts])

    assert not module.all_at_once(q.shape[2], sum(part.slots for part in parts))
    wanted = jax.tree.leaves(gradients(FORMS["at_once"]))
    assert max(float(jnp.max(jnp.abs(expected))) for expected in wanted) > 0.1
    for got, expected in zip(jax.tree.leaves(gradients(lambda *inputs: attention(*inputs)[0])), wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_equal_products_for_one_query(dtype):
    """On a GPU, these sums replace the products."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, HEADS, 1, SIZE), (ROWS, KV_HEADS, 9, SIZE), (ROWS, KV_HEADS, 9, SIZE)
    q, keys, values = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    scores = module._product(q, keys, "bkqh,bksh->bkqs")
    np.testing.assert_allclose(workarounds._scores_as_sums(q, keys), scores, atol=1e-5)
    weights = jax.nn.softmax(scores, axis=-1)
    products = module._product(weights, values, "bkqs,bksh->bkqh")
    np.testing.assert_allclose(workarounds._weighted_as_sums(weights, values), products, atol=1e-5)


@pytest.mark.parametrize(("steps", "slots", "products"), [(1, 1024, 0), (1, 1025, 1), (2, 9, 2)])
def test_gpu_replaces_products_of_a_single_query(steps, slots, products):
    """Only a single query's products become sums. With more than 1,024 slots, only its products with keys do."""
    shapes = (ROWS, HEADS, steps, SIZE), (ROWS, KV_HEADS, slots, SIZE), (ROWS, KV_HEADS, slots, SIZE)
    q, keys, values = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    order = jax.ShapeDtypeStruct((ROWS, steps), jnp.int32)
    orders = jax.ShapeDtypeStruct((ROWS, slots), jnp.int32)

    def attend(q, keys, values, queries, orders):
        return attention(q, (KeysValues(keys, values, "bfloat16"),), Visibility(queries, (orders,)))[0]

    lowered = jax.jit(attend).trace(q, keys, values, order, orders).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("dot_general") == products


@pytest.mark.slow
def test_attention_weights_are_returned_only_on_request(small_blocks):
    q, parts, seen = CASES["prefix"].make()
    out, weights = attention(q, parts, seen, with_weights=True)
    assert weights.shape == (ROWS, HEADS, 9, 19)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    blocks, nothing = attention(q, parts, seen)
    assert nothing is None
    sees = plain(q, parts, seen)[1]
    np.testing.assert_allclose(blocks.swapaxes(1, 2)[sees], out.swapaxes(1, 2)[sees], atol=1e-5)


@pytest.mark.slow
def test_memory_of_training_does_not_grow_with_the_square_of_the_length():
    def bytes_of(steps: int) -> int:
        shape = jax.ShapeDtypeStruct((1, HEADS, steps, SIZE), jnp.float32)
        kv = jax.ShapeDtypeStruct((1, KV_HEADS, steps, SIZE), jnp.float32)

        def loss(q, k, v):
            order = jnp.arange(steps, dtype=jnp.int32)[None]
            return jnp.sum(attention(q, [KeysValues(k, v, "float32")], Visibility(order, (order,)))[0] ** 2)

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, kv, kv)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(4096) < 2.2 * bytes_of(2048)
    assert bytes_of(4096) < 4 * HEADS * 4096 * 4096 / 2


WINDOWED = model_config(use_sliding_window=True, sliding_window=4, max_window_layers=1)
PARAMS = random_params(WINDOWED)


def run(ids, **kwargs):
    return jax.jit(functools.partial(CausalLM(WINDOWED).apply, {"params": PARAMS}))(jnp.asarray(ids), **kwargs)


def logits_of(cache: dict, ids, mask):
    return CausalLM(WINDOWED).apply({"params": PARAMS}, ids, attention_mask=mask, **cache).logits


def first_logits(ids, mask):
    cfg = GenerationConfig(model=WINDOWED, max_new_tokens=1, eos_token_id=None, pad_token_id=0, output_logits=True)
    return generate(PARAMS, ids, None, cfg, attention_mask=mask).logits


def scores_after(ids, mask):
    """Return, for each column, the log-probability of the token that follows it."""
    first = ids[:, :1], jnp.ones((2, 1), bool)
    more = [jnp.concatenate(pair, axis=1) for pair in zip((ids, mask), first, strict=True)]
    sizes = {"context": NO_CONTEXT, "model": WINDOWED, "chunk": 301}
    return continuation_logprobs(PARAMS, *first, *more, **sizes).logprobs[:, 1:]


PASSES = {
    "no cache": functools.partial(logits_of, {}),
    "from slot 0": functools.partial(logits_of, {"cache": KVCache.create(WINDOWED, 2, 300), "cache_position": 0}),
    "generate": first_logits,
    "score_many": scores_after,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "score_many", "no cache", "from slot 0"])
def test_on_a_cpu_the_scores_of_later_keys_are_not_computed(name, monkeypatch):
    """Several blocks give the same outputs as a single block of all queries, with padding on either side."""
    ids = jnp.asarray(np.random.default_rng(0).integers(1, WINDOWED.vocab_size, (2, 300)), jnp.int32)
    mask = np.ones((2, 300), bool)
    mask[0, :140] = mask[1, 250:] = False
    mask = jnp.asarray(mask)

    def in_blocks_of(size: int):
        monkeypatch.setattr(module, "_CAUSAL_BLOCK", size)
        jax.clear_caches()
        program = jax.jit(PASSES[name]).lower(ids, mask).compile()
        return program(ids, mask), program.cost_analysis()["flops"]

    (logits, work), (whole, most) = in_blocks_of(100), in_blocks_of(300)
    if name == "generate":
        np.testing.assert_allclose(logits, whole, atol=2e-5)
    else:
        np.testing.assert_allclose(logits[mask], whole[mask], atol=2e-5)
    products = 2 * WINDOWED.num_hidden_layers * 2 * WINDOWED.num_attention_heads  # of two rows
    assert most - work >= products * 2 * WINDOWED.head_dim * (300 * 300 - 100 * (100 + 200 + 300))


@pytest.mark.slow
def test_known_position_in_shared_slots(monkeypatch):
    """If rows share slots, a token's position differs from its slot."""
    monkeypatch.setattr(module, "_CAUSAL_BLOCK", 4)
    ids = np.random.default_rng(0).integers(1, WINDOWED.vocab_size, (2, 12))
    cache = run(ids[:1, :3], cache=KVCache.create(WINDOWED, 1, 3)).cache.fork(2, 12, shared=True)

    def logits(**position):
        return jax.jit(functools.partial(CausalLM(WINDOWED).apply, {"params": PARAMS}, **position))(
            ids, cache=cache
        ).logits

    np.testing.assert_allclose(logits(cache_position=3), logits(), atol=1e-5)


@pytest.mark.slow
def test_choice_of_the_cpu_form_for_many_queries(monkeypatch):
    """The form depends on the number of queries and the number of slots that they may see."""
    chosen = []
    for name in ("_without_later_keys", "_over_rows_and_heads"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *inputs, f=original, name=name: chosen.append(name) or f(*inputs))
    inputs = CASES["start"].make()  # 10 queries from slot 3 on, after 12 slots of a prefix
    for queries, slots in [(10, 25), (10, 24), (9, 25)]:
        monkeypatch.setattr(module, "_CPU_QUERIES", queries)
        monkeypatch.setattr(module, "_CPU_SLOTS", slots)
        jax.eval_shape(lambda *x: module._on_cpu(*x), *inputs)  # a new function, so that it is traced again
    assert chosen == ["_without_later_keys", "_over_rows_and_heads", "_over_rows_and_heads"]


@pytest.mark.slow
def test_model_in_blocks_equals_one_pass(small_blocks, monkeypatch):
    ids = np.random.default_rng(0).integers(1, WINDOWED.vocab_size, (2, 14))
    mask = np.ones((2, 14), bool)
    mask[1, :5] = False
    blocks = run(ids, attention_mask=mask)
    cache, chunks, start = KVCache.create(WINDOWED, 2, 17), [], 0
    for length in (9, 1, 4):
        part = slice(start, start + length)
        out = run(ids[:, part], attention_mask=mask[:, part], cache=cache)
        cache, start = out.cache, start + length
        chunks.append(out.logits)
    monkeypatch.undo()
    jax.clear_caches()
    whole = run(ids, attention_mask=mask)
    np.testing.assert_allclose(blocks.logits[mask], whole.logits[mask], atol=2e-5)
    np.testing.assert_allclose(jnp.concatenate(chunks, 1)[mask], whole.logits[mask], atol=2e-5)


@pytest.mark.slow
def test_gradients_of_packed_rows_in_blocks_equal_one_pass(small_blocks, monkeypatch):
    ids = jnp.asarray(np.random.default_rng(0).integers(1, WINDOWED.vocab_size, (1, 11)))
    segments = jnp.asarray([[1] * 4 + [2] * 5 + [0] * 2])

    def gradient():
        def loss(params):
            return (
                CausalLM(WINDOWED, remat=True)
                .apply({"params": params}, ids, segment_ids=segments, attention_mask=segments > 0, labels=ids)
                .loss
            )

        return jax.tree.leaves(jax.jit(jax.grad(loss))(PARAMS))

    blocks = gradient()
    monkeypatch.undo()
    jax.clear_caches()
    for got, wanted in zip(blocks, gradient(), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.max(jnp.abs(wanted))) + 1e-6)
