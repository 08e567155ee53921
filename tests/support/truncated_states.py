"""A program that truncates and removes a saved state's files one by one, and prints how often the state was rejected.

It runs separately because orbax, when it fails, leaves coroutines behind that the interpreter warns about later.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen import InputError
from jaxgen.training.checkpoint import read_state, write_state

STATE = {"weight": jax.random.normal(jax.random.key(0), (40, 50)), "step": jnp.int32(3)}


def main(directory: Path) -> None:
    write_state(directory, STATE, 3, "")
    refused = tried = 0
    for file in [file for file in directory.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        for part in (0.0, 0.3, 0.9, None):
            if part is None:
                file.unlink()
            else:
                file.write_bytes(content[: int(part * len(content))])
            tried += 1
            refused += is_refused(directory)
        file.write_bytes(content)
    print(tried, refused)


def is_refused(directory: Path) -> bool:
    """Return whether the state is rejected. An accepted state must have the values that were written."""
    try:
        read = read_state(directory, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE))
    except InputError:
        return True
    jax.tree.map(np.testing.assert_array_equal, read, STATE)
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
