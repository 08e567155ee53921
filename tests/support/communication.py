"""Communication between the devices of a mesh in a decode step, read from the compiled program."""

import math

from jax.sharding import Mesh

from benchmarks import hlo
from benchmarks.targets import compile_generate
from jaxgen import GenerationConfig, ModelConfig
from jaxgen.core.model.sharding import divide
from tests.support.models import model_config

# The options of each kind of step, and its rows per prompt.
STEPS = {
    "greedy": ({}, 1),
    "sampling": ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}, 1),
    "slots": ({"slots": 8, "do_sample": True, "top_p": 0.8}, 1),
    "beams": ({"num_beams": 4}, 4),
    "beam sampling": ({"num_beams": 4, "do_sample": True}, 4),
    "groups": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, 4),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, 4),
}
PROMPTS = 8

# With these sizes and 8 prompts, only hidden states and scores are large enough to be counted.
MODEL = model_config(
    **{"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 128, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "num_hidden_layers": 3},
)


# The same with 16 experts in each layer; none of a device's experts has a matrix that is smaller than a hidden state.
EXPERTS = model_config(
    **{"model_type": "qwen3_moe", "vocab_size": 16384, "hidden_size": 1024, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 128},
    **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 72},
)


def check_communication(mesh: Mesh, name: str, model: ModelConfig = MODEL) -> str:
    """Check that a step's only large collectives are all-reduces over `model`: two per layer, one for embeddings.

    Return the program.
    """
    options, copies = STEPS[name]
    cfg = GenerationConfig(model=model, max_new_tokens=8, pad_token_id=0, eos_token_id=1, **options)
    program = compile_generate(cfg, divide(model, mesh), PROMPTS, 32).as_text()
    rows = PROMPTS // mesh.shape["data"] * copies
    collectives = [operation for operation in hlo.decode_step(program) if operation.is_collective]
    large = [c for c in collectives if max(map(math.prod, c.dims)) >= rows * model.hidden_size]
    sums = [c for c in large if c.kind == "all-reduce" and max(c.dims, key=math.prod)[-1] == model.hidden_size]
    assert large == sums
    assert sum(c.times for c in sums) == (0 if mesh.shape["model"] == 1 else 2 * model.num_hidden_layers + 1)
    return program
