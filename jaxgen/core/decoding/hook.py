"""User-defined functions that run before and after every step, and can change the model's inputs and logits."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from jaxgen.core.logits.history import History
from jaxgen.shapes import short_repr


@flax.struct.dataclass
class StepInputs:
    """Inputs of the model in a step: all tokens of the prompts in the first step, and one token per row after that.

    Attributes:
        ids: int32[rows, T], the tokens; read-only, because the model reads `inputs_embeds` instead.
        inputs_embeds: `[rows, T, D]`, the embeddings of the tokens.
        position_ids: int32[rows, T], the positions of the tokens, for RoPE.
        attention_mask: bool[rows, W], True for tokens that may be attended to. Column i is for token i of the row.
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
        logits: float32[rows, V], before any processors.
        hidden_states: L + 1 arrays `[rows, D]`: the embeddings, then the output of each layer. The last layer's output
            is normalized. Read-only.
    """

    logits: jax.Array
    hidden_states: tuple[jax.Array, ...]

    __repr__ = short_repr


class StepHook:
    """Base class of hooks, which `generate(..., hook=)` calls around each step.

    Hooks replace transformers' `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation`. Override
    the methods that you need with pure functions. The state can be any pytree of arrays with one entry per row on the
    first axis. These arrays are repeated and reordered along with the rows. The first step has one row per prompt, and
    later steps have one row per sequence. With `guidance_scale`, the rows of the stream without the prompt come last.
    With `slots`, a hook call covers a few prompts during prefill, or a single sequence that enters a slot. Hook calls
    in later steps cover all slots.

    A hook that contains arrays should be a `flax.struct.dataclass`, so that the arrays are arguments of the compiled
    program and not constants. Any other hook is part of the program, so a new object triggers a recompilation.
    """

    def init(self, history: History) -> Any:
        """Return the state before the first step."""
        return ()

    def before(self, state: Any, history: History, inputs: StepInputs) -> tuple[StepInputs, Any]:
        """Optionally change the model's inputs."""
        return inputs, state

    def after(self, state: Any, history: History, output: StepOutput) -> tuple[StepOutput, Any]:
        """Inspect the model's output, and optionally change the logits."""
        return output, state
