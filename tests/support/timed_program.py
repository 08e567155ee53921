"""A benchmark program with known times: 1 s per prompt and 0.1 s per step, and twice that for the variant `slow`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "programs"))

from worker import Program, serve


class Timed(Program):
    def load(self, path, dtype, variant, mesh):
        self.variant, self.runs = variant, 0
        return {"seconds": 2.0, "step_bytes": 10**6, "platform": "cpu", "device": "cpu"}

    def run(self, ids, new_tokens, room, options):
        self.runs += 1
        if options.get("num_beams") and self.variant == "no beams":
            raise RuntimeError("no beams")
        if options.get("num_beams"):
            raise NotImplementedError("no beams")
        if self.variant == "ends":
            sys.exit(3)
        step = 0.0 if self.variant == "endless" else 0.2 if self.variant == "slow" else 0.1
        tokens = [list(range(new_tokens)) for _ in ids]
        if self.variant == "differs":
            tokens[0][3:] = [-1] * len(tokens[0][3:])
        if self.variant == "short":
            tokens[0].pop()
        return {
            "seconds": 1.0 + step * (new_tokens - 1),
            "tokens": tokens,
            "compilations": int(self.variant == "compiles" and self.runs > 3),
            "slots": new_tokens if self.variant == "grows" else 256,
        }


if __name__ == "__main__":
    serve(Timed(), {})
