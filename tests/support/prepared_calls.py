"""Calls of the counting model that are prepared but not run, for tests of the code that runs them."""

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.model.sharding import divide
from jaxgen.core.request.prepare import CallInputs, Prepared, prepare
from tests.support import counting
from tests.support.models import left_pad

MESH = divide(counting.CFG.model, Mesh(np.array(jax.devices()[:2]), ("data",)))
"""Two devices, over which the rows are divided."""


def prepared(prompts, cfg=counting.CFG, params=counting.PARAMS, extensions=None, eager=False, **inputs) -> Prepared:
    """Prepare a call without additional prompts.

    If `eager` is False, its arrays have exactly the prompts' width and `max_new_tokens` steps.
    """
    ids, mask = left_pad(prompts)
    given = CallInputs(**{"ids": ids, "attention_mask": mask, **inputs})
    return prepare(params, cfg, given, extensions or Extensions(), eager=eager, more_prompts=False)


def begun(given: Prepared) -> tuple[Tokens, Rows]:
    """Return the prompts of a call and their rows, before anything is generated."""
    request = given.request.complete()
    tokens = Tokens.align(request.ids, request.mask, request.embeds)
    return tokens, Rows.begin(given.run, request, tokens, tokens.ids, tokens.length)
