"""The Responses API and embeddings, used by openai-agents, langchain-openai and pydantic-ai with the bundled model.

The packages are in the extra `clients`.
"""

import asyncio
import json
from typing import Literal

import jax
import numpy as np
import pytest

from jaxgen import Engine, Tokenizer, demo, embed, load_hf
from jaxgen.serving.app import Service
from tests.support.service import answering

agents = pytest.importorskip("agents", reason="the extra clients is not installed")
langchain = pytest.importorskip("langchain_openai", reason="the extra clients is not installed")
pydantic_ai = pytest.importorskip("pydantic_ai", reason="the extra clients is not installed")
pydantic = pytest.importorskip("pydantic")

import openai  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from pydantic_ai.models.openai import OpenAIResponsesModel, OpenAIResponsesModelSettings  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("open_loops"),
    pytest.mark.filterwarnings("default"),  # the clients' own warnings
]
WHO, STORY = "Who are you?", "Tell me a story about a fox"


class Animal(pydantic.BaseModel):
    """An animal."""

    kind: Literal["fox", "owl"]
    legs: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module")
def service():
    params, cfg = load_hf(demo.PATH, dtype="float32")
    tokenizer = Tokenizer.from_pretrained(demo.PATH)
    cfg = cfg.replace(max_new_tokens=320, do_sample=True, top_k=0, output_logprobs="logits", top_logprobs=5)
    sizes = {"slots": 4, "prompt_width": 448, "stop_in_prompt": False, "id_entries": 320, "grammar_states": 8192}
    engine = Engine(params, cfg, jax.random.key(0), tokenizer=tokenizer, **sizes)
    with engine, answering(Service(engine, params, "demo").app()) as url:
        yield {"url": f"{url}/v1", "params": params, "cfg": cfg, "tokenizer": tokenizer}


@pytest.fixture(scope="module")
def answer(service):
    """Return the text that the model answers, as a plain client gets it."""
    client = openai.OpenAI(base_url=service["url"], api_key="none")

    def ask(*messages):
        roles = [{"role": role, "content": text} for role, text in messages]
        return client.responses.create(model="demo", input=roles, temperature=0).output_text

    with client:
        yield ask


