"""What the layers share in one pass, besides the tokens."""

from __future__ import annotations

import flax.struct


@flax.struct.dataclass
class Context:
    """What a pass tells every weight.

    Attributes:
        divided: whether the weights are divided over a mesh, which not all forms of a product allow; None if that is
            not known, static.
    """

    divided: bool | None = flax.struct.field(pytree_node=False, default=None)


UNKNOWN = Context()
