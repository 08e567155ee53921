"""Text to ids and back: HF's fast tokenizers and chat templates, without transformers."""

import functools
import itertools
import operator
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from jaxgen.errors import ConfigError, InputError, JaxgenError, shown
from jaxgen.model.families import FAMILIES
from jaxgen.text import chat_template
from jaxgen.text.json_file import fetch_again, read_file, read_json
from jaxgen.text.token_bytes import token_bytes
from jaxgen.text.tokenizer_file import library_errors, probe, read_backend
from jaxgen.text.utf8_text import decoded, encoded

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Defaults of the tokenizer classes for keys that tokenizer_config.json lacks (null is a value)
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "LlamaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    },
}
TYPES: dict[str, type | tuple[type, ...]] = {
    "tokenizer_class": str,
    "model_max_length": (int, float),
    "truncation_side": str,
    "added_tokens_decoder": Mapping,
    "additional_special_tokens": (list, tuple),
    **dict.fromkeys(("add_bos_token", "add_eos_token"), bool),
    **dict.fromkeys(("clean_up_tokenization_spaces", "split_special_tokens"), bool),
}
# Methods of transformers' tokenizers, and what takes their place
ELSEWHERE = {
    "__call__": "batch(texts), or encode(text) for one",
    "batch_encode_plus": "batch(texts)",
    "encode_plus": "encode(text)",
    "batch_decode": "decode_batch(out) for the generated part, or decode_batch(sequences) for rows of ids",
    "apply_chat_template": "chat(conversations) for ids, or render_chat(conversation) for text",
    "convert_tokens_to_ids": "backend.token_to_id(token)",
    "convert_ids_to_tokens": "backend.id_to_token(id)",
    "get_vocab": "backend.get_vocab()",
    "tokenize": "backend.encode(text).tokens",
}
# transformers writes int(1e30) where a checkpoint states no limit
NO_MAX_LENGTH = 10**20
_MOST_ADDING = 20_000_000  # added tokens times the runs in which they are added
_LARGEST_ID = 2**31 - 1


class Batch(NamedTuple):
    """Prompts of one call: `ids` and `attention_mask`, both int32[B, P] and left-padded."""

    ids: np.ndarray
    attention_mask: np.ndarray


