"""Real clients against the service: openai, langchain with langgraph, pydantic-ai, litellm, instructor, openai-agents.

All but openai's need the extra `clients`. The model is random, so grammars make its answers useful: a forced call, a
schema, or a regular expression for the whole answer.
"""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.dialects import KINDS
from tests.support.service import running

WIDTH = 3000
MODEL = "tiny"
USER = {"role": "user", "content": "What is the weather in Oslo?"}
CALL_TEXT = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("open_loops")]
# The packages give warnings about their own futures.
quiet = pytest.mark.filterwarnings("ignore")


class Animal(BaseModel):
    """An animal."""

    kind: Literal["fox", "owl"]
    legs: int = Field(ge=0, le=9)
    name: str = Field(max_length=8)


class Zoo(BaseModel):
    """Animals."""

    animals: list[Animal] = Field(max_length=2)
    is_open: bool


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def serving(kind):
    sizes = {"prompt_width": WIDTH, "grammar_states": 16_384, "grammar_classes": 512, "new": 400}
    return running(template=KINDS[kind], options={"context": WIDTH}, **sizes)


@pytest.fixture(scope="module")
def url():
    with serving("HERMES") as made:
        yield f"{made.url}/v1"


@pytest.fixture(scope="module")
def thinking():
    """The address of a service whose model thinks."""
    with serving("QWEN3") as made:
        yield f"{made.url}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def thinker(thinking):
    with openai.OpenAI(base_url=thinking, api_key="none", max_retries=0) as made:
        yield made


def forced(text: str) -> dict:
    """Return the fields of a request whose answer is a text."""
    return {"extra_body": {"guided_regex": text}}


