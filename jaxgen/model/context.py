"""Information about one pass for the layers and their weights."""

from __future__ import annotations

import flax.struct


@flax.struct.dataclass
class Context:
    """Information about one pass that every weight receives.

    Attributes:
        divided: whether the weights are divided over a mesh, which not all forms of a product allow; None if that is
            not known, static.
    """

    divided: bool | None = flax.struct.field(pytree_node=False, default=None)


NO_CONTEXT = Context()
