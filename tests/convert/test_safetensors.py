import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from convert.safetensors import DTYPES, CheckpointError, read_header, write_file

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
def test_a_file_is_the_librarys_byte_for_byte_and_reads_back(tmp_path, layout):
    file, other, arrays = tmp_path / "ours", tmp_path / "theirs", draw(layout)
    file.unlink(missing_ok=True)
    write_file(file, layout, arrays.__getitem__)
    save_file(arrays, other, metadata={"format": "pt"})
    assert file.read_bytes() == other.read_bytes()
    with safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {*opened.keys()} == arrays.keys()
        for name, array in arrays.items():
            read = opened.get_tensor(name)
            assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


@same_folder
@given(layouts)
def test_we_read_what_the_library_writes(tmp_path, layout):
    file, arrays = tmp_path / "theirs", draw(layout)
    save_file(arrays, file)
    tensors = read_header(file)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        read = tensors[name].read(array.dtype)
        assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_a_cast_is_numpys(file, monkeypatch, source, target):
    monkeypatch.setattr("convert.safetensors._CHUNK", 1000)
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


def test_a_value_that_becomes_infinite_is_an_error(file):
    save_file({"x": np.array([1, 65504, 65520, -1e30, np.inf], np.float32)}, file)
    tensor = read_header(file)["x"]
    assert tensor.read(np.dtype(jnp.bfloat16))[0] == 1
    with pytest.raises(CheckpointError, match=r"model.safetensors: x: 2 or more values are too large for float16"):
        tensor.read(np.dtype(np.float16))


def test_a_read_is_aligned_for_jax_and_independent_of_others(file):
    save_file({"x": np.arange(9, dtype=np.float32), "y": np.arange(3, dtype=np.float32)}, file)
    tensors = read_header(file)
    first, second = tensors["x"].read(FLOATS[0]), tensors["x"].read(FLOATS[0])
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    first[:] = 0
    assert second.tolist() == [*range(9)]


def test_a_file_cut_after_its_header_was_read(file):
    save_file({"x": np.arange(9, dtype=np.float32)}, file)
    tensor = read_header(file)["x"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="x: the file was cut"):
        tensor.read(FLOATS[0])


def test_every_truncation_is_noticed(file):
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


def test_a_flipped_header_byte_is_noticed_or_changes_no_place(file):
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
            # What remains are other names, other shapes of the same size, other dtypes of the same width.
            assert sorted(tensor.nbytes for tensor in tensors.values()) == [4, 24]
            assert sorted(tensor.offset - start for tensor in tensors.values()) == [0, 24]
    assert noticed > 1.5 * start


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ([1], b"", "not an object"),
        ({"x": [1]}, b"", "x: damaged header: [1] does not consist of dtype, shape and data_offsets"),
        (
            {"x": {"dtype": "F33", "shape": [], "data_offsets": [0, 4]}},
            b"1234",
            "x: damaged header: unknown dtype 'F33'",
        ),
        (
            {"x": {"dtype": [], "shape": [], "data_offsets": [0, 4]}},
            b"1234",
            "x: damaged header: unknown dtype []",
        ),
        (
            {"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
            b"1234",
            "must be lists of whole numbers",
        ),
        (
            {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
            b"1234",
            "must be lists of whole numbers",
        ),
        (
            {"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
            b"1234",
            "must be lists of whole numbers",
        ),
        (
            {"x": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}},
            b"1234",
            "must be lists of whole numbers",
        ),
        (
            {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
            b"1234",
            "do not span the 4 bytes of F32 [1]",
        ),
        (
            {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            b"1234",
            "do not span the 8 bytes of F32 [2]",
        ),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234", "do not span the 4 bytes"),
        (
            {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
            b"12341234",
            "x: damaged header: leaves a gap",
        ),
        (
            {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
            b"12345",
            "1 bytes follow the last tensor",
        ),
        ({"x": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4 * 10**30]}}, b"1234", "cut off: x"),
    ],
)
def test_damaged_entries(file, header, data, expected):
    file.write_bytes(raw(header, data))
    (problem,) = problems(file)
    assert expected in problem


def test_overlap_and_truncation_are_reported_together(file):
    entry = {"dtype": "F16", "shape": [2]}
    header = {name: entry | {"data_offsets": span} for name, span in {"a": [0, 4], "b": [2, 6], "c": [6, 10]}.items()}
    file.write_bytes(raw(header, b"12345678"))
    overlap, truncated = problems(file)
    assert "b: damaged header: overlaps the tensor before it" in overlap
    assert "truncated" in truncated
    assert "cut off: c" in truncated


@pytest.mark.parametrize(
    "text",
    [b"{", b"\xff\xfe{}", b'{"x": ' * 5000, b"", b'{"a":1e}', b'{"a":' + b"1" * 5000 + b"}"],
    ids=["open", "not UTF-8", "deep", "empty", "number", "long number"],
)
def test_headers_that_are_no_json(file, text):
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    (problem,) = problems(file)
    assert "its header cannot be read" in problem


def test_a_name_twice_in_the_header(file):
    entry = '{"dtype":"F16","shape":[2],"data_offsets":[0,4]}'
    text = f'{{"x":{entry},"x":{entry}}}'.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    (problem,) = problems(file)
    assert "twice there: x" in problem


def test_a_huge_header_length_is_not_believed(file):
    with open(file, "wb") as stream:
        stream.write((1 << 30).to_bytes(8, "little"))
        stream.truncate(1 << 31)
    (problem,) = problems(file)
    assert "cannot hold a header" in problem


def test_write_refuses_an_array_other_than_declared(file):
    with pytest.raises(CheckpointError, match="x: float32"):
        write_file(file, {"x": (FLOATS[1], (2,))}, lambda name: np.zeros(2, np.float32))
