"""Serve a checkpoint with Ray Serve: each replica has an engine, and Ray spreads the requests over the replicas.

    cd docs/examples/deploy
    serve run ray_serve:build model=/shared/Qwen2.5-7B-Instruct replicas=4 gpus=1

A replica is the application of `jaxgen serve`, so clients, streams and seeds work as in docs/serving.md.
"""

from collections.abc import Mapping

import jax
from ray import serve
from starlette.applications import Starlette

from jaxgen import Engine, Tokenizer, demo, enable_cache, load_hf
from jaxgen.serving.app import Service

DEFAULTS = {"model": str(demo.PATH), "name": "jaxgen", "replicas": 1, "gpus": 0, "cpus": 1}
DEFAULTS |= {"slots": 16, "queue": 256, "prompt_width": 1024, "max_new_tokens": 512}


def build(given: Mapping[str, str]) -> serve.Application:
    """Return the application; `given` has the arguments of `serve run`, as text."""
    if unknown := given.keys() - DEFAULTS:
        raise ValueError(f"unknown argument {min(unknown)}: use {', '.join(DEFAULTS)}")
    args = {name: type(default)(given.get(name, default)) for name, default in DEFAULTS.items()}

    def service() -> Starlette:
        """Load the checkpoint; Ray calls this function in each replica."""
        enable_cache()
        params, cfg = load_hf(args["model"])
        cfg = cfg.replace(max_new_tokens=args["max_new_tokens"], do_sample=True, output_logprobs="logits")
        engine = Engine(
            params,
            cfg.replace(top_logprobs=5),
            jax.random.key(0),  # not used, because each request has its own key
            tokenizer=Tokenizer.from_pretrained(args["model"]),
            slots=args["slots"],
            prompt_width=args["prompt_width"],
            most_waiting=args["queue"],
            stop_in_prompt=False,
        )
        engine.warmup()
        return Service(engine, params, args["name"]).app()

    replica = serve.deployment(
        serve.ingress(service)(),
        name="jaxgen",
        num_replicas=args["replicas"],
        ray_actor_options={"num_gpus": args["gpus"], "num_cpus": args["cpus"]},
        max_ongoing_requests=args["slots"] + args["queue"],  # Ray's default of 5 would leave slots empty
        graceful_shutdown_timeout_s=600,  # the longest time that an answer may take
    )
    return replica.bind()
