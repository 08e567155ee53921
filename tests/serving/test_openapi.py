"""The OpenAPI document: it is valid, has all paths, and describes what the service answers and refuses. Also CORS."""

import itertools
import json
import re
import subprocess
import sys

import httpx
import jsonschema
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from openapi_spec_validator import validate

from jaxgen.serving.openapi import openapi
from tests.support.dialects import KINDS
from tests.support.service import KEY, running

ORIGIN = "http://localhost:3000"
WORDS = [{"role": "user", "content": "Who?"}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
BODIES = {"/v1/chat/completions": ChatCompletion, "/v1/completions": Completion}  # described by OpenAI
CHUNKS = {
    "/v1/chat/completions": pydantic.TypeAdapter(ChatCompletionChunk),
    "/v1/completions": pydantic.TypeAdapter(Completion),
    "/v1/responses": pydantic.TypeAdapter(ResponseStreamEvent),
}
TOOLS = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}


@pytest.fixture(scope="module")
def service():
    with running(keys=[KEY], options={"cors_origins": [ORIGIN]}) as made:
        yield made


@pytest.fixture(scope="module")
def http(service):
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def document(service):
    return httpx.get(f"{service.url}/openapi.json").json()


def check(document, schema, value):
    validator = jsonschema.Draft202012Validator({"$defs": document["components"], **schema})
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]
    assert not errors


def resolved(document, schema):
    """Return a schema whose references work inside the schema itself."""
    text = json.dumps(schema).replace("#/components/", "#/$defs/")
    return json.loads(text), json.loads(json.dumps(document).replace("#/components/", "#/$defs/"))


def answered(document, http, path, **fields):
    """Send a request, and check its answer with the document."""
    method = "post" if fields or path in ("/tokenize", "/detokenize") else "get"
    template = next(known for known in document["paths"] if matches(known, path))
    operation = document["paths"][template][method]
    answer = http.post(path, json=fields) if method == "post" else http.get(path)
    kind = answer.headers["content-type"].partition(";")[0]
    described = operation["responses"]["200" if answer.status_code == 200 else "default"]
    schema, whole = resolved(document, described["content"][kind]["schema"])
    if kind == "text/event-stream":
        check(whole, schema, answer.text)
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                CHUNKS[path].validate_python(json.loads(line.removeprefix("data: ")))
    elif kind == "application/json":
        check(whole, schema, answer.json())
        if answer.status_code == 200 and path in BODIES and not fields.get("echo"):  # its first log-probability is null
            BODIES[path].model_validate(answer.json(), strict=True)
    return answer.status_code


def matches(template, path):
    parts, known = path.split("/"), template.split("/")
    return len(parts) == len(known) and all(a in (b, "{name}") for a, b in zip(known, parts, strict=True))


@pytest.mark.parametrize("needs_key", [True, False])
def test_document_is_valid(needs_key):
    document = json.loads(openapi(needs_key))
    validate(document)
    assert ("securitySchemes" in document["components"]) == needs_key
    assert ("security" in document["paths"]["/v1/responses"]["post"]) == needs_key
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)


def test_all_paths(service, document):
    found = {}
    for route in service.service.app().routes:
        path = route.path.replace(":path}", "}")
        found.setdefault(path, set()).update(method.lower() for method in route.methods - {"HEAD"})
    assert {path: set(methods) for path, methods in document["paths"].items()} == found


def test_only_some_paths_need_a_key(service, document):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = httpx.request(method, service.url + path.replace("{name}", "x"), json={})
            assert (answer.status_code == 401) == ("security" in operation)


