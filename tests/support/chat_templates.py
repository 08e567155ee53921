"""Short chat templates with the properties of published ones, and the texts that a model generates with them.

Each template writes thoughts (`reasoning_content`) and calls, if its model does.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tokenizers

from jaxgen import Tokenizer
from tests.support.tokenizers import byte_level_backend

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot|>", "<s>", "</s>", "[INST]", "[/INST]", "[CALLS]", "<User>", "<Bot>"]


class Kind(NamedTuple):
    """A template, and a function that returns what the model generates to give a message as its answer."""

    template: str
    generated: Callable[[Mapping[str, Any]], str]

    @property
    def tokenizer(self) -> Tokenizer:
        return template_tokenizer(self.template)


def template_tokenizer(template: str | list[dict[str, str]], backend: tokenizers.Tokenizer | None = None) -> Tokenizer:
    backend = backend or byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>", "chat_template": template}
    return Tokenizer(backend, {"clean_up_tokenization_spaces": False, **config})


def _hermes(message: Mapping[str, Any]) -> str:
    """Return the text and the calls of a message in the format of Qwen2.5 and Hermes."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    texts = [f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {_arguments(c)}}}\n</tool_call>' for c in calls]
    return "\n".join([*([message["content"]] if message["content"] or not texts else []), *texts])


def _arguments(function: Mapping[str, Any]) -> str:
    given = function["arguments"]
    return json.dumps(json.loads(given) if isinstance(given, str) else given, ensure_ascii=False)


_CALLS = (
    "{% for call in message.tool_calls or [] %}{% if not loop.first or message.content %}{{ '\\n' }}{% endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_HEAD = "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
_START, _END = "{{ '<|im_start|>' + message.role + '\\n' }}", "{{ '<|im_end|>\\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def _chatml(answer: str, ask: str = _ASK) -> str:
    return (
        f"{_HEAD}{{% for message in messages %}}{{% if message.role == 'assistant' %}}{answer}{{% else %}}"
        f"{_START}{{{{ message.content }}}}{_END}{{% endif %}}{{% endfor %}}{ask}"
    )


# Qwen2.5's: nothing ever changes, and thoughts are not written
QWEN25 = Kind(
    _chatml(f"{_START}{{{{ message.content or '' }}}}{_CALLS}{_END}"), lambda message: _hermes(message) + "<|im_end|>"
)
# Qwen3's: a thought, or an empty one, in answers after the last question only; earlier ones are dropped. Between calls,
# an answer without a thought loses the empty one.
_SET = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
_SPLIT = (
    "{% set thought, text = message.reasoning_content or '', message.content or '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}"
)
QWEN3 = Kind(
    _SET
    + "{% endif %}{% endfor %}"
    + _chatml(
        f"{_SPLIT}{_START}{{% if loop.index0 > ns.last and (loop.last or thought) %}}"
        "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}"
        f"{{% else %}}{{{{ text }}}}{{% endif %}}{_CALLS}{_END}",
        _ASK.replace(
            "{% endif %}",
            "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
            "{% endif %}",
        ),
    ),
    lambda message: (
        f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{_hermes(message).lstrip(chr(10))}<|im_end|>"
    ),
)
# Llama 3's: contents are trimmed, and a message has text or one call
LLAMA3 = Kind(
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\\n\\n' }}"
    "{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{% set call = message.tool_calls[0].function %}{{ \'{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson + '}' }}{% else %}{{ message.content | trim }}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}",
    lambda message: (
        (
            "".join(
                f'{{"name": "{call["function"]["name"]}", "parameters": {_arguments(call["function"])}}}'
                for call in message.get("tool_calls", [])
            )
            or message["content"].strip()
        )
        + "<|eot|>"
    ),
)
# Mistral's: the tools and the system message are before the last question, so they move; no generation prompt
MISTRAL = Kind(
    "{{ bos_token }}{% set ns = namespace(system='', last=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content + '\\n\\n' %}{% elif m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}{{ tools | tojson }}{% endif %}"
    "{{ '[INST]' + (ns.system if loop.last else '') + message.content + '[/INST]' }}"
    "{% elif message.role == 'tool' %}{{ '[INST]result ' + message.content + '[/INST]' }}"
    "{% elif message.tool_calls %}{{ '[CALLS][' }}{% for call in message.tool_calls %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + '</s>' }}{% endif %}{% endfor %}",
    lambda message: (
        "[CALLS]["
        + ", ".join(
            f'{{"name": "{call["function"]["name"]}", "arguments": {_arguments(call["function"])}}}'
            for call in message["tool_calls"]
        )
        + "]</s>"
        if message.get("tool_calls")
        else f" {message['content']}</s>"
    ),
)
# R1-Distill's: the generation prompt begins a thought, and no answer ever has one. Calls are written only if the
# content is None, and their arguments must be text. Tools are not written.
R1 = Kind(
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' and message.content is none %}"
    "{{ '<Bot>' }}{% for call in message.tool_calls %}{{ '<call>' + call.function.name + '\\n' }}"
    "{{ call.function.arguments + '</call>' }}{% endfor %}{{ '</s>' }}"
    "{% elif message.role == 'assistant' %}{{ '<Bot>' + message.content.split('</think>')[-1] + '</s>' }}"
    "{% else %}{{ '<User>' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Bot><think>\\n' }}{% endif %}",
    lambda message: (
        message.get("reasoning_content", "")
        + "\n</think>\n\n"
        + (
            "".join(
                f"<call>{call['function']['name']}\n{_arguments(call['function'])}</call>"
                for call in message.get("tool_calls", [])
            )
            or message["content"].lstrip("\n")
        )
        + "</s>"
    ),
)
# SmolLM3's: generation blocks, which contain the header and the newline after the end; thoughts are not written, and
# calls are part of the text
SMOLLM3 = Kind(
    _chatml(
        "{% generation %}{% if enable_thinking | default(true) %}"
        "{{ '<|im_start|>assistant\\n' + message.content.lstrip('\\n') + '<|im_end|>\\n' }}{% else %}"
        "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + message.content.lstrip('\\n') + '<|im_end|>\\n' }}"
        "{% endif %}{% endgeneration %}",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{{ '' if enable_thinking | default(true) else '<think>\\n\\n</think>\\n' }}{% endif %}",
    ),
    lambda message: (
        (f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message.get("reasoning_content") else "")
        + message["content"].lstrip("\n")
        + "<|im_end|>"
    ),
)
KINDS = {"qwen25": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "r1": R1, "smollm3": SMOLLM3}
