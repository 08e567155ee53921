"""Token healing: the whole text of a row begins with the prompt's text, whichever tokens spell it."""

import io

import jax
import numpy as np
import pytest

from convert import load_hf
from jaxgen import (
    CausalLM,
    ConfigError,
    GenerationConfig,
    InputError,
    StopReason,
    TextStreamer,
    TokenAutomaton,
    Tokenizer,
    demo,
    generate,
    prefill,
)
from jaxgen.core.request.healing import heal
from jaxgen.core.request.prepare import CallInputs
from tests.support.automata import matrix
from tests.support.compilations import compilations
from tests.support.models import all_generated, generated, model_config, random_params, slow
from tests.support.tokenizers import byte_level, llama

TEXTS = [
    "Once upon a time, there was a little fox who lost a key in the deep wood.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🦊👩‍🚀 — 東京の夜",
    "The link is https://example.org/a?b=c&d=%20  and   more",
]


def cuts(count, seed, texts=TEXTS):
    rng = np.random.default_rng(seed)
    for number in range(count):
        text = texts[number % len(texts)]
        yield text[: rng.integers(1, len(text) + 1)]


def config(tokenizer, **fields):
    model = model_config(vocab_size=len(tokenizer) + 3, num_hidden_layers=4)
    fields = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id, **fields}
    return GenerationConfig(model=model, token_healing=True, **fields)


SMALL = byte_level()
CFG = config(SMALL)
PARAMS = random_params(CFG.model)
PROMPTS = ["one hell", " he", "wide and hello he", "x"]
BATCH = SMALL.batch(PROMPTS)


def run(cfg=CFG, batch=BATCH, key=None, tokenizer=SMALL, **more):
    more = {"attention_mask": batch.attention_mask, **more}
    return generate(PARAMS, batch.ids, key, cfg, tokenizer=tokenizer, **more)


def text_bytes(tokenizer, ids):
    table = tokenizer.token_bytes()
    return b"".join(table[token] or b"" for token in ids if token < len(table))


def texts_of(out, tokenizer=SMALL):
    rows = zip(np.asarray(out.sequences), np.asarray(out.attention_mask), strict=True)
    return [text_bytes(tokenizer, row[mask]) for row, mask in rows]


