"""jaxgen's version, in a module without imports, so that any module can import it."""

__version__ = "0.1.0"
