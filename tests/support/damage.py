"""Checkpoints with one random fault each, and a process that tries to use them.

    python -m tests.support.damage SEED COUNT FOLDER

tries COUNT cases of each group (0: all of them), and prints the outcome of each case as a line of JSON.
"""

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from convert import load_hf
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.text import sandbox
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import JaxgenError
from tests.support.checkpoints import GENERATION, QWEN2, weights, write
from tests.support.processes import memory_status, peak_memory
from tests.support.templates import HOSTILE
from tests.support.tokenizers import CHATML, byte_level_backend, save

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
MAPS = ("special_tokens_map.json", "added_tokens.json")
CONFIG = QWEN2 | {"vocab_size": 263}
CONFIG_KEYS = (
    *CONFIG,
    *"head_dim sliding_window use_sliding_window max_window_layers layer_types rope_scaling rope_parameters".split(),
    *"quantization_config attention_bias initializer_range attention_dropout partial_rotary_factor dtype".split(),
    *"is_decoder pruned_heads unknown".split(),
)
ROPE_KEYS = (
    "rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast truncate".split()
)
TOKENIZER_KEYS = (
    *"bos_token eos_token unk_token pad_token additional_special_tokens added_tokens_decoder add_bos_token".split(),
    *"add_eos_token clean_up_tokenization_spaces model_max_length truncation_side tokenizer_class".split(),
    *"split_special_tokens chat_template".split(),
)
# JSON texts, because Python's values cannot express some of these.
VALUES = (
    *"null true false 0 -1 1 2 3 0.5 -0.5 1e-50 1e308 1e999 -1e999 NaN Infinity 1000000000 1000000000000000000".split(),
    *(
        "2147483648",
        "9223372036854775808",
        "1" * 400,
        "1" * 5000,
        '""',
        '"x"',
        '"a\\u0000\\nb"',
        '"\\ud800"',
        "[]",
        "{}",
    ),
    *(
        '["x"]',
        "[1, 2]",
        "[-1]",
        "[[1]]",
        "[[[1]]]",
        "[null]",
        "[true]",
        '{"a": 1}',
        '{"a": {"a": 1}}',
        "[" * 90 + "]" * 90,
    ),
    *(json.dumps("y" * 100_000), json.dumps(list(range(100_000))), json.dumps({f"k{n}": n for n in range(50_000)})),
    *('[{"content": "a"}]', '{"content": "<|end|>"}', '{"content": 1}', '{"1": {"content": "a", "lstrip": 1}}'),
    *('{"260": {"content": "<|end|>"}}', '{"99999999999999": {"content": "a"}}', '{"260": {"content": ""}}'),
    *('"float64"', '"torch.float16"', "[262, 263]", "263", '"$A"', '"<s>:1"'),
)
# Contents of whole files.
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "spaces": b" " * 1000,
    "list": b"[]",
    "null": b"null",
    "object": b"{}",
    "open": b'{"a": ',
    "not UTF-8": b'{"a": "\xff"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep and valid": b'{"a":' * 500 + b"1" + b"}" * 500,
    "huge": b'{"a": [' + b"[]," * 3_300_000 + b"[]]}",
    "duplicates": b'{"a": 1' + b', "a": 1' * 100_000 + b"}",
    "other duplicates": b"{" + b",".join(b'"%d": 1, "%d": 2' % (n, n) for n in range(50_000)) + b"}",
    "long number": b'{"vocab_size": ' + b"1" * 100_000 + b"}",
    "pickle": b"\x80\x04\x95.",
    "zeros": bytes(1000),
}
NOT_FILES: dict[str, Callable[[Path], object]] = {
    "absent": lambda file: None,
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": lambda file: file.symlink_to(file.name),
    "dangling": lambda file: file.symlink_to("absent"),
    "device": lambda file: file.symlink_to("/dev/zero"),
    "sparse": lambda file: file.write_bytes(b"") or os.truncate(file, 1 << 40),
    "memory": lambda file: file.symlink_to("/proc/self/mem"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    group: str
    name: str
    damage: Callable[[Path], object]
    tokenizer: bool = False


def good(folder: Path) -> Path:
    """Write a valid checkpoint, including a tokenizer."""
    path = write(folder, CONFIG, weights(CONFIG), GENERATION)
    (path / "chat_template.jinja").write_text(CHATML)
    return save(path, byte_level_backend(), tokenizer_config={"eos_token": "<|im_end|>", "pad_token": "<|end|>"})


def cases(seed: int, count: int) -> list[Case]:
    """Return `count` cases of each group (0: all of them)."""
    draw = random.Random(seed)
    chosen = []
    for group in (config_values, generation_values, tokenizer_values, files, headers, indices, tokenizers, templates):
        of_group = list(group(draw))
        chosen += draw.sample(of_group, count) if 0 < count < len(of_group) else of_group
    return chosen


def with_value(file: str, key: str, value: str) -> Callable[[Path], object]:
    """Return a function that sets a key of a JSON file to a value, given as JSON text."""

    def damage(path: Path) -> None:
        content = json.loads((path / file).read_text())
        content.pop(key, None)
        text = json.dumps(content).removesuffix("}")
        (path / file).write_text(f"{text}{', ' if content else ''}{json.dumps(key)}: {value}}}")

    return damage


def of_values(group: str, file: str, keys, tokenizer: bool = False) -> Iterator[Case]:
    for key in keys:
        for value in VALUES:
            yield Case(group, f"{key}={value[:40]}", with_value(file, key, value), tokenizer)


def config_values(draw) -> Iterator[Case]:
    yield from of_values("config", "config.json", CONFIG_KEYS)
    for kind in ("linear", "dynamic", "llama3", "yarn", "default"):
        good_rope = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        for key in ROPE_KEYS:
            for value in VALUES:
                rope = json.dumps({name: number for name, number in good_rope.items() if name != key})[:-1]
                damage = with_value("config.json", "rope_scaling", f"{rope}, {json.dumps(key)}: {value}}}")
                yield Case("config", f"rope {kind} {key}={value[:40]}", damage)


def generation_values(draw) -> Iterator[Case]:
    yield from of_values("generation", "generation_config.json", [*OPTIONS, "unknown", "x" * 100_000, "a\nb"])


def tokenizer_values(draw) -> Iterator[Case]:
    yield from of_values("tokenizer_config", "tokenizer_config.json", TOKENIZER_KEYS, tokenizer=True)


def files(draw) -> Iterator[Case]:
    """Yield cases in which a file is missing, is not a regular file, or has wrong content."""
    for name in (*JSON_FILES, *MAPS, WEIGHTS, INDEX, "chat_template.jinja"):
        of_tokenizer = "token" in name or "template" in name
        for kind, make in NOT_FILES.items():

            def replace(path: Path, name=name, make=make) -> None:
                (path / name).unlink(missing_ok=True)
                make(path / name)

            yield Case("files", f"{name}: {kind}", replace, of_tokenizer)
        for kind, content in CONTENTS.items():
            yield Case(
                "files", f"{name}: {kind}", lambda path, n=name, c=content: (path / n).write_bytes(c), of_tokenizer
            )
        for part in (0.1, 0.5, 0.99):

            def cut(path: Path, name=name, part=part) -> None:
                if (path / name).exists():
                    os.truncate(path / name, int((path / name).stat().st_size * part))

            yield Case("files", f"{name}: {part} of it", cut, of_tokenizer)


def headers(draw) -> Iterator[Case]:
    """Yield cases in which the file of the weights is damaged, usually in its header."""
    for length in (0, 1, 7, 2**20, 10**7 + 1, 2**32, 2**63, 2**64 - 1):
        yield Case(
            "safetensors", f"length {length}", lambda path, n=length: overwrite(path, 0, n.to_bytes(8, "little"))
        )
    for _ in range(60):
        place, byte = draw.random(), draw.randrange(256)
        yield Case("safetensors", f"byte {place}", lambda path, p=place, b=byte: flip(path, p, b))
    for _ in range(20):
        part = draw.random()
        yield Case("safetensors", f"{part} of the file", lambda path, p=part: cut_weights(path, p))
    hostile = {
        "dtype": ('"F64"', '"I8"', '"F8_E4M3"', '"BOOL"', '"F33"', '""', "null", "1", "[]", '"BF16"', '"F16"'),
        "shape": ("[]", "[-1]", "[0]", "[true]", "[1.5]", '"x"', "null", "[1, 1, 16]", "[16, 1]", f"[{10**18}]"),
        "data_offsets": (
            "[]",
            "[0]",
            "[4, 0]",
            "[-4, 0]",
            "[0, 64]",
            "[8, 72]",
            "[0.0, 4.0]",
            f"[0, {10**18}]",
            "null",
        ),
    }
    long = f"[1{'0' * 4000}]"
    for key, values in hostile.items():
        for value in (*values, long, f"[0, {long[1:]}", "{}", '"a\\nb"', json.dumps([1] * 100_000)):
            change = rf'\1"{key}":' + value.replace("\\", "\\\\")
            pattern = rf'("model\.norm\.weight":\{{[^}}]*?)"{key}":("\w+"|\[[\d,]*\])'
            damage = lambda path, a=pattern, b=change: edit_header(path, lambda text: re.sub(a, b, text))  # noqa: E731
            yield Case("safetensors", f"{key} {value[:40]}", damage)
    edits: dict[str, Callable[[str], str]] = {
        "renamed": lambda text: text.replace("model.norm.weight", "model.morn.weight"),
        "control characters": lambda text: text.replace("model.norm.weight", "model.\\u0000\\n.weight"),
        "long name": lambda text: text.replace("model.norm.weight", "n" * 1_000_000),
        "a layer of 5000 digits": lambda text: text.replace("layers.1.", f"layers.{'1' * 5000}."),
        "duplicate": lambda text: '{"model.norm.weight":1,' + text[1:],
        "many duplicates": lambda text: '{"a":1,"a":1' + ',"a":1,"b":1' * 100_000 + "," + text[1:],
        "many names": lambda text: "{" + "".join(f'"t{n}":1,' for n in range(100_000)) + text[1:],
        "metadata": lambda text: text.replace('"format":"pt"', '"format":1'),
        "huge": lambda text: text + " " * 11_000_000,
        "deep": lambda text: '{"x":' * 100_000,
        "list": lambda text: "[]",
        "empty": lambda text: "{}",
    }
    for name, edit in edits.items():
        yield Case("safetensors", name, lambda path, edit=edit: edit_header(path, edit))
    yield Case(
        "safetensors", "more bytes", lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes() + b"x")
    )


def overwrite(path: Path, place: int, content: bytes) -> None:
    with open(path / WEIGHTS, "r+b") as stream:
        stream.seek(place)
        stream.write(content)


def header_of(path: Path) -> tuple[str, bytes]:
    content = (path / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end].decode().rstrip(), content[end:]


def edit_header(path: Path, edit: Callable[[str], str]) -> None:
    text, data = header_of(path)
    edited = edit(text).encode()
    (path / WEIGHTS).write_bytes(len(edited).to_bytes(8, "little") + edited + data)


def flip(path: Path, place: float, byte: int) -> None:
    overwrite(path, 8 + int(place * len(header_of(path)[0])), bytes([byte]))


def cut_weights(path: Path, part: float) -> None:
    os.truncate(path / WEIGHTS, int((path / WEIGHTS).stat().st_size * part))


def indices(draw) -> Iterator[Case]:
    """Yield cases in which the weights' index names other files."""
    names = (*weights(CONFIG),)
    places = [
        "../x.safetensors",
        "/etc/passwd",
        "",
        ".",
        "..",
        "a\0b.safetensors",
        "a/b.safetensors",
        "config.json",
        1,
        None,
    ]
    places += [[], "x" * 5000 + ".safetensors", "absent.safetensors", "\u2028.safetensors", "é" * 200 + ".safetensors"]
    for place in places:
        yield Case("index", f"to {str(place)[:30]!r}", lambda path, p=place: write_index(path, dict.fromkeys(names, p)))
    maps: dict[str, object] = {
        "good": dict.fromkeys(names, WEIGHTS),
        "one absent": dict.fromkeys((*names, "x"), WEIGHTS),
        "one more": dict.fromkeys(names[1:], WEIGHTS),
        "many files": {f"t{n}": f"f{n}.safetensors" for n in range(100_000)},
        "many names": {f"{n}.{n}": WEIGHTS for n in range(200_000)},
        "long digits": {f"model.layers.{'1' * 9000}.x": WEIGHTS},
        "null": None,
        "list": [1],
    }
    for name, weight_map in maps.items():
        yield Case("index", name, lambda path, m=weight_map: write_index(path, m))


def write_index(path: Path, weight_map: object) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def tokenizers(draw) -> Iterator[Case]:
    """Yield cases with damaged parts of tokenizer.json."""
    token = {"id": 3, "content": "zz", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    template = {"type": "TemplateProcessing", "pair": [], "single": [{"SpecialToken": {"id": "A", "type_id": 0}}]}
    doubling = {"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    nested: dict = {"type": "NFC"}
    for _ in range(60):
        nested = {"type": "Sequence", "normalizers": [nested]}
    parts: list[tuple[str, object]] = [
        ("version", "9"),
        *(
            ("truncation", value)
            for value in (1, {"direction": "Right", "max_length": 2, "strategy": "x", "stride": 5})
        ),
        *(("padding", value) for value in (1, {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 2**32})),
        *(
            ("added_tokens", [token | change])
            for change in ({"id": 2**32}, {"id": -1}, {"content": ""}, {"special": 1})
        ),
        ("added_tokens", [token | {"id": 2**32 - 1, "special": True}]),
        ("added_tokens", [token | {"content": f"z{n}", "id": 263 + n, "special": bool(n % 2)} for n in range(5000)]),
        *(
            ("normalizer", value)
            for value in (1, "NFC", {"type": "x"}, {"type": "Sequence", "normalizers": [doubling] * 64})
        ),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 10_000}),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}),
        ("normalizer", nested),
        *(
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": m})
            for m in ("AAAA", "/////w==", "?", None, "AQAAAA==")
        ),
        ("pre_tokenizer", split | {"pattern": {"Regex": "("}}),
        ("pre_tokenizer", split | {"pattern": {"Regex": "(?:(?:a| |t|e|x)+)+$"}}),
        ("pre_tokenizer", split | {"pattern": {"String": ""}}),
        *(("pre_tokenizer", {"type": "FixedLength", "length": length}) for length in (0, -1, 2**64)),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "ab"}),
        ("post_processor", template | {"special_tokens": {}}),
        ("post_processor", template | {"special_tokens": {"A": {"id": "A", "ids": [2**32 - 1], "tokens": ["A"]}}}),
        ("post_processor", template | {"special_tokens": {"A": {"id": "A", "ids": [], "tokens": []}}}),
        (
            "post_processor",
            template
            | {
                "single": template["single"] * 50_000,
                "special_tokens": {"A": {"id": "A", "ids": [1] * 1000, "tokens": ["A"] * 1000}},
            },
        ),
        ("post_processor", {"type": "RobertaProcessing", "sep": ["x", 2**32 - 1], "cls": ["x", 0]}),
        ("decoder", {"type": "Strip", "content": "a", "start": 2**64 - 1, "stop": 1}),
        ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
        ("decoder", {"type": "Sequence", "decoders": [doubling] * 64}),
        ("decoder", 1),
        ("model", None),
        ("model", {"type": "x"}),
        ("model", {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}),
        ("model", {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}),
        ("model", {"type": "WordLevel", "unk_token": "x", "vocab": {}}),
        ("model", {"type": "WordPiece", "unk_token": "x", "vocab": {}, "max_input_chars_per_word": 0}),
    ]
    for key, value in parts:
        name = f"{key}={json.dumps(value)[:60]}"
        yield Case("tokenizer", name, with_value("tokenizer.json", key, json.dumps(value)), tokenizer=True)
    changes: list[dict] = [
        *({"merges": merges} for merges in ([["z", "q"]], [1], ["a"], ["a b c"], 1, None, [["h", "e"]] * 100_000)),
        *({"vocab": vocab} for vocab in ({}, [], {"a": -1}, {"a": 2**32}, {"a": 2**32 - 1}, {"a": 1, "b": 1})),
        *({"continuing_subword_prefix": prefix} for prefix in ("é" * 10, "##", 1)),
        *({"dropout": rate} for rate in (-1, 2, "x")),
        {"unk_token": "absent", "fuse_unk": True},
        {"end_of_word_suffix": "é", "byte_fallback": True},
    ]
    for change in changes:

        def alter(path: Path, change=change) -> None:
            content = json.loads((path / "tokenizer.json").read_text())
            content["model"] |= change
            (path / "tokenizer.json").write_text(json.dumps(content))

        yield Case("tokenizer", f"model {json.dumps(change)[:60]}", alter, tokenizer=True)