def check(out, prompts=PROMPTS, copies=1):
    for row, text in enumerate(texts_of(out)):
        assert text.startswith(prompts[row // copies].encode()), (row, text)


def is_within_a_character(text):
    """Return True if the bytes begin inside a character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start == 0
    return False


def walk(automaton, start, rng, tokens):
    """Return random tokens that the automaton allows."""
    state, chosen = int(start), []
    classes, table = matrix(automaton)
    for _ in range(tokens):
        after = table[state][classes]
        token = int(rng.choice(np.flatnonzero(after >= 0)))
        state = int(after[token])
        chosen.append(token)
        assert np.asarray(automaton.accepting)[state] == (state == 0)
    return state, chosen


@pytest.mark.parametrize("name", ["bundled", "llama", *slow("qwen")])
def test_any_tokenization_spells_the_prompt(name, data):
    tokenizer = {
        "qwen": lambda: Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct"),
        "bundled": lambda: Tokenizer.from_pretrained(demo.PATH),
        "llama": llama,
    }[name]()
    vocab, rng = len(tokenizer.token_bytes()) + 5, np.random.default_rng(0)
    texts = TEXTS if name == "qwen" else [TEXTS[0], TEXTS[1]]
    prompts = [text for text in cuts(40, 1, texts) if len(tokenizer.encode(text)) > 1]
    ids, mask = tokenizer.batch(prompts)
    cfg = GenerationConfig(model=model_config(vocab_size=vocab), token_healing=True)
    moved, automaton = heal(cfg, CallInputs(ids, attention_mask=mask), None, tokenizer)
    respelled = 0
    for row, prompt in enumerate(prompts):
        original, kept = ids[row][mask[row] == 1].tolist(), moved.ids[row][moved.attention_mask[row]].tolist()
        assert kept == original[: len(kept)]
        taken = [text_bytes(tokenizer, original[place:]) for place in range(len(kept), len(original))]
        assert taken[0].decode()
        assert all(is_within_a_character(text) for text in taken[1:])
        for _ in range(5):
            state, chosen = walk(automaton, automaton.start[row], rng, 40)
            assert state == 0
            whole = [*kept, *chosen]
            assert text_bytes(tokenizer, whole).startswith(text_bytes(tokenizer, original))
            if name != "llama":  # if one byte token is invalid, Llama's decoder replaces all adjacent ones too
                decoded = (tokenizer.decode(x, clean_up_tokenization_spaces=False) for x in (whole, original))
                assert next(decoded).startswith(next(decoded)), prompt
            respelled += chosen[0] != original[len(kept)]
    assert respelled > 20


@pytest.mark.parametrize(
    ("prompt", "kept", "text"),
    [
        ("he \N{FOX FACE}", "he ", "\N{FOX FACE}"),
        ("caf\u00e9", "caf", "\u00e9"),
        ("\N{FOX FACE}", b"\xf0\x9f\xa6", b"\x8a"),  # the first token is kept
        ("<|im_end|>\u00e9", b"<|im_end|>", "\u00e9"),
    ],
)
def test_the_answer_begins_with_a_whole_character(prompt, kept, text):
    ids = np.array([[*SMALL.encode(prompt), 0, 0]])
    mask = (np.arange(ids.shape[1]) < ids.shape[1] - 2)[None, :]
    mask[:, -3], mask[:, -2], ids[:, -2] = False, True, ids[:, -3]  # padding before the last token
    moved, automaton = heal(CFG, CallInputs(ids, attention_mask=mask), None, SMALL)
    rest = moved.ids[moved.attention_mask].tolist()
    whole = SMALL.encode(prompt)
    assert rest == whole[: len(rest)]
    kept, text = (x.encode() if isinstance(x, str) else x for x in (kept, text))
    special = b"<|im_end|>" if prompt.startswith("<") else b""
    assert special + text_bytes(SMALL, rest) == kept
    _, chosen = walk(automaton, automaton.start[0], np.random.default_rng(0), 12)
    assert text_bytes(SMALL, chosen).startswith(text)


@pytest.mark.slow
def test_a_batch_generates_the_text_of_its_prompts():
    out = run()
    check(out)
    assert [int(n) for n in np.asarray(out.attention_mask)[:, : out.prompt_width].sum(axis=1)] == [
        max(len(SMALL.encode(prompt)) - 1, 1) for prompt in PROMPTS
    ]
    assert np.asarray(out.attention_mask)[0, out.prompt_width - 1]  # the prompts are still padded on the left
    assert out.prompt_width == BATCH.ids.shape[1]
    assert (np.asarray(out.sequences)[:, 0] == SMALL.pad_token_id).all()  # padding


OPTIONS = {
    "sample": {"do_sample": True, "top_k": 0, "temperature": 5.0, "num_return_sequences": 2},
    "guidance": {"guidance_scale": 1.5},
    "chunks": {"prefill_chunk_size": 3},
    "without_eos": {"eos_token_id": None},
    "min_length": {"min_new_tokens": 9},
    "one_token": {"max_new_tokens": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_healing_works_with_other_options(name):
    cfg = CFG.replace(**OPTIONS[name])
    out = run(cfg, key=jax.random.key(0) if cfg.do_sample else None)
    check(out, copies=cfg.num_return_sequences)
    if name == "without_eos":
        assert (np.asarray(out.stop_reasons) == StopReason.LENGTH).all()


@pytest.mark.slow
def test_row_does_not_depend_on_its_batch():
    expected = all_generated(run())
    for row, prompt in enumerate(PROMPTS):
        assert all_generated(run(batch=SMALL.batch([prompt]))) == [expected[row]]
    flipped = run(batch=BATCH._replace(ids=BATCH.ids[:, ::-1], attention_mask=BATCH.attention_mask[:, ::-1]))
    right = [SMALL.encode(prompt) for prompt in PROMPTS]
    width = BATCH.ids.shape[1]
    ids = np.array([row + [0] * (width - len(row)) for row in right])
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in right])
    assert all_generated(run(batch=BATCH._replace(ids=ids, attention_mask=mask))) == expected
    assert all_generated(flipped) != expected


def test_special_tokens_and_single_tokens_are_not_healed():
    batch = SMALL.batch(["hello<|im_end|>", "x"])
    moved, automaton = heal(CFG, CallInputs(batch.ids, attention_mask=batch.attention_mask), None, SMALL)
    np.testing.assert_array_equal(moved.ids, batch.ids)
    np.testing.assert_array_equal(moved.attention_mask, batch.attention_mask == 1)
    assert automaton.start.tolist() == [0, 0]
    allowed = automaton.allowed(automaton.start, None)
    assert bool(allowed.all())  # as without healing, even special tokens and ids without a token are allowed


@pytest.mark.slow
def test_healing_after_a_cache_and_before_continuing():
    head, tail = SMALL.encode("one he"), SMALL.encode("ll and hell")
    cache = prefill(PARAMS, [head], CFG)
    out = generate(PARAMS, [tail], None, CFG, cache=cache, tokenizer=SMALL)
    whole = generate(PARAMS, [head + tail], None, CFG, tokenizer=SMALL)
    assert all_generated(out) == all_generated(whole)
    plain = CFG.replace(token_healing=None)
    again = [[*np.asarray(whole.sequences)[0][np.asarray(whole.attention_mask)[0]].tolist(), 5]]
    on = generate(PARAMS, [[5]], None, plain, cache=whole.cache)
    assert all_generated(on) == all_generated(generate(PARAMS, again, None, plain))


@pytest.mark.slow
def test_embeddings_move_with_the_ids():
    embeds = CausalLM(CFG.model).apply({"params": PARAMS}, BATCH.ids, method="embed")
    assert all_generated(run(inputs_embeds=embeds)) == all_generated(run())


@pytest.mark.slow
def test_a_streamer_prints_the_whole_text():
    file = io.StringIO()
    batch = SMALL.batch([PROMPTS[2]])
    out = run(batch=batch, streamer=TextStreamer(SMALL, file=file))
    text = file.getvalue()
    assert text.startswith(PROMPTS[2])
    row = np.asarray(out.sequences)[0][np.asarray(out.attention_mask)[0]]
    assert text == SMALL.decode(row) + "\n"


@pytest.mark.slow
def test_other_prompts_compile_nothing():
    run()
    rng = np.random.default_rng(0)
    with compilations() as count:
        for _ in range(10):
            prompts = [TEXTS[number][: rng.integers(2, 12)] for number in range(4)]
            check(run(batch=SMALL.batch(prompts)), prompts)
    assert count[0] == 0


@pytest.mark.slow
def test_the_bundled_model_finds_the_better_spelling():
    params, cfg = load_hf(demo.PATH)
    tok = Tokenizer.from_pretrained(demo.PATH)
    prompts = [text for text in cuts(24, 2, TEXTS[:1]) if len(tok.encode(text)) > 1]
    ids, mask = tok.batch(prompts)
    cfg = cfg.replace(do_sample=False, temperature=1.0, top_p=1.0, max_new_tokens=8, token_healing=True)
    out = generate(params, ids, None, cfg, attention_mask=mask, tokenizer=tok)
    respelled = 0
    for row, prompt in enumerate(prompts):
        whole = np.asarray(out.sequences)[row][np.asarray(out.attention_mask)[row]]
        assert tok.decode(whole, clean_up_tokenization_spaces=False).startswith(prompt)
        respelled += generated(out, row)[0] != ids[row, -1]
    assert respelled > len(prompts) // 4


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"tokenizer": None}, InputError, "token_healing compares texts: pass the tokenizer"),
        ({"tokenizer": "qwen"}, TypeError, "tokenizer must be a jaxgen.Tokenizer, got str"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, InputError, "both restrict the first tokens: leave one"),
        (
            {"prefix_allowed_tokens_fn": TokenAutomaton.from_prefixes(["a"], SMALL)},
            InputError,
            "token_healing and prefix_allowed_tokens_fn",
        ),
        ({"cfg": CFG.replace(forced_bos_token_id=3)}, ConfigError, "forced_bos_token_id counts its tokens"),
        (
            {"cfg": CFG.replace(max_new_tokens=3), "batch": SMALL.batch(["he \N{FOX FACE}"])},
            InputError,
            "the text that token_healing takes back has 4 tokens, which exceeds the budget of 3",
        ),
        ({"cfg": CFG.replace(forced_decoder_ids=[[9, 3]])}, ConfigError, "forced_decoder_ids counts its tokens"),
    ],
)
def test_unsupported_options_are_refused(more, error, text):
    with pytest.raises(error, match=text):
        run(**more)


def test_embeddings_alone_are_refused():
    embeds = np.zeros((1, 3, CFG.model.hidden_size), np.float32)
    with pytest.raises(InputError, match="needs the prompts' ids, and only inputs_embeds were given"):
        generate(PARAMS, None, None, CFG, inputs_embeds=embeds, tokenizer=SMALL)


def test_healing_is_refused_under_jit():
    with pytest.raises(InputError, match="token_healing needs the host and cannot be used under jit"):
        jax.jit(lambda params: generate(params, BATCH.ids, None, CFG, tokenizer=SMALL))(PARAMS)
