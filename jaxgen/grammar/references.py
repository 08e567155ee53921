"""References between the parts of a JSON schema, and their cycles."""

from __future__ import annotations

from typing import Any

from jaxgen.errors import InputError
from jaxgen.grammar.keywords import target

MOST = 500  # limit on the number of referenced parts
MOST_STEPS = 500_000  # limit on visited values; a value inside several referenced parts counts once for each of them


class References:
    """References between the parts of a schema. A part is identified by Python's `id`."""

    def __init__(self, root: Any):
        self.root = root
        self.named: dict[str, Any] = {}
        self.direct: dict[int, list[Any]] = {}
        self.reached: dict[int, dict[int, Any]] = {}
        self.cycles: dict[int, frozenset[int]] = {}
        self.steps = 0

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
                name = here.get("$ref") if isinstance(here, dict) else None
                if isinstance(name, str) and (other := self._find(name)) is not None:
                    found[id(other)] = other
                rest += here.values() if isinstance(here, dict) else here if isinstance(here, list) else []
            self.direct[id(part)] = list(found.values())
        return self.direct[id(part)]

    def _find(self, name: str) -> Any:
        if name not in self.named:
            try:
                self.named[name] = target(self.root, name, "")
            except InputError:  # an invalid reference is rejected elsewhere
                self.named[name] = None
        return self.named[name]
