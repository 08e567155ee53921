"""The constants of the decode loop."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.sharding import ROWS, constrain, rows_on

_PROCESSORS = frozenset(option.name for option in OPTIONS.values() if option.stage)


def is_expanded(rows: int, prompts: int, mesh: Mesh | None) -> bool:
    """Return True if a cache of `rows` rows must be expanded to one row per prompt instead of being shared.

    Each cache row is shared by the same number of consecutive prompts. Padding for a mesh would change which prompts
    share a row.
    """
    return 1 < rows <= prompts < rows_on(mesh, prompts)


@flax.struct.dataclass
class Run:
    """The constants of a run, which are the same in every step and for every row.

    Attributes:
        params: the model's parameters.
        cfg: the model's config and the options. The values of per-prompt options are in `Request.options` and
            `Rows.values`; `Rows.options` combines them.
        extensions: processors, criteria, grammar, stop strings and hook.
        prompts: the number of prompts, B; static, like the next three.
        capacity: the maximum number of tokens that a row can generate, N.
        needs: the requirements of the decode mode.
        cached_slots: the number of cache slots for the tokens of the given cache; 0 if no cache is given. If each
            prompt has its own cache row, this includes space for the prompts.
        context: the context of every pass.
        draft: in assisted generation, the run of the model that drafts tokens; otherwise None. Only the model and
            drafting settings of `draft` are used, because tokens are chosen with the settings of the main run.
        mesh: the mesh that the parameters are split across, or None.
    """

    params: Any
    cfg: GenerationConfig
    extensions: Extensions
    prompts: int = flax.struct.field(pytree_node=False)
    capacity: int = flax.struct.field(pytree_node=False)
    needs: Needs = flax.struct.field(pytree_node=False, default=Needs())
    cached_slots: int = flax.struct.field(pytree_node=False, default=0)
    context: Context = NO_CONTEXT
    draft: Run | None = None
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def model(self) -> ModelConfig:
        """The model's config."""
        return self.cfg.model

    @property
    def changes_scores(self) -> bool:
        """True if anything changes the scores before a token is chosen."""
        extensions = self.extensions
        return bool(extensions.processors or extensions.allowed is not None or self.cfg.enabled & _PROCESSORS)

    @property
    def guided(self) -> bool:
        """True if the model reads each row in two streams; see `guidance`."""
        return self.cfg.on("guidance_scale")

    @property
    def reads_states(self) -> bool:
        """True if the mode or the hook reads the hidden states of all layers at each row's last token."""
        return self.extensions.hook is not None or self.needs.layer_states

    @property
    def pad_id(self) -> jax.Array:
        """The id that pads a row after its last token."""
        return jnp.asarray(self.cfg.pad_token_id, jnp.int32)

    @property
    def padded_prompts(self) -> int:
        """The number of prompts in the loop, rounded up to a multiple of the size of the mesh's axis `data`."""
        return rows_on(self.mesh, self.prompts)

    def pad(self, tree: Any) -> Any:
        """Pad arrays `[B, ...]` to `padded_prompts` rows with copies of row 0, and split the arrays across the mesh."""
        if self.prompts < self.padded_prompts:
            row = jnp.arange(self.padded_prompts)
            tree = jax.tree.map(lambda x: x[jnp.where(row < self.prompts, row, 0)], tree)
        return constrain(tree, self.mesh, ROWS)

    def cut(self, tree: Any) -> Any:
        """Drop the padding, and return the rows of the caller's prompts, `[B * n, ...]`."""
        padded = self.padded_prompts
        if self.prompts == padded:
            return tree
        return jax.tree.map(lambda x: x[: x.shape[0] * self.prompts // padded], tree)
