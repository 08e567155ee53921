"""transformers' generate() as a pure function in JAX, for Qwen, Llama, Mistral, Gemma, Phi, Granite, ...

Public names are imported on first use, so `import jaxgen` itself does not import jax or numpy.
"""

from jaxgen.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers assume that this is True; importing the name from typing would be slow

_NAMES = {
    "compile_cache": "enable_cache",
    "core.config.constraints": "DisjunctiveConstraint PhrasalConstraint",
    "core.config.generation_config": "GenerationConfig",
    "core.decoding.continuation": "Continuation",
    "core.decoding.hook": "StepHook StepInputs StepOutput",
    "core.decoding.stop_reasons": "StopReason",
    "engine.engine": "Engine",
    "engine.home": "EngineClosed",
    "engine.many_prompts": "generate_many",
    "engine.results": "Completion Event Handle QueueFull",
    "errors": "ConfigError GenerationError InputError JaxgenError JaxgenWarning",
    "export.file": "ExportedPrograms",
    "export.generate": "export_generate",
    "core.generation": "generate prefill",
    "core.grammar.grammar": "Grammar",
    "core.grammar.token_automaton": "TokenAutomaton",
    "core.logits.history": "History",
    "core.logits.watermark": "WatermarkDetector WatermarkingConfig",
    "core.model.cache": "KVCache",
    "core.model.causal_lm": "CausalLM ModelOutput",
    "core.model.config": "ModelConfig RopeConfig",
    "core.model.fused": "fuse_projections",
    "core.model.sharding": "shard_params",
    "core.output": "GenerateOutput",
    "core.decoding.logprobs": "LogProbs",
    "core.scoring.choices": "ChoiceScores score_choices",
    "core.scoring.embedding": "embed",
    "core.scoring.score_many": "TokenScores score_many",
    "core.scoring.pooling": "Pooling",
    "core.scoring.score": "score",
    "core.scoring.transitions": "compute_transition_scores",
    "core.text.streaming": "AsyncTextIteratorStreamer TextIteratorStreamer TextRowStreamer TextStream TextStreamer",
    "core.text.tokenizer": "Batch Tokenizer",
    "core.precompile": "warmup",
    "core.request.running.engine_sizes": "EngineSizes",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
_HOMES |= dict.fromkeys(("load_adapter", "load_hf", "save_adapter", "save_hf"), "convert")

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from convert import (
        load_adapter as load_adapter,
        load_hf as load_hf,
        save_adapter as save_adapter,
        save_hf as save_hf,
    )
    from jaxgen.compile_cache import enable_cache as enable_cache
    from jaxgen.core.config.constraints import (
        DisjunctiveConstraint as DisjunctiveConstraint,
        PhrasalConstraint as PhrasalConstraint,
    )
    from jaxgen.core.config.generation_config import GenerationConfig as GenerationConfig
    from jaxgen.core.decoding.continuation import Continuation as Continuation
    from jaxgen.core.decoding.hook import (
        StepHook as StepHook,
        StepInputs as StepInputs,
        StepOutput as StepOutput,
    )
    from jaxgen.core.decoding.logprobs import LogProbs as LogProbs
    from jaxgen.core.decoding.stop_reasons import StopReason as StopReason
    from jaxgen.core.generation import generate as generate, prefill as prefill
    from jaxgen.core.grammar.grammar import Grammar as Grammar
    from jaxgen.core.grammar.token_automaton import TokenAutomaton as TokenAutomaton
    from jaxgen.core.logits.history import History as History
    from jaxgen.core.logits.watermark import (
        WatermarkDetector as WatermarkDetector,
        WatermarkingConfig as WatermarkingConfig,
    )
    from jaxgen.core.model.cache import KVCache as KVCache
    from jaxgen.core.model.causal_lm import CausalLM as CausalLM, ModelOutput as ModelOutput
    from jaxgen.core.model.config import ModelConfig as ModelConfig, RopeConfig as RopeConfig
    from jaxgen.core.model.fused import fuse_projections as fuse_projections
    from jaxgen.core.model.sharding import shard_params as shard_params
    from jaxgen.core.output import GenerateOutput as GenerateOutput
    from jaxgen.core.precompile import warmup as warmup
    from jaxgen.core.request.running.engine_sizes import EngineSizes as EngineSizes
    from jaxgen.core.scoring.choices import ChoiceScores as ChoiceScores, score_choices as score_choices
    from jaxgen.core.scoring.embedding import embed as embed
    from jaxgen.core.scoring.pooling import Pooling as Pooling
    from jaxgen.core.scoring.score import score as score
    from jaxgen.core.scoring.score_many import TokenScores as TokenScores, score_many as score_many
    from jaxgen.core.scoring.transitions import compute_transition_scores as compute_transition_scores
    from jaxgen.core.text.streaming import (
        AsyncTextIteratorStreamer as AsyncTextIteratorStreamer,
        TextIteratorStreamer as TextIteratorStreamer,
        TextRowStreamer as TextRowStreamer,
        TextStream as TextStream,
        TextStreamer as TextStreamer,
    )
    from jaxgen.core.text.tokenizer import Batch as Batch, Tokenizer as Tokenizer
    from jaxgen.engine.engine import Engine as Engine
    from jaxgen.engine.home import EngineClosed as EngineClosed
    from jaxgen.engine.many_prompts import generate_many as generate_many
    from jaxgen.engine.results import (
        Completion as Completion,
        Event as Event,
        Handle as Handle,
        QueueFull as QueueFull,
    )
    from jaxgen.errors import (
        ConfigError as ConfigError,
        GenerationError as GenerationError,
        InputError as InputError,
        JaxgenError as JaxgenError,
        JaxgenWarning as JaxgenWarning,
    )
    from jaxgen.export.file import ExportedPrograms as ExportedPrograms
    from jaxgen.export.generate import export_generate as export_generate
else:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        home = importlib.import_module(_HOMES[name])
        if not hasattr(home, name):
            own = f"jaxgen's package {home.__name__}"
            raise ImportError(f"{home.__file__} has the name of {own} and is imported in its place: rename it")
        value = globals()[name] = getattr(home, name)
        return value

    def __dir__() -> list[str]:
        loaded = {"demo", "evaluate", "training"} & set(globals())  # documented modules, once they are imported
        return sorted({*__all__, "__version__", *loaded})
