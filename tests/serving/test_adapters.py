"""Requests that name an adapter as their model."""

import httpx
import numpy as np
import pytest

from jaxgen import InputError, embed, generate, score
from jaxgen.serving.app import Service
from tests.support.adapters import factors, write
from tests.support.models import slow
from tests.support.service import MODEL, running


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [(name, write(folder / name, factors(MODEL, 2, i))) for i, name in enumerate(("owl", "fox"))]
    with running(adapters=adapters, prompt_options=["adapter"]) as made:
        yield made


@pytest.mark.parametrize(("name", "adapter"), [("owl", 0), *slow(("tiny", -1), ("fox", 1))])
def test_a_model_answers_with_its_adapter(service, name, adapter):
    ids = [5, 9, 200, 31]
    body = {"model": name, "prompt": ids, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    body |= {"return_token_ids": True, "echo": True, "logprobs": 0}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).json()
    assert answer["model"] == name
    cfg = service.cfg.replace(do_sample=False, max_new_tokens=8, adapter=adapter, eos_token_id=None)
    out = generate(service.params, [ids], None, cfg)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == np.asarray(out.sequences)[0, 4:].tolist()
    scores = score(service.params, out.sequences, cfg).logprobs[0]
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], scores[1:], atol=1e-4)


def test_vectors_and_responses_with_an_adapter(service):
    found = []
    for name, adapter in (("tiny", -1), ("fox", 1)):
        body = {"model": name, "input": [[5, 9, 200, 31]]}
        answer = httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=60).json()
        found.append(answer["data"][0]["embedding"])
        vectors = embed(service.params, body["input"], service.cfg.replace(adapter=adapter))
        np.testing.assert_allclose(found[-1], vectors[0], atol=3e-5)
        own = {"model": name, "input": "Who?", "max_output_tokens": 8, "temperature": 0}
        response = httpx.post(f"{service.url}/v1/responses", json=own, timeout=60).json()
        assert response["model"] == answer["model"] == name
        found.append(response["output"][0]["content"][0]["text"])
    assert not np.allclose(found[0], found[2], atol=1e-3)
    assert found[1] != found[3]


def test_models_are_listed_with_their_base(service):
    cards = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("owl", "tiny"), ("fox", "tiny")]
    assert httpx.get(f"{service.url}/v1/models/fox").json()["id"] == "fox"
    response = httpx.post(f"{service.url}/v1/completions", json={"model": "hen", "prompt": "A"})
    assert response.status_code == 404
    assert "use tiny or owl or fox" in response.json()["error"]["message"]


def test_names_must_differ(service):
    with pytest.raises(InputError, match="params have 2 adapters, but there are 1 names"):
        Service(service.engine, service.params, "tiny", adapters=["owl"])
    with pytest.raises(InputError, match="different names"):
        Service(service.engine, service.params, "tiny", adapters=["owl", "tiny"])
