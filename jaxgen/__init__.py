"""transformers' generate() as a pure function in JAX, for Qwen2 and Llama checkpoints.

A name is imported when it is first used, so that neither `import jaxgen` nor `jaxgen --help` waits for jax.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgen.config.generation_config import GenerationConfig
    from jaxgen.config.watermarking import WatermarkingConfig
    from jaxgen.decoding.hook import StepHook, StepInputs, StepOutput
    from jaxgen.decoding.stopping import StopReason
    from jaxgen.errors import ConfigError, GenerationError, InputError, JaxgenError, JaxgenWarning, NotBuiltYetError
    from jaxgen.generate import generate, prefill
    from jaxgen.grammar.token_automaton import TokenAutomaton
    from jaxgen.logits.history import History
    from jaxgen.logits.watermark import WatermarkDetector
    from jaxgen.model.cache import KVCache
    from jaxgen.model.causal_lm import CausalLM, ModelOutput
    from jaxgen.model.config import ModelConfig, RopeConfig
    from jaxgen.output import GenerateOutput
    from jaxgen.scoring import LogProbs, compute_transition_scores, score
    from jaxgen.text.streaming import TextIteratorStreamer, TextStream, TextStreamer
    from jaxgen.text.tokenizer import Batch, Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CausalLM",
    "ConfigError",
    "GenerateOutput",
    "GenerationConfig",
    "GenerationError",
    "History",
    "InputError",
    "JaxgenError",
    "JaxgenWarning",
    "KVCache",
    "LogProbs",
    "ModelConfig",
    "ModelOutput",
    "NotBuiltYetError",
    "RopeConfig",
    "StepHook",
    "StepInputs",
    "StepOutput",
    "StopReason",
    "TextIteratorStreamer",
    "TextStream",
    "TextStreamer",
    "TokenAutomaton",
    "Tokenizer",
    "WatermarkDetector",
    "WatermarkingConfig",
    "compute_transition_scores",
    "generate",
    "prefill",
    "score",
]

_NAMES = {
    "jaxgen.config.generation_config": "GenerationConfig",
    "jaxgen.config.watermarking": "WatermarkingConfig",
    "jaxgen.decoding.hook": "StepHook, StepInputs, StepOutput",
    "jaxgen.decoding.stopping": "StopReason",
    "jaxgen.errors": "ConfigError, GenerationError, InputError, JaxgenError, JaxgenWarning, NotBuiltYetError",
    "jaxgen.generate": "generate, prefill",
    "jaxgen.grammar.token_automaton": "TokenAutomaton",
    "jaxgen.logits.history": "History",
    "jaxgen.logits.watermark": "WatermarkDetector",
    "jaxgen.model.cache": "KVCache",
    "jaxgen.model.causal_lm": "CausalLM, ModelOutput",
    "jaxgen.model.config": "ModelConfig, RopeConfig",
    "jaxgen.output": "GenerateOutput",
    "jaxgen.scoring": "LogProbs, compute_transition_scores, score",
    "jaxgen.text.streaming": "TextIteratorStreamer, TextStream, TextStreamer",
    "jaxgen.text.tokenizer": "Batch, Tokenizer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split(", ")}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Keeps `jaxgen.generate` the function when its module, which has the same name, is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generate" and isinstance(value, types.ModuleType):
            value = value.generate
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
