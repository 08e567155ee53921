"""The caller's functions and objects, checked."""

from __future__ import annotations

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.extensions import Extensions, as_pytree, check_arguments, functions
from jaxgen.decoding.hook import StepHook
from jaxgen.grammar.stop_strings import StopStrings
from jaxgen.request.checks import check_tokenizer

# The methods of a `StepHook` and their arguments.
_HOOK = {
    "init": ("history",),
    "before": ("state", "history", "inputs"),
    "after": ("state", "history", "output"),
}


def extensions_of(cfg: GenerationConfig, logits_processor, stopping_criteria, tokenizer, hook) -> Extensions:
    """Return the caller's functions and the automaton for the stop strings. The arguments are as in `generate`."""
    return Extensions(
        processors=() if logits_processor is None else functions("logits_processor", logits_processor),
        criteria=() if stopping_criteria is None else functions("stopping_criteria", stopping_criteria),
        stop_strings=None if cfg.stop_strings is None else _stop_strings(cfg, tokenizer),
        hook=None if hook is None else _hook(hook),
    )


def _stop_strings(cfg: GenerationConfig, tokenizer) -> StopStrings:
    assert cfg.stop_strings is not None
    check_tokenizer(tokenizer)
    return StopStrings.build(cfg.stop_strings, tokenizer, cfg.model.vocab_size)


def _hook(given):
    if not isinstance(given, StepHook):
        raise TypeError(f"hook must be an object of a class derived from jaxgen.StepHook, got {given!r}")
    for name, arguments in _HOOK.items():
        check_arguments(f"hook's {name}", getattr(given, name), *arguments)
    return as_pytree(given)
