"""A streamer for tests."""

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
