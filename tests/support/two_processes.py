"""One of two processes with four devices each: run one of the tasks below, and print its result as JSON."""

import contextlib
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from convert import load_hf, save_hf
from convert.tensors import Tensor
from jaxgen import Engine, JaxgenError, TokenAutomaton, generate, generate_many, score
from jaxgen.core.request.running.automaton_tables import grammar_capacity, tables_of
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.engine.processes import Action, ChunkPlan, Processes
from jaxgen.training.loop import TrainBatch, TrainConfig, train
from tests.support.processes import peak_memory
from tests.support.tokenizers import byte_level


def main(task: str, process: int, port: int, shape: tuple[int, int], *paths: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh(shape, ("data", "model"))
    print("RESULT", json.dumps(TASKS[task](mesh, *paths)), flush=True)


def load_generate_save(mesh: Mesh, checkpoint: str, target: str) -> dict:
    read, runs = [], Tensor.runs

    def counted(self, part, array):
        for offset, run in runs(self, part, array):
            read.append(len(run))
            yield offset, run

    Tensor.runs = counted  # pyright: ignore
    params, cfg = load_hf(checkpoint, mesh=mesh)
    Tensor.runs = runs
    result: dict = {"read": sum(read)}
    ids = np.arange(3, 30, dtype=np.int32).reshape(3, 9)
    for name, more in OPTIONS.items():
        changed = cfg.replace(max_new_tokens=6, **more)
        key = jax.random.key(4) if changed.do_sample else None
        out = generate(params, ids, key, changed)
        result[name] = np.asarray(out.sequences).tolist()
        if changed.output_scores:
            result["best"] = np.asarray(out.scores).max(axis=-1).round(3).tolist()
    result["again"] = np.asarray(generate(params, ids[:, :2], None, cfg, cache=out.cache).sequences).tolist()
    result["score"] = np.asarray(score(params, ids[:2], cfg).logprobs).round(3).tolist()
    for name, refused in {
        "max_time": lambda: generate(params, ids, None, cfg.replace(max_time=1.0)),
        "to_hf": lambda: out.to_hf(),
    }.items():
        try:
            refused()
        except JaxgenError as error:
            result[name] = str(error)
    save_hf(params, cfg, target)
    try:
        save_hf(params, cfg, target)
    except JaxgenError as error:
        result["again_saved"] = type(error).__name__
    return result


def answer_prompts(mesh: Mesh, checkpoint: str) -> dict:
    """Answer prompts in process 0, including after a weight update and with a grammar; process 1 follows."""
    params, cfg = load_hf(checkpoint, mesh=mesh)
    cfg = cfg.replace(max_new_tokens=6, do_sample=True)
    key, sizes = jax.random.key(4), {"slots": 3, "prompt_width": 9}
    result: dict = {}
    result["many"] = [done.tokens for done in generate_many(params, PROMPTS, key, cfg, ordered=True, **sizes)]
    result["error"] = ""
    try:
        Engine(params, cfg, jax.random.key(jax.process_index()), **sizes)
    except JaxgenError as error:
        result["error"] = str(error)
    with Engine(params, cfg, key, **sizes) as made:
        made.warmup()
        if made.leads:
            result["before"] = [made.submit(prompt).result()[0].tokens for prompt in PROMPTS]
            time.sleep(2.5)  # the other process waits
        else:
            try:
                made.submit([5])
            except JaxgenError as error:
                result["submit"] = str(error)
        made.update_params(jax.jit(lambda params: jax.tree.map(lambda x: x * 1.25, params))(params))
        if made.leads:
            handles = [made.submit(prompt, index=n) for n, prompt in enumerate(PROMPTS)]
            made.submit([5]).cancel()
            result["after"] = [handle.result()[0].tokens for handle in handles]
            result["grammar"] = made.submit([5], allowed=grammar(), index=9).result()[0].tokens
    return result


def fail_to_lead(mesh: Mesh, checkpoint: str) -> dict:
    """Answer a prompt, then let the engine fail in process 0. Return the errors."""
    params, cfg = load_hf(checkpoint, mesh=mesh)
    made = Engine(params, cfg.replace(max_new_tokens=6, do_sample=False), slots=3, prompt_width=9)
    errors = []
    if made.leads:
        made.submit([5]).result()
        made._schedule.arrivals = lambda: 1 / 0
        try:
            made.submit([5]).result()
        except ZeroDivisionError as error:
            errors.append(str(error))
    try:
        made.close()
    except (ZeroDivisionError, JaxgenError) as error:
        errors.append(str(error))
    return {"errors": errors}


def follow_tables(mesh: Mesh) -> dict:
    """Send an engine's tables before and after a grammar is added. Return the bytes of each broadcast, and the tables.

    The tables are those that process 1 has after each plan.
    """
    sizes, broadcast = [], multihost_utils.broadcast_one_to_all

    def counted(array):
        sizes.append(array.nbytes)
        return broadcast(array)

    multihost_utils.broadcast_one_to_all = counted
    made = tables_of(5000, EngineSizes(stop_states=512), byte_level(), True)
    processes = Processes(np.zeros(1), {name: table.joint for name, table in made.items()}, "")
    result: dict = {"table": grammar_capacity(EngineSizes()).bytes(5000), "sums": [], "sent": []}
    for name, pattern in (("none", None), ("letters", "[a-c]{1,8}"), ("digits", "[0-9]{2,40}"), ("digits", "")):
        if pattern:
            made["allowed"].enter(name, TokenAutomaton.from_regex(pattern, byte_level(), vocab_size=5000))
        plan = ChunkPlan(Action.CHUNK, 0, 1, None, {name: table.joint for name, table in made.items()})
        sizes.clear()
        if jax.process_index() == 0:
            processes.send(plan)
        else:
            plan = processes.receive()
        result["sent"].append(sizes[:])
        leaves = [np.asarray(leaf, np.int64) for leaf in jax.tree.leaves(plan.tables)]
        result["sums"].append([[int(leaf.sum()), int((leaf.ravel() * np.arange(leaf.size)).sum())] for leaf in leaves])
    return result


PROMPTS = [list(range(3 + n, 6 + 2 * n)) for n in range(6)]


def grammar() -> TokenAutomaton:
    return TokenAutomaton.from_regex("[a-c]+", byte_level(), vocab_size=96)


def fail_to_save(mesh: Mesh, checkpoint: str, target: str) -> dict:
    """Save while the second process fails to write its parts, and return the error."""

    def fail(*_):
        raise OSError("no space left")

    params, cfg = load_hf(checkpoint, mesh=mesh)
    if jax.process_index() == 1:
        Tensor.write = fail
    try:
        save_hf(params, cfg, target)
    except (OSError, ValueError) as error:
        return {"error": f"{type(error).__name__} {error}"}
    return {}


def memory_of_load(mesh: Mesh, checkpoint: str) -> dict:
    jax.block_until_ready(jnp.zeros(8))  # so that memory that jax allocates only once does not count
    before = peak_memory()
    params, _ = load_hf(checkpoint, mesh=mesh)
    jax.block_until_ready(params)
    return {"grown": peak_memory() - before}


def train_and_resume(mesh: Mesh, checkpoint: str, directory: str) -> dict:
    """Train with and without an interruption. Return the resumed run's steps and the results of `compared`."""
    params, cfg = load_hf(checkpoint, mesh=mesh)
    ids = np.random.default_rng(0).integers(2, 90, (6, 4, 12), np.int32)
    seen: list[int] = []

    def batches(step: int) -> TrainBatch:
        seen.append(step)
        return TrainBatch(ids[step], ids[step], np.ones_like(ids[step]))

    def stops(step: int) -> TrainBatch:
        if step == 3:
            raise KeyboardInterrupt
        return batches(step)

    options = {"model": cfg.model, "cfg": TrainConfig(steps=6, learning_rate=1e-2)}
    saved = {"directory": Path(directory), "save_every": 2}
    whole = train(params, batches, **options)
    with contextlib.suppress(KeyboardInterrupt):
        train(params, stops, **options, **saved)
    seen.clear()
    resumed = train(params, batches, **options, **saved)
    same, total = jax.jit(compared)(whole, resumed)
    return {"seen": seen, "same": bool(same), "total": float(total)}


def compared(whole, resumed) -> tuple[jax.Array, jax.Array]:
    """Compare parameters and sum their magnitudes. Call this in one program, because several can deadlock on CPUs."""
    same = jax.tree.map(lambda a, b: jnp.all(a == b), whole, resumed)
    return jnp.all(jnp.stack(jax.tree.leaves(same))), sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(resumed))


OPTIONS = {
    "sampling": {"do_sample": True, "top_k": 30, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3, "do_sample": False},
    "assisted": {"prompt_lookup_num_tokens": 2, "do_sample": False},
    "greedy": {"do_sample": False, "output_scores": True},
}

TASKS = {"generate": load_generate_save, "fail": fail_to_save, "load": memory_of_load, "train": train_and_resume}
TASKS |= {"engine": answer_prompts, "fail to lead": fail_to_lead, "tables": follow_tables}

if __name__ == "__main__":
    process, port, data, model = map(int, sys.argv[2:6])
    main(sys.argv[1], process, port, (data, model), *sys.argv[6:])
