"""Read what published checkpoints contain beyond what the model needs, and name what is ignored."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from convert.tensors import Tensor
from jaxgen.core.config.file_options import usable_options
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.model.config import ModelConfig, read_model
from jaxgen.core.model.families import TEXT_PARTS
from jaxgen.errors import JaxgenError, one_line

_BASE = ("embed_tokens", "layers", "norm", "rotary_emb")  # parts of transformers' base models
# The text part's names in models for images and text: of transformers up to 4.51, and of later releases
_TEXT_PREFIX = re.compile(r"^(?:language_model\.(?=(?:model|lm_head)\.)|(?P<own>model\.)language_model\.)")
_OTHER_HEADS = re.compile(r"(v_head|value_head|score)\..+")  # of TRL and of transformers' classifiers


def read_configs(
    path: Path, config: dict[str, Any], generation: dict[str, Any] | None, source: Path | None = None
) -> tuple[ModelConfig | None, GenerationConfig | None, list[str], list[str]]:
    """Return the model config and the generation config (each None if invalid), a list of problems, and notes.

    `source` is the file that contains `config`, by default config.json in the directory `path`.
    """
    own = source or path / "config.json"
    problems: list[str] = []
    notes: list[str] = []
    model = cfg = None
    try:
        model, ignored = read_model(config)
        notes += [f"{own.name}: {note}" for note in ignored]
    except (JaxgenError, TypeError) as error:
        problems.append(f"{own}: {error}")
    if generation is not None:
        own = path / "generation_config.json"
    else:
        names = {field.name for field in dataclasses.fields(GenerationConfig)} - {"model", "use_cache"}
        generation = {name: value for name, value in config.items() if name in names}
    try:
        options, ignored = usable_options(GenerationConfig, generation)
        notes += [f"{own.name}: {note}" for note in ignored]
        cfg = GenerationConfig.from_hf(options, model=model)
    except (JaxgenError, TypeError) as error:
        problems.append(f"{own}: {error}")
    return model, cfg, problems, notes


def renamed(
    tensors: Mapping[str, Tensor], listed: set[str] | None, model_type: Any = None
) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Return the tensors and `listed` under the names of `AutoModelForCausalLM`'s parameters, and notes.

    As in transformers, the tensors of a base model get the prefix "model." (if no name has it), and the heads for other
    tasks are left out. Of a model for images and text, only the text part remains.
    """
    if model_type in TEXT_PARTS:
        return _text_part(tensors, listed)
    is_base = not any(name.startswith("model.") for name in (*tensors, *(listed or ())))

    def names(given: Collection[str]) -> dict[str, str]:
        return {
            f"model.{name}" if is_base and name.split(".")[0] in _BASE else name: name
            for name in given
            if not _OTHER_HEADS.fullmatch(name)
        }

    heads = sorted(filter(_OTHER_HEADS.fullmatch, tensors))
    notes = [f"heads for other tasks are ignored: {one_line(', '.join(heads), 200)}"] if heads else []
    own = {name: tensors[given] for name, given in names(tensors).items()}
    return own, None if listed is None else set(names(listed)), notes


def _text_part(
    tensors: Mapping[str, Tensor], listed: set[str] | None
) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Return the tensors and `listed` of the text part under the names that they have in a model for text."""

    def names(given: Collection[str]) -> dict[str, str]:
        found = {name: _TEXT_PREFIX.sub(r"\g<own>", name) for name in given}
        return {own: name for name, own in found.items() if own != name or name == "lm_head.weight"}

    own = {name: tensors[given] for name, given in names(tensors).items()}
    others = len(tensors) - len(own)
    notes = [f"only the text part is read; tensors of other parts are ignored ({others})"] if others else []
    return own, None if listed is None else set(names(listed)), notes
