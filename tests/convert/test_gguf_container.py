"""Headers of GGUF files: what is read, and that damaged or hostile ones are one-line errors."""

import os
import random
import struct
import time
import tracemalloc

import numpy as np
import pytest

from convert import CheckpointError, load_hf
from jaxgen import ConfigError, JaxgenError, JaxgenWarning, Tokenizer
from jaxgen.gguf.container import read_gguf
from tests.support.gguf_files import content, pair, stored, text, write_gguf

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "a.number": -0.5,
    "a.large": 2**40,
    "a.flag": True,
    "a.text": "Grüße\n",
    "a.list": ["", "b", "ü"],
    "an.array": np.array([1, -2], np.int64),
    "an.array.of.flags": np.array([True, False]),
}
TENSORS = {"one": stored(np.ones((3, 32)), "Q8_0"), "two": stored(np.arange(5))}


def header(version=3, tensors=0, pairs=0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, pairs)


def entry(name="a", axes=(4,), kind=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes) + struct.pack("<IQ", kind, offset)


def test_a_header_is_read(tmp_path):
    file = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS)
    read = read_gguf(file)
    for key, value in METADATA.items():
        np.testing.assert_array_equal(read.metadata[key], value)
    assert [(t.type, t.shape, t.nbytes) for t in read.tensors.values()] == [("Q8_0", (3, 32), 102), ("F32", (5,), 20)]
    data = file.read_bytes()
    for tensor in read.tensors.values():
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == TENSORS[tensor.name][2]
        assert tensor.offset % 64 == 0
    assert content(METADATA, TENSORS, version=2)[8:] == data[8:]


def test_a_changed_file_is_read_again(tmp_path):
    file = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS)
    first = read_gguf(file)
    assert read_gguf(file) is first
    write_gguf(file, METADATA | {"general.name": "another"}, TENSORS)
    assert read_gguf(file).metadata["general.name"] == "another"


def test_a_long_header_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxgen.gguf.container._FIRST", 100)
    file = write_gguf(tmp_path / "x.gguf", METADATA, TENSORS)
    assert read_gguf(file).metadata["a.list"] == METADATA["a.list"]
    monkeypatch.setattr("jaxgen.gguf.container.LARGEST", 300)
    write_gguf(file, METADATA | {"x": "y" * 300}, TENSORS)
    with pytest.raises(ConfigError, match="its header has more than 300 bytes"):
        read_gguf(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with the letters GGUF"),
        (b"GGUF", "truncated or damaged: ends within 'a number'"),
        (b"<html>" * 20, "does not begin with the letters GGUF"),
        (header(1), "the format has version 1, but only the versions 2 and 3 are read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "so it is big-endian"),
        (header(4), "the format has version 4"),
        (header(tensors=2**60), "has 1152921504606846976 tensors"),
        (header(pairs=2**60), "pairs of metadata; at most 65,536"),
        (header(pairs=1) + struct.pack("<Q", 2**63), "a key has 9223372036854775808 bytes"),
        (header(pairs=1) + text("k") + struct.pack("<IQ", 8, 2**62), "ends within 'k'"),
        (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 2**62), "'k' has 4611686018427387904 strings"),
        (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 8, 2) + text("a"), "ends within 'k'|'k' has 2 strings"),
        (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**62), "ends within 'k'"),
        (header(pairs=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "is an array of the type 9"),
        (header(pairs=1) + text("k") + struct.pack("<I", 77), "has a value of the unknown type 77"),
        (header(pairs=1) + text("k") + struct.pack("<IB", 7, 2), "'k' is 2, but a boolean must be 0 or 1"),
        (header(pairs=1) + struct.pack("<Q", 1) + b"\xff", "is not UTF-8"),
        (header(pairs=2) + pair("k", 1) * 2, "has the key 'k' twice"),
        (header(pairs=1) + pair("general.alignment", 0), "general.alignment must be a power of two, got 0"),
        (header(pairs=1) + pair("general.alignment", 48), "general.alignment must be a power of two, got 48"),
        (header(pairs=1) + pair("general.alignment", "32"), "must be a power of two, got '32'"),
        (header(tensors=1) + entry(axes=()) + bytes(99), "has 0 dimensions"),
        (header(tensors=1) + entry(axes=(1,) * 5) + bytes(99), "has 5 dimensions"),
        (header(tensors=1) + entry(axes=(0,)) + bytes(99), r"has the shape \[0\]"),
        (header(tensors=1) + entry(axes=(2**39, 2**39)) + bytes(99), r"has the shape"),
        (header(tensors=1) + entry(kind=2) + bytes(99), "has rows of 4, which blocks of 32 do not divide"),
        (header(tensors=1) + entry(kind=17) + bytes(99), "'a' has the type IQ2_XS, which is not implemented: use"),
        (header(tensors=1) + entry(kind=999) + bytes(99), "has the type with the number 999"),
        (header(tensors=1) + entry(offset=8) + bytes(99), "the offset of 'a' is not a multiple of 32"),
        (header(tensors=1) + entry(offset=2**40), "truncated: .* bytes of .*; cut off: 'a'"),
        (header(tensors=2) + entry() * 2 + bytes(99), "has the tensor 'a' twice|begins within another"),
        (header(tensors=2) + entry() + entry("b") + bytes(99), "'b' begins within another tensor"),
    ],
)
def test_damaged_headers_are_one_line_errors(tmp_path, data, message):
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_gguf(file)
    assert str(caught.value).startswith(f"{file}: ")
    for read in (load_hf, Tokenizer.from_pretrained):
        with pytest.raises(JaxgenError) as caught:
            read(file)
        assert "\n" not in str(caught.value)


def test_files_that_are_not_regular_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match="not a regular file: a pipe"):
        read_gguf(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="No such file"):
        load_hf(tmp_path / "absent.gguf")


def test_random_damage_is_an_error_or_harmless(tmp_path):
    """Bytes changed at random, and files cut anywhere: no other exception, no hang, no large allocation."""
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b", "ab c"]}
    tokens |= {"tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc", "<s>"]}
    tokens |= {"tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 1, 3], np.int32)}
    sizes = {"block_count": 1, "context_length": 16, "embedding_length": 32, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    whole = content(
        {"general.architecture": "llama", **tokens, **{f"llama.{key}": value for key, value in sizes.items()}},
        {"token_embd.weight": stored(np.ones((6, 32)), "Q8_0"), "output_norm.weight": stored(np.ones(32))},
    )
    head = len(whole) - 6 * 34 - 160
    rng, file = random.Random(0), tmp_path / "x.gguf"
    messages, ignored = [], []
    tracemalloc.start()
    started = time.monotonic()
    for trial in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(head)] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
        file.write_bytes(data[: rng.randrange(len(data))] if trial % 3 == 0 else data)
        for read in (load_hf, Tokenizer.from_pretrained):
            try:
                read(file)
            except JaxgenError as error:
                messages += getattr(error, "problems", [str(error)])
            except JaxgenWarning as warning:
                ignored.append(str(warning))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not [message for message in messages if "\n" in message or not message.startswith(str(file))]
    assert all("is ignored" in message or "never end" in message for message in ignored)
    assert len({message.removeprefix(str(file))[:20] for message in messages}) > 15
    assert peak < 50_000_000
    assert time.monotonic() - started < 120
