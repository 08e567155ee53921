import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.numpy import save_file

from convert.errors import CheckpointError
from convert.tensors import DTYPES, _open, read_header, same_bits, write_file

FLOATS = list(DTYPES.values())
layouts = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(FLOATS), st.lists(st.integers(0, 5), max_size=4).map(tuple)),
    max_size=8,
)
same_folder = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def draw(layout) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: np.asarray(random.normal(size=shape)).astype(dtype) for name, (dtype, shape) in layout.items()}


def raw(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def problems(file: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert all(problem.startswith(f"{file}: ") and "\n" not in problem for problem in caught.value.problems)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "model.safetensors"


@same_folder
@given(layouts)
def test_file_round_trips_and_equals_the_librarys(tmp_path, layout):
    file, other, arrays = tmp_path / "ours", tmp_path / "theirs", draw(layout)
    file.unlink(missing_ok=True)
    write_file(file, arrays)
    save_file(arrays, other, metadata={"format": "pt"})
    assert file.read_bytes() == other.read_bytes()
    tensors = read_header(file)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor, content = tensors[name], file.read_bytes()
        assert same_bits(tensor.read(), array)
        assert (DTYPES[tensor.dtype], tensor.shape, tensor.nbytes) == (array.dtype, array.shape, array.nbytes)
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


def test_arrays_of_any_layout_are_written(file):
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"fortran": np.asfortranarray(matrix), "strided": matrix[::2, ::2], "jax": jnp.asarray(matrix)}
    write_file(file, arrays)
    tensors = read_header(file)
    assert all(same_bits(tensors[name].read(), np.array(array)) for name, array in arrays.items())


def test_file_has_default_permissions(file, tmp_path):
    write_file(file, {"x": np.ones(2, np.float32)})
    (tmp_path / "other").write_text("")
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_unwritable_file_is_an_error(file, monkeypatch):
    def fail(*arguments, **options):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("convert.tensors.save_file", fail)
    with pytest.raises(OSError, match=r"model.safetensors: I/O error: No space left on device"):
        write_file(file, {"x": np.ones(2, np.float32)})
    with pytest.raises(FileExistsError):
        write_file(file, {"x": np.ones(2, np.float32)})


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_cast_equals_numpys(file, monkeypatch, source, target):
    monkeypatch.setattr("convert.tensors.CHUNK", 1000)
    bits = (
        np.arange(1 << 16, dtype=np.uint16) if source.itemsize == 2 else np.arange(0, 1 << 32, 65537, dtype=np.uint32)
    )
    values = bits.view(source)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(target)
        kept = ~np.isinf(expected) | np.isinf(values)
        values, expected = values[kept], expected[kept]
    save_file({"x": values}, file)
    assert values.size > 20_000
    read = read_header(file)["x"].read(target)
    assert read.tobytes() == expected.tobytes()


def test_overflow_to_infinity_is_an_error(file):
    save_file({"x": np.array([1, 65504, 65520, -1e30, np.inf], np.float32)}, file)
    tensor = read_header(file)["x"]
    assert tensor.read(np.dtype(jnp.bfloat16))[0] == 1
    with pytest.raises(CheckpointError, match=r"model.safetensors: x: 2 values are too large for float16"):
        tensor.read(np.dtype(np.float16))


def test_each_read_returns_a_new_array(file):
    save_file({"x": np.arange(9, dtype=np.float32)}, file)
    tensor = read_header(file)["x"]
    first, second = tensor.read(), tensor.read(FLOATS[0])
    first[:] = 0
    assert second.tolist() == [*range(9)]


def test_same_bits_compares_bits_shape_and_dtype():
    zero, nan = np.zeros(2, np.float32), np.full(2, np.nan, np.float32)
    assert same_bits(nan, nan)
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.view(np.int32))
    assert not same_bits(zero, zero.reshape(2, 1))


def test_truncation_after_the_header_was_read_is_detected(file):
    save_file({"x": np.arange(9, dtype=np.float32)}, file)
    tensor = read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="x: the file was truncated"):
        tensor.read()


def test_truncation_of_an_open_file_is_detected(file):
    """Reading through the library's memory map would kill the process with SIGBUS."""
    save_file({"x": np.zeros(1 << 20, np.float32)}, file)
    with _open(file) as opened:
        os.truncate(file, 1000)
        with pytest.raises(SafetensorError, match="Could not read tensor x"):
            opened.get_tensor("x")


