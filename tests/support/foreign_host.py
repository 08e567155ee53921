"""A process that runs exported programs with only jax, NumPy and flatbuffers. Importing jaxgen raises an error.

Argument: a folder with generate.zip, engine.zip and arrays.npz (parameters, prompts). It writes results.json there.
"""

import collections
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


def read(path):
    """Return a file's description, the default values of its inputs, and its programs."""
    with zipfile.ZipFile(path) as file:
        description = json.loads(file.read("description.json"))
        inputs = dict(np.load(io.BytesIO(file.read("inputs.npz"))))
        programs = {
            name: export.deserialize(bytearray(file.read(f"{name}.bin"))).call for name in description["programs"]
        }
    return description, inputs, programs


def drive(path, params, requests):
    """Use an exported engine to answer requests, each with one prompt. There can be more requests than slots."""
    description, nobody, programs = read(path)
    chunk = jax.jit(programs["chunk"], donate_argnums=1)
    state = jax.jit(programs["open"])(params)
    tokens = collections.defaultdict(list)
    waiting, flying, queued = list(enumerate(requests)), set(), 0
    while waiting or flying:
        inputs = {name: array.copy() for name, array in nobody.items()}
        space = min(description["slots"], description["most_waiting"] - queued)
        for place, (number, request) in enumerate(waiting[:space]):
            request = {"number": number, "index": number, **request}
            ids = request.pop("ids")
            inputs["ids"][place, : len(ids)], inputs["attention_mask"][place, : len(ids)] = ids, True
            for name, value in request.items():
                inputs[name][place] = value
            flying.add(number)
        waiting = waiting[space:]
        state, outputs = chunk(params, state, inputs)
        journal = np.asarray(outputs["journal"])
        entries, queued, _ = journal[0, :3]
        for number, _, token, reason in journal[1 : 1 + entries].tolist():
            if token >= 0:
                tokens[number].append(token)
            if reason:
                flying.remove(number)
    return [tokens[number] for number in range(len(requests))]


def main(folder):
    folder = Path(folder)
    arrays = dict(np.load(folder / "arrays.npz"))
    prompts = {name: arrays.pop(name) for name in ("ids", "attention_mask", "key")}
    results = {}
    if (folder / "generate.zip").exists():
        _, inputs, programs = read(folder / "generate.zip")
        run = jax.jit(programs["generate"])
        for temperature in (0.7, 1.5):
            given = inputs | prompts | {"temperature": np.float32(temperature)}
            results[str(temperature)] = run(arrays, given)["sequences"].tolist()
    if (folder / "engine.zip").exists():
        requests = json.loads((folder / "requests.json").read_text())
        results["engine"] = drive(folder / "engine.zip", arrays, requests)
    assert not FORBIDDEN & set(sys.modules)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
