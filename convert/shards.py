"""Which tensors lie in which of a directory's files: model.safetensors, or shards and their index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.atomic_directory import replaced
from convert.safetensors import CheckpointError, Tensor, read_header, write_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_SHARD = 5_000_000_000  # bytes of tensors in one file, as in transformers

# Constants that old versions of transformers saved with the weights; the config says what they are.
CONSTANTS = re.compile(r".*\.rotary_emb\.inv_freq")

_PICKLED = (".bin", ".pt", ".pth")

Layout = dict[str, tuple[np.dtype, tuple[int, ...]]]


def find_tensors(path) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Return the tensors in a directory's files, all names that should be there, and what is wrong.

    The names are None where damage hides them.
    """
    path = checkpoint_directory(path)
    found = sorted(path.glob("*.safetensors"))
    if (path / INDEX).exists():
        return _find_sharded(path)
    if not found:
        pickled = [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLED]
        advice = "download the *.safetensors files too"
        if pickled:
            advice = (
                f"{', '.join(pickled)} holds pickled weights, which are not read; with transformers, "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) converts them"
            )
        return {}, None, [f"{path}: no *.safetensors: {advice}"]
    if path / SINGLE not in found and len(found) > 1:
        names = ", ".join(file.name for file in found)
        return {}, None, [f"{path}: several files ({names}) and no {INDEX} to say which belong together"]
    file = path / SINGLE if path / SINGLE in found else found[0]
    try:
        tensors = read_header(file)
    except CheckpointError as error:
        return {}, None, error.problems
    except OSError as error:
        return {}, None, [f"{file}: {error.strerror}"]
    return tensors, set(tensors), []


def write_tensors(directory: Path, layout: Layout, read: Callable[[str], np.ndarray]) -> None:
    """Write the tensors of `layout`, which `read` returns by name, to one file or to shards with an index."""
    shards = _shards(layout)
    if len(shards) == 1:
        write_file(directory / SINGLE, layout, read)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / name, shard, read)
        weight_map |= dict.fromkeys(shard, name)
    size = sum(_nbytes(*entry) for entry in layout.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX, index)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names with layer 2 before layer 10."""
    return sorted(names, key=lambda name: [(int(part) if part.isdecimal() else 0, part) for part in name.split(".")])


def checkpoint_directory(path) -> Path:
    """Return `path` as a Path.

    Raises:
        CheckpointError: it is no directory.
    """
    given, path = path, Path(path)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError([f"{path} is a file: give the directory that it is in"])
    if replaced(path).is_dir():
        raise CheckpointError(
            [f"{path}: replacing it was interrupted; {replaced(path)} is the old one: rename it back"]
        )
    advice = "give a local checkpoint directory"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)):
        advice += "; a model on the Hugging Face Hub is fetched by convert.hub.local_directory"
    raise CheckpointError([f"{given} is not a directory: {advice}"])


def read_json(file: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the object in a JSON file, None without one, and what is wrong with the file."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [f"{file}: {error.strerror}"]
    except (ValueError, RecursionError) as error:
        return None, [f"{file}: not valid JSON: {error}"]
    if not isinstance(content, dict):
        return None, [f"{file}: must hold a JSON object, holds {type(content).__name__}"]
    return content, []


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object as transformers formats its JSON files."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _find_sharded(path: Path) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    index, problems = read_json(path / INDEX)
    if index is None:
        return {}, None, problems
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file not in ("", ".", "..") and "/" not in file and "\\" not in file
        for file in weight_map.values()
    ):
        fault = "weight_map must give each tensor the name of a file beside the index"
        return {}, None, [f"{path / INDEX}: {fault}"]
    if (path / SINGLE).exists() and SINGLE not in weight_map.values():
        problems.append(f"{path}: both {SINGLE} and {INDEX} without it: remove the one that is outdated")
    tensors: dict[str, Tensor] = {}
    headers: dict[str, dict[str, Tensor]] = {}
    for shard in sorted(set(weight_map.values())):
        file = path / shard
        try:
            header = headers[shard] = read_header(file)
        except CheckpointError as error:
            problems += error.problems
            continue
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            problems.append(f"{file}: {f'absent, though {INDEX} names it' if absent else error.strerror}")
            continue
        for name in header:
            if name in tensors:
                problems.append(f"{file}: {name} is also in {tensors[name].file.name}")
            elif name not in weight_map and not CONSTANTS.fullmatch(name):
                problems.append(f"{file}: {name} is not in {INDEX}")
        tensors = header | tensors
    for name, shard in weight_map.items():
        if shard in headers and name not in headers[shard]:
            elsewhere = f": it is in {tensors[name].file.name}" if name in tensors else ""
            problems.append(f"{path / shard}: {name} is absent, though {INDEX} puts it there{elsewhere}")
    return tensors, set(tensors) | set(weight_map), problems


def _shards(layout: Layout) -> list[Layout]:
    shards: list[Layout] = [{}]
    size = 0
    for name, entry in layout.items():
        if shards[-1] and size + _nbytes(*entry) > MAX_SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += _nbytes(*entry)
    return shards


def _nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
