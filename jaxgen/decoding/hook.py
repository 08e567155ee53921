"""Functions of the user's own at every step: what goes into the model and what comes out of it."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from jaxgen.logits.history import History


@flax.struct.dataclass
class StepInputs:
    """What the model is about to read: T = 1 token per row, all tokens of the prompts in the first step.

    Attributes:
        ids: int32[rows, T], the tokens; a change is for the hook's own eyes, the model reads `inputs_embeds`.
        inputs_embeds: `[rows, T, D]`, their embeddings.
        position_ids: int32[rows, T], their positions, for RoPE.
        attention_mask: bool[rows, W], which of its row's tokens may be attended to, from the row's first token on.
        real: bool[rows, T], which of the T are tokens; the prompts' rows are filled up at their ends. A change has no
            effect.
    """

    ids: jax.Array
    inputs_embeds: jax.Array
    position_ids: jax.Array
    attention_mask: jax.Array
    real: jax.Array


@flax.struct.dataclass
class StepOutput:
    """What the model made of the last token of each row.

    Attributes:
        logits: float32[rows, V], before any processor.
        hidden_states: L + 1 arrays `[rows, D]`, the embedding first, the last one normed. A change has no effect.
    """

    logits: jax.Array
    hidden_states: tuple[jax.Array, ...]


class StepHook:
    """Base of hooks, which `generate(..., hook=)` calls before and after every forward pass of the model.

    It takes the place of overriding `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation` of
    transformers' models. Override what is needed with pure functions. The state is a pytree of the user's own
    whose arrays all have the rows as first axis, so that it can be repeated and reordered with them: the first
    step has one row per prompt, later ones one per sequence. With `guidance_scale` the rows without the prompt follow
    after the others.

    A hook that holds arrays should be a `flax.struct.dataclass`, so that they are arguments of the compiled program and
    not constants in it; another hook is a part of the program, and a new object compiles anew.
    """

    def init(self, history: History) -> Any:
        """Return the state before the first step."""
        return ()

    def before(self, state: Any, history: History, inputs: StepInputs) -> tuple[StepInputs, Any]:
        """Change what goes into the model."""
        return inputs, state

    def after(self, state: Any, history: History, output: StepOutput) -> tuple[StepOutput, Any]:
        """See what came out of the model, and change the logits."""
        return output, state
