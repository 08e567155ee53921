"""Information that layers and their weights need about one pass."""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class Context:
    """Information that every weight receives about one pass.

    Attributes:
        divided: whether the weights are split across a mesh, which some forms of a product do not support; None if
            unknown; static.
        adapter: int32[B], the adapter of each row, -1 for none; None if no row has an adapter.
    """

    divided: bool | None = flax.struct.field(pytree_node=False, default=None)
    adapter: jax.Array | None = None


NO_CONTEXT = Context()
