"""Information about one pass that layers and their weights need."""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class Context:
    """Information about one pass that every weight receives.

    Attributes:
        divided: whether the weights are divided over a mesh, which some forms of a product do not support; None if this
            is unknown; static.
        adapter: int32[B], the adapter of each row, -1 for none; None if no row has one.
    """

    divided: bool | None = flax.struct.field(pytree_node=False, default=None)
    adapter: jax.Array | None = None


NO_CONTEXT = Context()
