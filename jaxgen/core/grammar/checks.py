"""Checks of the parts of a JSON schema, and what is left out of them."""

from __future__ import annotations

import copy
from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.references import References
from jaxgen.errors import InputError, bare, shown


class Checks:
    """Checks of one schema. If `lenient` is True, what is malformed or unsupported is left out and listed."""

    def __init__(self, references: References, name: str, lenient: bool):
        self.references, self.lenient = references, lenient
        self.left_out: list[str] = []
        self.clean: dict[int, tuple[Any, dict[str, Any]]] = {}  # each part, and the part without what is left out
        self.names = {id(references.root): name}  # of parts without a schema around them
        self.around: dict[int, tuple[int, tuple[str | int, ...]]] = {}  # the schema around a part, and the way there

    def leave_out(self, name: str, reason: str) -> None:
        """Raise an error about a keyword or, if the caller agrees, note that it is left out."""
        if not self.lenient:
            keywords.refuse(
                name,
                f"{reason}. Leave it out and check the value afterwards, or pass unsupported='warn'"
                if reason.startswith(" has ") and "nothing" not in reason else reason,
            )  # fmt: skip
        if (message := name + reason) not in self.left_out:
            self.left_out.append(message)

    def all_parts(self) -> None:
        """Check that no part has a keyword with an invalid value, even where no text could depend on the part."""
        rest = [(self.references.root, 0)]
        while rest:
            schema, depth = rest.pop()
            if isinstance(schema, bool):
                continue
            if depth > keywords.DEEPEST:
                raise InputError(f"the schema is nested more than {keywords.DEEPEST} levels deep: simplify it")
            for way, reason in keywords.malformed(schema):
                self.leave_out(keywords.inside(self.name(schema), *way[:-1]), reason)
            new = [(part, (id(schema), way)) for way, part in keywords.subschemas(schema)]
            for part, around in reversed(new):
                self.around[id(part)] = around
                rest.append((part, depth + 1))

    def name(self, schema: Any) -> str:
        """Return a part's name in messages."""
        if id(schema) in self.names:
            return self.names[id(schema)]
        ways, number = [], id(schema)
        while number in self.around:
            number, way = self.around[number]
            ways.append(way)
        return keywords.inside(self.names.get(number, "the schema"), *(step for way in ways[::-1] for step in way))

    def call(self, schema: Any, name: str) -> None:
        """Give a name to a part that has none."""
        if id(schema) not in self.around:
            self.names.setdefault(id(schema), name)

    def sound(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema without the keywords that are unknown, unsupported or invalid."""
        if id(schema) not in self.clean:
            name, kept = self.name(schema), schema
            for (keyword, *key), reason in [*keywords.malformed(schema), *keywords.unsupported(schema)]:
                self.leave_out(keywords.inside(name, *[keyword, *key][:-1]), reason)
                kept = without(kept, keyword, *key)
            if "$ref" in kept:
                try:
                    target = self.references.target(kept)
                    if not keywords.is_schema(target):
                        keywords.refuse(bare(kept["$ref"]), f" must be an object, got {shown(target)}")
                except InputError as error:
                    self.leave_out(name, str(error))
                    kept = without(kept, "$ref")
            for keyword, reason in [*keywords.conflicts(kept)]:
                self.leave_out(name, reason)
                kept = without(kept, keyword)
            self.clean[id(schema)] = schema, self.references.adopt(kept, schema)
        return self.clean[id(schema)][1]


def without(schema: dict[str, Any], keyword: str, key: str | int | None = None) -> dict[str, Any]:
    """Return a schema without a keyword, or without the condition that a part of the keyword's value is."""
    kept = copy.copy(schema)
    if key is None:
        kept.pop(keyword, None)
    elif keyword in kept:
        kept[keyword] = copy.copy(kept[keyword])
        kept[keyword][key] = True
    return kept
