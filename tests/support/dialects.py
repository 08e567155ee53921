"""Short chat templates with the properties of published ones."""

_START = "{{ '<|im_start|>' ~ message.role ~ '\\n' }}"
_END = "{{ '<|im_end|>\\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def chatml(said: str, ask: str = _ASK, before: str = _TOOLS) -> str:
    """Return a template in ChatML, in which `said` writes a message's text and calls."""
    return f"{before}{{%- for message in messages %}}{_START}{said}{_END}{{% endfor %}}{ask}"


# Calls as JSON in tags, after the text; None as content fails
HERMES = chatml(
    "{{ message.content + '' }}{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}{% endfor %}"
)
# Qwen3's: thoughts of the last turn, and arguments as text or objects
QWEN3 = chatml(
    "{% if message.reasoning_content and loop.index0 >= messages | length - 2 %}"
    "{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '' }}{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}",
    _ASK + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
)
# R1-Distill's: calls only if the content is None, arguments as text, no text together with calls, and an open thought
R1 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '<User>' ~ message.content }}{% endif %}"
    "{% if message.role == 'assistant' and message.content is none %}{% for call in message.tool_calls %}"
    "{{ '<call>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```</call>' }}{% endfor %}"
    "{% elif message.role == 'assistant' %}{{ '<Assistant>' + message.content.split('</think>')[-1] + '<end>' }}"
    "{% elif message.role == 'tool' %}{{ '<output>' ~ message.content ~ '</output>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}"
)
# Qwen3-Coder's: each argument in tags, so that text instead of an object fails
CODER = chatml(
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"
    "{% for name, value in call.function.arguments.items() %}"
    "{{ '<parameter=' ~ name ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}"
)
# Llama's: one call in a message, without text, and results for the role ipython
LLAMA = (
    '{{ \'Respond with {"name": function name, "parameters": arguments}.\' }}'
    + _TOOLS
    + "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<|start|>ipython\\n' ~ message.content | tojson ~ '<|eot|>' }}"
    "{% elif 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{% set call = message.tool_calls[0].function %}{{ \'<|start|>assistant\\n{"name": "\' ~ call.name }}'
    "{{ '\", \"parameters\": ' ~ call.arguments | tojson ~ '}<|eot|>' }}"
    "{% else %}{{ '<|start|>' ~ message.role ~ '\\n' ~ message.content | trim ~ '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_MISTRAL = (
    "{%% for message in messages %%}{%% if message.role == 'user' %%}{{ '[INST]' ~ message.content ~ '[/INST]' }}"
    "{%% elif message.tool_calls %%}%s{%% elif message.role == 'tool' %%}"
    "{%% if message.tool_call_id | length != 9 %%}{{ raise_exception('ids have nine letters') }}{%% endif %%}"
    "{{ '[TOOL_RESULTS]' ~ message.content ~ '[/TOOL_RESULTS]' }}{%% else %%}{{ message.content ~ '</s>' }}"
    "{%% endif %%}{%% endfor %%}"
)
_IDS = "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
# Nemo's: a list of calls, with ids of nine letters, without text
NEMO = _MISTRAL % (
    "{{ '[TOOL_CALLS][' }}{% for call in message.tool_calls %}" + _IDS + "{{ call.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}"
)
# Mistral Small's: each call after its own tag, with its id
SMALL = _MISTRAL % (
    "{% for call in message.tool_calls %}" + _IDS + "{{ '[TOOL_CALLS]' ~ call.function.name ~ '[CALL_ID]' ~ call.id }}"
    "{{ '[ARGS]' ~ call.function.arguments | tojson }}{% endfor %}{{ '</s>' }}"
)
# Devstral's: the same without ids, after the text
DEVSTRAL = _MISTRAL % (
    "{{ message.content ~ '' }}{% for call in message.tool_calls %}{{ '[TOOL_CALLS]' ~ call.function.name }}"
    "{{ '[ARGS]' ~ call.function.arguments | tojson }}{% endfor %}{{ '</s>' }}"
)
# Functionary's: arguments as text only
FUNCTIONARY = chatml(
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ '>>>' + call.function.name + '\\n' + call.function.arguments }}{% endfor %}"
)
# Python's dict if the arguments are an object, as templates without tojson write it
CARELESS = chatml(
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ '<call>' ~ call.function.name ~ ' ' ~ call.function.arguments ~ '</call>' }}{% endfor %}"
)
# SmolLM3's in some editions: calls are not written at all
SMOL = chatml("{{ message.content if message.content is string else '' }}")

KINDS = {name: value for name, value in list(globals().items()) if name.isupper() and not name.startswith("_")}