class TestAgents:
    """openai-agents."""

    @pytest.fixture
    def run(self, service):
        """Return a function that runs an agent in a loop of its own."""

        def run(work, **options):
            async def within():
                async with openai.AsyncOpenAI(base_url=service["url"], api_key="none", max_retries=0) as client:
                    settings = {"temperature": 0.0} | options.pop("settings", {})
                    agent = agents.Agent(
                        name="Fox",
                        model=agents.OpenAIResponsesModel(model="demo", openai_client=client),
                        model_settings=agents.ModelSettings(**settings),
                        **options,
                    )
                    return await work(agent, {"run_config": agents.RunConfig(tracing_disabled=True)})

            return asyncio.run(within())

        return run

    def test_text(self, run, answer):
        result = run(lambda agent, own: agents.Runner.run(agent, WHO, **own))
        assert result.final_output == answer(("user", WHO))
        [response] = result.raw_responses
        assert response.usage.input_tokens > 0
        assert response.usage.output_tokens > 0

    def test_instructions(self, run, answer):
        result = run(lambda agent, own: agents.Runner.run(agent, WHO, **own), instructions="You are a fox.")
        assert result.final_output == answer(("system", "You are a fox."), ("user", WHO))

    def test_a_stream(self, run, answer):
        async def work(agent, own):
            result = agents.Runner.run_streamed(agent, STORY, **own)
            pieces = []
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    pieces.append(event.data.delta)
            return result.final_output, pieces

        output, pieces = run(work)
        assert output == "".join(pieces) == answer(("user", STORY))
        assert len(pieces) > 3

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_tool_and_the_answer_after_it(self, run, stream):
        called = []

        @agents.function_tool
        def weather(city: Literal["Oslo", "Rome"]) -> str:
            """Return the weather in a city."""
            called.append(city)
            return "rain"

        async def work(agent, own):
            if not stream:
                return await agents.Runner.run(agent, WHO, **own)
            result = agents.Runner.run_streamed(agent, WHO, **own)
            async for _ in result.stream_events():
                pass
            return result

        settings = {"tool_choice": "required", "parallel_tool_calls": False}
        result = run(work, tools=[weather], settings=settings)
        assert called
        assert set(called) <= {"Oslo", "Rome"}
        kinds = [type(item).__name__ for item in result.new_items]
        assert kinds == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]
        assert result.final_output

    @pytest.mark.parametrize("stream", [False, True])
    def test_structured_output(self, run, stream):
        async def work(agent, own):
            if not stream:
                return await agents.Runner.run(agent, WHO, **own)
            result = agents.Runner.run_streamed(agent, WHO, **own)
            async for _ in result.stream_events():
                pass
            return result

        assert isinstance(run(work, output_type=Animal).final_output, Animal)

    def test_turns(self, run, answer):
        """The second turn by the id of the first response, and by its items."""

        async def work(agent, own):
            first = await agents.Runner.run(agent, WHO, **own)
            by_id = await agents.Runner.run(agent, STORY, previous_response_id=first.last_response_id, **own)
            items = [*first.to_input_list(), {"role": "user", "content": STORY}]
            by_items = await agents.Runner.run(agent, items, **own)
            return first.final_output, by_id.final_output, by_items.final_output

        first, by_id, by_items = run(work)
        assert by_id == by_items == answer(("user", WHO), ("assistant", first), ("user", STORY))

    def test_an_agent_as_a_tool_and_a_handoff(self, run):
        async def work(agent, own):
            other = agent.clone(name="Owl", handoffs=[])
            chosen = agents.ModelSettings(temperature=0.0, tool_choice="transfer_to_owl", parallel_tool_calls=False)
            first = agent.clone(handoffs=[other], model_settings=chosen)
            return await agents.Runner.run(first, WHO, **own)

        result = run(work)
        assert result.last_agent.name == "Owl"
        assert result.final_output

    def test_hosted_tools_are_refused_by_name(self, run):
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type: invalid value 'web_search"):
            run(lambda agent, own: agents.Runner.run(agent, WHO, **own), tools=[agents.WebSearchTool()])


class TestLangchain:
    """langchain-openai."""

    @pytest.fixture
    def chat(self, service):
        def chat(**options):
            own = {"model": "demo", "base_url": service["url"], "api_key": "none", "use_responses_api": True}
            return langchain.ChatOpenAI(**own | {"temperature": 0, "max_retries": 0} | options)

        return chat

    def test_text(self, chat, answer):
        found = chat().invoke([SystemMessage("You are a fox."), HumanMessage(WHO)])
        assert found.text == answer(("system", "You are a fox."), ("user", WHO))
        assert found.usage_metadata["output_tokens"] > 0
        assert found.response_metadata["status"] == "completed"

    def test_a_stream(self, chat, answer):
        chunks = list(chat().stream(STORY))
        assert "".join(chunk.text for chunk in chunks) == answer(("user", STORY))
        whole = sum(chunks[1:], chunks[0])
        assert whole.usage_metadata["output_tokens"] > 0

    @pytest.mark.parametrize("stream", [False, True])
    def test_tools_and_their_results(self, chat, stream):
        tool = {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]},
            },
        }
        bound = chat().bind_tools([tool], tool_choice="weather", parallel_tool_calls=False)
        if stream:
            chunks = list(bound.stream(WHO))
            found = sum(chunks[1:], chunks[0])
        else:
            found = bound.invoke(WHO)
        [call] = found.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
        message = found if not stream else AIMessage(content=found.content, tool_calls=found.tool_calls)
        history = [HumanMessage(WHO), message, ToolMessage("rain", tool_call_id=call["id"])]
        assert chat().bind_tools([tool]).invoke(history).text

    def test_structured_output(self, chat):
        assert isinstance(chat().with_structured_output(Animal, method="json_schema").invoke(WHO), Animal)
        by_call = chat().with_structured_output(Animal, method="function_calling").invoke(WHO)
        assert isinstance(by_call, Animal)

    def test_turns(self, chat, answer):
        first = chat().invoke(WHO)
        history = [HumanMessage(WHO), first, HumanMessage(STORY)]
        by_items = chat().invoke(history)
        by_id = chat(use_previous_response_id=True).invoke(history)
        assert by_id.response_metadata["id"] != first.response_metadata["id"]
        assert by_items.text == by_id.text == answer(("user", WHO), ("assistant", first.text), ("user", STORY))

    def test_log_probabilities(self, chat, answer):
        own = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        assert chat(**own).invoke(WHO).text == answer(("user", WHO))

    def test_embeddings(self, service):
        given = {"model": "demo", "base_url": service["url"], "api_key": "none", "check_embedding_ctx_length": False}
        model = langchain.OpenAIEmbeddings(**given)
        found = model.embed_documents([WHO, STORY])
        assert found[0] == pytest.approx(model.embed_query(WHO), abs=1e-5)
        for text, vector in zip([WHO, STORY], found, strict=True):
            ids = [service["tokenizer"].encode(text)]
            np.testing.assert_allclose(vector, embed(service["params"], ids, service["cfg"])[0], atol=1e-4)


