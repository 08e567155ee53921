"""Files of a checkpoint directory: JSON files, and weights in model.safetensors or in shards with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.atomic_directory import replaced
from convert.errors import CheckpointError
from convert.tensors import Tensor, read_header, write_file
from jaxgen import json_file
from jaxgen.errors import ConfigError
from jaxgen.remote import is_url

STEM = "model"
INDEX, SINGLE = f"{STEM}.safetensors.index.json", f"{STEM}.safetensors"
ADAPTER_STEM = "adapter_model"
ADAPTER = f"{ADAPTER_STEM}.safetensors"
MAX_SHARD = 5_000_000_000  # maximum total size in bytes of the tensors in one file, as in transformers

# Constants that old versions of transformers saved with the weights, although the config determines them.
CONSTANTS = re.compile(r".*\.rotary_emb\.inv_freq")


def find_tensors(path, stem: str = STEM) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Return the tensors in a directory's files, the names of all expected tensors, and a list of problems.

    `stem` is the prefix of the file names. The set of names is None if there is no index and no file can be read.
    """
    path = checkpoint_directory(path)
    index = f"{stem}.safetensors.index.json"
    files, weight_map, problems = _files(path, index, stem)
    there = set(os.listdir(path))
    tensors: dict[str, Tensor] = {}
    headers: dict[str, dict[str, Tensor]] = {}
    for file in files:
        if weight_map and file.name not in there:
            problems.append(f"{file}: absent, though {index} names it")
            continue
        try:
            header = headers[file.name] = read_header(file)
        except CheckpointError as error:
            problems += error.problems
            continue
        for name in header:
            if name in tensors:
                problems.append(f"{file}: {name} is also in {tensors[name].file.name}")
            elif weight_map and name not in weight_map and not CONSTANTS.fullmatch(name):
                problems.append(f"{file}: {name} is not in {index}")
        tensors = header | tensors
    for name, shard in weight_map.items():
        if shard in headers and name not in headers[shard]:
            elsewhere = f": it is in {tensors[name].file.name}" if name in tensors else ""
            problems.append(f"{path / shard}: {name} is absent, though {index} puts it there{elsewhere}")
    listed = {*tensors, *weight_map} if headers or weight_map else None
    return tensors, listed, problems


def plan(sizes: Mapping[str, int], max_shard: int | None = None, stem: str = STEM) -> dict[str, list[str]]:
    """Map each file name of a checkpoint to the names of its tensors.

    `sizes` maps tensor names to sizes in bytes, in the order in which the tensors are written. A file contains at most
    `max_shard` bytes (None means `MAX_SHARD`), or a single larger tensor. File names begin with `stem`.
    """
    limit = max_shard or MAX_SHARD
    shards: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if shards[-1] and total + size > limit:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    names = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    return dict(zip(names if len(shards) > 1 else [f"{stem}.safetensors"], shards, strict=True))


def write_index(directory: Path, files: Mapping[str, Iterable[str]], sizes: Mapping[str, int]) -> None:
    """Write the index of a checkpoint that has more than one file."""
    if len(files) > 1:
        weight_map = {tensor: name for name, shard in files.items() for tensor in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        stem = next(iter(files)).split("-")[0]
        write_json(directory / f"{stem}.safetensors.index.json", index)


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    sizes: Mapping[str, int],
    read: Callable[[str], np.ndarray],
    max_shard: int | None = None,
    stem: str = STEM,
) -> None:
    """Write both configs, the tensors and an index to an empty directory; `read` returns the tensor with a given name.

    `plan` determines the file names. Only the arrays of one file are in memory at a time.
    """
    write_configs(directory, config, generation)
    files = plan(sizes, max_shard, stem)
    for name, shard in files.items():
        write_file(directory / name, {tensor: read(tensor) for tensor in shard})
    write_index(directory, files, sizes)


