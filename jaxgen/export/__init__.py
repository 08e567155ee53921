"""Export programs to files that jax can run without jaxgen.

The module `generate` exports `generate()`, and `engine` exports the loop of an `Engine`. Both trace a function whose
arguments and results are dicts of arrays. `plain` converts jaxgen's own types to and from these dicts. `file` writes
programs to a file, and `lowering` contains the code that all exports share. The command `python -m jaxgen.export`
writes a checkpoint's programs to a file, or describes an exported file.
"""