def templates(draw) -> Iterator[Case]:
    """Yield cases with hostile chat templates, or with a valid one in which a piece is removed or doubled."""
    for name, text in HOSTILE.items():
        yield Case("template", name, lambda path, t=text: (path / "chat_template.jinja").write_text(t), tokenizer=True)
    for _ in range(20):
        first, last = sorted(draw.randrange(len(CHATML)) for _ in range(2))
        text = CHATML[:first] + CHATML[last:] if draw.random() < 0.5 else CHATML[:last] + CHATML[first:]
        damage = lambda path, t=text: (path / "chat_template.jinja").write_text(t)  # noqa: E731
        yield Case("template", f"damaged {first} {last}", damage, tokenizer=True)


def use(path: Path, tokenizer: bool) -> str:
    """Use a checkpoint as a caller does. Return what is wrong with the result, or an empty string."""
    if tokenizer:
        tok = Tokenizer.from_pretrained(path)
        ids = tok.encode("hello <|end|> a text")
        batch = tok.chat([{"role": "user", "content": "hello"}])
        same = ids == tok.encode("hello <|end|> a text") and tok.decode(ids) == tok.decode(ids)
        return "" if same and batch.ids.dtype == np.int32 else "not the same twice"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        params, cfg = load_hf(path)
    stored = load_file(path / WEIGHTS)
    loaded = {".".join(entry.key for entry in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if loaded.keys() != stored.keys() or any(stored[n].tobytes() != np.asarray(loaded[n]).tobytes() for n in stored):
        return "not the tensors of the file"
    content = json.loads((path / "config.json").read_text())
    fields = {field.name: getattr(cfg.model, field.name) for field in dataclasses.fields(cfg.model)}
    wrong = [
        name for name in fields.keys() & content.keys() if content[name] is not None and fields[name] != content[name]
    ]
    if set(wrong) - {"dtype", "attention_bias"}:  # the tensors determine the dtype, and Qwen2 always has these biases
        return f"config: {wrong}"
    file = path / "generation_config.json"
    given = json.loads(file.read_text()) if file.exists() else {}
    known = {name: value for name, value in given.items() if name in OPTIONS}
    numbers = {name: value for name, value in known.items() if isinstance(value, int | float | str) and value == value}
    off = {name for name, value in numbers.items() if value == 0 and getattr(cfg, name) is None}
    left_out = " ".join(str(warning.message) for warning in told)
    wrong = [name for name in numbers.keys() - off if getattr(cfg, name) != numbers[name] and name not in left_out]
    return f"generation config: {wrong}" if wrong else ""


def outcome(case: Case, path: Path) -> dict:
    """Try a case. Return the kind of outcome, its message, the CPU seconds, and the growth of peak memory in bytes."""
    start, before = time.process_time(), peak_memory()
    text, kind = "", "loaded"
    with warnings.catch_warnings(record=True):
        try:
            text = use(path, case.tokenizer)
        except JaxgenError as error:
            kind, text = "refused", str(error)
    result = {"group": case.group, "name": case.name, "kind": kind, "text": text, "path": str(path)}
    return result | {"seconds": time.process_time() - start, "bytes": peak_memory() - before}


def written() -> int:
    """Return the size of this process's private writable memory in bytes."""
    return memory_status("VmData")


def main(seed: int, count: int, folder: Path) -> None:
    source = good(folder / "good")
    assert not use(source, tokenizer=True)
    assert not use(source, tokenizer=False)
    if count:
        sandbox.SECONDS = 0.1  # only if cases are sampled; a run of all cases uses the real limit
    for number, case in enumerate(cases(seed, count)):
        path = folder / str(number)
        shutil.copytree(source, path)
        case.damage(path)
        # RLIMIT_AS would also count what malloc reserves for each thread, which depends on the number of cores.
        resource.setrlimit(resource.RLIMIT_DATA, (written() + (500 << 20), resource.RLIM_INFINITY))
        try:
            line = json.dumps(outcome(case, path))
        except BaseException:
            print(f"{case.group}: {case.name}", file=sys.stderr, flush=True)
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(line, flush=True)
        shutil.rmtree(path)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
