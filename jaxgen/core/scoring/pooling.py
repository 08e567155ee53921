"""`Pooling`: how a checkpoint turns the hidden states of a text into one vector."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxgen.errors import ConfigError, InputError, check_whole, shown
from jaxgen.gguf.container import is_gguf
from jaxgen.json_file import parse_json, read_file, read_json

KINDS = ("last", "mean", "cls")
_LARGEST = 100_000  # maximum number of bytes of a file of sentence-transformers
# sentence-transformers' names of the kinds, as keys of a pooling config and as its newer `pooling_mode`.
_MODES = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
_MODULES = "Transformer, Pooling and Normalize"


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The way to reduce the last hidden states of a text, `[T, D]`, to one vector, `[D]`.

    >>> embed(params, ids, cfg, pooling=Pooling("mean", normalized=False))

    Attributes:
        kind: "last" for the last token's state, "cls" for the first token's, or "mean" for the mean of all tokens.
        normalized: if True, vectors are divided by their length.
        shortens: if True, the model was trained so that the first entries of a vector are a vector of their own.
        dimensions: the numbers of entries for which it was trained; empty if any number will do.
    """

    kind: str = "last"
    normalized: bool = True
    shortens: bool = False
    dimensions: tuple[int, ...] = ()

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for size in self.dimensions:
            check_whole("dimensions", size, error=ConfigError)

    @classmethod
    def from_pretrained(cls, path) -> Pooling:
        """Read the files of sentence-transformers in a checkpoint's directory.

        `modules.json` lists the modules; vectors are normalized if it lists `Normalize`. The config of the module
        `Pooling` says which states are used. A checkpoint without these files, such as a GGUF file, gets the default:
        the last token's state, normalized, as in vLLM. `is_matryoshka` and `matryoshka_dimensions` in config.json set
        `shortens` and `dimensions`.

        Raises:
            ConfigError: a file is invalid, or the checkpoint pools in another way or has further modules.
        """
        folder = Path(path)
        if is_gguf(folder):
            return cls()
        config = read_json(folder / "config.json") or {}
        dimensions = config.get("matryoshka_dimensions") or ()
        if not isinstance(dimensions, list | tuple) or not all(type(size) is int and size > 0 for size in dimensions):
            raise ConfigError(f"{folder / 'config.json'}: matryoshka_dimensions must be a list of sizes")
        shortens = bool(dimensions) or config.get("is_matryoshka") is True
        file = folder / "modules.json"
        if (data := read_file(file, _LARGEST)) is None:
            return cls(shortens=shortens, dimensions=tuple(dimensions))
        modules = _modules(file, data)
        if [name for name, _ in modules] not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            names = ", ".join(name for name, _ in modules)
            raise ConfigError(f"{file}: the modules {names} are not supported: only {_MODULES} are, in this order")
        kind = _kind(folder / modules[1][1] / "config.json")
        return cls(kind, len(modules) == 3, shortens, tuple(dimensions))


def _modules(file: Path, data: bytes) -> list[tuple[str, str]]:
    """Return the name of each module's class, and the path of its files."""
    try:
        listed: Any = parse_json(data.decode("utf-8", "replace"))
    except InputError as error:
        raise ConfigError(f"{file}: {error}") from error
    modules = []
    for module in listed if isinstance(listed, list) else [None]:
        kind, path = (module.get("type"), module.get("path", "")) if isinstance(module, dict) else (None, "")
        if not isinstance(kind, str) or not isinstance(path, str) or Path(path).is_absolute() or ".." in path:
            raise ConfigError(f"{file}: must be a list of modules with a type and a path, got {shown(module)}")
        modules.append((kind.rpartition(".")[2], path))
    return modules


def _kind(file: Path) -> str:
    """Return the kind in the config of sentence-transformers' `Pooling`."""
    config = read_json(file, _LARGEST)
    if config is None:
        raise ConfigError(f"{file} is missing")
    if config.get("include_prompt", True) is not True:
        raise ConfigError(f"{file}: include_prompt=false is not supported")
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if config.get("pooling_mode") is not None:
        modes.append(config["pooling_mode"])
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        found = " and ".join(map(str, modes)) or "no mode"
        raise ConfigError(f"{file}: pooling with {found} is not supported: only lasttoken, mean or cls")
    return _MODES[modes[0]]
