"""An engine on several processes: process 0 plans each chunk, and the other processes follow."""

from __future__ import annotations

import enum
import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgen.buckets import power_of_two
from jaxgen.errors import InputError

_LEAST = 4096  # the smallest number of bytes in which changes of tables are sent


class Action(enum.IntEnum):
    """The next action of all processes."""

    WAIT = 0  # do nothing; sent periodically, because collective operations would otherwise time out
    CHUNK = 1
    END = 2
    FAIL = 3  # the engine failed in process 0, so the other processes must end too


class ChunkPlan(NamedTuple):
    """The next action of all processes, with its data.

    Attributes:
        action: the action.
        version: the version of the weights that the chunk uses.
        steps: the number of steps in the chunk.
        arrivals: the changes to apply before the chunk; None if there are none.
        tables: the tables of automata, by name.
    """

    action: Action
    version: int
    steps: int
    arrivals: Any
    tables: dict[str, Any]


class Processes:
    """Broadcast of plans by process 0. All processes call the same functions in the same order.

    `arguments` are the engine's arguments as text. If they differ between processes, an `InputError` is raised.
    """

    def __init__(self, no_arrivals: Any, tables: dict[str, Any], arguments: str):
        self._no_arrivals, self._tables = no_arrivals, tables
        self._known = _on_host(tables)  # the contents of the tables in the other processes
        digest = hashlib.sha256(arguments.encode())
        for leaf in map(np.asarray, jax.tree.leaves(no_arrivals)):
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        digests = multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint8))
        if (np.asarray(digests) != digests[0]).any():
            raise InputError("the processes created the engine with different arguments: they must be the same in all")

    def send(self, plan: ChunkPlan) -> None:
        """Send a plan to the other processes, with the changed parts of its tables. Called by process 0."""
        arrivals, known, bounds = plan.arrivals, self._known, np.zeros((len(self._known), 2), np.int32)
        if any(table is not self._tables[name] for name, table in plan.tables.items()):
            self._tables, self._known = plan.tables, _on_host(plan.tables)
            bounds = np.asarray([_changed(*pair) for pair in zip(known, self._known, strict=True)], np.int32)
        head = [plan.action, plan.version, plan.steps, arrivals is not None]
        _broadcast(np.asarray([*head, *bounds.flat], np.int32))
        if arrivals is not None:
            _broadcast(arrivals)
        if bounds.any():
            self._broadcast_parts(bounds)

    def send_nothing(self, action: Action) -> None:
        """Tell the other processes to wait, to end or to fail."""
        self.send(ChunkPlan(action, 0, 0, None, self._tables))

    def receive(self) -> ChunkPlan:
        """Return the plan that process 0 has sent."""
        empty = np.zeros(4 + 2 * len(self._known), np.int32)
        action, version, steps, arrive, *bounds = _broadcast(empty).tolist()
        arrivals = _broadcast(self._no_arrivals) if arrive else None
        if any(bounds):
            bounds = np.reshape(bounds, (-1, 2))
            parts = self._broadcast_parts(bounds)
            # Arrays are replaced, because those on the device may share memory with these.
            self._known = [np.copy(x) for x in self._known]
            for x, (begin, end), part in zip(self._known, bounds, parts, strict=True):
                np.atleast_1d(x)[begin:end] = part
            self._tables = jax.tree.unflatten(jax.tree.structure(self._tables), self._known)
        return ChunkPlan(Action(action), version, steps, arrivals, self._tables)

    def _broadcast_parts(self, bounds: np.ndarray) -> list[np.ndarray]:
        """Broadcast a part of each of the tables' arrays, from the first to the second index in `bounds`."""
        parts = [np.atleast_1d(x)[begin:end] for x, (begin, end) in zip(self._known, bounds, strict=True)]
        # A program is compiled for each size, so sizes are rounded up.
        return _broadcast(parts, power_of_two(sum(part.nbytes for part in parts), _LEAST))


def _on_host(tables: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tables)]


def _changed(old: np.ndarray, new: np.ndarray) -> tuple[int, int]:
    """Return the bounds of the part of an array, along its first axis, that contains all changes; 0, 0 if none."""
    differs = np.atleast_1d(old != new)
    (changed,) = np.nonzero(differs.any(axis=tuple(range(1, differs.ndim))))
    return (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (0, 0)


def _broadcast(tree: Any, size: int = 0) -> Any:
    """Send process 0's tree to all processes in one operation of at least `size` bytes, and return it.

    All trees must have the same form.
    """
    leaves, form = jax.tree.flatten(tree)
    leaves: list[np.ndarray] = [np.asarray(leaf) for leaf in leaves]
    packed = np.concatenate([np.frombuffer(leaf.tobytes(), np.uint8) for leaf in leaves])
    packed = np.pad(packed, (0, max(size - len(packed), 0)))
    received = np.asarray(multihost_utils.broadcast_one_to_all(packed))
    *parts, _ = np.split(received, np.cumsum([leaf.nbytes for leaf in leaves]))
    pairs = zip(parts, leaves, strict=True)
    return form.unflatten(np.frombuffer(part.tobytes(), leaf.dtype).reshape(leaf.shape) for part, leaf in pairs)
