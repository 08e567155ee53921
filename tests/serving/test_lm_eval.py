"""lm-evaluation-harness gets the same log-likelihoods and answers from the service as from `score` and `generate`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from jaxgen import generate, score
from tests.support.service import running

QUESTIONS = [("The fox is", [" red", " blue and old"]), ("Owls", [" fly", " swim", " ring"]), ("2 + 2 =", [" 4", " 5"])]
CHOICES = """
task: own_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ANSWERS = """
task: own_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{max_gen_toks: 8, until: ["\\u2603"]}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.slow
def test_local_completions(tmp_path):
    if find_spec("lm_eval") is None:  # importing it would emit warnings
        pytest.skip("lm-evaluation-harness is not installed: install the extra eval")
    data, tasks = tmp_path / "data.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps({"question": q, "choices": c}) + "\n" for q, c in QUESTIONS))
    tasks.mkdir()
    for name, text in (("choices", CHOICES), ("answers", ANSWERS)):
        (tasks / f"{name}.yaml").write_text(text.format(data=data))
    with running() as service:
        model = f"model=tiny,base_url={service.url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
        command += ["--tasks", "own_choices,own_answers", "--include_path", tasks, "--batch_size", "2"]
        command += ["--output_path", tmp_path / "out", "--log_samples"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=500, env=os.environ | offline)
        tok, params = service.tokenizer, service.params
        (file,) = (tmp_path / "out").rglob("samples_own_choices*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        for sample, (question, choices) in zip(samples, QUESTIONS, strict=True):
            for (value, is_greedy), choice in zip((r[0] for r in sample["resps"]), choices, strict=True):
                ids, start = tok.encode(question + choice), len(tok.encode(question))
                mask = np.ones((1, len(ids)), bool)
                scores = score(params, [ids], service.cfg, attention_mask=mask, top_logprobs=1)
                np.testing.assert_allclose(float(value), scores.logprobs[0, start:].sum(), rtol=1e-4)
                assert str(is_greedy) == str(bool((scores.top_tokens[0, start:, 0] == np.asarray(ids[start:])).all()))
        (file,) = (tmp_path / "out").rglob("samples_own_answers*.jsonl")
        for sample in map(json.loads, file.read_text().splitlines()):
            batch = tok.batch([QUESTIONS[sample["doc_id"]][0]])
            cfg = service.cfg.replace(do_sample=False, max_new_tokens=8, output_logprobs=None, top_logprobs=0)
            out = generate(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
            assert sample["resps"][0][0] == tok.decode_batch(out)[0]
