"""The fields of a prompt: equal prompts in different forms, and data that is passed through."""

import jax
import pytest

from jaxgen import ConfigError, InputError, TokenAutomaton, generate_many
from jaxgen.core.request.fields import hint, translated
from jaxgen.errors import JaxgenWarning
from tests.engine.test_engine import KEY, SIMPLE, SMALL, TOK
from tests.support.byte_model import PARAMS

SIZES = SMALL | {"tokenizer": TOK, "prompt_width": 64, "slots": 4, "prompt_options": ["top_p"]}


@pytest.mark.slow
def test_equivalent_fields_give_equal_prompts():
    regex, schema = "[a-c]{3}", {"enum": [12, 345]}
    automata = {
        "regex": TokenAutomaton.from_regex(regex, TOK, vocab_size=320),
        "json_schema": TokenAutomaton.from_json_schema(schema, TOK, vocab_size=320),
    }
    messages = [{"role": "user", "content": "ab"}]
    seed, key, greedy = {"seed": 3}, {"key": jax.random.key(3)}, {"do_sample": False}
    pairs = [
        ("ab", {"ids": TOK.encode("ab"), "index": 0}),
        ({"prompt": "ab"} | seed, {"text": "ab"} | key),
        ({"messages": messages} | seed, {"ids": TOK.encode(TOK.render_chat(messages))} | key),
        ({"text": "ab", "temperature": 0}, {"text": "ab"} | greedy),
        ({"text": "ab", "temperature": 0.0, "top_p": 0.5}, {"text": "ab"} | greedy),
        ({"text": "ab", "regex": regex} | seed, {"text": "ab", "allowed": automata["regex"]} | key),
        ({"text": "ab", "json_schema": schema} | seed, {"text": "ab", "allowed": automata["json_schema"]} | key),
    ]
    prompts = [prompt for pair in pairs for prompt in pair]
    done = list(generate_many(PARAMS, iter(prompts), KEY, SIMPLE, ordered=True, **SIZES))
    assert [completion.error for completion in done] == [None] * len(prompts)
    for one, other in zip(done[::2], done[1::2], strict=True):
        assert (one.ids, one.tokens) == (other.ids, other.tokens)
    assert done[10].text.strip('abc"#') == ""  # the ends, tokens 1 and 2, are quotes and hashes in this vocabulary
    assert done[12].text.rstrip('"#') in ("12", "345")


def test_metadata_is_passed_through():
    prompts = [{"text": "ab", "metadata": {"id": 7}, "n": 2}, "a", {"ids": [999], "metadata": "x"}]
    done = list(generate_many(PARAMS, prompts, KEY, SIMPLE, ordered=True, **SIZES))
    assert [completion.metadata for completion in done] == [{"id": 7}, {"id": 7}, None, "x"]
    assert "the token 999" in done[3].error


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"max_tokens": 3}, "did you mean 'max_new_tokens'"),
        ({"stop": "."}, "did you mean 'stop_strings'"),
        ({"id": "p7"}, "put data of your own in metadata"),
    ],
)
def test_an_unknown_field_is_an_error_for_all_prompts(field, hint):
    prompts = [{"text": "a"}, {"text": "b"} | field]
    with pytest.raises(ConfigError, match=f"prompt 1: unknown option '.*': {hint}"):
        list(generate_many(PARAMS, prompts, KEY, SIMPLE, **SIZES))


def test_names_of_user_data_get_no_hint():
    own = "id source category label topic answer expected reference context question language model name title url date"
    own += " sequences top_n slot score length"
    assert [name for name in own.split() if hint(name)] == []


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        ("max_new_token maxTokens max_output_tokens", "max_new_tokens"),
        ("top-p topP", "top_p"),
        ("Temperature temp", "temperature"),
        ("json_shema guided_json schema", "json_schema"),
        ("guided_regex", "regex"),
        ("num_samples n_samples", "n"),
        ("stop stop_sequences", "stop_strings"),
        ("metadata_ meta_data", "metadata"),
        ("adapters", "adapter"),
    ],
)
def test_names_of_other_libraries_get_a_hint(names, meant):
    assert {hint(name) for name in names.split()} == {f"did you mean {meant!r}?"}


def test_names_without_an_equivalent_get_an_explanation():
    names = "tools system chat_template_kwargs enable_thinking options sampling_params guided_choice grammar best_of"
    names += " ignore_eos greedy seeds enableThinking"
    for name in names.split():
        assert not (hint(name) or "did you mean").startswith("did you mean")


def test_a_schema_that_cannot_be_written_as_json():
    for schema in ({"enum": {1, 2}}, {"type": object}):
        with pytest.raises(TypeError, match="json_schema must be a JSON schema: "):
            translated({"text": "a", "json_schema": schema}, TOK, 320, None)


class Lazy:
    """Prompts in a sized iterable that is not a list."""

    def __init__(self, *prompts):
        self.prompts = prompts

    def __len__(self):
        return len(self.prompts)

    def __iter__(self):
        return iter(self.prompts)


@pytest.mark.parametrize("kind", [lambda *prompts: [*prompts], Lazy])
def test_two_prompts_with_one_index(kind):
    for first, index in (({"text": "a", "index": 1}, 1), ({"text": "a"}, 0)):
        second = "b" if index else {"text": "b", "index": 0}
        with pytest.raises(InputError, match=f"prompt 1: index {index} is also the index of prompt 0"):
            list(generate_many(PARAMS, kind(first, second), KEY, SIMPLE, **SIZES))
    same = iter([{"text": "a", "index": 4}, {"text": "b", "index": 4}])  # an endless iterable could not be compared
    assert [done.index for done in generate_many(PARAMS, same, KEY, SIMPLE, **SIZES)] == [4, 4]


def test_a_schema_is_compiled_once():
    fields = [{"text": "a", "json_schema": {"enum": [1, 2, 3]}} for _ in range(2)]
    first, second = (translated(each, TOK, 320, None)["allowed"] for each in fields)
    assert first is second


def test_a_pydantic_class_and_keywords_that_are_left_out():
    class Tags:
        @staticmethod
        def model_json_schema():
            return {"type": "array", "items": {"type": "string"}, "uniqueItems": True}

    with pytest.raises(InputError, match="json_schema: the schema has uniqueItems"):
        translated({"text": "a", "json_schema": Tags}, TOK, 320, None)
    with pytest.warns(JaxgenWarning, match="left out of the schema, and not enforced: the schema has uniqueItems"):
        translated({"text": "a", "json_schema": Tags, "unsupported": "warn"}, TOK, 320, None)
    with pytest.raises(InputError, match="unsupported must be 'error' or 'warn', got 'x'"):
        translated({"text": "a", "json_schema": Tags, "unsupported": "x"}, TOK, 320, None)
    with pytest.raises(InputError, match="unsupported is about keywords of a json_schema"):
        translated({"text": "a", "unsupported": "warn"}, TOK, 320, None)
