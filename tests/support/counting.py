"""The counting model and its answers."""

import jax.numpy as jnp

from jaxgen import generate
from tests.support.models import counting_config, counting_params, left_pad

CFG = counting_config(max_new_tokens=6, pad_token_id=0)
PARAMS = counting_params(CFG)


def count(rows, cfg=CFG, key=None, **kwargs):
    ids, mask = left_pad(rows)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **kwargs)


def with_second_best(cfg):
    """Return the counting model's parameters, changed so that its second choice is the token after the next."""
    params = counting_params(cfg)
    params["lm_head"]["weight"] += 0.5 * jnp.roll(params["lm_head"]["weight"], 1, axis=0)
    return params
