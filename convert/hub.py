"""A model's directory: a local one, or one downloaded from the Hugging Face Hub by its id.

huggingface_hub does the downloading, with its cache and its environment variables: HF_HOME, HF_HUB_CACHE,
HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path

from convert.hf import TOKENIZER_FILES
from jaxgen.errors import ConfigError, InputError
from jaxgen.model.config import ModelConfig

# All files that are read or copied, except the weights.
SMALL_FILES = ("config.json", "generation_config.json", "*.safetensors.index.json", *TOKENIZER_FILES)
WEIGHTS = ("*.safetensors",)

_PART = r"[\w-][\w.-]*"
_ID = re.compile(rf"({_PART}(?:/{_PART})?)(?:@(.+))?", re.ASCII)
_LOG_IN = "log in (hf auth login) or set HF_TOKEN"
# Offline, older releases of huggingface_hub return a model's directory even if only some of its files are cached.
_IF_INTERRUPTED = "; if its download was interrupted, repeat it online"


def local_directory(model: str | os.PathLike[str]) -> Path:
    """Return the directory of a model given as a directory or by its hub id.

    An id is "owner/name", or just "name" for old models, optionally followed by "@" and a branch, a tag or the full
    hash of a commit. A directory is returned unchanged, and takes precedence over an id of the same spelling. Files
    that are not in the cache are downloaded; if the hub cannot be reached, only the cache is used. The weights are
    downloaded last, and only if the model's config is supported.

    Raises:
        InputError: neither a directory nor an id, or a model that cannot be downloaded; the text says why.
        ConfigError: a model that is not supported.
    """
    model = os.fspath(model)
    if os.path.isdir(model):
        return Path(model)
    if os.path.exists(model):
        raise InputError(f"{model} is a file: pass the directory that it is in")
    match = _ID.fullmatch(model)
    if match is None:
        raise InputError(f"{model!r} is neither a directory nor a hub id, such as Qwen/Qwen2.5-0.5B-Instruct")
    name, revision = match.groups()
    directory = _fetch(name, revision, SMALL_FILES)
    _check_config(model, directory)
    directory = _fetch(name, directory.name, WEIGHTS)  # of the same commit, which is the directory's name
    if not any(directory.glob(WEIGHTS[0])):
        raise InputError(f"{model} has no {WEIGHTS[0]}, and no other format of weights is read{_IF_INTERRUPTED}")
    return directory


def _fetch(name: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Download those of a model's files that are not in the cache, and return their directory in the cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        advice = 'to download it from the Hugging Face Hub, pip install "jaxgen[hub]"'
        raise InputError(f"{name} is not a directory: {advice}") from error
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(files), ignore_patterns=["*/*"])
    except Exception as error:
        # The base of HfHubHTTPError is that of all errors of the HTTP library, which differs between releases.
        # RuntimeError is what hf_xet raises.
        if not isinstance(error, (OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__)):
            raise
        raise InputError(_explain(error, name, revision)) from error
    return Path(folder)


def _check_config(model: str, directory: Path) -> None:
    file = directory / "config.json"
    if not file.is_file():
        raise InputError(f"{model} has no config.json, so it is not a transformers checkpoint{_IF_INTERRUPTED}")
    try:
        ModelConfig.from_hf(json.loads(file.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{model}: config.json: {error}") from error


def _explain(error: Exception, name: str, revision: str | None) -> str:
    """Say in one line why a model cannot be downloaded."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    cause = error
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        cause = error.__cause__  # why the hub was not asked, or did not answer
    if isinstance(cause, errors.OfflineModeIsEnabled):
        cache = constants.HF_HUB_CACHE
        return f"the cache {cache} lacks all or part of {name}, and HF_HUB_OFFLINE is set: unset it to download"
    if isinstance(cause, errors.GatedRepoError):
        return f"{name} is gated: ask for access at {hub}/{name}, then {_LOG_IN}"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"{name} is neither a directory nor a model on {hub}: check the name; if it is private, {_LOG_IN}"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision or 'main'!r} on {hub}: name a branch, a tag or a full commit hash"
    if isinstance(cause, errors.HFValidationError):
        return f"{name!r} is neither a directory nor a hub id: {_line(cause)}"
    if isinstance(cause, errors.HfHubHTTPError) and cause.response is not None:
        status = cause.response.status_code
        advice = _LOG_IN if status in (401, 403) else "try again later"
        return f"{name} cannot be downloaded: {hub} answered {status}: {advice}"
    lacking = "" if cause is error else ", and the cache lacks all or part of it"
    return f"{name} is not a directory here and cannot be downloaded from {hub}{lacking}: {_line(cause)}"


def _line(error: Exception) -> str:
    """Return the first line of an error's text, shortened if it is long."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return textwrap.shorten(lines[0], 200, placeholder=" ...") if lines else type(error).__name__