def test_every_truncation_is_detected(file):
    save_file({"some.weight": np.arange(6, dtype=np.float32), "b": np.ones(2, np.float16)}, file)
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for size in range(len(content)):
        file.write_bytes(content[:size])
        (problem,) = problems(file)
        assert "truncated" in problem
        if size >= start:
            assert f"{size} bytes of {len(content)}; cut off: " in problem
            assert "b" in problem.split("cut off: ")[1]
            assert ("some.weight" in problem) == (size < start + 24)


def test_flipped_header_byte_is_detected_or_harmless(file):
    arrays = {"w": np.arange(6, dtype=np.float32), "b": np.ones(2, np.float16)}
    save_file(arrays, file)
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    noticed = 0
    for place in range(start):
        for flip in (1, 4, 0x80):
            damaged = bytearray(content)
            damaged[place] ^= flip
            file.write_bytes(damaged)
            try:
                tensors = read_header(file)
            except CheckpointError:
                noticed += 1
                continue
            # The flip changed only a name, a shape to one of the same size, or a dtype to one of the same width.
            assert sorted(tensor.nbytes for tensor in tensors.values()) == [4, 24]
            assert sorted(tensor.offset - start for tensor in tensors.values()) == [0, 24]
    assert noticed > 1.5 * start


FORM = "must be dtype, shape and data_offsets, in whole numbers"


@pytest.mark.parametrize(
    ("entry", "data", "expected"),
    [
        ([1], b"", "x: damaged header: [1] must be dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": []}, b"", FORM),
        ({"dtype": "F32", "shape": [], "data_offsets": [0, 4], "strides": []}, b"1234", FORM),
        ({"dtype": [], "shape": [], "data_offsets": [0, 4]}, b"1234", FORM),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, b"1234", FORM),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, b"1234", FORM),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, b"1234", FORM),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, b"1234", FORM),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}, b"1234", FORM),
        ({"dtype": "F33", "shape": [], "data_offsets": [0, 4]}, b"1234", "unknown variant `F33`"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, b"1234", "invalid shape, data type, or offset"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, b"1234", "invalid offset for tensor `x`"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, b"12341234", "invalid offset for tensor `x`"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, b"12345", "file not fully covered"),
        ({"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4 * 10**30]}, b"1234", FORM),
        ({"dtype": "F32", "shape": [10**18], "data_offsets": [0, 4 * 10**18]}, b"1234", "cut off: x"),
    ],
)
def test_damaged_entries_are_refused(file, entry, data, expected):
    file.write_bytes(raw({"x": entry}, data))
    (problem,) = problems(file)
    assert expected in problem


def test_header_must_be_an_object(file):
    file.write_bytes(raw([1], b""))
    (problem,) = problems(file)
    assert "its header: must contain a JSON object, contains list" in problem


def test_damaged_entries_are_reported_together(file):
    file.write_bytes(raw({"a": {}, "b": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}, "c": 3}, b"1234"))
    first, second = problems(file)
    assert "a: damaged header" in first
    assert "c: damaged header" in second


def test_overlapping_tensors_are_refused(file):
    entry = {"dtype": "F16", "shape": [2]}
    header = {name: entry | {"data_offsets": span} for name, span in {"a": [0, 4], "b": [2, 6]}.items()}
    file.write_bytes(raw(header, b"123456"))
    (problem,) = problems(file)
    assert "damaged: " in problem
    assert "invalid offset for tensor `b`" in problem


@pytest.mark.parametrize(
    "text",
    [b"{", b"\xff\xfe{}", b'{"x": ' * 5000, b"", b'{"a":1e}', b'{"a":' + b"1" * 5000 + b"}"],
    ids=["open", "not UTF-8", "deep", "empty", "number", "long number"],
)
def test_header_must_be_json(file, text):
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    (problem,) = problems(file)
    assert "damaged: its header: not valid JSON" in problem


def test_duplicate_name_in_the_header_is_refused(file):
    entry = '{"dtype":"F16","shape":[2],"data_offsets":[0,4]}'
    text = f'{{"x":{entry},"x":{entry}}}'.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    (problem,) = problems(file)
    assert "duplicate keys: x" in problem


def test_huge_header_length_is_refused(file):
    with open(file, "wb") as stream:
        stream.write((1 << 30).to_bytes(8, "little"))
        stream.truncate(1 << 31)
    (problem,) = problems(file)
    assert "a header of 1,073,741,824 bytes; at most 10,000,000 are read" in problem