class TestPydanticAI:
    """pydantic-ai."""

    @pytest.fixture
    def agent(self, service):
        def agent(settings=None, **options):
            provider = OpenAIProvider(base_url=service["url"], api_key="none")
            own = OpenAIResponsesModelSettings(temperature=0.0, **settings or {})
            return pydantic_ai.Agent(OpenAIResponsesModel("demo", provider=provider), model_settings=own, **options)

        return agent

    def test_text(self, agent, answer):
        result = agent(instructions="You are a fox.").run_sync(WHO)
        assert result.output == answer(("system", "You are a fox."), ("user", WHO))
        assert result.usage.output_tokens > 0

    def test_a_stream(self, agent, answer):
        async def work():
            async with agent().run_stream(STORY) as result:
                return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

        pieces = asyncio.run(work())
        assert "".join(pieces) == answer(("user", STORY))
        assert len(pieces) > 3

    @pytest.mark.parametrize("native", [False, True])
    def test_structured_output(self, agent, native):
        kind = pydantic_ai.NativeOutput(Animal) if native else Animal  # otherwise by a forced call
        assert isinstance(agent(output_type=kind).run_sync(WHO).output, Animal)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_tool_and_the_answer_after_it(self, agent, stream):
        def choose(ctx):
            return {"tool_choice": "none" if ctx.run_step > 1 else "required", "parallel_tool_calls": False}

        made = pydantic_ai.Agent(agent().model, model_settings=choose)

        @made.tool_plain
        def weather(city: Literal["Oslo"]) -> str:
            """Return the weather in a city."""
            return f"rain in {city}"

        async def work():
            if not stream:
                return (await made.run(WHO)).all_messages()
            async with made.run_stream(WHO) as result:
                await result.get_output()
                return result.all_messages()

        parts = [part for message in asyncio.run(work()) for part in message.parts]
        kinds = [part.part_kind for part in parts]
        assert kinds == ["user-prompt", "tool-call", "tool-return", "text"]
        assert parts[2].content == "rain in Oslo"

    def test_turns(self, agent, answer):
        first = agent().run_sync(WHO)
        by_items = agent().run_sync(STORY, message_history=first.all_messages())
        by_id = agent({"openai_previous_response_id": "auto"}).run_sync(STORY, message_history=first.all_messages())
        wanted = answer(("user", WHO), ("assistant", first.output), ("user", STORY))
        assert by_items.output == by_id.output == wanted

    def test_thoughts_are_replayed(self, service, answer):
        """A reasoning item, as another model returned it, does not disturb the conversation."""
        client = openai.OpenAI(base_url=service["url"], api_key="none")
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret"}
        said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
        said["content"] = [{"type": "output_text", "text": "A fox.", "annotations": [], "logprobs": None}]
        with client:
            items = [{"role": "user", "content": WHO}, thought, said, {"role": "user", "content": STORY}]
            found = client.responses.create(model="demo", input=items, temperature=0, store=False)
        assert found.output_text == answer(("user", WHO), ("assistant", "A fox."), ("user", STORY))
        assert json.loads(found.model_dump_json())["store"] is False
