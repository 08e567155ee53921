"""Export programs to files that jax can run without jaxgen.

The module `generate` traces `generate()` as a function whose arguments and results are dicts of arrays. `plain` makes
these dicts from jaxgen's own types, `lowering` exports the function for several platforms, and `file` writes the
program to a file. The command `python -m jaxgen.export` does this for a checkpoint, or describes an exported file.
"""
