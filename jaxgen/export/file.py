"""Files of exported programs. Each file is a zip archive with a description, default inputs and the programs."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from typing import Any

import jax
import numpy as np
from jax import export

from jaxgen.core.request.flat_call import flat_params
from jaxgen.errors import InputError

DESCRIPTION, INPUTS = "description.json", "inputs.npz"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ExportedPrograms:
    """Programs that run with jax alone, as docs/production.md shows.

    Attributes:
        description: a description of the programs, their inputs and their outputs; stored as description.json.
        inputs: the default values of the inputs, by name; stored as inputs.npz.
        programs: the programs by name.
    """

    description: dict[str, Any]
    inputs: dict[str, np.ndarray]
    programs: dict[str, export.Exported]

    def save(self, path) -> None:
        """Write the file, overwriting any existing file."""
        contents = {name: program.serialize() for name, program in self.programs.items()}
        values = io.BytesIO()
        np.savez(values, allow_pickle=False, **self.inputs)  # pyright: ignore[reportArgumentType]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(DESCRIPTION, json.dumps(self.description, indent=1))
            file.writestr(INPUTS, values.getvalue())
            for name, program in contents.items():
                file.writestr(f"{name}.bin", bytes(program))

    def params(self, params: Any) -> dict[str, jax.Array]:
        """Return `params` as the dict that the programs accept: arrays, keyed by their tensor names in a checkpoint.

        Raises:
            InputError: the names, shapes or dtypes differ from those of the exported parameters.
        """
        flat = flat_params(params)
        wanted, given = self.description["params"], forms(flat)
        for name in [*wanted, *given]:
            if wanted.get(name) != given.get(name):
                found, needed = (_form(entries.get(name)) for entries in (given, wanted))
                raise InputError(f"params: {name} is {found}, but the programs need {needed}: export again")
        return flat


def forms(arrays: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the dtype and shape of each array, with symbolic sizes written as strings."""
    return {
        name: {"dtype": str(x.dtype), "shape": [size if isinstance(size, int) else str(size) for size in x.shape]}
        for name, x in arrays.items()
    }


def _form(entry: dict[str, Any] | None) -> str:
    return "missing" if entry is None else f"{entry['dtype']}[{', '.join(map(str, entry['shape']))}]"


def read_description(path) -> dict[str, Any]:
    """Return a file's description.

    Raises:
        InputError: the file does not contain exported programs, or has the format of another version.
    """
    try:
        with zipfile.ZipFile(path) as file:
            description = json.loads(file.read(DESCRIPTION))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a file of exported programs: pass a file that jaxgen.export wrote") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise InputError(f"{path} does not have format {FORMAT}: read it with the version of jaxgen that wrote it")
    return description


def summary(description: dict[str, Any]) -> str:
    """Return a description as text. The text gives the number of parameters but does not list them."""
    lines = []
    for name, value in description.items():
        if name == "params":
            lines.append(f"params: {len(value)} arrays, such as {next(iter(value))}")
        elif name in ("inputs", "outputs"):
            lines += [f"{name}:", *(f"  {key}: {_form(entry)}" for key, entry in value.items())]
        elif isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name}: {', '.join(value) if isinstance(value, list) else value}")
    return "\n".join(lines)
