"""Answer the prompts of a file with Ray Data: a pool of actors, each with an engine that all of its batches share.

    python docs/examples/ray_data.py prompts.txt answers.jsonl --actors 8 --gpus 1 --model /shared/Qwen2.5-7B

An answer depends on the prompt's number, but not on the actor. To continue a run that was stopped, repeat the command.
"""

import argparse
import json
from pathlib import Path

import jax
import ray

from jaxgen import Engine, Tokenizer, demo, load_hf

parser = argparse.ArgumentParser()
for name in ("prompts", "answers", "--model"):
    parser.add_argument(name)
sizes = {"actors": 2, "gpus": 0, "slots": 32, "prompt-width": 512, "max-new-tokens": 256, "batch": 1024}
for name, default in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=default)


class Answerer:
    """An engine that lives as long as its actor. It accepts prompts from several threads, so batches can overlap."""

    def __init__(self, args: argparse.Namespace):
        model, sizes = args.model or demo.PATH, {"slots": args.slots, "prompt_width": args.prompt_width}
        params, cfg = load_hf(model)
        cfg, tok = cfg.replace(max_new_tokens=args.max_new_tokens), Tokenizer.from_pretrained(model)
        self.engine = Engine(params, cfg, jax.random.key(0), tokenizer=tok, **sizes)

    def submit(self, index: int, prompt: str):
        """Return a handle, or an error message if the prompt cannot be answered, for example because it is too long."""
        try:
            return self.engine.submit({"text": prompt, "index": index}, timeout=None)
        except (ValueError, TypeError) as error:
            return str(error)

    def __call__(self, batch: dict) -> dict:
        """Answer the columns `index` and `prompt`."""
        handles = [self.submit(*row) for row in zip(batch["index"].tolist(), batch["prompt"], strict=True)]
        done = [None if isinstance(handle, str) else handle.result()[0] for handle in handles]
        return {
            "index": batch["index"],
            "text": [each.text if each else "" for each in done],
            "tokens": [each.tokens if each else [] for each in done],
            "error": [(each.error if each else handles[place]) or "" for place, each in enumerate(done)],
            "stop_reason": [each.stop_reason.name if each else "NONE" for each in done],
        }


if __name__ == "__main__":
    args = parser.parse_args()
    with Path(args.answers).open("ab+") as file:
        file.seek(0)
        lines = [line for line in file if line.endswith(b"\n")]  # the last line may be incomplete
        file.truncate(sum(map(len, lines)))
        done = {json.loads(line)["index"] for line in lines}
        prompts = enumerate(Path(args.prompts).read_text("utf-8").splitlines())
        left = [{"index": index, "prompt": prompt} for index, prompt in prompts if index not in done]
        data = ray.data.from_items(left, override_num_blocks=-(-len(left) // args.batch) or 1)
        pool, more = ray.data.ActorPoolStrategy(size=args.actors), {"num_gpus": args.gpus, "max_concurrency": 2}
        answers = data.map_batches(Answerer, fn_constructor_args=[args], batch_size=None, compute=pool, **more)
        for row in answers.iter_rows() if left else ():
            file.write(json.dumps(row | {"tokens": [int(token) for token in row["tokens"]]}).encode() + b"\n")
            file.flush()