class Tokenizer:
    """Conversion of text and conversations to ids and back, as by HF's fast tokenizer of the same files.

    `backend` is the `tokenizers.Tokenizer` that does the work. It is modified: tokens are added, and its own padding
    and truncation are turned off. `config` is the content of a tokenizer_config.json.
    `Tokenizer.from_pretrained` reads both from a directory.

    `bos_token`, `eos_token`, `unk_token`, `pad_token` and their `*_token_id` are None if the checkpoint has no such
    token, `model_max_length` if it states no limit. `chat_template` is the default template or None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None):
        config = dict(config or {})
        _check_types(config)
        self.source = "tokenizer"
        tokenizer_class = (config.get("tokenizer_class") or "").removesuffix("Fast")
        if backend.padding:
            config.setdefault("pad_token", backend.padding["pad_token"])
        if backend.truncation:
            config.setdefault("truncation_side", backend.truncation["direction"])
        config = {**CLASS_DEFAULTS.get(tokenizer_class, {}), **config}
        backend.no_padding()
        backend.no_truncation()

        self.backend = backend
        self.special_tokens = _add_tokens(backend, config)
        self.bos_token, self.bos_token_id = self._special("bos_token")
        self.eos_token, self.eos_token_id = self._special("eos_token")
        self.unk_token, self.unk_token_id = self._special("unk_token")
        self.pad_token, self.pad_token_id = self._special("pad_token")
        if tokenizer_class == "LlamaTokenizer":
            self._rebuild_post_processor(config["add_bos_token"], config["add_eos_token"])

        self.clean_up_tokenization_spaces: bool = config.get("clean_up_tokenization_spaces", True)
        self.split_special_tokens: bool = config.get("split_special_tokens", False)
        self.truncation_side: str = config.get("truncation_side", "right")
        if self.truncation_side not in ("left", "right"):
            raise ConfigError(f'truncation_side must be "left" or "right", got {self.truncation_side!r}')
        max_length = config.get("model_max_length")
        if isinstance(max_length, bool) or (max_length is not None and not 1 <= max_length < float("inf")):
            raise ConfigError(f"model_max_length must be a number >= 1, got {shown(max_length)}")
        self.model_max_length = None if max_length is None or max_length > NO_MAX_LENGTH else int(max_length)
        self._templates = chat_template.named(config.get("chat_template"))
        self.chat_template = self._templates.get("default")

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Read the tokenizer of a local HF directory.

        Reads tokenizer.json and, if they exist, tokenizer_config.json, chat_template.jinja (which takes precedence
        over the config's template), special_tokens_map.json and added_tokens.json (as in HF, only if the config has
        no `added_tokens_decoder`), and config.json for the tokenizer class if the config names none.

        BOS and EOS are added as tokenizer.json says. With LlamaTokenizer and LlamaTokenizerFast, `add_bos_token` (on
        by default) and `add_eos_token` decide instead, because HF's class ignores tokenizer.json there.

        Raises:
            InputError: a directory without a fast tokenizer.
            ConfigError: damaged files.
        """
        directory = Path(path)
        if not os.path.isdir(directory):
            raise InputError(f"{directory} is not a directory: from_pretrained reads a local HF directory")
        file = directory / "tokenizer.json"
        try:
            backend, config = read_backend(file), _read_config(directory)
        except JaxgenError as error:
            raise ConfigError("; ".join([str(error), *fetch_again(directory, [f"damaged: {error}"])])) from error
        if backend is None:
            found = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
            raise InputError(
                f"{directory} has no tokenizer.json (it has: {found}). Slow tokenizers (tokenizer.model, "
                "vocab.json with merges.txt) cannot be read: save a fast one there"
            )
        try:
            tokenizer = cls(backend, config)
        except ConfigError as error:
            raise ConfigError(f"{directory}: {error}") from error
        probe(str(file), backend)
        tokenizer.source = str(file)
        return tokenizer

    def __call__(self, *_: Any, **__: Any) -> None:
        """Refuse, and name the methods that encode."""
        raise TypeError(f"a Tokenizer is not called: use {ELSEWHERE['__call__']}")

    def __getattr__(self, name: str) -> Any:
        hint = f": use {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        raise AttributeError(f"Tokenizer has no {name}{hint}")

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens without the added ones, as in HF; `len(tokenizer)` counts all."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Convert one text to its ids.

        Special tokens written in the text are recognised unless `split_special_tokens` is set, which is meant for
        untrusted text (None: as the config says, off by default). `max_length` includes the added special tokens and
        truncates at the config's `truncation_side`.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode accepts one str, got {type(text).__name__}: use batch for a list of them")
        encoded("the text", text)
        split = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        backend = self._splitting_backend if split else self.backend
        # In two steps, because the backend's own truncation is a setting of the whole tokenizer
        with library_errors(self.source):
            encoding = backend.encode(text, add_special_tokens=False)
        if max_length is not None:
            added = backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
            if max_length < max(added, 1):
                raise InputError(
                    f"max_length must be at least {max(added, 1)}, because the tokenizer itself adds {added} tokens, "
                    f"got {max_length}"
                )
            encoding.truncate(max_length - added, direction=self.truncation_side)
        with library_errors(self.source):
            ids = backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        if max(ids, default=0) > _LARGEST_ID:
            raise ConfigError(f"{self.source}: a token has the id {max(ids)}; ids must be below 2**31")
        return ids

    def decode(
        self, ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """Convert one sequence of ids (list, numpy or jax array, or a single id) to text.

        `clean_up_tokenization_spaces` removes the spaces before punctuation and English contractions (None: as the
        config says, on by HF's default). Ids beyond the vocabulary decode to nothing, as in HF, because models pad
        their vocabularies; a negative id is an error.
        """
        with library_errors(self.source):
            text = self.backend.decode(id_list(ids), skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.cleans_up(clean_up_tokenization_spaces) else text

    def batch(self, texts: Sequence[str], *, add_special_tokens: bool = True, max_length: int | None = None) -> Batch:
        """Encode texts and left-pad them to the longest.

        `add_special_tokens=False` is for texts that continue others: a BOS does not belong in the middle of a row. Pads
        with the pad id, else eos, else unk, else 0. The mask makes the choice irrelevant to the model.
        """
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"batch accepts a list of str, got {type(texts).__name__}: pass [text] for one text")
        return self.pad([self.encode(t, add_special_tokens=add_special_tokens, max_length=max_length) for t in texts])

    def chat(
        self,
        conversations: Sequence[Any],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        after: Any = (),
        max_length: int | None = None,
        **template_kwargs: Any,
    ) -> Batch:
        """Render conversations with the chat template, encode and left-pad them.

        A conversation is a list of {"role": ..., "content": ...} dicts; a single one may come without the list around
        it. The template writes BOS and other special tokens itself; none are added. `max_length` truncates at the
        config's `truncation_side`: on the right, that removes the generation prompt. The other arguments are those of
        `render_chat`.

        `after`: the ids that `chat_prefix` returned. Each conversation must begin with them, and they are left out.
        `max_length` counts them, and what follows them is truncated.
        """
        if isinstance(conversations, str | Mapping) or not isinstance(conversations, Sequence):
            raise TypeError(f"chat accepts a list of conversations, got {type(conversations).__name__}")
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        rendered = [
            self.render_chat(c, add_generation_prompt, tools=tools, documents=documents, **template_kwargs)
            for c in conversations
        ]
        prefix = id_list(after)
        if not prefix:
            return self.pad([self.encode(t, add_special_tokens=False, max_length=max_length) for t in rendered])
        rows = _without_prefix([self.encode(t, add_special_tokens=False) for t in rendered], prefix)
        if max_length is not None:
            left = max_length - len(prefix)
            if left < 1:
                raise InputError(f"max_length must be greater than the {len(prefix)} tokens of after, got {max_length}")
            rows = [row[:left] if self.truncation_side == "right" else row[-left:] for row in rows]
        return self.pad(rows)

    def chat_prefix(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the first ids of every conversation that begins with `messages`, such as a system message.

        >>> prefix = tok.chat_prefix(system)                                                # doctest: +SKIP
        >>> cache = prefill(params, [prefix], cfg)                                          # doctest: +SKIP
        >>> batch = tok.chat([[*system, *turns] for turns in requests], after=prefix)       # doctest: +SKIP

        They end before the first token that the next message could change. The arguments are those of `render_chat`;
        `chat` must be called with the same ones.

        Raises:
            InputError: with this template, such conversations have no first token in common.
        """
        options = {"tools": tools, "documents": documents, **template_kwargs}
        rendered = [self.render_chat(c, **options) for c in chat_template.continuations(messages)]
        rows = [self.encode(text, add_special_tokens=False) for text in rendered]
        prefix = [ids[0] for ids in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))]
        if not prefix:
            raise InputError("conversations with this beginning have no first token in common: use chat alone")
        return prefix

    def render_chat(
        self,
        conversation: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render one conversation as HF's `apply_chat_template(tokenize=False)`.

        A role is system, user, assistant, tool or one that the template names, as a string in quotes.
        `tools` are JSON schemas and select the template "tool_use" if there is one. `template_kwargs` are further
        variables of the template and override the special tokens' names. The template runs in a sandbox, with the
        functions of 4.41.1 and of later releases: `tojson` without HTML escapes, `break` and `continue`, generation
        blocks, and `strftime_now`, with which some templates print today's date.
        """
        return chat_template.render(
            self._templates,
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **template_kwargs},
            source="" if self.source == "tokenizer" else os.path.dirname(self.source),
        )

    def decode_batch(
        self,
        out: Any,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
        *,
        lengths: Any = None,
        prompt_width: int | None = None,
    ) -> list[str]:
        """Decode the generated tokens of each row of a `GenerateOutput`, or rows of ids.

        >>> tok.decode_batch(out)                                                           # doctest: +SKIP
        >>> tok.decode_batch(sequences, lengths=lengths, prompt_width=ids.shape[1])         # doctest: +SKIP
        >>> tok.decode_batch(sequences)                                                     # doctest: +SKIP

        The second form, with the arrays of an output, is the same as the first. Without `prompt_width`, rows are
        decoded whole, with the prompt and the text of any padding that is not a special token, as by HF's
        `batch_decode`. Rows of ids are an array, `int[rows, n]`, or a list of sequences of any lengths.
        """
        if hasattr(out, "prompt_width"):
            lengths = out.lengths if lengths is None else lengths
            prompt_width = out.prompt_width if prompt_width is None else prompt_width
            out = out.sequences
        rows = _rows(out)
        if lengths is not None and prompt_width is None:
            raise InputError(
                "lengths are the numbers of generated tokens: pass prompt_width too, the width of ids, or 0 for "
                "sequences without prompts"
            )
        if prompt_width is not None and operator.index(prompt_width) < 0:
            raise InputError(f"prompt_width must be at least 0, got {prompt_width}")
        ends = np.asarray([None] * len(rows) if lengths is None else lengths)
        if ends.shape != (len(rows),):
            raise InputError(f"lengths has shape {ends.shape}: pass one number for each of the {len(rows)} rows")
        if lengths is not None and ends.dtype.kind not in "iu":
            raise InputError(f"lengths must be whole numbers, got {ends.dtype}")
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if end is not None and not 0 <= end <= len(row) - operator.index(prompt_width or 0):
                raise InputError(f"row {i} has {len(row)} ids, got prompt_width={prompt_width} and the length {end}")
        return [
            self.decode(row[prompt_width:][:end], skip_special_tokens, clean_up_tokenization_spaces)
            for row, end in zip(rows, ends, strict=True)
        ]

    @property
    def padding_id(self) -> int:
        """The id that `pad` fills rows with: that of pad, else of eos, else of unk, else 0."""
        choices = (self.pad_token_id, self.eos_token_id, self.unk_token_id, 0)
        return next(choice for choice in choices if choice is not None)

    def token_bytes(self) -> list[bytes | None]:
        """Return the bytes that each id adds to a text; None for a special token and for an id without a token.

        The list is as long as the vocabulary with the added tokens. Joined, the bytes of a text's ids are the text in
        UTF-8; a single token may contribute only part of a character. A SentencePiece token with a leading space keeps
        it here, although `decode` drops the space at the beginning of a whole text.

        Raises:
            ConfigError: the tokenizer's text is not the concatenation of its tokens' text.
        """
        return list(self._token_bytes)

    @functools.cached_property
    def _token_bytes(self) -> list[bytes | None]:
        return token_bytes(self.backend)

    def _special(self, name: str) -> tuple[str | None, int | None]:
        token = self.special_tokens.get(name)
        return (None, None) if token is None else (token, self.backend.token_to_id(token))

    def cleans_up(self, choice: bool | None) -> bool:
        """Return `choice`, or if it is None whether the config turns clean-up on."""
        return self.clean_up_tokenization_spaces if choice is None else choice

    def _rebuild_post_processor(self, add_bos: bool, add_eos: bool) -> None:
        """Replace the post-processor of tokenizer.json, as HF's LlamaTokenizerFast does."""
        added = []
        for name, wanted in (("bos_token", add_bos), ("eos_token", add_eos)):
            token, token_id = self._special(name)
            if wanted and token is None:
                raise ConfigError(f"add_{name} is true but there is no {name}: correct one of the two")
            added.append([(token, token_id)] if wanted else [])
        before, after = added
        template = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
        self.backend.post_processor = TemplateProcessing(single=template, special_tokens=before + after)

    @functools.cached_property
    def _splitting_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def pad(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Left-pad rows of ids to the longest, as `batch` does."""
        if not rows:
            raise InputError("the list is empty: pass at least one prompt")
        for i, row in enumerate(rows):
            if not row:
                raise InputError(f"prompt {i} has no tokens: a prompt needs at least one, such as BOS")
        pad = self.padding_id
        width = max(map(len, rows))
        ids = np.full((len(rows), width), pad, np.int32)
        mask = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        return Batch(ids, mask)


def _rows(sequences: Any) -> list[Any]:
    """Return the rows of an array, or of a list of sequences, as a list."""
    if hasattr(sequences, "ndim"):
        sequences = list(np.atleast_1d(sequences))
    if not isinstance(sequences, Sequence) or any(np.ndim(row) != 1 for row in sequences):
        raise TypeError(
            f"decode_batch accepts an output of generate or rows of ids, got {shown(sequences)}: use decode for one row"
        )
    return list(sequences)


def _without_prefix(rows: list[list[int]], prefix: list[int]) -> list[list[int]]:
    """Return what follows the prefix in each row.

    Raises:
        InputError: a row does not begin with it, or has nothing else.
    """
    for i, row in enumerate(rows):
        pairs = enumerate(itertools.zip_longest(prefix, row[: len(prefix)]))
        different = next((place for place, (wanted, given) in pairs if wanted != given), None)
        if different is not None:
            raise InputError(
                f"conversation {i} does not begin with the {len(prefix)} tokens of after: token {different} differs. "
                "Pass the messages, tools and variables that chat_prefix had first, or call chat without after"
            )
        if prefix and len(row) == len(prefix):
            raise InputError(f"conversation {i} has only the {len(prefix)} tokens of after: add a message")
    return [row[len(prefix) :] for row in rows]


def check_tokenizer(tokenizer: object) -> None:
    """Raise a TypeError for another tokenizer, such as one of transformers."""
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer must be a jaxgen.Tokenizer, got {type(tokenizer).__name__}")


def clean_up(text: str) -> str:
    """Remove the spaces that HF's `clean_up_tokenization` removes, in its order."""
    for mark in (".", "?", "!", ","):
        text = text.replace(" " + mark, mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(" " + ending, ending)
    return text


def id_list(ids: Any) -> list[int]:
    """Check one sequence of token ids, or a single id, of any type and return it as a list."""
    try:
        array = np.atleast_1d(np.asarray(ids))
    except ValueError as error:
        raise InputError("expected one sequence of ids, got several: decode_batch decodes rows") from error
    if array.size == 0:
        return []
    if array.dtype.kind not in "iu":
        got = type(ids).__name__ if array.dtype == object else array.dtype
        raise TypeError(f"token ids must be integers, got {got}: decode_batch decodes an output of generate")
    if array.ndim > 1:
        raise InputError(f"expected one sequence of ids, got shape {array.shape}: decode_batch decodes rows")
    if array.min() < 0 or array.max() >= 2**32:
        wrong = array[(array < 0) | (array >= 2**32)][0]
        raise InputError(f"{wrong} is not a token id: ids are at least 0 and below 2**32")
    return array.tolist()


def _read_config(directory: Path) -> dict[str, Any]:
    """Merge the directory's files into the form of a modern tokenizer_config.json."""
    config = read_json(directory / "tokenizer_config.json") or {}
    if not config.get("tokenizer_class"):
        model = read_json(directory / "config.json") or {}
        family = FAMILIES.get(str(model.get("model_type")))
        config["tokenizer_class"] = model.get("tokenizer_class") or (family.tokenizer if family else None)
    if "added_tokens_decoder" not in config:
        additional = _additional(directory, config)
        config.update(read_json(directory / "special_tokens_map.json") or {})
        known = {repr(token) for token in additional}
        additional += [token for token in _additional(directory, config) if repr(token) not in known]
        config["additional_special_tokens"] = additional
        special = [_content(token) for token in (*map(config.get, SPECIAL_NAMES), *additional)]
        config["added_tokens_decoder"] = {
            str(index): {"content": token, "special": token in special, "normalized": token not in special}
            for token, index in (read_json(directory / "added_tokens.json") or {}).items()
        }
    template = directory / "chat_template.jinja"
    if (data := read_file(template, 4 * chat_template.LARGEST)) is not None:
        config["chat_template"] = decoded(str(template), data)
    return config


def _additional(directory: Path, config: Mapping[str, Any]) -> list[Any]:
    tokens = config.get("additional_special_tokens") or []
    if not isinstance(tokens, list):
        raise ConfigError(f"{directory}: additional_special_tokens must be a list, got {shown(tokens)}")
    return list(tokens)


def _check_types(config: Mapping[str, Any]) -> None:
    for name, kind in TYPES.items():
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ConfigError(f"{name} of the tokenizer's config must be of type {wanted}, got {shown(value)}")


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _added_token(token: Any, special: bool) -> AddedToken:
    flags = dict(token) if isinstance(token, Mapping) else {"normalized": False}
    flags = {name: flags[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in flags}
    if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
        raise ConfigError(f"{', '.join(wrong)} of the added token {shown(_content(token))} must be true or false")
    return AddedToken(_content(token) or "", special=special, **flags)


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the config's tokens to the backend as HF does and return its special tokens by name."""
    named = {name: config[name] for name in SPECIAL_NAMES if config.get(name) is not None}
    additional = list(config.get("additional_special_tokens") or ())
    for name, token in (*named.items(), *(("additional_special_tokens", token) for token in additional)):
        if not isinstance(_content(token), str):
            raise ConfigError(f"{name} of the tokenizer's config must be a string, got {shown(token)}")
    special = {_content(token): token for token in (*named.values(), *additional)}

    listed: dict[int, Mapping[str, Any]] = {}
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        is_token = isinstance(token, Mapping) and isinstance(token.get("content"), str)
        if not is_token or not str(index).isdecimal() or len(str(index)) > 10:
            raise ConfigError(f"added_tokens_decoder must map ids to tokens, got {shown(index)}: {shown(token)}")
        listed[int(index)] = token
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {_content(token) for token in listed.values()}
    tokens = [
        _added_token(token, bool(token.get("special")) or _content(token) in special)
        for _, token in sorted(listed.items())
    ]
    tokens += [_added_token(token, True) for content, token in special.items() if content not in known]
    # In runs, because the order gives the ids and older releases of the library read no flag in add_tokens
    runs = [(special, list(run)) for special, run in itertools.groupby(tokens, key=lambda token: token.special)]
    if len(runs) * len(tokens) > _MOST_ADDING:
        raise ConfigError(f"{len(tokens)} added tokens, of which special ones and others alternate {len(runs)} times")
    with library_errors("the added tokens"):
        for is_special, run in runs:
            (backend.add_special_tokens if is_special else backend.add_tokens)(run)
    for index, token in listed.items():
        if backend.token_to_id(token["content"]) != index:
            raise ConfigError(
                f"the added token {shown(token['content'])} has the id {index} in tokenizer_config.json and "
                f"{backend.token_to_id(token['content'])} with this tokenizer.json: the files do not match"
            )
    names: dict[str, Any] = {name: _content(token) for name, token in named.items()}
    if additional:
        names["additional_special_tokens"] = [_content(token) for token in additional]
    return names
