"""Everything that greedy search in transformers 4.41.1 returns for a left-padded batch."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from oracle import Oracle, left_pad, smallest_gap

LENGTHS = (6, 2, 4)
NEW = 5
RETURNED = {
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), True),
}


def output_goldens(oracle: Oracle, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the arrays of a batch whose best two scores are always 1e-3 apart, so that rounding cannot swap them.

    The first row ends early, with an eos id that it would generate anyway. No option used here is affected by padding.
    """
    while True:
        prompts = [rng.integers(0, oracle.vocab, size=n) for n in LENGTHS]
        ids, mask = left_pad(prompts, rng, oracle.vocab)
        plain = {"eos_token_id": None, "repetition_penalty": 1.0, "max_new_tokens": NEW}
        first = oracle.greedy(prompts[0].tolist(), plain)[0][len(prompts[0]) :]
        suppressed = [i for i in rng.choice(oracle.vocab, size=8, replace=False).tolist() if i not in first]
        eos = [first[2], int(rng.integers(oracle.vocab))]
        options = plain | {"suppress_tokens": suppressed, "eos_token_id": eos, "min_new_tokens": 2, "pad_token_id": 0}
        oracle.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # generation_config.json sets sampling options although do_sample=False
            out = oracle.model.generate(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), do_sample=False, **RETURNED, **options
            )
        ends_early = out.sequences[0, -1] == 0 and out.sequences.shape[1] == ids.shape[1] + NEW
        if ends_early and all(smallest_gap(scores.numpy()) >= 1e-3 for scores in out.scores):
            return recorded(oracle, ids, mask, out) | {
                "eos_token_id": np.array(eos, np.int32),
                "suppress_tokens": np.array(suppressed, np.int32),
            }


def recorded(oracle: Oracle, ids: np.ndarray, mask: np.ndarray, out) -> dict[str, np.ndarray]:
    """Return the outputs as arrays. The prompts' outputs are separate from those of later steps.

    Entries are zero if the query or the key is padding. Attentions are also zero after a step's last key.
    """
    width, steps, real = ids.shape[1], len(out.scores), mask.astype(np.float32)
    keys = np.pad(real, ((0, 0), (0, steps - 1)), constant_values=1)
    arrays = {"ids": ids.astype(np.int32), "attention_mask": mask.astype(np.int32)}
    arrays |= {"sequences": out.sequences.numpy().astype(np.int32)}
    arrays |= {"scores": torch.stack(out.scores).numpy(), "logits": torch.stack(out.logits).numpy()}
    for normalize in (False, True):
        transition = oracle.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=normalize)
        arrays["transition_scores_normalized" if normalize else "transition_scores"] = transition.numpy()

    states = [torch.stack(layers).numpy() for layers in out.hidden_states]
    arrays["prompt_hidden_states"] = states[0] * real[None, :, :, None]
    arrays["hidden_states"] = np.stack(states[1:])[:, :, :, 0]
    weights = [torch.stack(layers).numpy() for layers in out.attentions]
    arrays["prompt_attentions"] = weights[0] * real[None, :, None, :, None]
    arrays["attentions"] = np.stack(
        [np.pad(w[..., 0, :], ((0, 0), (0, 0), (0, 0), (0, steps - 1 - i))) for i, w in enumerate(weights[1:], 1)]
    )
    cache = np.stack([[tensor.numpy() for tensor in layer] for layer in out.past_key_values])
    assert cache.shape[4] == width + steps - 1
    arrays["past_key_values"] = cache * keys[None, None, :, None, :, None]
    return arrays
