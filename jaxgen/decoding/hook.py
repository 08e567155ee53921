"""The user's own functions around every step, which can change the model's inputs and its logits."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from jaxgen.logits.history import History
from jaxgen.shapes import short_repr


@flax.struct.dataclass
class StepInputs:
    """Inputs of the model in a step: T = 1 token per row, or all tokens of the prompts in the first step.

    Attributes:
        ids: int32[rows, T], the tokens, read-only: the model reads `inputs_embeds`.
        inputs_embeds: `[rows, T, D]`, their embeddings.
        position_ids: int32[rows, T], their positions, for RoPE.
        attention_mask: bool[rows, W], which tokens of the row may be attended to, starting with its first token.
        real: bool[rows, T], False for padding, which follows the tokens of each prompt; read-only.
    """

    ids: jax.Array
    inputs_embeds: jax.Array
    position_ids: jax.Array
    attention_mask: jax.Array
    real: jax.Array

    __repr__ = short_repr


@flax.struct.dataclass
class StepOutput:
    """Outputs of the model for the last token of each row.

    Attributes:
        logits: float32[rows, V], before any processor.
        hidden_states: L + 1 arrays `[rows, D]`, the embedding first; the last one is normed; read-only.
    """

    logits: jax.Array
    hidden_states: tuple[jax.Array, ...]

    __repr__ = short_repr


class StepHook:
    """Base class of hooks, which `generate(..., hook=)` calls around each step.

    Hooks replace overriding `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation` of transformers'
    models. Override the methods that you need with pure functions. The state is your own pytree. The first axis of all
    its arrays is the rows, so that it can be repeated and reordered with them: the first step has one row per prompt,
    later steps have one per sequence. With `guidance_scale`, the rows without the prompt come after the others. With
    `slots`, a call has a few prompts while they are read, one row when a sequence enters, and then one row per slot.

    A hook that contains arrays should be a `flax.struct.dataclass`, so that they are arguments of the compiled program
    and not constants in it. Any other hook is part of the program, and a new object triggers recompilation.
    """

    def init(self, history: History) -> Any:
        """Return the state before the first step."""
        return ()

    def before(self, state: Any, history: History, inputs: StepInputs) -> tuple[StepInputs, Any]:
        """Change the model's inputs."""
        return inputs, state

    def after(self, state: Any, history: History, output: StepOutput) -> tuple[StepOutput, Any]:
        """Inspect the output, and change the logits."""
        return output, state
