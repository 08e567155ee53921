"""Programs in files, which jax runs without jaxgen.

`generate` exports `generate()` and `engine` the loop of an `Engine`. Both trace a function whose arguments and results
are dicts of arrays, which `plain` makes of jaxgen's own types. `file` writes programs to a file, and `lowering` has
what all exports share. `python -m jaxgen.export` is the command.
"""