def write_configs(directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> None:
    """Write config.json, and generation_config.json if there is one."""
    write_json(directory / "config.json", config)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names so that layer 2 comes before layer 10."""
    return sorted(names, key=lambda name: [(_number(part), part) for part in name.split(".")])


def _number(part: str) -> int:
    return int(part) if part.isdecimal() and len(part) < 20 else 0


def checkpoint_directory(path) -> Path:
    """Return `path` as a Path, or raise a CheckpointError if it is not a readable directory."""
    given, path = path, Path(path)
    if os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):
            raise CheckpointError([f"{path}: Permission denied"])
        return path
    if os.path.lexists(path):
        kind = "a file" if path.is_file() else "not a directory"
        raise CheckpointError([f"{path} is {kind}: pass the directory that contains it"])
    if path.name and os.path.isdir(replaced(path)):
        raise CheckpointError(
            [f"{path}: replacing it was interrupted; {replaced(path)} is the old one: rename it back"]
        )
    advice = "pass a local checkpoint directory"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)):
        advice += "; a model on the Hugging Face Hub is fetched by convert.hub.local_directory"
    elif is_url(str(given)):
        advice += ", such as the one that convert.hub.local_directory copies a URL to"
    raise CheckpointError([f"{given} is not a directory: {advice}"])


def read_json(file: Path, largest: int = json_file.LARGEST) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the object in a JSON file (None if the file is missing or damaged), and a list of problems."""
    try:
        return json_file.read_json(file, largest), []
    except ConfigError as error:
        return None, [str(error)]


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object in the format of transformers' JSON files."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _files(path: Path, index: str, stem: str) -> tuple[list[Path], dict[str, str], list[str]]:
    """Return the weight files, a map from tensors to files (empty without an index), and a list of problems."""
    single = f"{stem}.safetensors"
    found = [file for file in sorted(path.glob("*.safetensors")) if file.name != ADAPTER or stem == ADAPTER_STEM]
    quantized = stem not in (STEM, ADAPTER_STEM) and [file.name for file in found if file.name.startswith(stem)]
    if quantized and any(os.path.lexists(path / name) for name in (SINGLE, INDEX)):
        return [], {}, [f"{path} has quantized weights, {quantized[0]}, and others: remove one of the two"]
    if os.path.lexists(path / index):
        content, problems = read_json(path / index)
        if content is None:
            return [], {}, problems
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
            fault = "weight_map must map each tensor to the name of a file of the directory, which ends in .safetensors"
            return [], {}, [f"{path / index}: {fault}"]
        if os.path.lexists(path / single) and single not in weight_map.values():
            problems.append(f"{path} has {single} and an {index} that does not list it: remove the outdated one")
        return [path / shard for shard in sorted(set(weight_map.values()))], weight_map, problems
    if path / single in found:
        return [path / single], {}, []
    if len(found) == 1 and stem != ADAPTER_STEM:
        return found, {}, []
    if found and stem != ADAPTER_STEM:
        names = ", ".join(file.name for file in found)
        return [], {}, [f"{path}: several files ({names}) and no {index} to say which belong together"]
    return [], {}, [f"{path}: {_absent(path, stem)}"]


def _absent(path: Path, stem: str) -> str:
    """Return the problem of a directory without the weights of a model or, depending on `stem`, of an adapter."""
    name, library, loader = "*.safetensors", "transformers", "AutoModelForCausalLM"
    if stem == ADAPTER_STEM:
        name, library, loader = ADAPTER, "PEFT", "AutoPeftModelForCausalLM"
    elif os.path.lexists(path / ADAPTER):
        return f"no {name} of a model, only an adapter: load its base model, then call load_adapter"
    pickled = ", ".join(file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return (
            f"no {name}: {pickled} contains pickled weights, which are not read; with {library}, "
            f"{loader}.from_pretrained(DIR).save_pretrained(NEW_DIR) converts them"
        )
    return f"no {name}: download the weights too"


def _is_file_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors") or len(name.encode(errors="replace")) > 255:
        return False
    return name.isprintable() and not {"/", "\\"} & set(name)