class TestOpenAI:
    def ask(self, client, **fields):
        own = {"model": MODEL, "messages": [USER], "max_tokens": 100, "seed": 1, **fields}
        return client.chat.completions.create(**own)

    def test_chat(self, client):
        done = self.ask(client, **forced("Rain in Oslo"))
        assert done.choices[0].message.content == "Rain in Oslo"
        assert done.choices[0].finish_reason == "stop"

    def test_a_stream(self, client):
        chunks = list(self.ask(client, stream=True, **forced("Rain in Oslo")))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Rain in Oslo"

    def test_usage_in_a_stream(self, client):
        *_, last = self.ask(client, stream=True, stream_options={"include_usage": True}, **forced("Rain"))
        assert last.usage.completion_tokens >= 4

    def test_an_asynchronous_client(self, url):
        async def ask():
            async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
                answers = [self.ask(client, **forced(f"Rain {i}")) for i in range(3)]
                return [done.choices[0].message.content for done in await asyncio.gather(*answers)]

        assert asyncio.run(ask()) == ["Rain 0", "Rain 1", "Rain 2"]

    def test_the_stream_helper(self, client):
        own = {"model": MODEL, "messages": [USER], "max_tokens": 100, **forced("Rain")}
        with client.chat.completions.stream(**own) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.content == "Rain"
        assert {"chunk", "content.delta", "content.done"} <= kinds

    def test_a_tool_that_the_model_chooses(self, client):
        choice = self.ask(
            client, tools=[WEATHER, NOW], tool_choice="auto", **forced(f"Let me see\\.\\n{CALL_TEXT}")
        ).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}

    def test_a_text_although_there_are_tools(self, client):
        choice = self.ask(client, tools=[WEATHER], **forced("Rain <b>")).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == ("Rain <b>", None)

    def test_a_required_tool(self, client):
        message = (
            self.ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
        )
        assert len(json.loads(message.tool_calls[0].function.arguments)["city"]) <= 6

    def test_a_named_tool(self, client):
        named = {"type": "function", "function": {"name": "now"}}
        message = self.ask(client, tools=[WEATHER, NOW], tool_choice=named).choices[0].message
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("now", "{}")]

    def test_no_tool(self, client):
        assert (
            self.ask(client, tools=[WEATHER], tool_choice="none", **forced("Rain")).choices[0].message.content == "Rain"
        )

    def test_allowed_tools(self, client):
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        message = self.ask(client, tools=[WEATHER, NOW], tool_choice=choice).choices[0].message
        assert {call.function.name for call in message.tool_calls} == {"now"}

    def test_parallel_calls(self, client):
        choice = self.ask(client, tools=[WEATHER], max_tokens=200, **forced(f"{CALL_TEXT}\\n{CALL_TEXT}")).choices[0]
        assert len(choice.message.tool_calls) == 2
        assert len({call.id for call in choice.message.tool_calls}) == 2

    def test_streamed_calls(self, client):
        own = {"model": MODEL, "messages": [USER], "max_tokens": 200, "tools": [WEATHER]}
        with client.chat.completions.stream(**own, **forced(f"{CALL_TEXT}\\n{CALL_TEXT}")) as stream:
            done = stream.get_final_completion()
        assert [call.function.arguments for call in done.choices[0].message.tool_calls] == ['{"city": "Oslo"}'] * 2

    def test_the_answer_and_its_results_are_replayed(self, client):
        first = self.ask(client, tools=[WEATHER], **forced(CALL_TEXT)).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
        for message in (first, first.model_dump(), first.model_dump(exclude_none=True)):
            again = self.ask(client, messages=[USER, message, result], tools=[WEATHER], **forced("Rain"))
            assert again.choices[0].message.content == "Rain"

    def test_parse(self, client):
        own = {"model": MODEL, "messages": [USER], "max_tokens": 200}
        animal = client.chat.completions.parse(**own, response_format=Animal).choices[0].message.parsed
        assert isinstance(animal, Animal)

    def test_parse_with_tools(self, client):
        tool = openai.pydantic_function_tool(Animal)
        own = {"model": MODEL, "messages": [USER], "max_tokens": 200}
        done = client.chat.completions.parse(**own, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        assert isinstance(done.choices[0].message.tool_calls[0].function.parsed_arguments, Animal)

    def test_a_schema(self, client):
        form = {
            "type": "json_schema",
            "json_schema": {"name": "zoo", "schema": Zoo.model_json_schema(), "strict": True},
        }
        text = self.ask(client, response_format=form, max_tokens=300).choices[0].message.content
        assert len(Zoo.model_validate_json(text).animals) <= 2

    def test_a_streamed_schema(self, client):
        own = {"model": MODEL, "messages": [USER], "max_tokens": 200, "response_format": Animal}
        with client.chat.completions.stream(**own) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)

    def test_json_object(self, client):
        text = self.ask(client, response_format={"type": "json_object"}, max_tokens=40).choices[0].message.content
        assert isinstance(json.loads(text), dict)

    def test_log_probabilities(self, client):
        [choice] = self.ask(client, logprobs=True, top_logprobs=3, max_tokens=5).choices
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * len(choice.logprobs.content)

    def test_several_answers(self, client):
        assert [choice.index for choice in self.ask(client, n=3, max_tokens=5).choices] == [0, 1, 2]

    def test_a_stop_string(self, client):
        choice = self.ask(client, stop=["in"], **forced("Rain and sun")).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Ra", "stop")

    def test_a_seed(self, client):
        texts = {self.ask(client, max_tokens=20).choices[0].message.content for _ in range(3)}
        assert len(texts) == 1

    def test_usage(self, client):
        usage = self.ask(client, **forced("Rain")).usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    def test_thoughts(self, thinker):
        text = "<think>\nIt rains\\.\n</think>\n\nRain"
        off = {"chat_template_kwargs": {"enable_thinking": False}, "guided_regex": text}
        message = self.ask(thinker, extra_body=off).choices[0].message
        assert (message.reasoning_content, message.content) == ("It rains.", "Rain")
        chunks = self.ask(thinker, extra_body=off, stream=True)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "It rains."

    def test_thoughts_are_counted_and_replayed(self, thinker):
        off = {"chat_template_kwargs": {"enable_thinking": False}, "guided_regex": "<think>Hm</think>Rain"}
        first = self.ask(thinker, extra_body=off)
        assert first.usage.completion_tokens_details.reasoning_tokens > 2
        history = [USER, first.choices[0].message, USER]
        again = self.ask(thinker, messages=history, reasoning_effort="none", **forced("Sun"))
        assert again.choices[0].message.content == "Sun"

    def test_reasoning_effort(self, thinker):
        done = self.ask(thinker, reasoning_effort="none", **forced("Rain"))
        assert done.choices[0].message.content == "Rain"

    def test_an_answer_begun_by_the_client(self, client):
        messages = [USER, {"role": "assistant", "content": "It"}]
        begun = {"add_generation_prompt": False, "continue_final_message": True, "guided_regex": " rains"}
        assert self.ask(client, messages=messages, extra_body=begun).choices[0].message.content == " rains"

    @pytest.mark.parametrize(
        ("fields", "kind"),
        [
            ({"model": "other"}, openai.NotFoundError),
            ({"temperature": -1}, openai.BadRequestError),
            ({"messages": []}, openai.BadRequestError),
            ({"max_tokens": 10**6}, openai.BadRequestError),
            ({"extra_body": {"unheard_of": 1}}, openai.BadRequestError),
        ],
    )
    def test_errors(self, client, fields, kind):
        with pytest.raises(kind):
            self.ask(client, **fields)

    def test_completions(self, client):
        done = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=10, extra_body={"guided_regex": " upon"}
        )
        assert done.choices[0].text == " upon"

    def test_models(self, client):
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


