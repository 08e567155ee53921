"""The version, for the modules that `jaxgen` itself imports."""

__version__ = "0.1.0"
