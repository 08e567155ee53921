"""Choose the format of a packed checkpoint, and assemble the matrices from its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from convert.errors import CheckpointError
from convert.packed.awq import Awq
from convert.packed.compressed_tensors import CompressedTensors
from convert.packed.formats import NO_CACHE, Format, Parts
from convert.packed.fp8 import Fp8Blocks
from convert.packed.gptq import Gptq
from convert.quantized import NEVER_QUANTIZED
from convert.shards import read_json
from convert.tensors import DTYPES, Tensor
from jaxgen.core.model.weights import Packed
from jaxgen.errors import ConfigError, InputError, one_line, shown

FORMATS: dict[str, Any] = {"fp8": Fp8Blocks, "compressed-tensors": CompressedTensors, "gptq": Gptq, "awq": Awq}
_OLD_CONFIG = "quantize_config.json"  # of AutoGPTQ
_CACHE_SCALE = re.compile(r".*\.[qkv]_(?:scale|zero_point)")


def quantization_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the description of a packed checkpoint's format from its config.json; None if it is not packed.

    Raises:
        CheckpointError: the description is not an object.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = config.get("quantization_config") or inner
    if not found and (path / _OLD_CONFIG).is_file():
        old, problems = read_json(path / _OLD_CONFIG)
        if problems:
            raise CheckpointError(problems)
        found = {"quant_method": "gptq", **(old or {})}
    if found and not isinstance(found, Mapping):
        raise CheckpointError([f"{path / 'config.json'}: quantization_config must be an object, got {shown(found)}"])
    return dict(found) if found else None


def read_format(path: Path, config: Mapping[str, Any]) -> tuple[Format, list[str]]:
    """Return the format that a `quantization_config` describes, and notes about what is ignored.

    Raises:
        CheckpointError: the format is not read, or an option of it.
    """
    method = config.get("quant_method")
    file = path / "config.json"
    if not isinstance(method, str) or method not in FORMATS:
        known = ", ".join(FORMATS)
        fault = f"quantization_config: quant_method {shown(method)} is not read, only {known}: load the original model"
        raise CheckpointError([f"{file}: {fault}"])
    kind = FORMATS[method]
    try:
        form: Format = kind.of(config)
    except ConfigError as error:
        raise CheckpointError([f"{file}: quantization_config ({kind.title}): {error}"]) from error
    unknown = sorted(set(map(str, config)) - set(kind.keys))
    notes = [f"unknown keys of quantization_config are ignored: {one_line(', '.join(unknown), 200)}"] if unknown else []
    return form, [*notes, *form.notes]


def read_packed(
    form: Format, tensors: Mapping[str, Tensor], listed: set[str] | None, dtype: Any
) -> tuple[dict[str, Any], set[str] | None, list[str], list[str]]:
    """Return a checkpoint's weights, with packed matrices in place of their tensors.

    Args:
        form: the checkpoint's format.
        tensors: the tensors by their names in `AutoModelForCausalLM`.
        listed: the names of all tensors in the checkpoint, including those in damaged files; None if unknown.
        dtype: the dtype of the matrices.

    Returns:
        The weights by name, `listed` with the names of matrices in place of those of their tensors, a list of problems,
        and notes.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    weights: dict[str, Any] = {}
    problems: list[str] = []
    ignored: dict[str, None] = {}
    for module, parts in modules.items():
        cached = [suffix for suffix in parts if _CACHE_SCALE.fullmatch(f"{module}.{suffix}")]
        if cached:
            ignored[NO_CACHE] = None
        own = {suffix: tensor for suffix, tensor in parts.items() if suffix not in cached}
        if not form.is_packed(own):
            weights |= {f"{module}.{suffix}".removeprefix("."): tensor for suffix, tensor in own.items()}
            problems += _wrongly_dense(form, module, own)
            continue
        used = {suffix: tensor for suffix, tensor in own.items() if suffix not in form.ignored}
        ignored |= {form.ignored[suffix]: None for suffix in own if suffix in form.ignored}
        try:
            found, faults = _matrix(form, module, used, listed, dtype)
        except CheckpointError as error:
            problems += error.problems
            continue
        weights |= found
        problems += faults
    return weights, _listed(form, listed), problems, [note for note in ignored if note not in form.notes]


def _matrix(
    form: Format, module: str, parts: dict[str, Tensor], listed: set[str] | None, dtype: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return a module's packed matrix and its bias by name, and a list of problems."""
    first, name = next(iter(parts.values())), f"{module}.weight"
    where = f"{first.file}: {form.title}: {module}"
    absent = [names for names in form.required if not any(name in parts for name in names)]
    if absent:
        known = listed is None or any(f"{module}.{name}" in listed for names in absent for name in names)
        return {}, [] if known else [f"{where}.{' or '.join(absent[0])} is missing"]
    extra = {suffix: parts.pop(suffix) for suffix in [*parts] if suffix not in (*form.suffixes, "weight")}
    result: dict[str, Any] = {f"{module}.{suffix}": tensor for suffix, tensor in extra.items()}
    if form.packs(first.name.rpartition(".")[0]) is False:
        return result, [f"{where} is packed, but quantization_config excludes it: correct the config"]
    if "weight" in parts and (both := {"qweight", "weight_packed"} & parts.keys()):
        return result, [f"{where} has both weight and {both.pop()}: remove one of the two"]
    try:
        result[name] = form.weight(name, parts, dtype)
    except InputError as error:
        return result, [f"{where} {error}"]
    return result, []


def _wrongly_dense(form: Format, module: str, parts: Parts) -> list[str]:
    """Return a problem if a dense matrix should be packed, according to the config."""
    matrix = parts.get("weight")
    if matrix is None or len(matrix.shape) != 2 or matrix.dtype not in DTYPES:
        return []
    if module.endswith(("embed_tokens", ".gate")) or f"{module}.weight".endswith(NEVER_QUANTIZED):
        return []
    if form.packs(matrix.name.rpartition(".")[0]) in (False, None):
        return []
    fault = "is not packed, but quantization_config does not exclude it: correct the config"
    return [f"{matrix.file}: {form.title}: {module} {fault}"]


def without_zero_biases(weights: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Leave out biases of zeros, which some programs write for packed matrices without a bias.

    `names` are those of the model's parameters.
    """

    def is_left_out(name: str) -> bool:
        if name in names or not name.endswith(".bias"):
            return False
        is_packed = isinstance(weights.get(f"{name.removesuffix('bias')}weight"), Packed)
        return is_packed and weights[name].dtype in DTYPES and not weights[name].read().any()

    return {name: weight for name, weight in weights.items() if not is_left_out(name)}


def _listed(form: Format, listed: set[str] | None) -> set[str] | None:
    """Return the names of all tensors, with the names of matrices in place of those of their tensors."""
    if listed is None:
        return None
    result = set()
    for name in listed:
        module, _, suffix = name.rpartition(".")
        result.add(f"{module}.weight" if suffix in form.suffixes else name)
    return result
