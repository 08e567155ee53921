"""A small random model for the tokens of `tokenizers.byte_level`, and six prompts of printable bytes."""

import numpy as np

from tests.support.models import model_config, random_params

MODEL = model_config(vocab_size=320, hidden_size=32)
PARAMS = random_params(MODEL, scale=0.3)
IDS = np.random.default_rng(0).integers(40, 120, (6, 9), np.int32)
MASK = np.arange(9)[None, :] >= np.array([0, 3, 5, 0, 1, 2])[:, None]
