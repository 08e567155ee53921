"""lm-evaluation-harness with an in-process model reports what `score` and `generate` return."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from jaxgen import GenerationConfig, Tokenizer, demo, generate, load_hf, score

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed: the extra eval"),
]
TASKS = Path(__file__).parent / "tasks"
STORIES = [
    ("Once upon a time, a lazy owl", [" lived in the woods.", " train is late.", " qqq"]),
    ("One sunny morning,", [" Olive heard a noise", " zzz of of"]),
    ("She was not afraid", [" of the dark.", " the dark of.", " a.", " of deep water or of loud storms."]),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Run the command on each task, and return the samples that it writes."""
    folder = tmp_path_factory.mktemp("evaluate")
    data = folder / "data.jsonl"
    rows = ({"question": q, "choices": c, "text": q + c[0]} for q, c in STORIES)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for file in TASKS.glob("*.yaml"):
        (tasks / file.name).write_text(file.read_text().replace("DATA", str(data)))
    command = [sys.executable, "-m", "jaxgen.evaluate", "--model", demo.PATH, "--dtype", "float32"]
    command += ["--tasks", "own_choices", "own_answers", "own_texts", "--include_path", tasks]
    command += ["--output_path", folder / "out", "--log_samples", "--no-compile-cache"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=500, env=os.environ | offline
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in ("own_choices", "own_answers", "own_texts"):
        (file,) = (folder / "out").rglob(f"samples_{name}*.jsonl")
        samples = map(json.loads, file.read_text().splitlines())
        found[name] = sorted(samples, key=lambda sample: sample["doc_id"])
    return found


@pytest.fixture(scope="module")
def model():
    params, cfg = load_hf(demo.PATH, dtype="float32")
    return params, cfg, Tokenizer.from_pretrained(demo.PATH)


def log_likelihood(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    params, cfg, _ = model
    ids = np.array([[*context, *continuation]])
    scores = score(params, ids, cfg, attention_mask=np.ones_like(ids))
    start = len(context)
    return float(np.asarray(scores.logprobs)[0, start:].sum()), bool(np.asarray(scores.is_greedy)[0, start:].all())


def test_multiple_choice_task(results, model):
    tok = model[2]
    for sample, (question, choices) in zip(results["own_choices"], STORIES, strict=True):
        for (response,), choice in zip(sample["filtered_resps"] and sample["resps"], choices, strict=True):
            whole, start = tok.encode(question + choice), len(tok.encode(question))
            total, is_greedy = log_likelihood(model, whole[:start], whole[start:])
            assert float(response[0]) == pytest.approx(total, abs=1e-3)
            assert str(response[1]) == str(is_greedy)


def test_perplexity_task(results, model):
    tok = model[2]
    prefix = tok.eos_token_id if tok.bos_token_id is None else tok.bos_token_id
    for sample, (question, choices) in zip(results["own_texts"], STORIES, strict=True):
        total, _ = log_likelihood(model, [prefix], tok.encode(question + choices[0]))
        assert float(np.ravel(sample["resps"])[0]) == pytest.approx(total, abs=1e-3)


def test_chat_template_is_applied(model):
    from jaxgen.evaluate.lm import JaxgenLM

    lm = JaxgenLM(*model)
    turns = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am"}]
    for text in ("I am", "end", "|"):
        turns[1]["content"] = text
        prompt = lm.apply_chat_template(turns, add_generation_prompt=False)
        assert prompt == lm.apply_chat_template(turns[:1]) + text
    assert lm.apply_chat_template(turns[:1]) == model[2].render_chat(turns[:1])


def test_unsupported_task_options_are_refused(model):
    from jaxgen import ConfigError
    from jaxgen.evaluate.lm import JaxgenLM

    lm = JaxgenLM(*model)
    with pytest.raises(ConfigError, match="max_length, which is not an option here: use max_gen_toks"):
        lm._read("A", {"max_length": 5})
    prompt, stops = lm._read("A", {"until": ["\n", lm._eos_text], "temperature": 0.0})
    assert prompt["stop_strings"] == ["\n"]
    assert stops == ["\n", lm._eos_text]


def test_answers_end_before_the_stop_string(results, model):
    params, cfg, tok = model
    cfg = cfg.replace(max_new_tokens=24, do_sample=False)
    for sample, (question, _) in zip(results["own_answers"], STORIES, strict=True):
        out = generate(params, [tok.encode(question)], None, cfg)
        (text,) = tok.decode_batch(out)
        assert sample["resps"][0][0] == text.split(" the")[0]


def test_options_that_a_task_does_not_set_are_those_of_the_checkpoint(model):
    from lm_eval.api.instance import Instance

    from jaxgen.evaluate.lm import JaxgenLM

    params, cfg, tok = model
    fields = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.5, "eos_token_id": 2}
    cfg = GenerationConfig.from_hf(fields, cfg.model)
    arguments = STORIES[0][0], {"max_gen_toks": 24, "until": [], "do_sample": False}
    (answer,) = JaxgenLM(params, cfg, tok).generate_until([Instance("generate_until", {}, arguments, 0)])

    def greedy(**options) -> str:
        ids = np.asarray([tok.encode(STORIES[0][0])])
        plain = cfg.replace(do_sample=False, max_new_tokens=24, **options)
        return tok.decode_batch(generate(params, ids, None, plain, attention_mask=np.ones_like(ids)))[0]

    assert answer == greedy()
    assert answer != greedy(repetition_penalty=1.0)
