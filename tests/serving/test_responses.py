"""The Responses API: events and their order, refusals, the store, and what a request means for the model."""

import concurrent.futures
import json
import time

import httpx
import msgspec
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from jaxgen.serving.answer_text import Delta
from jaxgen.serving.formats.reading import Call
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.limits import Limits
from jaxgen.serving.protocol import AllowedFunctions, ChatRequest, ChosenTools, Function, NamedFunction, NamedTool, Tool
from jaxgen.serving.requests import Asked
from jaxgen.serving.response_input import chat_request, messages_of, read_request
from jaxgen.serving.response_records import Item, ResponseRequest
from jaxgen.serving.response_store import ResponseStore, StoredResponse
from jaxgen.serving.response_writer import ResponseWriter, new_response
from tests.support.dialects import KINDS
from tests.support.service import KEY, running

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "owl"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
WORDS = {"role": "user", "content": "Who are you?"}
EVENTS = pydantic.TypeAdapter(ResponseStreamEvent)
NOTHING_ASKED = Asked([], None, 1, None, None, list, 1)
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


@pytest.fixture(scope="module")
def service():
    with running(keys=[KEY], limits=Limits(stored=20_000)) as made:
        yield made


@pytest.fixture(scope="module")
def thinking():
    """A client of a model whose template opens a thought."""
    with running(template=KINDS["R1"]) as service, httpx.Client(base_url=service.url, timeout=60) as made:
        yield made


def create(http, status=200, **fields) -> dict:
    response = http.post("/v1/responses", json=fields)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def events(http, **fields) -> list[dict]:
    with http.stream("POST", "/v1/responses", json={"stream": True, **fields}) as response:
        assert response.status_code == 200
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks[-1] == ""
    found = []
    for block in blocks[:-1]:
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        EVENTS.validate_python(event)
    return found