@quiet
class TestLangchain:
    @pytest.fixture
    def chat(self, url):
        langchain_openai = pytest.importorskip("langchain_openai")

        def make(**fields):
            own = {"model": MODEL, "base_url": url, "api_key": "none", "max_tokens": 200, "seed": 1}
            return langchain_openai.ChatOpenAI(**own, **fields)

        return make

    @pytest.fixture
    def weather(self):
        tools = pytest.importorskip("langchain_core.tools")

        @tools.tool
        def weather(city: str) -> str:
            """Tell the weather."""
            return f"rain in {city}"

        return weather

    def test_an_answer(self, chat):
        assert chat(**forced("Rain")).invoke("Weather?").content == "Rain"

    def test_a_stream_with_usage(self, chat):
        chunks = list(chat(stream_usage=True, **forced("Rain in Oslo")).stream("Weather?"))
        assert "".join(chunk.content for chunk in chunks) == "Rain in Oslo"
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 5

    def test_a_batch(self, chat):
        assert [message.content for message in chat(**forced("Rain")).batch(["a", "b", "c"])] == ["Rain"] * 3

    def test_an_asynchronous_answer(self, chat):
        assert asyncio.run(chat(**forced("Rain")).ainvoke("Weather?")).content == "Rain"

    def test_a_system_message_and_a_history(self, chat):
        history = [("system", "Be brief."), ("human", "Hi"), ("ai", "Hello"), ("human", "Weather?")]
        assert chat(**forced("Rain")).invoke(history).content == "Rain"

    @pytest.mark.parametrize("choice", ["required", "any", "weather", True])
    def test_forced_tools(self, chat, weather, choice):
        message = chat().bind_tools([WEATHER], tool_choice=choice).invoke("Weather?")
        assert {call["name"] for call in message.tool_calls} == {"weather"}
        assert message.invalid_tool_calls == []

    def test_a_chosen_tool(self, chat, weather):
        message = chat(**forced(CALL_TEXT)).bind_tools([weather]).invoke("Weather?")
        assert message.tool_calls[0]["args"] == {"city": "Oslo"}

    def test_a_streamed_tool(self, chat, weather):
        total = None
        for chunk in chat(**forced(CALL_TEXT)).bind_tools([weather]).stream("Weather?"):
            total = chunk if total is None else total + chunk
        assert total.tool_calls[0]["args"] == {"city": "Oslo"}

    def test_results_are_replayed(self, chat, weather):
        messages = pytest.importorskip("langchain_core.messages")
        first = chat(**forced(CALL_TEXT)).bind_tools([weather]).invoke("Weather?")
        result = weather.invoke(first.tool_calls[0])
        history = [messages.HumanMessage("Weather?"), first, result]
        assert chat(**forced("Rain")).bind_tools([weather]).invoke(history).content == "Rain"

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, chat, method):
        assert isinstance(chat().with_structured_output(Animal, method=method).invoke("An animal"), Animal)

    def test_json_mode(self, chat):
        assert isinstance(chat().with_structured_output(None, method="json_mode").invoke("JSON"), dict)

    def test_log_probabilities(self, chat):
        message = chat(logprobs=True, top_logprobs=2, **forced("Rain")).invoke("Weather?")
        assert len(message.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2

    def test_stop_and_several_answers(self, chat):
        messages = pytest.importorskip("langchain_core.messages")
        assert chat(stop_sequences=["in"], **forced("Rain")).invoke("Weather?").content == "Ra"
        assert len(chat(n=2, **forced("Rain")).generate([[messages.HumanMessage("Hi")]]).generations[0]) == 2

    def test_an_error(self, chat):
        with pytest.raises(openai.BadRequestError, match="temperature"):
            chat(temperature=-1.0).invoke("Weather?")

    def test_an_agent(self, chat, weather):
        """The first answer calls the tool, and the second, which has its result, is a text."""
        prebuilt = pytest.importorskip("langgraph.prebuilt")
        calling, saying = (chat(**forced(text)).bind_tools([weather]) for text in (CALL_TEXT, "Rain"))
        agent = prebuilt.create_react_agent(
            lambda state, _: saying if state["messages"][-1].type == "tool" else calling, [weather]
        )
        messages = agent.invoke({"messages": [("human", "Weather?")]})["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        assert messages[-1].content == "Rain"


@quiet
class TestPydanticAI:
    @pytest.fixture
    def make(self, url):
        pydantic_ai = pytest.importorskip("pydantic_ai")
        models, providers = (
            pytest.importorskip("pydantic_ai.models.openai"),
            pytest.importorskip("pydantic_ai.providers.openai"),
        )

        def make(text=None, base_url=url, **fields):
            model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=base_url, api_key="none"))
            settings = {"max_tokens": 300, "seed": 1, **(forced(text) if text else {})}
            return pydantic_ai.Agent(model, model_settings=settings, retries=0, **fields)

        return make

    def test_a_text(self, make):
        result = make("Rain").run_sync("Weather?")
        assert result.output == "Rain"
        assert result.usage.output_tokens >= 4

    def test_instructions_and_a_history(self, make):
        agent = make("Rain", instructions="Be brief.", system_prompt="You know the weather.")
        first = agent.run_sync("Weather?")
        assert agent.run_sync("And now?", message_history=first.all_messages()).output == "Rain"

    def test_a_stream(self, make):
        async def stream():
            async with make("Rain in Oslo").run_stream("Weather?") as result:
                return [text async for text in result.stream_text(debounce_by=None)]

        assert asyncio.run(stream())[-1] == "Rain in Oslo"

    @pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
    @pytest.mark.parametrize("output", [Animal, Zoo])
    def test_an_output(self, make, kind, output):
        wrapped = getattr(pytest.importorskip("pydantic_ai"), kind)(output)
        assert isinstance(make(output_type=wrapped).run_sync("An animal").output, output)

    def test_one_of_two_outputs(self, make):
        assert isinstance(make(output_type=[Animal, Zoo]).run_sync("An animal").output, Animal | Zoo)

    @pytest.mark.parametrize("arguments", [r'\{"city": "Oslo"\}', r"\{\}"])
    def test_a_tool_and_its_result(self, make, arguments):
        agent, seen = make(), []
        body = {"guided_regex": CALL_TEXT.replace(r'\{"city": "Oslo"\}', arguments)}

        @agent.tool_plain
        def weather(city: str = "here") -> str:
            """Tell the weather."""
            seen.append(city)
            body["guided_regex"] = "Rain"  # for the answer after the tool's result
            return "rain"

        assert agent.run_sync("Weather?", model_settings={"extra_body": body}).output == "Rain"
        assert seen == ["Oslo" if "Oslo" in arguments else "here"]

    def test_thoughts(self, make, thinking):
        settings = {"extra_body": {"guided_regex": "<think>Hm</think>Rain", "enable_thinking": False}}
        result = make(base_url=thinking).run_sync("Weather?", model_settings=settings)
        kinds = [part.part_kind for part in result.all_messages()[-1].parts]
        assert kinds == ["thinking", "text"]
        assert make("Sun").run_sync("And now?", message_history=result.all_messages()).output == "Sun"

    def test_an_error(self, make):
        errors = pytest.importorskip("pydantic_ai.exceptions")
        with pytest.raises(errors.ModelHTTPError, match="temperature"):
            make().run_sync("Weather?", model_settings={"temperature": -1.0})


