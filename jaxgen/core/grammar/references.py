"""References between the parts of a JSON schema, their bases, and their cycles."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from jaxgen.errors import InputError, shown

MOST = 500  # limit on the number of referenced parts
MOST_STEPS = 500_000  # limit on visited values; a value inside several referenced parts counts once for each of them
_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # an index in a JSON pointer
_VALUES = ("enum", "const", "default", "examples", "example")  # keywords whose values are not schemas


class References:
    """References between the parts of a schema. A part is identified by Python's `id`.

    `old` is True if the schema's draft ignores the keywords beside a `$ref` (draft 7 and earlier).
    """

    def __init__(self, root: Any):
        self.root = root
        draft = root.get("$schema") if isinstance(root, dict) else None
        found = re.search(r"draft-0?([3-7])", draft) if isinstance(draft, str) else None
        self.old = found is not None
        self.id = "id" if found and found[1] in "34" else "$id"
        self.resources: dict[str, Any] = {"": root}
        self.bases: dict[int, str] = {}  # the URI that references inside a part are relative to; "" if not here
        self.anchors: dict[tuple[str, str], Any] = {}
        self._find_names()
        self.direct: dict[int, list[Any]] = {}
        self.reached: dict[int, dict[int, Any]] = {}
        self.cycles: dict[int, frozenset[int]] = {}
        self.steps = 0

    def _find_names(self) -> None:
        """Find the parts with an `$id` or an anchor."""
        rest = [(self.root, "")]
        while rest:
            part, base = rest.pop()
            if isinstance(part, list):
                rest += [(inner, base) for inner in part]
            if not isinstance(part, dict):
                continue
            name = part.get(self.id)
            if isinstance(name, str):
                uri, fragment = _resolved(base, name)
                if fragment and not fragment.startswith("/"):
                    self.anchors[base, fragment] = part
                elif uri:
                    base = uri
                    self.resources.setdefault(uri, part)
            if isinstance(anchor := part.get("$anchor", part.get("$dynamicAnchor")), str):
                self.anchors[base, anchor] = part
            if base:
                self.bases[id(part)] = base
            rest += [(inner, base) for key, inner in part.items() if key not in _VALUES]

    def adopt(self, new: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
        """Return a changed copy of a part, whose references are relative to the same base."""
        if id(original) in self.bases:
            self.bases[id(new)] = self.bases[id(original)]
        return new

    def target(self, part: dict[str, Any]) -> Any:
        """Return the schema that the `$ref` of a part points to.

        Raises:
            InputError: it is not in the schema; the message continues a sentence that begins with the part's name.
        """
        name, base = part["$ref"], self.bases.get(id(part), "")
        uri, fragment = (base, name[1:]) if name.startswith("#") else _resolved(base, name)
        found = self.resources.get(uri)
        if found is None or not (uri or name.startswith("#")):
            raise InputError(
                f" refers to {shown(name)}: only references inside the schema are supported, such as #/$defs/a"
            )
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((uri, unquote(fragment)))
        for step in fragment.split("/")[1:] if fragment.startswith("/") else []:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and _INDEX.fullmatch(step):
                found = found[int(step)] if int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        if found is None:
            raise InputError(f" refers to {shown(name)}, which is not in the schema")
        return found

    def cycle(self, part: Any) -> frozenset[int]:
        """Return the ids of the parts that `part` refers to and that refer back to `part`, directly or indirectly."""
        if id(part) not in self.cycles:
            others = self._reach(part).items()
            self.cycles[id(part)] = frozenset(number for number, other in others if id(part) in self._reach(other))
        return self.cycles[id(part)]

    def _reach(self, part: Any) -> dict[int, Any]:
        """Return the parts that `part` refers to, directly or indirectly."""
        if id(part) not in self.reached:
            found: dict[int, Any] = {}
            rest = [part]
            while rest:
                new = [other for other in self._inside(rest.pop()) if id(other) not in found]
                found.update((id(other), other) for other in new)
                rest += new
            self.reached[id(part)] = found
        return self.reached[id(part)]

    def _inside(self, part: Any) -> list[Any]:
        """Return the targets of all references inside `part`; values that only look like references also count."""
        if id(part) not in self.direct:
            if len(self.direct) >= MOST:
                raise InputError(f"the schema refers to more than {MOST} of its parts: simplify it")
            found, rest = {}, [part]
            while rest:
                here = rest.pop()
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise InputError("the schema has too many references to nested parts: simplify it")
                if isinstance(here, dict) and isinstance(here.get("$ref"), str):
                    try:
                        other = self.target(here)
                        found[id(other)] = other
                    except InputError:  # an invalid reference is rejected elsewhere
                        pass
                rest += here.values() if isinstance(here, dict) else here if isinstance(here, list) else []
            self.direct[id(part)] = list(found.values())
        return self.direct[id(part)]


def _resolved(base: str, name: str) -> tuple[str, str]:
    """Resolve a name against a base; return the URI and the fragment. A name that is not a valid URI stays as it is."""
    try:
        uri, fragment = urldefrag(urljoin(base, name))
        return uri, fragment
    except ValueError:
        return name, ""
