"""The examples in docstrings run as written, and help() shows them without flags."""

import ast
import contextlib
import doctest
import functools
import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
import jaxgen
from jaxgen import demo
from jaxgen.training import TrainBatch, lora
from tests.support.models import model_config, random_params

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("jaxgen", "convert", "demo") for path in sorted((ROOT / package).rglob("*.py"))]


def docstrings(path: Path) -> list[tuple[str, str]]:
    """Return the docstrings in a file that contain examples, with the names of what they describe."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)]
    found = [(getattr(node, "name", path.stem), ast.get_docstring(node)) for node in nodes]
    return [(name, text) for name, text in found if text is not None and ">>> " in text]


EXAMPLES = {
    f"{path.relative_to(ROOT)}:{name}": (path, text)
    for path in FILES
    for name, text in docstrings(path)
    if path.parent.name != "evaluate" or importlib.util.find_spec("lm_eval")  # an extra
}


def test_examples_have_no_flags():
    assert len(EXAMPLES) >= 28
    assert [name for name, (_, text) in EXAMPLES.items() if "doctest:" in text] == []


@pytest.fixture(scope="module")
def names() -> dict:
    """Return the names that examples use without defining them; the model is the bundled one."""
    params, cfg = jaxgen.load_hf(demo.PATH, dtype="float32")
    cfg = cfg.replace(do_sample=False, max_new_tokens=4)
    tok = jaxgen.Tokenizer.from_pretrained(demo.PATH)
    system = [{"role": "system", "content": "You are a fox."}]
    requests = [[{"role": "user", "content": text}] for text in ("Who are you?", "Where do you live?", "Hello!")]
    batch = tok.chat(requests)
    out = jaxgen.generate(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
    question, yes, no = map(tok.encode, ("Is it a fox?", " Yes.", " No."))
    return {
        **{name: getattr(jaxgen, name) for name in jaxgen.__all__},
        **{"params": params, "cfg": cfg, "tok": tok, "key": jax.random.key(0), "batch": batch, "ids": batch.ids},
        **{"system": system, "text": "You are a fox.", "requests": requests, "out": out},
        **{"conversations": [system + turns for turns in requests], "prompts": [tok.encode("Once"), {"text": "One"}]},
        **{"sequences": out.sequences, "lengths": out.lengths, "question": question, "yes": yes, "no": no},
        **{"corpus": [question, yes + no], "detect": jaxgen.WatermarkDetector(jaxgen.WatermarkingConfig())},
        "lm_eval": SimpleNamespace(simple_evaluate=lambda model, tasks: {"results": {}}),
    }


def of_training(names: dict) -> dict:
    ids = jnp.asarray(names["ids"])
    return {"batch": TrainBatch(ids, ids, jnp.ones_like(ids))}


def of_sharding(names: dict) -> dict:
    model = model_config(num_attention_heads=8, num_key_value_heads=8, head_dim=4, vocab_size=64, intermediate_size=64)
    return {"params": random_params(model), "cfg": jaxgen.GenerationConfig(model=model)}


def of_fused(names: dict) -> dict:
    return {"params": jaxgen.load_hf(demo.PATH, dtype="float32")[0]}  # the example donates its parameters


def of_loop(names: dict) -> dict:
    """Return a tiny random model, and an eos id that ends the answer before its budget."""
    model = model_config(num_hidden_layers=1, vocab_size=64)
    cfg = jaxgen.GenerationConfig(model=model, max_new_tokens=12, eos_token_id=2, pad_token_id=0)
    params, ids = random_params(model), jnp.asarray([[5, 3, 9, 4]], jnp.int32)
    sixth = int(jaxgen.generate(params, ids, None, cfg).sequences[0, 4 + 5])
    return {"params": params, "ids": ids, "cfg": cfg.replace(eos_token_id=sixth)}


OTHER_NAMES = {
    "jaxgen/core/decoding/loop.py": of_loop,
    "jaxgen/core/model/fused.py": of_fused,
    "jaxgen/core/model/sharding.py": of_sharding,
    "jaxgen/training/loop.py": of_training,
}


@pytest.fixture
def folder(names, tmp_path, monkeypatch):
    """Enter a directory with the checkpoint and the adapters that examples read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-0.5B-Instruct").symlink_to(demo.PATH, target_is_directory=True)
    for seed, name in enumerate(("my-adapter", "adapter-0", "adapter-1")):
        updates = lora.init(names["params"], 2, jax.random.key(seed))
        convert.save_adapter(lora.attach(names["params"], updates, 2.0), names["cfg"], name)


def run(source: str, namespace: dict) -> str:
    """Run an example as the interactive interpreter does, and return what it shows."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(source, "<example>", "single"), namespace)
    return shown.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, names, folder):
    path, text = EXAMPLES[name]
    own = str(path.relative_to(ROOT))
    module = importlib.import_module(own.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    others = OTHER_NAMES[own](names) if own in OTHER_NAMES else {}
    namespace = {"jax": jax, "np": np, "functools": functools, **vars(module), **names, **others}
    examples = doctest.DocTestParser().get_examples(text)
    assert examples
    for example in examples:
        shown = run(example.source, namespace)
        assert not example.want or shown == example.want
