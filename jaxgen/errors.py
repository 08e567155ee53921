"""What jaxgen raises and the one category it warns in."""


class JaxgenError(ValueError):
    """Base of every error that a wrong value causes; a wrong type raises `TypeError`."""


class ConfigError(JaxgenError):
    """A configuration, of a model or of generation, that cannot be honoured."""


class NotBuiltYetError(JaxgenError):
    """An option of transformers 4.41.1 that jaxgen knows by name but has no code for yet."""


class InputError(JaxgenError):
    """An array or text given to `generate`, the model or the tokenizer that it cannot take."""


class GenerationError(JaxgenError):
    """A run that could not go on: every token banned, scores that are not numbers."""


class JaxgenWarning(UserWarning):
    """The category of every warning that jaxgen emits."""
