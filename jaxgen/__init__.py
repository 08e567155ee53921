"""transformers' generate() as a pure function in JAX, for Qwen2 and Llama checkpoints."""

from jaxgen.errors import ConfigError, InputError, JaxgenError, JaxgenWarning, NotBuiltYetError
from jaxgen.generate import GenerateOutput, generate
from jaxgen.generation_config import GenerationConfig
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import CausalLM, ModelOutput
from jaxgen.model.config import ModelConfig, RopeConfig
from jaxgen.streaming import TextStream, TextStreamer
from jaxgen.tokenizer import Batch, Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CausalLM",
    "ConfigError",
    "GenerateOutput",
    "GenerationConfig",
    "InputError",
    "JaxgenError",
    "JaxgenWarning",
    "KVCache",
    "ModelConfig",
    "ModelOutput",
    "NotBuiltYetError",
    "RopeConfig",
    "TextStream",
    "TextStreamer",
    "Tokenizer",
    "generate",
]