ANSWERS = [
    ("/v1/chat/completions", {"messages": WORDS, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": WORDS, "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": WORDS, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": WORDS, "stream": True, "logprobs": True, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": WORDS, **TOOLS, "max_tokens": 100}),
    ("/v1/chat/completions", {"messages": WORDS, **TOOLS, "max_tokens": 100, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": 2}),
    ("/v1/completions", {"prompt": "a", "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"input": WORDS}),
    ("/v1/responses", {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/v1/responses", {"input": "a", "stream": True}),
    ("/v1/responses", {"input": "a", "stream": True, "tools": [{"type": "function", **WEATHER}]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [65]}),
]


@pytest.mark.parametrize(("path", "fields"), ANSWERS, ids=map(str, range(len(ANSWERS))))
def test_answers_are_as_described(document, http, path, fields):
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    own = {most: 4, "seed": 1} if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses") else {}
    assert answered(document, http, path, **own | fields) == 200


@pytest.mark.parametrize("path", "/v1/models /v1/models/tiny /tokenizer_info /version /metrics /openapi.json /".split())
def test_what_is_read_is_as_described(document, http, path):
    assert answered(document, http, path) == 200


def test_stored_responses(document, http):
    made = http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1}).json()["id"]
    assert answered(document, http, f"/v1/responses/{made}") == 200
    schema, whole = resolved(document, {"$ref": "#/components/schemas/Deleted"})
    check(whole, schema, http.delete(f"/v1/responses/{made}").json())
    assert answered(document, http, f"/v1/responses/{made}") == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_errors_are_as_described(document, http, path):
    assert answered(document, http, path, unknown=1) == 400
    body = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": WORDS}}.get(path, {"input": "a"})
    assert answered(document, http, path, model="huge", **body) == 404


def test_values_outside_the_schema_are_refused(document, http):
    """Each field of each request, with values of all types; only values that the schema allows may be accepted."""
    bodies = {"/v1/responses": {"input": "a"}, "/v1/embeddings": {"input": "a"}, "/detokenize": {"tokens": [65]}}
    bodies |= {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": WORDS}}
    values = [True, 0.5, "x", [], ["x"], {}, {"x": "y"}, [{"type": "x"}]]
    refused = 0
    for path, body in bodies.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        record = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        schema, whole = resolved(document, schema)
        validator = jsonschema.Draft202012Validator({"$defs": whole["components"], **schema})
        assert validator.is_valid(body)
        for field, value in itertools.product(record["properties"], values):
            given = body | {field: value}
            if not validator.is_valid(given):
                answer = http.post(path, json=given)
                assert answer.status_code == 400, (path, field, value, answer.text[:200])
                refused += 1
    assert refused > 500


def test_thoughts_are_as_described(document):
    with running(template=KINDS["R1"]) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        for stream in (False, True):
            own = {"max_tokens": 4, "seed": 1, "stream": stream}
            assert answered(document, http, "/v1/chat/completions", messages=WORDS, **own) == 200


def test_type_fields_may_be_left_out(document, http):
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"text": "warm"}]}
    thought = {"type": "reasoning", "summary": [{"text": "a"}], "content": [{"text": "b"}]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "weather"}]}
    body = {"input": [*WORDS, thought, call, output], "tools": [WEATHER], "tool_choice": choice}
    schema, whole = resolved(document, {"$ref": "#/components/schemas/ResponseRequest"})
    check(whole, schema, body)
    assert answered(document, http, "/v1/responses", **body, max_output_tokens=1) == 200


@pytest.mark.slow
def test_schemathesis_finds_no_failure(service, tmp_path):
    """Schemathesis finds no request whose answer is a failure, or is not as described."""
    pytest.importorskip("schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--max-time", "120"]
    # The document says nothing about bounds of numbers, or about fields that exclude each other.
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--warnings", "off"]
    command += ["--continue-on-failure", "--no-shrink", "--generation-database", "none", "--no-color"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)  # it writes files
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    [count] = re.findall(r"(\d+) generated", done.stdout)
    assert int(count) > 200


class TestCors:
    def preflight(self, http, origin, method="POST", headers="authorization,content-type,x-stainless-lang"):
        own = {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
        return http.options("/v1/chat/completions", headers=own)

    @pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
    def test_a_preflight_needs_no_key(self, service, method):
        with httpx.Client(base_url=service.url) as http:
            answer = self.preflight(http, ORIGIN, method)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
        assert method in answer.headers["access-control-allow-methods"]

    def test_answers_and_errors_have_the_header(self, http, service):
        for path, status in (("/v1/models", 200), ("/v1/models/x", 404), ("/nowhere", 404)):
            answer = http.get(path, headers={"Origin": ORIGIN})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
        answer = httpx.get(f"{service.url}/v1/models", headers={"Origin": ORIGIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, ORIGIN)

    def test_other_origins(self, http):
        assert self.preflight(http, "http://evil.example").status_code == 400
        assert (
            "access-control-allow-origin" not in http.get("/version", headers={"Origin": "http://evil.example"}).headers
        )

    def test_all_origins_or_none(self):
        with (
            running(warm=False, options={"cors_origins": ["*"]}) as service,
            httpx.Client(base_url=service.url) as http,
        ):
            assert self.preflight(http, "http://any.example").headers["access-control-allow-origin"] == "*"
        with running(warm=False) as service, httpx.Client(base_url=service.url) as http:
            assert self.preflight(http, ORIGIN).status_code == 405
            assert "access-control-allow-origin" not in http.get("/version", headers={"Origin": ORIGIN}).headers
