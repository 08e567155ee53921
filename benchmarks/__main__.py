"""python -m benchmarks NAME ...: run one of the programs of this folder."""

import importlib
import sys

PROGRAMS = ("capacity", "checkpoint", "compile", "decode", "modes", "processors", "scale", "terminal")

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"usage: python -m benchmarks {{{','.join(PROGRAMS)}}} ...")
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    importlib.import_module(f"benchmarks.{name}").main()
