"""The package `convert` beside jaxgen: a file of the user with that name may come before it."""

import importlib.util
import os

_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "convert", "__init__.py")


def check_convert() -> None:
    """Raise an error if `import convert` would not import jaxgen's package.

    Raises:
        ImportError: another file would be imported; it is not executed.
    """
    spec = importlib.util.find_spec("convert")
    if spec is None:
        raise ImportError(f"jaxgen's package convert is not installed; it belongs to {_OWN}: install jaxgen again")
    if spec.origin is None or os.path.realpath(spec.origin) != _OWN:
        other = spec.origin or next(iter(spec.submodule_search_locations or ()), "a module without a file")
        raise ImportError(f"{other} has the name of jaxgen's package convert and is imported in its place: rename it")
