"""The model that counts, and its answers."""

from jaxgen import generate
from tests.support.models import counting_config, counting_params, left_pad

CFG = counting_config(max_new_tokens=6, pad_token_id=0)
PARAMS = counting_params(CFG)


def count(rows, cfg=CFG, key=None, **kwargs):
    ids, mask = left_pad(rows)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **kwargs)
