"""Make the environments of the programs that jaxgen is measured against, from the package index.

    python -m benchmarks environments DIR

llama.cpp is compiled, for the instructions of this machine; CMAKE_ARGS in the environment is passed on. How it was
compiled is written beside it, and its results say it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

CPU_TORCH = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    args = _arguments()
    packages = {
        "transformers": [args.torch, "transformers"],
        "llama_cpp": ["llama-cpp-python", "gguf"],
        "keras_hub": ["keras-hub", "safetensors", "jax[cuda13]" if args.cuda else "jax"],
    }
    for name in args.only or packages:
        _make(args.directory / name, packages[name], args.cuda)


def _make(directory: Path, packages: list[str], cuda: bool) -> None:
    print(f"{directory}: {', '.join(packages)}", file=sys.stderr)
    venv.create(directory, with_pip=True)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade", *packages]
    environment = dict(os.environ)
    if directory.name == "transformers" and not cuda:
        command += ["--extra-index-url", CPU_TORCH]
    if directory.name == "llama_cpp":
        command += ["--no-binary", "llama-cpp-python"]  # wheels for all machines use few instructions
        environment.setdefault("CMAKE_ARGS", "-DGGML_NATIVE=ON" + " -DGGML_CUDA=ON" * cuda)
    subprocess.run(command, env=environment, check=True)
    if directory.name == "llama_cpp":
        compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
        build = {"CMAKE_ARGS": environment["CMAKE_ARGS"], "CMAKE_BUILD_TYPE": "Release", "compiler": compiler}
        (directory / "build.json").write_text(json.dumps(build))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to make them")
    parser.add_argument("--only", nargs="+", choices=("transformers", "llama_cpp", "keras_hub"), metavar="NAME")
    parser.add_argument("--cuda", action="store_true", help="for an NVIDIA GPU; by default for the CPU alone")
    parser.add_argument("--torch", default="torch", help="the requirement for torch, such as torch==2.13.0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
