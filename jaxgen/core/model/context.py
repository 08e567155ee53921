"""`Context`: information about one pass through the model."""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class Context:
    """Information about one pass through the model, which attention and `Weight.product` use.

    Attributes:
        divided: whether the weights are split across a mesh, or None if unknown; static. A split rules out some ways to
            compute a product.
        adapter: int32[B], the index of each row's adapter, or -1 for a row without an adapter; None if no row has an
            adapter.
        portable: whether the program may run on a different kind of CPU, as an exported program may; static.
        expert_parts: the number of devices over which the experts of a layer are divided, where a product sees only
            those of one device; otherwise 1; static.
        left_aligned: whether padding is known to come last in each row; static.
    """

    divided: bool | None = flax.struct.field(pytree_node=False, default=None)
    adapter: jax.Array | None = None
    portable: bool = flax.struct.field(pytree_node=False, default=False)
    expert_parts: int = flax.struct.field(pytree_node=False, default=1)
    left_aligned: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def on_one_device(self) -> bool:
        """True if all arrays are known to be on the same device."""
        return jax.device_count() == 1 if self.divided is None else not self.divided

    @property
    def calls_libraries(self) -> bool:
        """True if the pass may call a library's kernel, which cannot be exported or divided over devices."""
        return self.on_one_device and not self.portable


NO_CONTEXT = Context()
