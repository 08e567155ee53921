import dataclasses

import jax
import numpy as np
import pytest

from jaxgen import generate
from jaxgen.buckets import cache_slots
from tests.support.models import counting_config, counting_params


@pytest.mark.parametrize(("slots", "rounded"), [(160, 160), (1024, 1024), (1025, 1152), (1568, 1664), (3200, 3200)])
def test_slots_beyond_1024_are_a_multiple_of_128(slots, rounded):
    assert cache_slots(slots) == rounded


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_calls_with_many_slots_are_correct(traced):
    """With `slots`, the caches of new prompts are inserted into a cache that was allocated before."""
    cfg = counting_config(max_new_tokens=1025, eos_token_id=20)
    cfg = cfg.replace(model=dataclasses.replace(cfg.model, max_position_embeddings=2048))
    ids = np.asarray([[5], [9], [12]], np.int32)
    params = counting_params(cfg)
    run = jax.jit(generate) if traced else generate
    for slots in (None, 2):
        out = run(params, ids, None, cfg.replace(slots=slots), attention_mask=np.ones_like(ids))
        width = out.sequences.shape[1] - 1025
        for row, first in zip(np.asarray(out.sequences), (6, 10, 13), strict=True):
            assert row[width : width + 21 - first].tolist() == list(range(first, 21))
        assert slots or out.cache.slots % 128 == 0
