"""A process that runs an exported program with only jax, NumPy and flatbuffers. Importing jaxgen raises an error.

Argument: a folder with generate.zip and arrays.npz (parameters, prompts). It writes results.json there.
"""

import io
import json
import sys
import zipfile
from pathlib import Path

FORBIDDEN = {"jaxgen", "convert", "flax", "optax", "orbax", "tokenizers", "safetensors", "tests"}


class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is not there")


sys.meta_path.insert(0, Forbidden())

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax import export  # noqa: E402


def run(path, arrays):
    """Return the sequences of an exported `generate`, by temperature."""
    prompts = {name: arrays.pop(name) for name in ("ids", "attention_mask", "key")}
    with zipfile.ZipFile(path) as file:
        inputs = dict(np.load(io.BytesIO(file.read("inputs.npz"))))
        program = jax.jit(export.deserialize(bytearray(file.read("generate.bin"))).call)
    inputs |= prompts
    return {
        str(value): program(arrays, inputs | {"temperature": np.float32(value)})["sequences"].tolist()
        for value in (0.7, 1.5)
    }


def main(folder):
    folder = Path(folder)
    results = run(folder / "generate.zip", dict(np.load(folder / "arrays.npz")))
    assert not FORBIDDEN & set(sys.modules)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
