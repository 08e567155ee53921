"""The inputs of a run: the prompts, and the constants of the loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.options import OPTIONS
from jaxgen.decoding.continuation import Continuation
from jaxgen.decoding.extensions import Extensions
from jaxgen.decoding.needs import Needs
from jaxgen.decoding.rng import prompt_keys
from jaxgen.logits.row_options import OptionValues, repeat_values
from jaxgen.model.config import ModelConfig
from jaxgen.model.context import NO_CONTEXT, Context
from jaxgen.model.sharding import ROWS, constrain, rows_on
from jaxgen.shapes import repeat_rows

Array = Any  # jax.Array inside a program, np.ndarray before
_PROCESSORS = frozenset(option.name for option in OPTIONS.values() if option.stage)


@flax.struct.dataclass
class Request:
    """The prompts of a run with everything that belongs to each: checked, rounded up in an eager call, all traced.

    Attributes:
        ids: int32[B, P], padded on any side; `UNKNOWN` throughout if only embeddings were given.
        mask: bool[B, P], True for tokens.
        budget: int32[B], the maximum number of tokens to generate per prompt.
        options: values of the enabled options, each for all prompts or `[B, ...]`; see `GenerationConfig.split`.
        grammar: int32[] or int32[B], the first state of the token automaton; None without one.
        stop_strings: int32[] or int32[B], the first state of the stop strings' automaton; None without stop strings.
        unusual: bool[B], prompts with options that are not in `Run.usual`; None without it.
        logged: bool[B], prompts whose log-probabilities are recorded; None for all.
        key: one key, `key[B]`, or None for greedy search.
        cache: the tokens before the prompts; its number of rows is B or a divisor of B. Or None.
        embeds: `[B, P, D]`, or None.
        negative_ids: int32[B, Q], the negative prompts of guidance, or None.
        negative_mask: bool[B, Q], or None.
    """

    ids: Array
    mask: Array
    budget: Array
    options: OptionValues
    grammar: Array | None = None
    stop_strings: Array | None = None
    unusual: Array | None = None
    logged: Array | None = None
    key: jax.Array | None = None
    cache: Continuation | None = None
    embeds: Array | None = None
    negative_ids: Array | None = None
    negative_mask: Array | None = None

    def select(self, prompts: jax.Array) -> Request:
        """Return the prompts numbered `prompts int32[n]` of a complete request; all must share the cache."""
        selected = jax.tree.map(lambda x: jnp.asarray(x)[prompts], dataclasses.replace(self, cache=None))
        return dataclasses.replace(selected, cache=self.cache)

    def complete(self) -> Request:
        """Return the request with one entry per prompt in every array except those of the cache.

        Prompts can then be selected by indexing each array.
        """
        prompts = self.ids.shape[0]
        states = {"grammar": self.grammar, "stop_strings": self.stop_strings}
        return dataclasses.replace(
            self,
            options=repeat_values(self.options, prompts),
            **jax.tree.map(lambda state: repeat_rows(jnp.atleast_1d(state), prompts), states),
            key=None if self.key is None else prompt_keys(self.key, prompts),
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of a run.

    Attributes:
        prompts: the number of prompts, B.
        capacity: the maximum number of tokens that a row can generate, N.
        slots: slots for the tokens of `Request.cache` and, unless its rows are shared, the prompts; 0 without a cache.
        needs: the requirements of the decode mode.
    """

    prompts: int
    capacity: int
    slots: int = 0
    needs: Needs = dataclasses.field(default_factory=Needs)


def is_expanded(rows: int, prompts: int, mesh: Mesh | None) -> bool:
    """Return True if a cache of `rows` rows is expanded to one row per prompt, instead of being shared.

    Otherwise, padding the prompts for a mesh could leave a number that is not a multiple of the cache's rows.
    """
    return 1 < rows <= prompts < rows_on(mesh, prompts)


@flax.struct.dataclass
class Run:
    """The constants of a run: the same in every step and for every row.

    Attributes:
        params: the model's parameters.
        cfg: the model's config, and which options are on. The values that belong to a prompt are in `Request.options`
            and `Rows.options`.
        usual: the config with the options that most rows have; None if all rows have all options of `cfg`. A step in
            which no row is unusual applies only these options. State 0 of the automata is then the state of rows
            without a grammar or stop strings.
        extensions: processors, criteria, grammar, stop strings and hook.
        sizes: the static sizes.
        context: the context of every pass.
        draft: in assisted generation, the run of the model that drafts tokens; otherwise None. Only its model and its
            drafting settings are used: tokens are chosen by this run.
        mesh: the mesh that the parameters are divided over, or None.
    """

    params: Any
    cfg: GenerationConfig
    extensions: Extensions
    sizes: Sizes = flax.struct.field(pytree_node=False)
    context: Context = NO_CONTEXT
    usual: GenerationConfig | None = None
    draft: Run | None = None
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def model(self) -> ModelConfig:
        """The model's config."""
        return self.cfg.model

    @property
    def needs(self) -> Needs:
        """The requirements of the decode mode."""
        return self.sizes.needs

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
    def capacity(self) -> int:
        """The maximum number of tokens that a row can generate, N."""
        return self.sizes.capacity

    @property
    def pad_id(self) -> jax.Array:
        """The id that fills a row after its end."""
        return jnp.asarray(self.cfg.pad_token_id, jnp.int32)

    @property
    def prompts(self) -> int:
        """The number of prompts in the loop: rounded up to a multiple of the mesh's axis `data`."""
        return rows_on(self.mesh, self.sizes.prompts)

    def of_prompts(self, prompts: int) -> Run:
        """Return the run with another number of prompts."""
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, prompts=prompts))

    def pad(self, tree: Any) -> Any:
        """Pad arrays `[B, ...]` to the number of prompts in the loop, and divide them over the mesh.

        The added rows are copies of the first.
        """
        given, wanted = self.sizes.prompts, self.prompts
        if given < wanted:
            row = jnp.arange(wanted)
            tree = jax.tree.map(lambda x: x[jnp.where(row < given, row, 0)], tree)
        return constrain(tree, self.mesh, ROWS)

    def cut(self, tree: Any) -> Any:
        """Drop the padding: return the rows of the caller's prompts, `[B * n, ...]`."""
        given, padded = self.sizes.prompts, self.prompts
        return tree if given == padded else jax.tree.map(lambda x: x[: x.shape[0] * given // padded], tree)
