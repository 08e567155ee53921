"""lm-evaluation-harness's model interface, implemented with jaxgen."""

from __future__ import annotations

import functools
from typing import Any

import jax
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.tables import eos_list
from jaxgen.core.scoring.score_many import score_many
from jaxgen.core.text.chat_template import continued
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.engine.many_prompts import generate_many
from jaxgen.errors import ConfigError, GenerationError, InputError
from jaxgen.progress import is_on


class JaxgenLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate` or `lm_eval.evaluate`.

    >>> lm = JaxgenLM(params, cfg, tok, name="Qwen2.5-0.5B")
    >>> results = lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])

    Log-likelihoods come from `score_many`, which reads a question's context only once for all of the choices. Answers
    come from `generate_many`, with the options and stop strings of each request. Texts are tokenized and truncated as
    in the harness's `hf` model.

    Args:
        params: the parameters.
        cfg: the model's config. Its options, which `load_hf` reads from generation_config.json, are the defaults for
            requests, as in the harness's `hf` model. For example, a repetition penalty also applies to greedy answers.
        tokenizer: the model's tokenizer.
        name: the model's name in reports and in the request cache.
        max_length: the maximum number of tokens per request; by default the model's context length.
        max_gen_toks: the maximum number of tokens per answer if the task sets no limit.
        slots: the number of answers generated at a time.
        batch_tokens: the approximate number of tokens in memory at a time, as in `score_many`.
        seed: the seed for requests that sample.
    """

    def __init__(
        self,
        params: Any,
        cfg: GenerationConfig,
        tokenizer: Tokenizer,
        *,
        name: str = "jaxgen",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        slots: int = 32,
        batch_tokens: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.max_length = max_length or cfg.model.context_length
        self.max_gen_toks, self.slots, self.batch_tokens = max_gen_toks, slots, batch_tokens
        self._params, self._cfg, self._tokenizer, self._name = params, cfg, tokenizer, name
        self._key = jax.random.key(seed)
        # The harness encodes a question's context once for each of its choices.
        self._encode = functools.lru_cache(maxsize=4)(tokenizer.encode)
        ends = eos_list(cfg.eos_token_id)
        self._eot = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(ends), None)
        if self._eot is None:
            raise InputError("an empty context needs an eos token, but neither the tokenizer nor the config has one")
        bos = tokenizer.bos_token_id
        self._prefix = self._eot if bos is None else bos
        self._eos_text = tokenizer.decode([self._eot], skip_special_tokens=False)
        self._prefix_text = tokenizer.decode([self._prefix], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a text."""
        return self._eot  # pyright: ignore[reportReturnType]

    @property
    def prefix_token_id(self) -> int:
        """The id used for an empty context: the bos token, or the eos token if there is no bos."""
        return self._prefix  # pyright: ignore[reportReturnType]

    @property
    def tokenizer_name(self) -> str:
        """The model's name in the request cache."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Return the ids of a string, without adding a bos token if the string already begins with one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        return list(self._encode(string, add_special_tokens=add_special_tokens)) if string else []

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, for the harness's report."""
        return self._tokenizer.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text; without a generation prompt, the model continues the last message."""
        if add_generation_prompt:
            return self._tokenizer.render_chat(chat_history)
        return continued(lambda messages: self._tokenizer.render_chat(messages, False), chat_history)

    def get_model_info(self) -> dict[str, Any]:
        """Return information about the model for the harness's report."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self._params))
        return {"model": self._name, "model_dtype": self._cfg.model.dtype, "model_num_parameters": count}

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations of contexts, truncating the contexts on the left to fit the model."""
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        progress = is_on() and not disable_tqdm
        found = score_many(self._params, pairs, self._cfg, batch_tokens=self.batch_tokens, progress=progress)
        results = [(scores.total, bool(scores.is_greedy.all())) for scores in found]
        for (texts, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        if not continuation or len(continuation) > self.max_length:
            raise InputError(f"a continuation has {len(continuation)} tokens: it must have 1 to {self.max_length}")
        room = self.max_length + 1 - len(continuation)  # the model does not read the last token
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood, computed in non-overlapping windows as wide as the model's context."""
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                before, rest = make_disjoint_window(window)
                windows.append((list(before), list(rest)))
                owners.append(number)
        totals = [0.0] * len(requests)
        progress = is_on() and not disable_tqdm
        found = score_many(self._params, windows, self._cfg, batch_tokens=self.batch_tokens, progress=progress)
        for owner, scores in zip(owners, found, strict=True):
            totals[owner] += scores.total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return each context's continuation, cut at the first occurrence of any of the request's stop strings."""
        if not requests:
            return []
        read = [self._read(*request.args) for request in requests]
        prompts = [prompt for prompt, _ in read]
        width = max(len(prompt["ids"]) for prompt in prompts)
        draws = any(prompt["do_sample"] for prompt in prompts)
        cfg = self._cfg.replace(
            max_new_tokens=max(prompt["max_new_tokens"] for prompt in prompts),
            eos_token_id=sorted({*eos_list(self._cfg.eos_token_id), self.eot_token_id}),
            do_sample=draws,
        )
        answers = [""] * len(requests)
        more = {"tokenizer": self._tokenizer, "slots": min(self.slots, len(prompts)), "prompt_width": width}
        more["progress"] = is_on() and not disable_tqdm
        for done in generate_many(self._params, prompts, self._key if draws else None, cfg, **more):
            if done.error is not None:
                raise GenerationError(f"request {done.index}: {done.error}")
            text = postprocess_generated_text(done.text or "", read[done.index][1], None)
            answers[done.index] = text
            self.cache_hook.add_partial("generate_until", requests[done.index].args, text)
        return answers

    def _read(self, context: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return a prompt for `generate_many`, and the strings at which to cut its answer."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        stops = [text for text in handle_stop_sequences(kwargs.pop("until", None), self._eos_text) if text]
        size = kwargs.pop("max_gen_toks")
        if size >= self.max_length:
            raise InputError(f"an answer of {size} tokens leaves no room for context: max_length is {self.max_length}")
        if not kwargs.get("do_sample"):
            kwargs = {name: value for name, value in kwargs.items() if name not in ("temperature", "top_p", "top_k")}
        for name in kwargs:
            if name not in OPTIONS or name == "max_length":
                remedy = "use max_gen_toks" if name == "max_length" else "leave it out"
                raise ConfigError(f"the task's generation_kwargs have {name}, which is not an option here: {remedy}")
        ids = self.tok_encode(context)[-(self.max_length - size) :] or [self.prefix_token_id]
        # The eos token itself ends an answer, so its text does not have to be a stop string.
        texts = [text for text in stops if text != self._eos_text]
        return {"ids": ids, "max_new_tokens": size, "stop_strings": texts or None, **kwargs}, stops
