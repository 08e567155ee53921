"""Options in a checkpoint's files that do not count. In a caller's config, they are errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.errors import JaxgenError, one_line, shown

# Fields that transformers writes in addition to the options, but that have no effect.
_BOOKKEEPING = ("transformers_version", "_from_model_config", "_commit_hash")
# Options that choose the decode mode, so an invalid value always counts.
_CHOOSE_MODE = frozenset(
    "do_sample num_beams num_beam_groups penalty_alpha prompt_lookup_num_tokens assistant_early_exit dola_layers "
    "constraints force_words_ids".split()
)
_LONGEST = 500  # maximum number of characters in a list of unknown options


def usable_options(make: Callable[..., Any], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options in a generation_config.json, and the content of a warning about those that are left out.

    An option is left out if it is unknown, if it asks for another way to compute the same tokens (`use_cache`,
    `cache_implementation`, ...), or if its value is invalid and the file's decode mode does not read it. A null that is
    not a value of the option means that the option is not set. `make` creates a `GenerationConfig` from options.
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
        elif value is None and not _is_valid(name, value):
            continue
        elif option.refused and option.is_given(option.parse(value)) and value not in option.offered:
            notes.append(f"{name}={shown(value)} is ignored: it does not change the generated tokens")
        else:
            fields[name] = value
    optional = {name for name in fields if OPTIONS[name].modes is not None} - _CHOOSE_MODE
    if invalid := {name for name in optional if not _is_valid(name, fields[name])}:
        others = make(**{name: value for name, value in fields.items() if name not in invalid})
        unread = sorted(invalid.intersection(option.name for option in others.unread()))
        notes += [f"{name}={shown(fields.pop(name))} is ignored: {others.mode} does not read it" for name in unread]
    if unknown:
        notes.append(f"unknown options are ignored: {one_line(', '.join(unknown), _LONGEST)}")
    return fields, notes


def _is_valid(name: str, value: Any) -> bool:
    try:
        OPTIONS[name].parse(value)
    except (JaxgenError, TypeError):
        return False
    return True
