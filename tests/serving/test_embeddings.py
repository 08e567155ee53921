"""/v1/embeddings, as seen by OpenAI's client and a plain HTTP client."""

import base64
import concurrent.futures

import httpx
import numpy as np
import pytest

from jaxgen import Pooling, embed
from jaxgen.serving.limits import Limits
from tests.support.compilations import compilations
from tests.support.service import KEY, WIDTH, running

POOLING = Pooling("mean", shortens=True)
TEXTS = ["One", "Who are you?", "a" * 50, "Two"]


@pytest.fixture(scope="module")
def service():
    with running(keys=[KEY], options={"pooling": POOLING}) as made:
        yield made


def wanted(service, text):
    ids = service.tokenizer.encode(text)
    return np.asarray(embed(service.params, [ids], service.cfg, pooling=POOLING))[0]


def ask(http, status=200, **fields):
    response = http.post("/v1/embeddings", json=fields)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def test_vectors_and_usage(client, service):
    found = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
    assert [row.index for row in found.data] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, TEXTS))
    for text, row in zip(TEXTS, found.data, strict=True):
        np.testing.assert_allclose(row.embedding, wanted(service, text), atol=3e-5)
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal(
        np.float32([row.embedding for row in plain.data]), np.float32([row.embedding for row in found.data])
    )


def test_base64_is_float32(http):
    plain = ask(http, input="One")
    coded = ask(http, input="One", encoding_format="base64")
    numbers = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.float32(plain["data"][0]["embedding"]))
    assert (plain["object"], plain["data"][0]["object"], plain["model"]) == ("list", "embedding", "tiny")


def test_all_forms_of_input(http, service):
    ids = [service.tokenizer.encode(text) for text in TEXTS[:2]]
    rows = ask(http, input=TEXTS[:2])["data"]
    assert ask(http, input=ids)["data"] == rows
    assert ask(http, input=[ids[0], TEXTS[1]])["data"] == rows
    assert ask(http, input=ids[0])["data"] == ask(http, input=TEXTS[0])["data"]


def test_dimensions(http):
    full = ask(http, input="One")["data"][0]["embedding"]
    short = ask(http, input="One", dimensions=8)["data"][0]["embedding"]
    np.testing.assert_allclose(short, np.array(full[:8]) / np.linalg.norm(full[:8]), atol=1e-6)
    assert ask(http, input="One", dimensions=len(full))["data"][0]["embedding"] == full
    for size in (0, -1, len(full) + 1):
        assert ask(http, 400, input="One", dimensions=size)["param"] == "dimensions"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "is missing"),
        ({"input": []}, "input", "at least one text"),
        ({"input": ["a"] * 2049}, "input", "2049"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": "a" * (WIDTH + 1)}, "input", f"1 to {WIDTH}"),
        ({"input": ["a" * WIDTH] * 800}, "input", "300000"),
        ({"input": [[1, 320]]}, "input", "vocabulary"),
        ({"input": [[1, -1]]}, "input", "vocabulary"),
        ({"input": [[1, True]]}, "input", "list of ids"),
        ({"input": [{"text": "a"}]}, "input", "must be a text"),
        ({"input": [1, "a"]}, "input", "must be a text"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "prompt": "b"}, "prompt", "not supported"),
    ],
)
def test_bad_requests_are_refused(http, fields, param, message):
    error = ask(http, 400, **fields)
    assert error["param"] == param
    assert message in error["message"]


def test_dimensions_require_a_matryoshka_model():
    with running(warm=False) as service:
        response = httpx.post(f"{service.url}/v1/embeddings", json={"input": "a", "dimensions": 8})
        assert response.status_code == 400
        assert "is_matryoshka" in response.json()["error"]["message"]
        own = Pooling("last")
        found = httpx.post(f"{service.url}/v1/embeddings", json={"input": "a"}, timeout=60).json()
        vector = np.asarray(embed(service.params, [service.tokenizer.encode("a")], service.cfg, pooling=own))[0]
        np.testing.assert_allclose(found["data"][0]["embedding"], vector, atol=3e-5)


def test_one_program_per_width(http):
    ask(http, input="a")
    ask(http, input=["a"] * 3)
    with compilations() as compiled:
        for count in (1, 2, 7, 19):
            ask(http, input=["b" * count] * count)
    assert compiled == [0]


def test_embeddings_and_answers_do_not_affect_each_other(http):
    """Answers and vectors are the same when they are computed at the same time."""

    def answer(seed):
        return http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 30, "seed": seed}).json()["choices"]

    def vectors(count):
        return ask(http, input=["b" * count] * count)["data"]

    alone = [answer(seed) for seed in range(4)], [vectors(count) for count in range(1, 9)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers, found = pool.map(answer, range(4)), pool.map(vectors, range(1, 9))
        assert (list(answers), list(found)) == alone


def test_the_time_limit():
    with running(warm=False, limits=Limits(seconds=0.01)) as service:
        response = httpx.post(f"{service.url}/v1/embeddings", json={"input": ["a" * 300] * 50}, timeout=60)
        assert response.status_code == 408
