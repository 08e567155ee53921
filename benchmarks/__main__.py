"""python -m benchmarks SUBCOMMAND ...: measure, or run one of the programs in this folder."""

import importlib
import sys

from jaxgen.errors import JaxgenError

PROGRAMS = (
    "accelerator",
    "adapters",
    "attack",
    "calls",
    "checkpoint",
    "compile",
    "environments",
    "evaluate",
    "experts",
    "plots",
    "processors",
    "profile",
    "replay",
    "scale",
    "schemas",
    "serving",
    "slots",
    "workarounds",
)


def main(words: list[str]) -> None:
    """Run the subcommand named by the first word; report a bad path or checkpoint as a one-line error."""
    try:
        _run(words)
    except JaxgenError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")


def _run(words: list[str]) -> None:
    if words and words[0] in PROGRAMS:
        sys.argv = [f"python -m benchmarks {words[0]}", *words[1:]]
        importlib.import_module(f"benchmarks.{words[0]}").main()
        return
    from benchmarks import suites  # imports jax; some programs must first set jax's platform

    if not words or words[0] not in suites.SUITES:
        sys.exit(f"usage: python -m benchmarks {{{','.join((*suites.SUITES, *PROGRAMS))}}} ...")
    suites.main(*words[:1], words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
