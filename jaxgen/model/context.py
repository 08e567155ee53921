"""`Context`: information about one pass through the model, for products with weights."""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class Context:
    """Information about one pass through the model, which every weight's `product` method receives.

    Attributes:
        divided: whether the weights are split across a mesh, which rules out some ways to compute a product; None
            if unknown; static.
        adapter: int32[B], the index of each row's adapter, -1 for none; None if no row has an adapter.
    """

    divided: bool | None = flax.struct.field(pytree_node=False, default=None)
    adapter: jax.Array | None = None


NO_CONTEXT = Context()