def kinds(found) -> list[str]:
    """Return the types of events; deltas that follow each other count once."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for i, name in enumerate(names) if not (name.endswith("delta") and i and names[i - 1] == name)]


def same(response: dict) -> dict:
    """Return a response without what differs between two equal requests."""
    text = json.dumps(response, sort_keys=True)
    for item in (response, *response["output"]):
        text = text.replace(item["id"], "ID")
        text = text.replace(item.get("call_id", "ID"), "ID")
    return {**json.loads(text), "created_at": 0, "completed_at": 0, "usage": 0}


class TestResponse:
    def test_text(self, client, service):
        done = client.responses.create(model="tiny", input="Who are you?", max_output_tokens=9, extra_body={"seed": 1})
        [message] = done.output
        chat = client.chat.completions.create(model="tiny", messages=[WORDS], max_tokens=9, seed=1)
        assert done.output_text == message.content[0].text == chat.choices[0].message.content
        assert (message.type, message.role, message.content[0].annotations) == ("message", "assistant", [])
        assert done.usage.input_tokens == chat.usage.prompt_tokens
        assert done.usage.output_tokens == chat.usage.completion_tokens
        assert done.usage.total_tokens == chat.usage.total_tokens
        assert done.usage.output_tokens_details.reasoning_tokens == 0
        assert (done.object, done.model, done.error, done.truncation) == ("response", "tiny", None, "disabled")

    def test_the_budget_makes_it_incomplete(self, http):
        cut = create(http, input="Who?", max_output_tokens=2, seed=1)
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (cut["output"][0]["status"], cut["completed_at"]) == ("incomplete", None)

    def test_answer_follows_the_schema(self, http):
        form = {"type": "json_schema", "name": "animal", "schema": SCHEMA, "strict": True}
        done = create(http, input="Who?", text={"format": form}, seed=3)
        assert done["status"] == "completed"
        assert json.loads(done["output"][0]["content"][0]["text"])["kind"] in ("fox", "owl")
        assert done["text"]["format"] == {**form, "description": None}
        assert done["completed_at"] >= done["created_at"]

    def test_what_cannot_be_enforced_is_left_out_on_request(self, http):
        tags = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True, "maxItems": 2}
        own = {"input": "Who?", "text": {"format": {"type": "json_schema", "name": "tags", "schema": tags}}, "seed": 1}
        error = create(http, status=400, **own)
        assert (error["param"], "uniqueItems" in error["message"]) == ("text.format", True)
        done = create(http, **own, unsupported="warn")
        assert "uniqueItems" in done["left_out"][0]
        assert http.get(f"/v1/responses/{done['id']}").json() == done
        [*_, last] = events(http, **own, unsupported="warn")
        assert last["response"]["left_out"] == done["left_out"]
        assert "left_out" not in create(http, input="Who?", unsupported="warn", max_output_tokens=1)

    def test_json_object_format(self, http):
        done = create(http, input="Who?", text={"format": {"type": "json_object"}}, seed=3)
        text = done["output"][0]["content"][0]["text"]
        assert text.startswith("{")
        assert done["status"] == "incomplete" or isinstance(json.loads(text), dict)

    def test_response_repeats_the_fields_of_its_request(self, http):
        given = {
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 1,
            "tools": [WEATHER],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "user": "me",
            "store": False,
            "reasoning": {"effort": "low", "summary": "auto"},
        }
        done = create(http, input="Who?", **given)
        given["tools"] = [{**WEATHER, "description": None}]
        given["reasoning"]["generate_summary"] = None
        assert {name: done[name] for name in given} == given

    def test_log_probabilities(self, http):
        own = {"input": "Who?", "max_output_tokens": 8, "seed": 2, "top_logprobs": 3}
        own["include"] = ["message.output_text.logprobs"]
        entries = create(http, **own)["output"][0]["content"][0]["logprobs"]
        words = [{"role": "user", "content": "Who?"}]
        chat = {"messages": words, "max_tokens": 8, "seed": 2, "logprobs": True, "top_logprobs": 3}
        assert entries == http.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
        found = events(http, **own)
        [done] = [event for event in found if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == entries
        sent = [entry for event in found if event["type"].endswith("text.delta") for entry in event["logprobs"]]
        assert sent == entries[: len(sent)]

    def test_neutral_values(self, http):
        fields = ("conversation", "prompt", "background", "truncation", "tools", "tool_choice", "include", "reasoning")
        own = dict.fromkeys(fields) | {"top_logprobs": 0, "max_output_tokens": 1}
        assert create(http, input=[WORDS], **own)["status"] == "incomplete"


class TestStream:
    def test_the_order_of_a_text(self, http):
        own = {"input": "Who?", "max_output_tokens": 40, "seed": 1}
        found = events(http, **own)
        part = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
        assert kinds(found)[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds(found)[4:-1] == part
        whole = create(http, **own)
        assert same(found[-1]["response"]) == same(whole)
        assert found[-1]["type"] == f"response.{whole['status']}"
        text = "".join(event["delta"] for event in found if event["type"].endswith("text.delta"))
        assert text == whole["output"][0]["content"][0]["text"]
        assert found[0]["response"]["output"] == found[1]["response"]["output"] == []
        assert {found[i]["response"]["status"] for i in (0, 1)} == {"in_progress"}
        assert (found[2]["item"]["status"], found[2]["item"]["content"]) == ("in_progress", [])
        [item] = found[-1]["response"]["output"]
        assert found[-2]["item"] == item
        assert {event.get("item_id", item["id"]) for event in found} == {item["id"]}

    def test_the_order_of_a_call(self, http):
        own = {"input": "Who?", "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "seed": 4}
        found = events(http, **own)
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        assert kinds(found) == ["created", "in_progress", *call, "output_item.done", "completed"]
        [item] = found[-1]["response"]["output"]
        assert found[2]["item"] == {**item, "arguments": "", "status": "in_progress"}
        assert found[-3]["arguments"] == item["arguments"]
        assert same(found[-1]["response"]) == same(create(http, **own))

    def test_a_failure_is_the_last_event(self, http):
        banned = {str(token): -100.0 for token in range(300)}
        assert create(http, 400, input="Who?", logit_bias=banned)["param"] == "logit_bias"  # not offered here
        with running(warm=False) as service:
            service.engine.close()
            response = httpx.post(f"{service.url}/v1/responses", json={"input": "Who?", "stream": True})
            assert response.status_code == 503

    def test_openai_client_reads_the_stream(self, client):
        form = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA}}
        with client.responses.stream(model="tiny", input="Who?", text=form) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text
        assert json.loads(text)["kind"] in ("fox", "owl")


class TestThoughts:
    """Thoughts that the random model never ends."""

    def test_thoughts_are_an_output_item(self, thinking):
        own = {"input": "Who?", "max_output_tokens": 20, "seed": 1}
        whole = create(thinking, **own)
        [item] = whole["output"]
        chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 20, "seed": 1}
        message = thinking.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
        assert (item["type"], item["status"]) == ("reasoning", "incomplete")
        assert item["content"] == [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 20
        found = events(thinking, **own)
        assert kinds(found)[2:5] == ["output_item.added", "content_part.added", "reasoning_text.delta"]
        assert same(found[-1]["response"]) == same(whole)

    def test_thoughts_are_replayed(self, thinking):
        first = create(thinking, input="Who?", max_output_tokens=5, temperature=0)
        again = create(thinking, input="And?", previous_response_id=first["id"], max_output_tokens=5, temperature=0)
        assert again["status"] == "incomplete"


class TestWriter:
    """All orders of thoughts, text and calls, which a small model does not generate."""

    def write(self, service, *deltas):
        writer = ResponseWriter(
            new_response(ResponseRequest(input=""), "m", service.cfg), None, Asked([], None, 1, None, None, None, 1)
        )
        found = [*writer.begin(), *(event for delta in deltas for event in writer.put(delta)), *writer.end(1, 0, 1, 0)]
        return [msgspec.to_builtins(event) for event in found], msgspec.to_builtins(writer.response)

    def delta(self, text="", calls=(), finish=None):
        return Delta(text, [Call(name, "{}") for name in calls], [], None, finish)

    def test_text_then_calls(self, service):
        found, response = self.write(
            service, self.delta("a"), self.delta("b", ["f", "g"]), self.delta("c"), self.delta(finish="tool_calls")
        )
        assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call", "message"]
        assert [item["content"][0]["text"] for item in response["output"] if "content" in item] == ["ab", "c"]
        text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
        text += ["content_part.done", "output_item.done"]
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        call += ["output_item.done"]
        assert kinds(found) == ["created", "in_progress", *text, *call, *call, *text, "completed"]
        places = [event["output_index"] for event in found if "output_index" in event]
        assert places == sorted(places)
        assert set(places) == {0, 1, 2, 3}
        ids = {item["id"] for item in response["output"]}
        assert len(ids) == 4
        for event in found:
            if "item_id" in event:
                assert response["output"][event["output_index"]]["id"] == event["item_id"]

    def test_thoughts_then_text_then_a_call(self, service):
        thought = [Delta("", [], [], None, None, "h"), Delta("a", [], [], None, None, "m")]
        found, response = self.write(service, *thought, self.delta("b", ["f"]), self.delta(finish="tool_calls"))
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert response["output"][0]["summary"] == []
        assert response["output"][1]["content"][0]["text"] == "ab"
        assert kinds(found)[2:9] == [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
        ]

    def test_calls_have_the_ids_of_their_format(self, service):
        calls = [Call("f", "{}", "abcdefghi"), Call("f", "{}")]
        _, response = self.write(service, Delta("", calls, [], None, "tool_calls"))
        assert response["output"][0]["call_id"] == "abcdefghi"
        assert response["output"][1]["call_id"].startswith("call_")

    def test_an_empty_answer_has_an_empty_message(self, service):
        found, response = self.write(service, self.delta(finish="stop"))
        assert response["output"][0]["content"] == [
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        ]
        assert kinds(found)[2:-1] == [
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ]

    def test_a_budget_that_ends_between_items(self, service):
        _, response = self.write(service, self.delta("", ["f"]), self.delta(finish="length"))
        assert response["status"] == "incomplete"
        assert [item["status"] for item in response["output"]] == ["completed"]

    def test_a_failure(self, service):
        writer = ResponseWriter(
            new_response(ResponseRequest(input=""), "m", service.cfg), None, Asked([], None, 1, None, None, None, 1)
        )
        writer.begin()
        writer.put(self.delta("a"))
        event = msgspec.to_builtins(writer.fail(ApiError(408, "too slow")))
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        assert event["response"]["error"] == {"code": "server_error", "message": "too slow"}


class TestInput:
    """The conversation that the model reads."""

    def messages(self, *items, instructions=None):
        return messages_of(msgspec.convert(list(items), list[Item]), instructions)

    def message(self, role, *texts):
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}

    def test_turns(self):
        found = self.messages(
            self.message("user", "a", "b"),
            self.message("assistant", "c"),
            CALL,
            {**CALL, "call_id": "call_2"},
            RESULT,
            {**RESULT, "output": [{"type": "input_text", "text": "sun"}]},
            self.message("assistant", "d"),
            self.message("assistant", "e"),
        )
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        calls = [{"id": f"call_{i}", "type": "function", "function": function} for i in (1, 2)]
        assert found == [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": "e"},
        ]

    def test_what_clients_and_other_servers_add_is_ignored(self):
        part = {"type": "output_text", "text": "b", "annotations": [{"type": "url_citation"}], "parsed": None}
        found = self.messages(
            {**self.message("user", "a"), "id": "msg_1", "status": "completed", "phase": None, "cache_control": {}},
            {"type": "message", "role": "assistant", "content": [part], "logprobs": None, "phase": "final_answer"},
            {**CALL, "id": "fc_1", "namespace": None, "caller": {"type": "direct"}, "status": "completed"},
            {**RESULT, "id": "fco_1", "name": "weather", "status": None},
        )
        assert found == self.messages(self.message("user", "a"), self.message("assistant", "b"), CALL, RESULT)

    def test_a_call_without_text(self):
        assert self.messages(CALL)[0]["content"] is None

    def test_thoughts_belong_to_what_follows(self):
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
        thought["content"] = [{"type": "reasoning_text", "text": "hm"}]
        found = self.messages(thought, self.message("assistant", "c"), thought, CALL, thought, CALL)
        assert [(m["reasoning_content"], m["content"], len(m.get("tool_calls", ()))) for m in found] == [
            ("hm", "c", 0),
            ("hm", None, 1),
            ("hm", None, 1),
        ]

    def test_instructions_become_one_message(self):
        found = self.messages(
            self.message("developer", "b"), self.message("user", "c"), self.message("system", "d"), instructions="a"
        )
        assert [(m["role"], m["content"]) for m in found] == [("system", "a\n\nb"), ("user", "c"), ("system", "d")]

    def test_instructions_join_only_at_the_beginning(self):
        found = self.messages(self.message("system", "a"), self.message("developer", "b"), self.message("user", "c"))
        assert [m["content"] for m in found] == ["a\n\nb", "c"]

    @pytest.mark.parametrize(
        "item",
        [
            {"type": "message", "role": "system", "content": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 40}]},
            CALL,
        ],
    )
    def test_joining_instructions_takes_linear_time(self, item):
        """Compared with the time for messages of the user, for which there is nothing to join."""
        first, count = self.message("user", "a"), 20_000

        def seconds(one):
            items = msgspec.convert([first] + [one] * count, list[Item])
            start = time.process_time()
            messages_of(items, None)
            return time.process_time() - start

        assert seconds(item) < 20 * seconds(first) + 0.2

    def test_tools(self):
        request = read_request(json.dumps({"input": "a", "tools": [WEATHER], "tool_choice": "required"}).encode())
        chat = chat_request(request, [])
        assert isinstance(chat, ChatRequest)
        assert chat.tools == [Tool(Function("weather", parameters=WEATHER["parameters"]))]
        chosen = {
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
        }
        request = read_request(json.dumps({"input": "a", "tools": [WEATHER], **chosen}).encode())
        allowed = AllowedFunctions("auto", [NamedTool(NamedFunction("f"))])
        assert chat_request(request, []).tool_choice == ChosenTools(allowed)


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
REFUSED = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
    ({"input": [IMAGE]}, "input[0].content[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{**RESULT, "output": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].output[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "stone"}}}}, "text.format"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"n": 2}, "n"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
]


class TestRefusals:
    @pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(place) for place in range(len(REFUSED))])
    def test_refusals_name_the_field(self, http, fields, param):
        error = create(http, 400, **({"input": "Who?"} | fields if fields else {}))
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        if param:
            assert param.split("[")[0].split(".")[0] in error["message"]
        assert "max_completion_tokens" not in error["message"]

    def test_refusals_name_what_is_allowed(self, http):
        assert "use function" in create(http, 400, input="Who?", tools=[{"type": "web_search"}])["message"]
        assert "only text is supported" in create(http, 400, input=[IMAGE])["message"]
        assert "input must have at least one message" in create(http, 400, input=[])["message"]

    def test_unknown_model_and_missing_key_are_refused(self, http, service):
        assert create(http, 404, input="Who?", model="huge")["param"] == "model"
        assert httpx.post(f"{service.url}/v1/responses", json={"input": "a"}).status_code == 401


class TestStore:
    def test_a_response_is_continued(self, http):
        own = {"max_output_tokens": 5, "seed": 1}
        first = create(http, input="Who?", instructions="Be brief.", **own)
        second = create(http, input="And?", previous_response_id=first["id"], **own)
        assert second["previous_response_id"] == first["id"]
        items = [{"role": "user", "content": "Who?"}, *first["output"], {"role": "user", "content": "And?"}]
        replayed = create(http, input=items, **own)
        assert second["output"][0]["content"] == replayed["output"][0]["content"]
        assert second["usage"]["input_tokens"] == replayed["usage"]["input_tokens"]  # without the instructions
        http.delete(f"/v1/responses/{first['id']}")  # the second has a copy of what came before
        third = create(http, input="Why?", previous_response_id=second["id"], **own)
        items += [*second["output"], {"role": "user", "content": "Why?"}]
        assert third["output"][0]["content"] == create(http, input=items, **own)["output"][0]["content"]

    def test_a_call_is_answered(self, http):
        own = {"tools": [WEATHER], "parallel_tool_calls": False, "seed": 4}
        first = create(http, input="Who?", tool_choice="required", **own)
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "rain"}
        second = create(http, input=[result], previous_response_id=first["id"], max_output_tokens=3, **own)
        replayed = create(
            http, input=[WORDS | {"content": "Who?"}, *first["output"], result], max_output_tokens=3, **own
        )
        assert second["output"][0]["content"] == replayed["output"][0]["content"]

    def test_an_item_is_referred_to(self, http):
        own = {"max_output_tokens": 3, "seed": 2}
        [item] = (first := create(http, input="Who?", **own))["output"]
        before, after = WORDS | {"content": "Who?"}, WORDS | {"content": "And?"}
        reference = {"type": "item_reference", "id": item["id"]}
        second = create(http, input=[before, reference, after], **own)
        assert (
            second["output"][0]["content"] == create(http, input=[before, item, after], **own)["output"][0]["content"]
        )
        http.delete(f"/v1/responses/{first['id']}")
        error = create(http, 404, input=[reference])
        assert (error["param"], error["message"]) == ("input", f"Item with id '{item['id']}' not found.")
        third = create(
            http, input="Why?", previous_response_id=second["id"], **own
        )  # the second has a copy of the item
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]

    def test_a_response_is_read_and_deleted(self, client, http):
        made = client.responses.create(model="tiny", input="Who?", max_output_tokens=2)
        assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
        assert http.get(f"/v1/responses/{made.id}?stream=true").status_code == 400
        deleted = http.delete(f"/v1/responses/{made.id}")
        assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
        for gone in (http.get, http.delete):
            answer = gone(f"/v1/responses/{made.id}")
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Response with id '{made.id}' not found."
        error = create(http, 400, input="And?", previous_response_id=made.id)
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")

    def test_a_streamed_response_is_stored_before_its_end(self, http):
        last = events(http, input="Who?", max_output_tokens=2)[-1]["response"]
        assert http.get(f"/v1/responses/{last['id']}").json() == last

    @pytest.mark.parametrize("stream", [False, True])
    def test_store_false(self, http, stream):
        own = {"input": "Who?", "max_output_tokens": 2, "store": False}
        made = events(http, **own)[-1]["response"] if stream else create(http, **own)
        assert made["store"] is False
        assert http.get(f"/v1/responses/{made['id']}").status_code == 404

    def test_a_response_larger_than_the_store(self, http):
        made = create(http, input="Who?", max_output_tokens=2, metadata={"a": "b" * 20_000})
        assert made["store"] is False
        assert http.get(f"/v1/responses/{made['id']}").status_code == 404

    def stored(self, store, names):
        """Return the names in a store, without using the responses."""
        return "".join(name for name in names if name in store._responses)

    def test_the_number_of_responses_is_limited(self):
        store = ResponseStore(1000, 3)
        for name in "abcd":
            assert store.put(name, StoredResponse(b"1", b"2"))
        assert self.stored(store, "abcd") == "bcd"
        store.get("b")
        store.put("e", StoredResponse(b"1", b"2"))
        assert self.stored(store, "abcde") == "bde"

    def test_the_size_of_responses_is_limited(self):
        store = ResponseStore(100)
        for name in "abcde":
            assert store.put(name, StoredResponse(b"1" * 10, b"2" * 10))
        assert self.stored(store, "abcde") == "abcde"
        store.put("f", StoredResponse(b"", b"2" * 21))
        assert self.stored(store, "abcdef") == "cdef"
        assert not store.put("g", StoredResponse(b"1" * 101, b""))
        assert self.stored(store, "abcdefg") == "cdef"
        store.delete("c")
        store.put("h", StoredResponse(b"1" * 39, b""))
        assert self.stored(store, "abcdefgh") == "defh"
        with pytest.raises(ApiError, match="Response with id 'c' not found"):
            store.delete("c")

    def test_concurrent_conversations_do_not_mix(self, http):
        """Conversations that share the store and the engine do not mix."""

        def converse(seed):
            own = {"max_output_tokens": 4, "seed": seed, "metadata": {"seed": str(seed)}}
            first = create(http, input=f"Who? {seed}", **own)
            if seed % 2:
                second = events(http, input="And?", previous_response_id=first["id"], **own)[-1]["response"]
            else:
                second = create(http, input="And?", previous_response_id=first["id"], **own)
            return same(first), same(second) | {"previous_response_id": None}

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            together = list(pool.map(converse, range(8)))
        assert together == [converse(seed) for seed in range(8)]
        assert len({json.dumps(second["output"]) for _, second in together}) == 8
