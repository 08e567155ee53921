"""Detect user files named `convert` that shadow jaxgen's package `convert`."""

import importlib.util
import os

_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "convert")


class ShadowedError(ImportError):
    """The package `convert` cannot be imported. The error message explains the cause and the fix."""


def check_convert() -> None:
    """Raise an error if `import convert` would not import jaxgen's package.

    Raises:
        ShadowedError: the package is missing, or other code would be imported in its place. The check does not run the
            other code.
    """
    try:
        spec = importlib.util.find_spec("convert")
    except ValueError:  # a module without __spec__, created by hand
        raise ShadowedError("sys.modules has a module convert that is not jaxgen's package: remove it") from None
    if spec is None:
        raise ShadowedError(f"jaxgen's package convert is not installed; it belongs to {_OWN}: install jaxgen again")
    if spec.origin is None or os.path.dirname(os.path.realpath(spec.origin)) != _OWN:
        other = spec.origin or next(iter(spec.submodule_search_locations or ()), "a module without a file")
        raise ShadowedError(f"{other} has the name of jaxgen's package convert and is imported in its place: rename it")
