"""Install the programs that jaxgen is compared with, each in its own environment, from the package index.

    python -m benchmarks environments DIR

llama.cpp is compiled for this machine's instruction set. If CMAKE_ARGS is set, it replaces the default build settings.
The settings are stored in llama.cpp's environment, and included in its results.
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
    build = {"CMAKE_ARGS": os.environ.get("CMAKE_ARGS", "-DGGML_NATIVE=ON" + " -DGGML_CUDA=ON" * args.cuda)}
    index = [] if args.cuda or not args.torch_index else ["--extra-index-url", args.torch_index]
    steps = {  # the arguments of each pip call
        "transformers": [[args.torch, *index], ["transformers"]],
        # Prebuilt wheels do not use all of this machine's instructions.
        "llama_cpp": [["llama-cpp-python", "--no-binary", "llama-cpp-python"], ["gguf"]],
        "lm_eval": [[args.torch, *index], ["lm_eval[hf]"]],
        "keras_hub": [["keras-hub", "safetensors", "jax[cuda13]" if args.cuda else "jax"]],
    }
    for name in args.only or steps:
        directory = args.directory / name
        venv.create(directory, with_pip=True)
        for words in steps[name]:
            print(f"{directory}: {' '.join(words)}", file=sys.stderr)
            command = [directory / "bin" / "python", "-m", "pip", "install", "--quiet", "--upgrade", *words]
            subprocess.run(command, env=os.environ | build, check=True)
        if name == "llama_cpp":
            compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
            facts = build | {"CMAKE_BUILD_TYPE": "Release", "compiler": compiler}  # scikit-build-core's default
            (directory / "build.json").write_text(json.dumps(facts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks environments",
        usage="%(prog)s DIR [options]",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("directory", type=Path, help="the directory in which to create them")
    parser.add_argument(
        "--only", nargs="+", choices=("transformers", "llama_cpp", "lm_eval", "keras_hub"), metavar="NAME"
    )
    parser.add_argument("--cuda", action="store_true", help="for an NVIDIA GPU; by default, for the CPU only")
    parser.add_argument("--torch", default="torch", help="the requirement for torch, such as torch==2.13.0")
    parser.add_argument(
        "--torch-index", default=CPU_TORCH, metavar="URL", help="a package index with torch for the CPU, or ''"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
