"""Sets of options with prompts, and the tokens and scores that transformers 4.41.1 computes for them.

Rows always run alone and without padding. To avoid two bugs of 4.41.1 that later releases fixed, no phrase has exactly
one token more than a prompt, and exponential decay never applies to an eos token that is banned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from oracle import Oracle
from processors_441 import boundary_distance, tie_is_chance
from transformers import GenerationConfig
from transformers.generation import logits_process as hf
from transformers.modeling_outputs import CausalLMOutput

SETS = 40
LONGEST = 24  # tokens of a prompt
STEPS = (0, 2, 5)  # steps whose processed scores are recorded
ROWS = 3  # rows of each group for which they are recorded
MARGIN = 1e-4  # warpers are redrawn if a boundary is closer than this, because rounding could change what they keep

OPTIONS = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_decoder_ids", "renormalize_logits", "guidance_scale", "prefix"),
)
PLAIN = {"eos_token_id": None, "repetition_penalty": 1.0}  # to see what the model generates without options
DECAY = "exponential_decay_length_penalty"
BANS_ENDS = {"min_length", "min_new_tokens", "forced_eos_token_id", "prefix"}  # DECAY turns their -inf into NaN
NEEDS_EOS = {"min_length", "min_new_tokens", DECAY}


def deal(rng: np.random.Generator) -> Iterator[list[str]]:
    """Deal hands of 2 to 5 different options from shuffled decks. Options that clash, mostly DECAY, are discarded."""
    deck: list[str] = []
    while True:
        hand: list[str] = []
        size = int(rng.integers(2, 6))
        while len(hand) < size:
            deck = deck or [str(name) for name in rng.permutation([*OPTIONS, DECAY, DECAY])]
            name = deck.pop()
            if name not in hand and not (BANS_ENDS & {*hand, name} and DECAY in (*hand, name)):
                hand.append(name)
        yield hand


class Material:
    """Material for drawing options: the prompts, and the tokens that the model generates without options."""

    def __init__(self, oracle: Oracle, prompts: list[list[int]], longest_phrase: int, rng: np.random.Generator):
        self.prompts, self.longest, self.rng, self.vocab = prompts, longest_phrase, rng, oracle.vocab
        runs = [oracle.greedy(prompt, PLAIN | {"max_new_tokens": 16})[0] for prompt in prompts[:4]]
        self.written = [run[len(prompt) :] for run, prompt in zip(runs, prompts, strict=False)]

    def between(self, low: float, high: float) -> float:
        return round(float(self.rng.uniform(low, high)), 3)

    def whole(self, low: int, high: int) -> int:
        """Draw an integer from low to high, inclusive."""
        return int(self.rng.integers(low, high + 1))

    def phrase(self, longest: int | None = None) -> list[int]:
        """Draw consecutive generated tokens."""
        size = self.whole(1, longest or self.longest)
        run = self.written[self.whole(0, len(self.written) - 1)]
        start = self.whole(0, len(run) - size)
        return run[start : start + size]

    def phrases(self, low: int, high: int) -> list[list[int]]:
        """Draw distinct phrases."""
        drawn = [self.phrase() for _ in range(self.whole(low, high))]
        return [list(phrase) for phrase in dict.fromkeys(map(tuple, drawn))]

    def tokens(self, low: int, high: int) -> list[int]:
        """Draw distinct generated tokens."""
        return list(dict.fromkeys(self.phrase(1)[0] for _ in range(self.whole(low, high))))

    def any_token(self) -> int:
        return self.whole(0, self.vocab - 1)

    def biases(self) -> list:
        """Draw biases mostly against generated phrases, and biases for phrases that end with another token instead."""
        biases = [[phrase, self.between(-12, 4)] for phrase in self.phrases(2, 4)]
        more = {(*phrase[:-1], self.any_token()): self.between(4, 16) for phrase in self.phrases(1, 3)}
        taken = {tuple(phrase) for phrase, _ in biases}
        return biases + [[list(phrase), bias] for phrase, bias in more.items() if phrase not in taken]

    def forced_at(self) -> list[list[int]]:
        """Draw pairs of a position, shortly after the end of a prompt, and a token to force there, in order."""
        places = {len(self.prompts[self.whole(0, len(self.prompts) - 1)]) + self.whole(0, 5) for _ in range(3)}
        return [[place, self.any_token()] for place in sorted(places)]


VALUES: dict[str, Callable[[Material], object]] = {
    "repetition_penalty": lambda m: m.between(0.6, 2.0),
    "encoder_repetition_penalty": lambda m: m.between(0.5, 1.8),
    "no_repeat_ngram_size": lambda m: max(1, m.whole(-1, 4)),
    "encoder_no_repeat_ngram_size": lambda m: max(1, m.whole(-1, 3)),
    "bad_words_ids": lambda m: m.phrases(3, 8),
    "sequence_bias": lambda m: m.biases(),
    "min_length": lambda m: m.whole(LONGEST // 2, LONGEST + 12),
    "min_new_tokens": lambda m: m.whole(1, 12),
    "forced_bos_token_id": lambda m: m.any_token(),
    "forced_eos_token_id": lambda m: m.any_token() if m.whole(0, 1) else [m.any_token(), m.any_token()],
    "remove_invalid_values": lambda m: True,
    DECAY: lambda m: [m.whole(0, 8), m.between(1.05, 1.8)],
    "suppress_tokens": lambda m: m.tokens(3, 10),
    "begin_suppress_tokens": lambda m: [*dict.fromkeys([*(run[0] for run in m.written), m.any_token()])],
    "forced_decoder_ids": lambda m: m.forced_at(),
    "renormalize_logits": lambda m: True,
    "guidance_scale": lambda m: m.between(-1.0, 0.9) if m.whole(0, 2) == 0 else m.between(1.1, 4.0),
    "prefix": lambda m: [m.whole(1, 96), m.whole(1, 96), m.whole(2, 4)],
}


def allowed_tokens(prefix: list[int], row: int, last: int, vocab: int) -> list[int]:
    """Return the ids that `[a, b, m]` allows after the token `last` in a row: one in `m` of the vocabulary."""
    a, b, m = prefix
    return [token for token in range(vocab) if (token + a * last + b * row) % m == 0]


def hf_arguments(group: dict, row: int, vocab: int) -> dict:
    """Return the arguments of generate for a row of a group. They are also the arguments of `prepared_lists`."""
    arguments = dict(group["options"])
    if "sequence_bias" in arguments:
        arguments["sequence_bias"] = {tuple(ids): bias for ids, bias in arguments["sequence_bias"]}
    if group.get("prefix"):
        arguments["prefix_allowed_tokens_fn"] = lambda batch_id, tokens: allowed_tokens(
            group["prefix"], row, int(tokens[-1]), vocab
        )
    return arguments


def draw_lengths(rng: np.random.Generator) -> dict:
    """Draw max_length or max_new_tokens."""
    if rng.random() < 0.3:
        return {"max_length": int(rng.integers(LONGEST + 4, LONGEST + 17))}
    return {"max_new_tokens": int(rng.integers(7, 25))}


def draw_eos(oracle: Oracle, group: dict, prompts: list[list[int]], hand: list[str], rng: np.random.Generator) -> dict:
    """Draw eos and pad ids. An eos id is a token that the model, if not stopped, generates early, late or never."""
    free = {name: value for name, value in group["options"].items() if name not in NEEDS_EOS}
    free = group | {"options": free | {"eos_token_id": None}}
    runs = []
    for row, prompt in enumerate(prompts[:3]):
        runs.append(oracle.greedy(prompt, hf_arguments(free, row, oracle.vocab))[0][len(prompt) :])
    never = int(rng.choice([i for i in range(oracle.vocab) if all(i not in run for run in runs)]))
    early = [run[min(int(rng.integers(0, 4)), len(run) - 1)] for run in runs]
    late = runs[1][min(int(rng.integers(4, 12)), len(runs[1]) - 1)]
    roles = {"list": [*dict.fromkeys([never, late, early[0]])], "early": [*dict.fromkeys(early)]}
    if not {"min_length", "min_new_tokens"} & set(hand):
        roles |= {"never": never, "one": early[0], "late": late}
    if not NEEDS_EOS & set(hand):
        roles["none"] = None
    ids = {"eos_token_id": roles[str(rng.choice(list(roles)))]}
    if rng.random() < 0.5:
        ids["pad_token_id"] = int(rng.integers(oracle.vocab))
    return ids


def smallest_gap(scores: np.ndarray) -> float:
    """Return the smallest gap between the two best scores of a step, leaving out banned tokens. Scores are [steps, V].

    Steps whose remaining scores are all equal, as with several forced tokens, are skipped: rounding cannot matter.
    """
    gaps = [1e6]
    for step in scores:
        left = np.sort(step[step > -1e30])
        if left[0] != left[-1]:
            gaps.append(float(left[-1] - left[-2]))
    return round(min(gaps), 6)


def is_sound(scores: np.ndarray) -> bool:
    """Return True if each step has a token that is not banned, and no score is NaN or +inf."""
    return not np.isnan(scores).any() and np.max(scores) < 1e30 and np.all(np.max(scores, axis=-1) > -1e30)


def run_case(oracle: Oracle, group: dict, row: int, prompt: list[int], rng: np.random.Generator) -> dict | None:
    """Run one row. While its scores are not sound, draw a new prompt; give up after 5 runs."""
    for _ in range(5):
        case: dict = {"ids": prompt}
        arguments = hf_arguments(group, row, oracle.vocab)
        if group["negative_prompts"]:
            case["negative_ids"] = rng.integers(oracle.vocab, size=int(rng.integers(1, 12))).tolist()
            arguments["negative_prompt_ids"] = torch.tensor([case["negative_ids"]])
        sequence, scores, _ = oracle.greedy(prompt, arguments)
        if is_sound(scores):
            return case | {"sequence": sequence, "smallest_gap": smallest_gap(scores)}
        prompt = rng.integers(0, oracle.vocab, size=len(prompt)).tolist()
    return None


def draw_prompts(oracle: Oracle, hand: list[str], count: int, rng: np.random.Generator) -> list[list[int]]:
    """Draw prompts of all lengths that the options allow. The model writes half of them, and soon repeats itself."""
    lengths = [*rng.integers(shortest_prompt(hand), LONGEST, size=count - 2), shortest_prompt(hand), LONGEST]
    if "forced_bos_token_id" in hand:  # it affects only prompts of one token
        lengths[: count // 2] = [1] * (count // 2)
    prompts = []
    for length in rng.permutation(lengths):
        prompt = rng.integers(0, oracle.vocab, size=length).tolist()
        if length > 1 and rng.random() < 0.5:
            prompt = oracle.greedy(prompt[:1], PLAIN | {"max_new_tokens": int(length) - 1})[0]
        prompts.append(prompt)
    return prompts


def shortest_prompt(hand: list[str]) -> int:
    """Return the minimum length of prompts, which is also the maximum length of phrases."""
    return 3 if {"bad_words_ids", "sequence_bias"} & set(hand) and "forced_bos_token_id" not in hand else 1


def draw_group(name: str, oracle: Oracle, hand: list[str], count: int, rng: np.random.Generator) -> dict | None:
    """Draw `count` prompts and values for a hand of options, and run all rows. Return None if a row is never sound."""
    prompts = draw_prompts(oracle, hand, count, rng)
    material = Material(oracle, prompts, shortest_prompt(hand), rng)
    values = {option: VALUES[option](material) for option in hand}
    group = {"checkpoint": name, "prefix": values.pop("prefix", None), "options": values | draw_lengths(rng)}
    group["negative_prompts"] = "guidance_scale" in values and bool(rng.random() < 0.5)
    group["options"] |= draw_eos(oracle, group, prompts, hand, rng)
    group["cases"] = []
    for row, prompt in enumerate(prompts):
        case = run_case(oracle, group, row, prompt, rng)
        if case is None:
            return None
        group["cases"].append(case)
    return group


WARPERS: dict[str, Callable[[np.random.Generator], float]] = {
    "temperature": lambda rng: np.exp(rng.uniform(-1, 1)),
    "top_k": lambda rng: int(rng.integers(4, 40)),
    "top_p": lambda rng: rng.uniform(0.4, 0.99),
    "min_p": lambda rng: np.exp(rng.uniform(-7, -1.5)),
    "typical_p": lambda rng: rng.uniform(0.4, 0.98),
    "epsilon_cutoff": lambda rng: np.exp(rng.uniform(-8, -2.5)),
    "eta_cutoff": lambda rng: np.exp(rng.uniform(-8, -2.5)),
}


def draw_warpers(rng: np.random.Generator) -> dict:
    """Draw values for 1 to 4 warpers. top_k is off unless it is one of them."""
    names = rng.choice(list(WARPERS), size=int(rng.integers(1, 5)), replace=False)
    drawn = {str(name): WARPERS[str(name)](rng) for name in names}
    return {"top_k": 0} | {name: v if isinstance(v, int) else float(np.float32(v)) for name, v in drawn.items()}


def prepared_lists(model, options: dict, prompt: torch.Tensor, prefix_allowed_tokens_fn=None) -> tuple[list, list]:
    """Return the processors and warpers that generate builds for these options and a prompt [1, P]."""
    config = GenerationConfig(**options)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    model._prepare_generated_length(
        config,
        has_default_max_length=True,
        has_default_min_length="min_length" not in options,
        model_input_name="input_ids",
        input_ids_length=prompt.shape[1],
        inputs_tensor=prompt,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from forced_decoder_ids
        processors = model._get_logits_processor(
            config,
            input_ids_seq_length=prompt.shape[1],
            encoder_input_ids=prompt,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            logits_processor=hf.LogitsProcessorList(),
            device="cpu",
            model_kwargs={"use_cache": True},
        )
    return list(processors), list(model._get_logits_warper(config))


def stand_in(logits: np.ndarray) -> Callable:
    """Return a function that guidance calls instead of the model to get the logits without the prompt, float32[V]."""
    return lambda *args, **kwargs: CausalLMOutput(logits=torch.from_numpy(logits)[None, None])


def process(lists: tuple[list, list], ids: list[int], logits: np.ndarray, uncond: np.ndarray):
    """Return the scores [V] after both lists, the distance to the nearest boundary, and whether chance split a tie."""
    processors, warpers = lists
    scores, distance, chance = torch.from_numpy(logits.copy())[None], np.inf, False
    for processor in processors:
        if isinstance(processor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor):
            processor.model = stand_in(uncond)
        scores = processor(torch.tensor([ids]), scores)
    if not is_sound(scores.numpy()):
        return scores[0].numpy(), 0.0, False
    for warper in warpers:
        before, scores = scores, warper(torch.tensor([ids]), scores)
        distance = min(distance, boundary_distance(warper, before[0].numpy()))
        if not isinstance(warper, hf.TemperatureLogitsWarper | hf.LogitNormalization):
            chance |= tie_is_chance(warper, before[0].numpy(), scores[0].numpy())
    return scores[0].numpy(), distance, chance


def draw_logits(row: list[int], vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Draw logits with few digits, float32[V]. Half the time, the row's tokens are likely, so that penalties matter."""
    logits = rng.standard_normal(vocab) * 2
    logits[row] += rng.choice([0.0, 2.5])
    return logits.astype(np.float16).astype(np.float32)


