"""Streamers for tests."""

import numpy as np


class Collector:
    """Stores what it is given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.values.append(np.asarray(value))

    def end(self):
        self.ended += 1

    @property
    def prompts(self) -> np.ndarray:
        """int32[B, P]: the first value."""
        return self.values[0]

    @property
    def tokens(self) -> np.ndarray:
        """int32[B, steps]: the other values, one column each."""
        return np.stack(self.values[1:], axis=1)


class RowCollector:
    """Stores the tokens of each row, and how often they came."""

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
