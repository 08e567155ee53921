"""Short names for sets of options of `generate`."""

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
MODES = {
    "greedy": {},
    "qwen": QWEN,
    "beams": {"num_beams": 4},
    "beam-sampling": {"num_beams": 4, "do_sample": True},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 8},
    "guidance": {"guidance_scale": 1.5},
}
