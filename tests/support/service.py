"""A service in a thread, with a small random model that generates arbitrary bytes."""

import contextlib
import dataclasses
import socket
import threading

import jax

from convert import load_adapter
from jaxgen import GenerationConfig
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.engine.engine import Engine
from jaxgen.serving.app import Service
from jaxgen.serving.limits import Limits
from jaxgen.serving.server import server
from tests.support.models import model_config, random_params
from tests.support.tokenizers import byte_level

# This template formats tools and calls as Qwen2.5's does.
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MODEL = model_config(vocab_size=320, hidden_size=32)
WIDTH, NEW = 400, 120
KEY = "secret"


@dataclasses.dataclass(frozen=True)
class Running:
    """A service that answers at `url`."""

    url: str
    engine: Engine
    service: Service
    tokenizer: Tokenizer
    cfg: GenerationConfig
    params: dict


@contextlib.contextmanager
def running(
    dtype: str = "float32",
    *,
    slots: int = 4,
    keys=(),
    limits: Limits | None = None,
    template=TEMPLATE,
    adapters=(),
    warm: bool = True,
    options=(),
    new: int = NEW,
    **engine,
):
    """Yield a service. `adapters` contains (name, folder) pairs. If `warm` is False, nothing is compiled in advance.

    `options` are more arguments of the service, and `engine` those of the engine. `new` is the longest answer.
    """
    tokenizer = byte_level(chat_template=template)
    model = model_config(vocab_size=320, hidden_size=32, torch_dtype=dtype)
    params = random_params(model, scale=0.3)
    if adapters:
        params = load_adapter([folder for _, folder in adapters], params, GenerationConfig(model=model))
    cfg = GenerationConfig(
        model=model,
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        do_sample=True,
        top_k=0,
        output_logprobs="logits",
        top_logprobs=5,
    )
    sizes = {"slots": slots, "prompt_width": WIDTH, "stop_in_prompt": False, "id_entries": 320, "grammar_states": 4096}
    with Engine(params, cfg, jax.random.key(0), tokenizer=tokenizer, **sizes | engine) as made:
        if warm:
            made.warmup()
        names = [name for name, _ in adapters]
        more = {"adapters": names, "fingerprint": "fp_1", "keys": keys, "limits": limits, "context": WIDTH}
        service = Service(made, params, "tiny", **more | dict(options))
        with answering(service.app()) as url:
            yield Running(url, made, service, tokenizer, cfg, params)


@contextlib.contextmanager
def answering(app, **options):
    """Serve an ASGI application in a thread, and yield the address. `options` are those of `server`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        made = server(app, **options)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"{'https' if 'ssl_certfile' in options else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            made.should_exit = True
            thread.join()
