"""The record of an option, and the names that records refer to: decode modes, stages, and sections of the reference.

This module does not import jax.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxgen.core.config.kinds import Kind
from jaxgen.core.config.values import is_array, is_tracer

# Decode modes, with the names that transformers' GenerationMode uses.
GREEDY, SAMPLE, CONTRASTIVE = "greedy_search", "sample", "contrastive_search"
BEAM, BEAM_SAMPLE = "beam_search", "beam_sample"
GROUP_BEAM, CONSTRAINED = "group_beam_search", "constrained_beam_search"
ASSISTED, DOLA = "assisted_generation", "dola_generation"
PROMPT_LOOKUP = "prompt_lookup"  # assisted generation without a draft model
BEAMS = (BEAM, BEAM_SAMPLE, GROUP_BEAM, CONSTRAINED)

# Stages of the processors, in the order in which they run. GUIDANCE runs in `decoding.guidance`, and the other stages
# run in `logits.pipeline`. The token automaton or prefix function runs between BEFORE_GRAMMAR and AFTER_GRAMMAR, and
# the caller's own processors run after AFTER_GRAMMAR.
GUIDANCE, BEFORE_GRAMMAR, AFTER_GRAMMAR = "guidance", "before the grammar", "after the grammar"
RENORMALIZE, WARP = "renormalize", "warp"

# Sections of the option reference.
LENGTH, CHOICE = "Length and end", "Choosing a token"
SCORES = "Scores, in the order in which they are applied"
OUTPUT, MODES, REFUSED = "Output and input", "Other decode modes", "Refused by name"


@dataclasses.dataclass(frozen=True)
class Option:
    """The record of one option.

    Attributes:
        name: transformers' name.
        default: transformers' default, in normal form.
        kind: how values are parsed, checked and passed to the program; see `Kind`.
        doc: the option's effect, in one line.
        group: the section of the option reference.
        hf: the class in transformers 4.41.1 that implements the option.
        since: the release that added the option, or "later"; "" for options in 4.41.1; "jaxgen" if only jaxgen has it.
        differs: differences from transformers.
        modes: the decode modes that read the option; None for all. Modes that draw tokens also read `sample`'s options.
        stage: the stage of a logits processor or warper.
        needs: options that must be on for a processor to run.
        of_tokens: True if the option depends on the prompt's token ids, so a cache passed with the option must
            include its tokens' ids.
        host: True if the option is used on the host, not by the compiled loop.
        command: True or a string if the command offers the option; a string is appended to the option's help text.
        instead_of: the alternative option, such as `max_length` for `max_new_tokens`; setting this option on the
            command line clears the alternative.
        refused: the error text for values that are not supported, with the reason and a remedy.
        offered: if there is an error text in `refused`, the supported values other than the default.
        examples: two values; changing from the first to the second must not cause recompilation.
    """

    name: str
    default: Any
    kind: Kind
    doc: str
    group: str
    hf: str = ""
    since: str = ""
    differs: str = ""
    modes: tuple[str, ...] | None = None
    stage: str = ""
    needs: tuple[str, ...] = ()
    of_tokens: bool = False
    host: bool = False
    command: bool | str = False
    instead_of: str = ""
    refused: str = ""
    offered: tuple[Any, ...] = ()
    examples: tuple[Any, ...] = ()

    def parse(self, value: Any) -> Any:
        """Return the normal form of a value; see `Kind.parse`."""
        if value is None and (self.kind.optional or self.default is None):
            return self.default
        return self.kind.parse(self.name, value)

    def is_given(self, value: Any) -> bool:
        """Return True if a value (in normal form) differs from the default and does not turn the option off."""
        if is_array(value):
            if is_tracer(value) or value.ndim:
                return True
            value = value.item()
        if isinstance(value, bool) or isinstance(self.default, bool):
            return bool(value) != bool(self.default)
        return value != self.default and not self.kind.is_off(value) and value not in ((), {})


def declare(kind: Kind, doc: str, group: str, default: Any = ..., **record: Any) -> Any:
    """Return a dataclass field that declares an option. If omitted, `default` is the kind's neutral value."""
    default = kind.neutral if default is ... else default
    return dataclasses.field(default=default, metadata={"kind": kind, "doc": doc, "group": group, **record})
