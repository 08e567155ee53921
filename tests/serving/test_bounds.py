"""Numbers at their bounds and beyond, through the service, its engine and `generate`: refused, or answered."""

import json

import httpx
import jax
import numpy as np
import pytest

from jaxgen import generate
from tests.support.service import running

pytestmark = pytest.mark.slow
# As a client may write them in JSON.
NUMBERS = (
    "0 -0.0 5e-324 1e-46 1e-45 1e-38 1.2e-38 1e-30 0.5 0.99999999999 1 1.0 1.0000001 2 1e18 1e38 3.4e38 3.4028235e38 "
    "1e39 1e308 1e309 -1e-45 -1e-38 -1 -2 -3.4e38 -1e308 2147483647 2147483648 -2147483648 4294967295 4294967296 "
    '9223372036854775808 18446744073709551616 true false null NaN Infinity -Infinity "1" [1] {}'
).split() + [f"1{'0' * zeros}" for zeros in (40, 400, 5000)]
COMPLETION = (
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed n min_tokens max_tokens "
    "logprobs prompt_logprobs truncate_prompt_tokens best_of length_penalty priority"
).split()
CHAT = "temperature top_p top_logprobs max_completion_tokens n frequency_penalty seed".split()
RESPONSES = "temperature top_p max_output_tokens top_logprobs".split()
SCORED = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.fixture(scope="module")
def service():
    with running(warm=False) as made:
        yield made


@pytest.fixture(scope="module")
def http(service):
    with httpx.Client(base_url=service.url, timeout=300, headers={"Content-Type": "application/json"}) as made:
        yield made


def check_post(http, path, fields, name, number):
    """Send a request in which one field has the number; no answer may be an error of the server."""
    own = {key: value for key, value in fields.items() if key != name}
    response = http.post(path, content=f'{json.dumps(own)[:-1]}, "{name}": {number}}}')
    assert response.status_code < 500, (path, name, number[:50], response.text)
    if response.status_code == 200:
        assert "NaN" not in response.text
    else:
        assert len(response.text) < 1000, (path, name, number[:50])
        assert (
            not any(word in response.text for word in ("do_sample", "remove_invalid_values")) or name == "temperature"
        )
    return response


@pytest.mark.parametrize("name", COMPLETION)
def test_completions(http, name):
    fields = {"prompt": "abc abc", "max_tokens": 3, "temperature": 1, "logprobs": 2}
    statuses = {check_post(http, "/v1/completions", fields, name, number).status_code for number in NUMBERS}
    assert statuses == {200, 400}
    if name in SCORED:
        for number in NUMBERS:
            for more in ({}, {"temperature": 1e-38}):
                # The grammar bans almost all tokens, and allows the same token again and again.
                check_post(http, "/v1/completions", fields | more | {"guided_regex": "a{20}"}, name, number)


def test_tables_of_ids(http):
    for number in NUMBERS:
        for name, value in ("logit_bias", f'{{"5": {number}}}'), ("stop_token_ids", f"[{number}]"):
            check_post(http, "/v1/completions", {"prompt": "abc", "max_tokens": 3}, name, value)
        check_post(http, "/v1/completions", {"max_tokens": 3}, "prompt", f"[{number}]")


def test_chats_and_responses(http):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logprobs": True}
    for number in NUMBERS:
        for name in CHAT:
            check_post(http, "/v1/chat/completions", chat, name, number)
        for name in RESPONSES:
            check_post(http, "/v1/responses", {"input": "a", "max_output_tokens": 3}, name, number)


# --- The same numbers through the engine and `generate` ---------------------------------------------------------------

REALS = [1e-45, 1e-38, 1e-30, 0.5, 2.0, 3.4e38]
SHARES = [1e-45, 1e-38, 0.5, 1 - 1e-7]
OPTIONS = {
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), REALS),
    **{name: [*REALS, *(-value for value in REALS)] for name in ("presence_penalty", "frequency_penalty")},
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), SHARES),
    "top_k": [1, 5, 2**31 - 1],
    "min_new_tokens": [0, 2, 4],
    "exponential_decay_length_penalty": [(0, 1e-45), (0, 3.4e38), (1, 1e30), (2**31 - 1, 2.0)],
    "sequence_bias": [{(5,): value} for value in (1e-45, 3.4e38, -3.4e38, float("inf"), -float("inf"))],
}


def test_an_engine_answers(service):
    prompt = service.tokenizer.encode("abc abc")
    for name, values in OPTIONS.items():
        for value in values:
            [answer] = service.engine.submit({"ids": prompt, name: value, "max_new_tokens": 4}).result()
            assert answer.error is None, (name, value)
            assert np.isfinite(answer.logprobs.logprobs).all(), (name, value)


def test_generate_answers(service):
    """All options are on, so changing one of them compiles nothing."""
    usual = {name: values[len(values) // 2] for name, values in OPTIONS.items()}
    cfg = service.cfg.replace(max_new_tokens=4, output_logprobs="scores", **usual)
    prompt = np.asarray([service.tokenizer.encode("abc abc")])
    for name, values in OPTIONS.items():
        for value in values:
            out = generate(service.params, prompt, jax.random.key(1), cfg.replace(**{name: value}))
            assert np.isfinite(out.logprobs).all(), (name, value)
