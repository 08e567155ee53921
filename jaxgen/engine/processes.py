"""An engine on several processes: process 0 plans each chunk, and the other processes follow."""

from __future__ import annotations

import enum
import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgen.decoding.chunks import Arrivals
from jaxgen.errors import InputError


class Step(enum.IntEnum):
    """The next action of all processes."""

    WAIT = 0  # do nothing; sent periodically, because collective operations would otherwise time out
    CHUNK = 1
    END = 2
    FAIL = 3  # the engine failed in process 0, so the other processes must end too


class Plan(NamedTuple):
    """The next action of all processes, with its data.

    Attributes:
        step: the action.
        version: the version of the weights that the chunk uses.
        steps: the number of steps in the chunk.
        arrivals: the changes to apply before the chunk; None if there are none.
        tables: the tables of automata, by name.
    """

    step: Step
    version: int
    steps: int
    arrivals: Arrivals | None
    tables: dict[str, Any]


class Processes:
    """Broadcast of plans by process 0. All processes call the same functions in the same order.

    `arguments` are the engine's arguments as text. If they differ between processes, an `InputError` is raised.
    """

    def __init__(self, no_arrivals: Arrivals, tables: dict[str, Any], arguments: str):
        self._no_arrivals, self._tables = no_arrivals, tables
        digest = hashlib.sha256(arguments.encode())
        for leaf in map(np.asarray, jax.tree.leaves(no_arrivals)):
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        digests = multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint8))
        if (np.asarray(digests) != digests[0]).any():
            raise InputError("the processes created the engine with different arguments: they must be the same in all")

    def send(self, plan: Plan) -> None:
        """Send a plan to the other processes. Called by process 0."""
        arrivals, tables = plan.arrivals, plan.tables
        change = any(table is not self._tables[name] for name, table in tables.items())
        _broadcast(np.asarray([plan.step, plan.version, plan.steps, arrivals is not None, change], np.int32))
        if arrivals is not None:
            _broadcast(arrivals)
        if change:
            self._tables = tables
            _broadcast(tables)

    def send_nothing(self, step: Step) -> None:
        """Tell the other processes to wait, to end or to fail."""
        self.send(Plan(step, 0, 0, None, self._tables))

    def receive(self) -> Plan:
        """Return the plan that process 0 has sent."""
        step, version, steps, arrive, change = _broadcast(np.zeros(5, np.int32)).tolist()
        arrivals = _broadcast(self._no_arrivals) if arrive else None
        if change:
            self._tables = _broadcast(self._tables)
        return Plan(Step(step), version, steps, arrivals, self._tables)


def _broadcast(tree: Any) -> Any:
    """Send process 0's tree to all processes in one operation, and return it. All trees must have the same form."""
    leaves, form = jax.tree.flatten(tree)
    leaves: list[np.ndarray] = [np.asarray(leaf) for leaf in leaves]
    packed = np.concatenate([np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves])
    received = np.asarray(multihost_utils.broadcast_one_to_all(packed))
    parts = np.split(received, np.cumsum([leaf.nbytes for leaf in leaves])[:-1])
    pairs = zip(parts, leaves, strict=True)
    return form.unflatten(np.frombuffer(part.tobytes(), leaf.dtype).reshape(leaf.shape) for part, leaf in pairs)
