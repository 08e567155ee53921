"""jaxgen's version, in a module that any other module can import."""

__version__ = "0.1.0"
