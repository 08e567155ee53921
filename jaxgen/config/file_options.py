"""Options in a checkpoint's files that do not count. In a caller's config, they are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from jaxgen.config.generation_options import OPTIONS
from jaxgen.config.option import SAMPLE
from jaxgen.errors import JaxgenError, one_line, shown

# Fields that transformers writes in addition to the options, but that have no effect.
_BOOKKEEPING = ("transformers_version", "_from_model_config", "_commit_hash")
_LONGEST = 500  # maximum number of characters in a list of unknown options


def usable_options(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options in a generation_config.json, and the content of a warning about those that are left out.

    An option is left out if it is unknown, if it asks for another way to compute the same tokens (`use_cache`,
    `cache_implementation`, ...), or if only sampling reads it, its value is invalid and `do_sample` is not true.
    """
    fields: dict[str, Any] = {}
    unknown, notes = [], []
    for name, value in config.items():
        if name in _BOOKKEEPING:
            continue
        option = OPTIONS.get(name)
        if option is None:
            near = difflib.get_close_matches(str(name)[:100], OPTIONS, n=1)
            unknown.append(one_line(str(name), 100) + (f" (did you mean {near[0]}?)" if near else ""))
        elif option.refused and option.is_given(option.parse(value)) and value not in option.offered:
            notes.append(f"{name}={shown(value)} is ignored: it does not change the generated tokens")
        elif option.modes == (SAMPLE,) and not config.get("do_sample") and not _is_valid(name, value):
            notes.append(f"{name}={shown(value)} is ignored: only sampling reads it, and do_sample is not true")
        else:
            fields[name] = value
    if unknown:
        notes.append(f"unknown options are ignored: {one_line(', '.join(unknown), _LONGEST)}")
    return fields, notes


def _is_valid(name: str, value: Any) -> bool:
    try:
        OPTIONS[name].parse(value)
    except JaxgenError:
        return False
    return True
