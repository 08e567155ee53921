"""Streamers for tests."""

import numpy as np


class Collector:
    """A streamer that stores all values."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.values.append(np.asarray(value))

    def end(self):
        self.ended += 1

    @property
    def prompts(self) -> np.ndarray:
        """Return the prompts, int32[B, P], which are the first value."""
        return self.values[0]

    @property
    def tokens(self) -> np.ndarray:
        """Return the other values as columns, int32[B, steps]."""
        return np.stack(self.values[1:], axis=1)


class RowCollector:
    """A streamer that stores each row's tokens and counts the calls that delivered them."""

    def __init__(self):
        self.rows: dict[int, list[int]] = {}
        self.calls: dict[int, int] = {}
        self.over: list[int] = []
        self.ended = 0

    def put_row(self, row, ids, ended):
        assert not self.ended
        assert row not in self.over
        assert isinstance(row, int)
        assert len(ids) > 0 or ended
        self.rows[row] = self.rows.get(row, []) + np.asarray(ids).tolist()
        self.calls[row] = self.calls.get(row, 0) + 1
        self.over += [row] * ended

    def end(self):
        self.ended += 1
