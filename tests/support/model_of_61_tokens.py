"""A small random model with 61 tokens, and three prompts of different lengths."""

import numpy as np

from tests.support.models import left_pad, model_config, random_params

MODEL = model_config(vocab_size=61)
PARAMS = random_params(MODEL)
TABLE = np.asarray(PARAMS["model"]["embed_tokens"]["weight"])
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5]]
IDS, MASK = left_pad(PROMPTS)
