"""The option reference: `python -m jaxgen.core.config.reference > docs/options.md`."""

from __future__ import annotations

from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.option import CHOICE, LENGTH, MODES, OUTPUT, REFUSED, SCORES, Option

_INTRODUCTION = """\
# Options

This page lists the fields of `GenerationConfig`. Their names are those of transformers.

- A *traced* option is an argument of the compiled program: a different value of the same form does not recompile. Lists
  of ids are padded to 4, 8, 16, ... entries. Which traced options are on is part of the program.
- A *static* option is part of the program.
- A *host* option is used on the host, before or between runs of the program.

The column *per prompt* shows an example for two prompts; it is empty if all prompts share one value. In arrays of ids,
-1 marks unused entries. If you set an option that the decode mode does not read, there is a warning, or an error where
transformers raises one. The names under *read by* are the values of `cfg.mode`. To update this page, run
`python -m jaxgen.core.config.reference > docs/options.md`.
"""


def reference() -> str:
    """Return the reference page for all options as Markdown."""
    lines = [_INTRODUCTION.rstrip()]
    for group in (LENGTH, CHOICE, SCORES, OUTPUT):
        lines += _table(group, "option", "type", "allowed", "default", "per prompt", "kind", "meaning", "transformers")
        lines += [_line(option) for option in OPTIONS.values() if option.group == group]
    lines += _table(MODES, "option", "type", "default", "meaning", "read by", "transformers")
    lines += [_mode_line(option) for option in OPTIONS.values() if option.group == MODES]
    lines += _table(REFUSED, "option", "reason")
    lines += [f"| `{name}` | {option.refused} |" for name, option in OPTIONS.items() if option.group == REFUSED]
    return "\n".join(lines) + "\n"


def _table(title: str, *columns: str) -> list[str]:
    return ["", f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _line(option: Option) -> str:
    kind = "host" if option.host else "traced" if option.kind.traced else "static"
    several = option.kind.per_prompt and len(option.examples) == 2
    per_prompt = f"`{option.kind.per_prompt_value(option.examples)!r}`" if several else ""
    return (
        f"| `{option.name}` | {option.kind.type_name} | {option.kind.allowed} | {_default(option)} | {per_prompt} | "
        f"{kind} | {option.doc} | {_transformers(option)} |"
    )


def _mode_line(option: Option) -> str:
    modes, default = ", ".join(option.modes or ()), _default(option)
    return (
        f"| `{option.name}` | {option.kind.type_name} | {default} | {option.doc} | {modes} | {_transformers(option)} |"
    )


def _default(option: Option) -> str:
    return "" if option.default is None else f"`{option.default!r}`"


def _transformers(option: Option) -> str:
    """Return the text for the column "transformers": the class, the release (if not 4.41.1), and how jaxgen differs."""
    since = {"": "", "jaxgen": "jaxgen's own", "later": "a later release"}.get(option.since, f"release {option.since}")
    return "; ".join(part for part in (option.hf and f"`{option.hf}`", since, option.differs) if part)


if __name__ == "__main__":
    print(reference(), end="")
