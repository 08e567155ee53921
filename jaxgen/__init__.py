"""transformers' generate() as a pure function in JAX, for Qwen2 and Llama checkpoints."""

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.continuation import Continuation
from jaxgen.decoding.hook import StepHook, StepInputs, StepOutput
from jaxgen.decoding.stopping import StopReason
from jaxgen.errors import ConfigError, GenerationError, InputError, JaxgenError, JaxgenWarning, NotBuiltYetError
from jaxgen.generate import generate, prefill
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.logits.history import History
from jaxgen.logits.watermark import WatermarkDetector, WatermarkingConfig
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
    "Continuation",
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
