"""The errors that jaxgen raises and the one category of its warnings."""


class JaxgenError(ValueError):
    """Base of every error that a wrong value causes; a wrong type raises `TypeError`."""


class ConfigError(JaxgenError):
    """A configuration, of a model or of generation, that cannot be honoured."""


class NotBuiltYetError(JaxgenError):
    """A feature that jaxgen recognises but has not implemented."""


class InputError(JaxgenError):
    """An invalid array or text passed to `generate`, the model or the tokenizer."""


class GenerationError(JaxgenError):
    """A run that could not continue: every token banned, or scores that are NaN."""


class JaxgenWarning(UserWarning):
    """The category of every warning that jaxgen emits."""
