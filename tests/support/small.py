"""A small random model, and three prompts of different lengths."""

import numpy as np

from jaxgen import GenerationConfig
from tests.support.models import left_pad, model_config, random_params

MODEL = model_config()
PARAMS = random_params(MODEL)
TABLE = np.asarray(PARAMS["model"]["embed_tokens"]["weight"])
CFG = GenerationConfig(model=MODEL, max_new_tokens=6, pad_token_id=0)
PROMPTS = [[5, 6, 7], [11], [20, 21, 22, 23, 24]]
IDS, MASK = left_pad(PROMPTS)