def sampling_goldens(oracle: Oracle, group: dict, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
    """Add warpers to a group's options, and return processed scores [ROWS, len(STEPS), V] after given tokens.

    Return None if every draw of warpers comes close to a boundary or yields scores that are not sound.
    """
    prompts = [case["ids"] for case in group["cases"][:ROWS]]
    for _ in range(50):
        warpers, records, near = draw_warpers(rng), [], np.inf
        rows = [case["sequence"] + rng.integers(oracle.vocab, size=max(STEPS)).tolist() for case in group["cases"]]
        for r, prompt in enumerate(prompts):
            arguments = hf_arguments(group, r, oracle.vocab)
            prefix = arguments.pop("prefix_allowed_tokens_fn", None)
            options = arguments | warpers | {"do_sample": True}
            lists = prepared_lists(oracle.model, options, torch.tensor([prompt]), prefix)
            for step in STEPS:
                ids = rows[r][: len(prompt) + step]
                logits = draw_logits(ids, oracle.vocab, rng)
                uncond = logits + draw_logits([], oracle.vocab, rng) / 4
                scores, distance, chance = process(lists, ids, logits, uncond)
                near = min(near, distance)
                records.append({"logits": logits, "uncond": uncond, "scores": scores, "tie_is_chance": chance})
        if near >= MARGIN:
            break
    else:
        return None
    tokens = [row[len(prompt) :][: max(STEPS)] for row, prompt in zip(rows, prompts, strict=False)]
    names = [name for name in records[0] if name != "uncond" or "guidance_scale" in group["options"]]
    group["sampling"] = {"warpers": warpers, "tokens": tokens}
    return {name: np.stack([r[name] for r in records]).reshape(ROWS, len(STEPS), -1) for name in names}


def option_goldens(
    oracles: dict[str, Oracle], cases: int, rng: np.random.Generator
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return SETS groups of at least 4 rows, one set of options per group, and their processed scores."""
    groups, arrays, hands = [], {}, deal(rng)
    names = list(oracles)
    for g in range(SETS):
        hand, name = next(hands), names[g % len(names)]
        if "guidance_scale" in hand and "dynamic" in name:
            name = names[0]  # in 4.41.1, both passes of a step share the growth of a dynamic RoPE
        scores = None
        while scores is None:
            group = draw_group(name, oracles[name], hand, max(4, -(-cases // SETS)), rng)
            scores = group and sampling_goldens(oracles[name], group, rng)
        groups.append(group)
        arrays |= {f"{g}_{key}": value for key, value in scores.items()}
    return groups, arrays