@quiet
class TestLiteLLM:
    @pytest.fixture
    def ask(self, url, monkeypatch):
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the list of prices would be downloaded
        litellm = pytest.importorskip("litellm")

        def ask(base=url, **fields):
            own = {"messages": [USER], "max_tokens": 200, "seed": 1, "num_retries": 0, **fields}
            return litellm.completion(model=f"openai/{MODEL}", api_base=base, api_key="none", **own)

        return ask

    def test_an_answer(self, ask):
        done = ask(**forced("Rain"))
        assert done.choices[0].message.content == "Rain"
        assert done.usage.completion_tokens >= 4

    def test_a_stream(self, ask):
        chunks = ask(stream=True, stream_options={"include_usage": True}, **forced("Rain in Oslo"))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Rain in Oslo"

    def test_tools_and_a_replayed_history(self, ask):
        first = ask(tools=[WEATHER], **forced(CALL_TEXT)).choices[0].message
        assert json.loads(first.tool_calls[0].function.arguments) == {"city": "Oslo"}
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "name": "weather", "content": "rain"}
        for message in (first, first.model_dump()):
            again = ask(messages=[USER, message, result], tools=[WEATHER], **forced("Rain"))
            assert again.choices[0].message.content == "Rain"

    def test_a_streamed_tool(self, ask):
        litellm = pytest.importorskip("litellm")
        chunks = list(ask(tools=[WEATHER], stream=True, **forced(CALL_TEXT)))
        [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}

    def test_a_required_tool(self, ask):
        [*calls] = ask(tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {"weather"}

    @pytest.mark.parametrize("form", [Animal, {"type": "json_object"}])
    def test_json(self, ask, form):
        text = ask(response_format=form).choices[0].message.content
        assert isinstance(json.loads(text), dict)

    def test_cache_control(self, ask):
        part = {"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "system", "content": [part]}, {"role": "user", "content": [part]}]
        assert ask(messages=messages, **forced("Rain")).choices[0].message.content == "Rain"

    def test_thoughts_and_a_replayed_history(self, ask, thinking):
        body = {"guided_regex": "<think>Hm</think>Rain", "enable_thinking": False}
        first = ask(thinking, extra_body=body).choices[0].message
        assert (first.reasoning_content, first.content) == ("Hm", "Rain")
        again = ask(messages=[USER, first.model_dump(), USER], **forced("Sun"))
        assert again.choices[0].message.content == "Sun"

    def test_options(self, ask):
        done = ask(n=2, logprobs=True, top_logprobs=2, stop=["in"], temperature=0.5, top_p=0.9, **forced("Rain"))
        assert [choice.message.content for choice in done.choices] == ["Ra"] * 2
        assert done.choices[0].logprobs is not None

    def test_an_error(self, ask):
        litellm = pytest.importorskip("litellm")
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            ask(temperature=-1)


@quiet
class TestInstructor:
    @pytest.fixture
    def make(self, client):
        instructor = pytest.importorskip("instructor")
        own = {"model": MODEL, "messages": [USER], "max_tokens": 300, "seed": 1, "max_retries": 0}

        def make(mode, method="create", **fields):
            made = instructor.from_openai(client, mode=instructor.Mode[mode])
            return getattr(made.chat.completions, method)(**own, **fields)

        return make

    @pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
    @pytest.mark.parametrize("output", [Animal, Zoo])
    def test_an_output(self, make, mode, output):
        assert isinstance(make(mode, response_model=output), output)

    def test_json_in_markdown(self, make):
        text = "```json\n" + r'\{"kind": "fox", "legs": 4, "name": "Fix"\}' + "\n```"
        assert make("MD_JSON", response_model=Animal, **forced(text)).name == "Fix"

    def test_parts_of_an_output(self, make):
        parts = list(make("TOOLS", "create_partial", response_model=Animal))
        assert parts[-1].kind in ("fox", "owl")

    def test_several_outputs(self, make):
        animals = list(make("TOOLS", "create_iterable", response_model=Animal))
        assert all(isinstance(animal, Animal) for animal in animals)

    def test_the_completion_is_returned_too(self, make):
        animal, done = make("TOOLS", "create_with_completion", response_model=Animal)
        assert isinstance(animal, Animal)
        assert done.usage.completion_tokens > 0


@quiet
class TestAgents:
    @pytest.fixture
    def agents(self, url, monkeypatch):
        agents = pytest.importorskip("agents")
        agents.set_tracing_disabled(True)
        model = agents.OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI(base_url=url, api_key="none"))

        def run(text=None, prompt="Weather?", streamed=False, settings=None, **fields):
            body = {"seed": 1} | (forced(text)["extra_body"] if text else {})
            own = agents.ModelSettings(max_tokens=300, extra_body=body, **(settings or {}))
            agent = agents.Agent("Weather", model=model, model_settings=own, **fields)
            if streamed:
                return agent, agents.Runner.run_streamed(agent, prompt)
            return agent, asyncio.run(agents.Runner.run(agent, prompt))  # `run_sync` never closes its event loop

        return run

    def test_a_text(self, agents):
        _, result = agents("Rain", instructions="Be brief.")
        assert result.final_output == "Rain"

    def test_a_stream(self, agents):
        async def stream():
            _, result = agents("Rain in Oslo", streamed=True)
            kinds = {event.type async for event in result.stream_events()}
            return kinds, result.final_output

        kinds, output = asyncio.run(stream())
        assert output == "Rain in Oslo"
        assert "raw_response_event" in kinds

    @pytest.mark.parametrize("output", [Animal, Zoo])
    def test_an_output(self, agents, output):
        _, result = agents(output_type=output)
        assert isinstance(result.final_output, output)

    @pytest.mark.parametrize("choice", ["required", "weather"])
    def test_a_tool_that_ends_the_run(self, agents, choice):
        sdk, seen = pytest.importorskip("agents"), []

        @sdk.function_tool
        def weather(city: Literal["Oslo", "Rome"]) -> str:
            """Tell the weather."""
            seen.append(city)
            return "rain"

        settings = {"tool_choice": choice, "parallel_tool_calls": False}
        _, result = agents(tools=[weather], tool_use_behavior="stop_on_first_tool", settings=settings)
        assert result.final_output == "rain"
        assert seen[0] in ("Oslo", "Rome")

    def test_a_history_with_calls(self, agents):
        sdk = pytest.importorskip("agents")

        @sdk.function_tool
        def weather(city: str) -> str:
            """Tell the weather."""
            return f"rain in {city}"

        own = {"tools": [weather], "tool_use_behavior": "stop_on_first_tool"}
        _, first = agents(CALL_TEXT, **own)
        assert first.final_output == "rain in Oslo"
        history = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
        _, again = agents("Sun", prompt=history, **own)
        assert again.final_output == "Sun"

    def test_usage(self, agents):
        _, result = agents("Rain")
        assert result.context_wrapper.usage.output_tokens >= 4

    def test_a_handoff(self, agents):
        sdk = pytest.importorskip("agents")
        other, _ = agents("Sun", handoff_description="Knows the sun.")
        text = r'<tool_call>\n\{"name": "transfer_to_weather", "arguments": \{\}\}\n</tool_call>'
        _, result = agents(text, handoffs=[sdk.handoff(other)])
        assert result.final_output == "Sun"
