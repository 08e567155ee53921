"""The sizes of an engine. This module does not import jax, because commands derive their options from it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxgen.errors import check_whole


def _size(text: str, default: int | None, *, least: int = 1, unset: str = "") -> Any:
    """Declare a size: its meaning, its default, its minimum, and the meaning of None."""
    return dataclasses.field(default=default, metadata={"text": text, "least": least, "unset": unset})


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """The sizes of an `Engine`. An invalid size raises an `InputError`, or a `TypeError` if it is not a whole number.

    >>> sizes = EngineSizes(slots=4, prompt_width=64)
    >>> with Engine(params, cfg, jax.random.key(0), sizes=sizes, tokenizer=tok) as engine:
    ...     completions = engine.submit("Once upon a time").result()

    """  # the attributes are added below

    slots: int = _size("answers generated at a time", 32)
    prompt_width: int = _size("maximum tokens in a prompt, for which memory is reserved", 1024)
    most_waiting: int = _size("maximum number of waiting prompts", 1024)
    grammar_states: int = _size("states in the table of all grammars in use; one grammar may use half", 2**16)
    grammar_transitions: int = _size("transitions in this table; one grammar may use half", 2**19)
    grammar_classes: int = _size("maximum classes of tokens that a grammar distinguishes", 2**12)
    grammars: int = _size("different grammars in use", 64)
    stop_states: int = _size("states in the table of stop strings; a string needs about one per byte", 1024)
    id_entries: int = _size("maximum entries in an option that is a table of ids, such as suppress_tokens", 32)
    prefix_cache_bytes: int | None = _size(
        "maximum bytes of the store for prompts that begin alike; 0 turns it off",
        None,
        least=0,
        unset="256 MB, or less if the prompts of all slots need less",
    )

    def __post_init__(self):
        for size in dataclasses.fields(self):
            if (value := getattr(self, size.name)) is not None or size.default is not None:
                object.__setattr__(self, size.name, check_whole(size.name, value, size.metadata["least"]))


_ATTRIBUTES = [
    f"\n        {size.name}: {size.metadata['text']} (default: {size.metadata['unset'] or size.default})."
    for size in dataclasses.fields(EngineSizes)
]
EngineSizes.__doc__ = f"{EngineSizes.__doc__}Attributes:{''.join(_ATTRIBUTES)}\n    "
